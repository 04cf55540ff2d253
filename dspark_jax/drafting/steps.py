"""The steps of a block, from the anchor to the last token: one scan in XLA operations, or kernels; one result.

Each step maps the previous token to a latent (heads.py), adds latent times rows of markov_w2 to the base logits in
float32, rounds the sum once to the logits dtype and picks a token from the rounded row. `in_xla` is the plain form and
the reference of the other; `in_kernels` hands whole steps (dense) or whole walks (candidates) to kernels/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import noise
from ..kernels import dispatch
from ..kernels.dense_step import Score, dense_step
from ..kernels.walk import walk
from ..linear import round_to
from ..types import DraftSampling
from .heads import DSparkHead, VanillaMarkovHead, bias, bias_at

Steps = tuple[Any, jax.Array, jax.Array]  # corrected rows [S, B, n] or None, tokens int32 [S, B], valid bool [S, B]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that a block's tokens are drawn from: all draft ids, or the candidates.

    Attributes:
        base: [S, B, n], base logits of the columns.
        ids: int32 target ids of the columns: [S, B, k] for candidates, ascending [n], or None where columns are ids.
        draft_ids: int32 [S, B, k], the candidates' rows of markov_w2; None for all of them in order.
        live: columns from here on are padding and never win; None for all.
    """

    base: jax.Array
    ids: jax.Array | None
    draft_ids: jax.Array | None = None
    live: int | None = None


def take_steps(
    head: DSparkHead,
    rows: Rows,
    anchor: jax.Array,
    hidden: Any,
    draw: DraftSampling | None,
    *,
    keep: bool,
    dtype: Any,
    implementation: str | None,
) -> Steps:
    """Take all S steps after anchor [B].

    Args:
        hidden: [S, B, H], or None where the head needs none; draw: None for greedy.
        keep: whether the corrected rows are returned; dtype: what they are rounded to.
        implementation: "xla", "pallas" or None, see kernels/dispatch.py.
    """
    args = (head, rows, anchor, hidden, draw)
    kernel = "dense_step" if rows.draft_ids is None else "walk"
    plain = partial(in_xla, *args, keep=keep, dtype=dtype)
    markov = head.markov
    if markov is None or not dispatch.addressable(rows.base, markov.markov_w1[...], markov.markov_w2[...]):
        return plain()
    fast = partial(in_kernels, *args, keep=keep, dtype=dtype)
    return dispatch.run(kernel, implementation, xla=plain, pallas=fast)


def in_xla(
    head: DSparkHead,
    rows: Rows,
    anchor: jax.Array,
    hidden: Any,
    draw: DraftSampling | None,
    *,
    keep: bool,
    dtype: Any,
) -> Steps:
    """Take the steps in XLA operations: one lax.scan."""
    S, B, n = rows.base.shape
    markov, correct = head.markov, _corrector(rows.base, keep, dtype)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev, kept = carry
        step, hoisted = xs
        added = None
        if markov is not None:
            state, latent = markov.step(state, markov.embed(prev), hoisted)
            w2 = markov.markov_w2[...]
            added = bias(latent, w2) if rows.draft_ids is None else bias_at(latent, w2, rows.draft_ids[step])
        kept, logits = correct(kept, step, added)
        if rows.live is not None:
            logits = jnp.where(jnp.arange(n) < rows.live, logits, -jnp.inf)
        ids = rows.ids if rows.ids is None or rows.ids.ndim == 1 else rows.ids[step]
        token = _choose(logits, ids, step, draw)
        return (state, token, kept), (token, noise.row_is_valid(logits))

    state = () if markov is None else markov.start(B)
    hoisted = () if markov is None else markov.hoist(hidden)
    in_place = rows.base.dtype == dtype
    kept = () if not keep else rows.base if in_place else jnp.zeros(rows.base.shape, dtype)
    xs = (jnp.arange(S, dtype=jnp.int32), hoisted)
    (_, _, kept), (tokens, valid) = lax.scan(body, (state, anchor, kept), xs)
    return (kept if keep else None), tokens, valid


