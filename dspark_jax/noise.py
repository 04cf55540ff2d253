"""Counter-based noise and token choice: every random number is a pure function of what it is for.

A noise word depends on (request seed, position of the block's first drafted token, step, stream, target token id) and
on nothing else, so a request draws the same tokens in any row of any batch, dense or over candidates, sharded or not:

    word = first output of threefry2x32-20 for key (seed, position), counter (token id, stream * 2**16 + step)

Threefry: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The words are stable across releases;
floats made from them may differ in the last bit between kernels. docs/noise.md lists known-answer vectors.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, UInt32

from .types import Bools, Floats, Ints, RequestFloats, RequestInts, RequestRows, RowIds, Words

# The streams never overlap: sharing draft and residual noise biases the committed tokens.
DRAFT, ACCEPT, RESIDUAL = 0, 1, 2
MAX_STEPS = 1 << 16

GREEDY_BELOW = 1e-5  # temperatures below this are greedy, row by row

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(key: tuple[Words, Words], counter: tuple[Words, Words]) -> tuple[Words, Words]:
    """Encrypt a two-word counter with threefry2x32, 20 rounds; all words uint32, broadcast together."""
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def noise_bits(seed: Words, position: Ints, step: Ints | int, stream: int, ids: Ints) -> Words:
    """Return the 32 noise bits of each token id; the arguments broadcast together.

    Args:
        seed: uint32, the request's seed.
        position: int32, index in the sequence of the block's first drafted token.
        step: int, the draft step inside the block, below 2**16.
        stream: DRAFT, ACCEPT or RESIDUAL.
        ids: int32 target token ids.

    Returns:
        uint32 of the broadcast shape.
    """
    low = jnp.asarray(step).astype(jnp.uint32) + jnp.uint32(stream * MAX_STEPS)
    return threefry2x32((seed.astype(jnp.uint32), position.astype(jnp.uint32)), (ids.astype(jnp.uint32), low))[0]


def uniform_from_bits(bits: Words) -> Floats:
    """Map uint32 bits to float32 in the open interval (0, 1): (bits + 1/2) / 2**32, at most 1 - 2**-24."""
    # The half keeps zero out; small values keep their full relative precision, which the Gumbel tail needs.
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))


def gumbel_from_bits(bits: Words) -> Floats:
    """Map uint32 bits to float32 standard Gumbel noise, -log(-log(1 - u)); its range is (-2.82, 22.9)."""
    # log1p(-u) with u near 0 resolves the large values, which decide the draw, to 2**-32.
    return -jnp.log(-jnp.log1p(-uniform_from_bits(bits)))


def is_greedy(temperature: Floats) -> Bools:
    """Say which rows are greedy: those whose temperature is below 1e-5, or NaN."""
    return ~(temperature >= GREEDY_BELOW)


def safe_temperature(temperature: Floats) -> Floats:
    """Return divisors that never give NaN: 1 in greedy rows, at most 1e30 (infinity would turn -inf into NaN)."""
    return jnp.where(is_greedy(temperature), 1.0, jnp.minimum(temperature, 1e30)).astype(jnp.float32)


def scores(
    logits: RequestRows,
    temperature: RequestFloats,
    bits: UInt32[Array, "B n"],
    top: Float32[Array, "B 1"] | None = None,
) -> RequestRows:
    """Return what a draw maximises: (logits - their maximum) / T + Gumbel noise, or the logits in greedy rows.

    Args:
        logits: float32 [B, n]; temperature: float32 [B]; bits: uint32 [B, n].
        top: float32 [B, 1], the rows' maxima where the caller has them.
    """
    # Relative to the maximum, which leaves the noise its precision at low temperatures; equal +inf stay equally likely.
    # By argmax, which XLA keeps apart: it fuses a maximum into the in-place update of the row and copies the buffer.
    if top is None:
        top = jnp.take_along_axis(logits, jnp.argmax(logits, axis=1)[:, None], axis=1)
    relative = jnp.where(logits == top, 0.0, logits - top)
    noisy = relative / safe_temperature(temperature)[:, None] + gumbel_from_bits(bits)
    return jnp.where(is_greedy(temperature)[:, None], logits, noisy)


def choose(score: RequestRows, ids: RowIds | None = None) -> RequestInts:
    """Return the slot of each row's largest score; among equals the one with the lowest id.

    The slot exists whatever the row holds; a row with NaN, or with nothing finite, is for the caller to flag.

    Args:
        score: float32 [B, n].
        ids: int32 [B, n], distinct within a row; None where slots are in ascending order of id.
    """
    if ids is None:
        return jnp.argmax(score, axis=1).astype(jnp.int32)
    best = jnp.max(score, axis=1, keepdims=True)
    lowest = jnp.min(jnp.where(score == best, ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    return jnp.argmax(ids == lowest, axis=1).astype(jnp.int32)


def row_is_valid(logits: Float[Array, "*rows n"]) -> Bool[Array, " *rows"]:
    """Say which rows (last axis) hold no NaN and at least one finite value."""
    return jnp.isfinite(logits).any(axis=-1) & ~jnp.isnan(logits).any(axis=-1)


def canonical(logits: Floats) -> Floats:
    """Replace -0 by +0, so that zeros of either sign are equal in every comparison and sort."""
    return lax.select(logits == 0, jnp.zeros_like(logits), logits)
