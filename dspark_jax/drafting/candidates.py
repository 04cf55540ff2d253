"""Candidates of a top-k draft: chosen once from the base logits, corrected step by step, scattered into dense rows.

The draft distribution is the softmax over the corrected candidates and zero outside, so a dense row of it is -inf
everywhere else. DraftBuffer rows are reused: only the columns written last time are reset.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ..kernels.select import select_topk
from ..types import CandidateIds, CandidateLogits, DraftBuffer, DraftLogits, StepLogits


def select(base: DraftLogits, k: int, *, implementation: str | None = None) -> tuple[CandidateLogits, CandidateIds]:
    """Return the k largest base logits of each row, descending, ties (and zeros of either sign) to the lowest id.

    NaN of either sign counts as the largest value, so a row that holds one shows it among its candidates.

    Args:
        base: [S, B, Vd] float.
        implementation: "xla", "pallas" or None, see kernels/dispatch.py.

    Returns:
        values [S, B, k] in the dtype of base, ids int32 [S, B, k], distinct within a row.
    """
    S, B, n = base.shape
    values, ids = select_topk(base.reshape(S * B, n), k, implementation=implementation)
    return values.reshape(S, B, k), ids.reshape(S, B, k)


def scatter(
    dense: StepLogits, ids: CandidateIds, values: CandidateLogits | float, *, sparse: bool = False
) -> StepLogits:
    """Write values [S, B, k] (or one number) into columns ids [S, B, k] of dense [S, B, V].

    With `sparse` ids from V on (dead slots, columns of other devices) are dropped; without it there must be none.
    """
    S, B, _ = ids.shape
    s = lax.broadcasted_iota(jnp.int32, (S, B, 1), 0)
    b = lax.broadcasted_iota(jnp.int32, (S, B, 1), 1)
    values = jnp.asarray(values, dense.dtype)
    return dense.at[s, b, ids].set(values, unique_indices=True, mode="drop" if sparse else "promise_in_bounds")


def empty_buffer(steps: int, batch: int, vocab_size: int, k: int, dtype: Any) -> DraftBuffer:
    """Return a fresh DraftBuffer: rows of -inf [S, B, V], and distinct ids [S, B, k] to be reset first."""
    ids = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (steps, batch, k))
    return DraftBuffer(logits=jnp.full((steps, batch, vocab_size), -jnp.inf, dtype), ids=jnp.array(ids))


def refill(
    buffer: DraftBuffer,
    vocab_size: int,
    ids: CandidateIds,
    logits: CandidateLogits,
    *,
    sparse: bool = False,
    axis: str | None = None,
) -> DraftBuffer:
    """Reset the columns the buffer's last call wrote and write this call's candidates: O(S * B * k) in place.

    Args:
        vocab_size: V; axis: the mesh axis that splits the buffer's columns (inside a shard_map over it), or None.
    """
    sparse = sparse or axis is not None
    written, wanted = (own_columns(vocab_size, x, axis)[1] for x in (buffer.ids, ids))
    empty = scatter(buffer.logits, written, -jnp.inf, sparse=sparse)
    return DraftBuffer(logits=scatter(empty, wanted, logits, sparse=sparse), ids=ids)


def own_columns(vocab_size: int, ids: CandidateIds, axis: str | None) -> tuple[int, CandidateIds]:
    """Return how many target columns this device holds, and target ids [S, B, k] counted from its first one.

    Devices of `axis` (inside a shard_map over it; None: one device) share the V columns where those split evenly; else
    each holds all. Ids of other devices' columns come out distinct and beyond the device's own.
    """
    if axis is None or vocab_size % lax.axis_size(axis):
        return vocab_size, ids
    width = vocab_size // lax.axis_size(axis)
    local = ids - lax.axis_index(axis) * width
    beyond = width + lax.broadcasted_iota(jnp.int32, ids.shape, 2)
    return width, jnp.where((local >= 0) & (local < width), local, beyond)
