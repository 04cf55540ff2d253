"""Attention over a cache, summed in blocks of one size: a request's numbers do not depend on the cache's capacity.

    out[t] = sum_c softmax_c(scale * q[t] . k[c]) v[c]      over the slots c that the mask shows

A product or a sum over all slots is ordered by their number, so its last bits would change with the capacity, which
the other requests of a batch decide. Here every product has the shape of one block of slots, and the blocks' results
are added one after the other; blocks that hold nothing visible add zeros.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..types import HeadStates, Visible

BLOCK = 32  # slots; capacities are multiples of it


def attention(
    queries: HeadStates,
    keys: Float[Array, "B C M D"],
    values: Float[Array, "B C M D"],
    mask: Visible,
    scale: float,
) -> HeadStates:
    """Return the attention of T queries of N heads over C slots of M key heads (N a multiple of M).

    Args:
        queries: [B, T, N, D]; keys, values: [B, C, M, D], cast to the queries' dtype.
        mask: bool [B, 1, T, C], the slots that each query sees; at least one.

    Returns:
        [B, T, N, D] in the queries' dtype; products accumulate in float32, the softmax is float32.
    """
    B, T, N, D = queries.shape
    C, M = keys.shape[1:3]
    n = -(-C // BLOCK)
    more = ((0, 0), (0, n * BLOCK - C), (0, 0), (0, 0))
    # [B, n, M, BLOCK, D]: each block is a batch entry of its own.
    blocks = [
        jnp.swapaxes(jnp.pad(x.astype(queries.dtype), more).reshape(B, n, BLOCK, M, D), 2, 3) for x in (keys, values)
    ]
    grouped = jnp.moveaxis(queries.reshape(B, T, M, N // M, D), 2, 1).reshape(B, 1, M, T * (N // M), D)
    grouped = jnp.broadcast_to(grouped, (B, n, *grouped.shape[2:]))
    batch = ((0, 1, 2), (0, 1, 2))
    # The library's default for float32 products on GPUs is TF32, which would miss the reference by 1e-3.
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    scores = lax.dot_general(
        grouped, blocks[0], (((4,), (4,)), batch), precision=exact, preferred_element_type=jnp.float32
    )  # [B, n, M, T * N/M, BLOCK]
    seen = jnp.pad(mask[:, 0], ((0, 0), (0, 0), (0, n * BLOCK - C))).reshape(B, T, n, BLOCK)
    seen = jnp.repeat(jnp.moveaxis(seen, 2, 1), N // M, axis=2)[:, :, None]
    scores = jnp.where(seen, scores * jnp.float32(scale), -jnp.inf)
    top = jnp.max(scores, axis=(1, 4), keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    mixed = lax.dot_general(
        weights.astype(queries.dtype), blocks[1], (((4,), (3,)), batch), precision=exact,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    total = _one_after_the_other(jnp.sum(weights, axis=4))
    mixed = _one_after_the_other(mixed) / jnp.maximum(total, jnp.float32(1e-30))[..., None]
    out = jnp.moveaxis(mixed.reshape(B, M, T, N // M, D), 1, 2)
    return out.reshape(B, T, N, D).astype(queries.dtype)


def _one_after_the_other(parts: Float[Array, "B n ..."]) -> Float[Array, "B ..."]:
    """Add up the blocks in their order, whatever their number."""
    parts = jnp.moveaxis(parts, 1, 0)
    return lax.scan(lambda total, part: (total + part, None), jnp.zeros(parts.shape[1:], parts.dtype), parts)[0]