def _corrector(base: jax.Array, keep: bool, dtype: Any) -> Callable[..., tuple[Any, jax.Array]]:
    """Return (kept, step, added) -> (kept, corrected row float32 [B, n]).

    Where the rows are kept in the dtype of the base, they are the base, corrected in place; the row is read back from
    them, which spares XLA a second copy of it.
    """
    in_place = keep and base.dtype == dtype

    def correct(kept: Any, step: jax.Array, added: jax.Array | None) -> tuple[Any, jax.Array]:
        # Slabs [1, B, n] read and written at one non-negative start fuse in place; a row [B, n] would be copied first.
        start, size = (step, jnp.int32(0), jnp.int32(0)), (1, *base.shape[1:])
        slab = lax.dynamic_slice(kept if in_place else base, start, size, allow_negative_indices=False)
        logits = slab.astype(jnp.float32) if added is None else slab.astype(jnp.float32) + added[None]
        logits = round_to(logits, dtype)
        if keep:
            kept = lax.dynamic_update_slice(kept, logits.astype(dtype), start, allow_negative_indices=False)
            logits = lax.dynamic_slice(kept, start, size, allow_negative_indices=False)
        return kept, logits[0].astype(jnp.float32)

    return correct


def _choose(logits: jax.Array, ids: jax.Array | None, step: jax.Array, draw: DraftSampling | None) -> jax.Array:
    """Return the drafted target ids int32 [B]; ids are [B, n], ascending [n], or None where slots are ids."""
    score = logits
    if draw is not None:
        # Without the barrier XLA hoists a [B, n] part of the generator out of the scan and keeps it.
        held, step = lax.optimization_barrier((draw, step))
        named = jnp.arange(logits.shape[1], dtype=jnp.int32) if ids is None else ids
        score = _score(logits, named, step, held)
    slot = noise.choose(score, ids if ids is not None and ids.ndim == 2 else None)
    if ids is None:
        return slot
    return ids[slot] if ids.ndim == 1 else jnp.take_along_axis(ids, slot[:, None], axis=1)[:, 0]


def _score(logits: jax.Array, ids: jax.Array, step: jax.Array, draw: Any, top: jax.Array | None = None) -> jax.Array:
    """Return what a draw maximises over rows [B, n] of target ids [B, n] or [n]; kernels call it on their blocks."""
    bits = noise.noise_bits(draw.seed[:, None], draw.position[:, None], step, noise.DRAFT, ids)
    return noise.scores(logits, draw.temperature, bits, top)


def _rate(draw: Any) -> jax.Array:
    """Return by how much scores rise per unit by which the maximum they are relative to falls: 1 / T, 0 for greedy."""
    return jnp.where(noise.is_greedy(draw.temperature), 0.0, 1.0 / noise.safe_temperature(draw.temperature))


def in_kernels(
    head: DSparkHead,
    rows: Rows,
    anchor: jax.Array,
    hidden: Any,
    draw: DraftSampling | None,
    *,
    keep: bool,
    dtype: Any,
    interpret: bool,
) -> Steps:
    """Take the steps with Pallas kernels: one per dense step, one for a whole walk of a vanilla head."""
    S, B, _ = rows.base.shape
    markov = head.markov
    assert markov is not None
    w1, w2 = markov.markov_w1[...], markov.markov_w2[...]
    score = None if draw is None else Score(_score, _rate)
    options = {"keep": keep, "dtype": dtype, "draw": draw, "score": score, "interpret": interpret}
    # The latent of a vanilla head is the embedding itself: the kernels look it up by the previous token.
    table = type(markov) is VanillaMarkovHead and w1.dtype == w2.dtype
    if rows.draft_ids is None:
        call = partial(dense_step, base=rows.base, live=rows.live, target_ids=rows.ids, **options)
    else:
        named = None if rows.ids is rows.draft_ids else rows.ids
        call = partial(walk, base=rows.base, ids=rows.draft_ids, target_ids=named, **options)
        if table:
            return call(rows=None, prev=anchor, latents=w1, w2=w2)

    in_place = keep and rows.draft_ids is None and rows.base.dtype == dtype

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev, kept = carry
        step, hoisted = xs
        latents, lookup = w1, prev
        if not table:
            state, latents = markov.step(state, markov.embed(prev), hoisted)
            latents, lookup = latents.astype(w2.dtype), jnp.arange(B, dtype=jnp.int32)
        if in_place:
            kept, token, valid = call(base=kept, rows=None, step=step, prev=lookup, latents=latents, w2=w2)
        else:
            kept, token, valid = call(rows=kept, step=step, prev=lookup, latents=latents, w2=w2)
        token, valid = token.reshape(B), valid.reshape(B)
        return (state, token, kept), (token, valid)

    kept = None if not keep else rows.base if in_place else jnp.zeros(rows.base.shape, dtype)
    # Steps are NumPy constants: a traced range would cost a launch a step to slice.
    xs = (np.arange(S, dtype=np.int32), markov.hoist(hidden))
    # Unrolled: a loop would add slices and counters, each a launch of its own, to two or three kernels a step.
    (_, _, kept), (tokens, valid) = lax.scan(body, (markov.start(B), anchor, kept), xs, unroll=not interpret)
    return kept, tokens, valid
