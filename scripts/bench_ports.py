"""Plain ports of the draft to compare with: straightforward JAX, and PyTorch; greedy, vanilla head, base logits given.

Each function drafts all steps from step-major base logits [S, B, V] and returns the corrected rows (dense [S, B, V] or
over candidates [S, B, k]) and the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.jit
def jax_dense(base: jax.Array, w1: jax.Array, w2: jax.Array, anchor: jax.Array) -> Any:
    """Scan over the steps with the corrected rows as outputs and a float32 addition."""

    def body(prev: jax.Array, row: jax.Array) -> Any:
        x = row.astype(jnp.float32) + jnp.dot(w1[prev], w2.T, preferred_element_type=jnp.float32)
        x = x.astype(base.dtype)
        token = jnp.argmax(x, axis=1).astype(jnp.int32)
        return token, (x, token)

    return lax.scan(body, anchor, base)[1]


@partial(jax.jit, static_argnames="k")
def jax_topk(base: jax.Array, w1: jax.Array, w2: jax.Array, anchor: jax.Array, k: int) -> Any:
    """Choose candidates with lax.top_k, gather their rows of w2, correct those alone."""
    values, ids = lax.top_k(base, k)

    def body(prev: jax.Array, step: Any) -> Any:
        value, i = step
        x = value.astype(jnp.float32) + jnp.einsum("bkr,br->bk", w2[i], w1[prev], preferred_element_type=jnp.float32)
        x = x.astype(base.dtype)
        token = jnp.take_along_axis(i, jnp.argmax(x, axis=1)[:, None], axis=1)[:, 0]
        return token, (x, token)

    return lax.scan(body, anchor, (values, ids))[1]


def torch_dense(base: Any, w1: Any, w2: Any, anchor: Any) -> Any:
    """Walk the steps in PyTorch, correcting the rows in place as a server does."""
    prev, tokens = anchor, []
    for s in range(base.shape[0]):
        base[s] += w1[prev] @ w2.T
        prev = base[s].argmax(dim=1)
        tokens.append(prev)
    return base, tokens


def torch_topk(base: Any, w1: Any, w2: Any, anchor: Any, k: int) -> Any:
    """Choose candidates with torch.topk, gather their rows of w2, correct those alone."""
    import torch

    values, ids = torch.topk(base, k, dim=-1)
    prev, tokens = anchor, []
    for s in range(base.shape[0]):
        values[s] += torch.bmm(w2[ids[s]], w1[prev].unsqueeze(2)).squeeze(2)
        prev = ids[s].gather(1, values[s].argmax(dim=1, keepdim=True)).squeeze(1)
        tokens.append(prev)
    return values, tokens
