"""The steps of a block, from the anchor to the last token: one scan in XLA operations, or kernels; one result.

Each step maps the previous token to a latent (heads.py), adds latent times rows of markov_w2 to the base logits in
float32, rounds the sum once to the logits dtype and picks a token from the rounded row. `in_xla` is the plain form and
the reference of the other; `in_kernels` hands whole steps (dense) or whole walks (candidates) to kernels/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..config import DraftOptions
from ..kernels import dispatch
from ..kernels.dense_step import dense_step
from ..kernels.summary import Score
from ..kernels.walk import walk
from ..linear import round_to
from ..types import DraftSampling, Index, RequestInts, RequestRows, StepFlags, StepHidden, StepRows, StepTokens
from .head import DSparkHead
from .rows import CandidateRows, DenseRows, draw_scores, inverse_temperature

Rows = DenseRows | CandidateRows
Steps = tuple[StepRows | None, StepTokens, StepFlags]  # corrected rows (None unless kept), tokens, valid


def take_steps(
    head: DSparkHead,
    rows: Rows,
    anchor: RequestInts,
    hidden: StepHidden | None,
    sampling: DraftSampling | None,
    *,
    options: DraftOptions,
) -> Steps:
    """Take all S steps after anchor [B].

    Args:
        hidden: [S, B, H], or None where the head needs none; sampling: None for greedy.
        options: whether the corrected rows are returned, what they are rounded to, and the implementation.
    """
    args = (head, rows, anchor, hidden, sampling)
    kernel = "dense_step" if isinstance(rows, DenseRows) else "walk"
    plain = partial(in_xla, *args, options=options)
    markov = head.markov
    if (
        markov is None
        or options.vocab_axis is not None
        or not dispatch.addressable(rows.base, markov.markov_w1[...], markov.markov_w2[...])
    ):
        return plain()
    fast = partial(in_kernels, *args, options=options)
    return dispatch.run(kernel, options.implementation, xla=plain, pallas=fast)


def in_xla(
    head: DSparkHead,
    rows: Rows,
    anchor: RequestInts,
    hidden: StepHidden | None,
    sampling: DraftSampling | None,
    *,
    options: DraftOptions,
) -> Steps:
    """Take the steps in XLA operations: one lax.scan."""
    S, B, _ = rows.base.shape
    keep, dtype = options.keeps_rows, options.logits_dtype
    markov, correct = head.markov, _corrector(rows.base, keep, dtype)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev, kept = carry
        step, hoisted = xs
        added = None
        if markov is not None:
            state, latent = markov.step(state, markov.embed(prev), hoisted)
            added = rows.bias(latent, markov.markov_w2[...], step)
        kept, logits = correct(kept, step, added)
        logits = rows.mask(logits)
        token, row_valid = rows.choose(logits, sampling, step)
        return (state, token, kept), (token, row_valid)

    state = () if markov is None else markov.start(B)
    hoisted = () if markov is None else markov.hoist(hidden)
    in_place = rows.base.dtype == dtype
    kept = () if not keep else rows.base if in_place else jnp.zeros(rows.base.shape, dtype)
    xs = (jnp.arange(S, dtype=jnp.int32), hoisted)
    (_, _, kept), (tokens, valid) = lax.scan(body, (state, anchor, kept), xs)
    return (kept if keep else None), tokens, valid


def _corrector(base: StepRows, keep: bool, dtype: Any) -> Callable[..., tuple[Any, RequestRows]]:
    """Return (kept, step, added) -> (kept, corrected row float32 [B, n]).

    Where the rows are kept in the dtype of the base, they are the base, corrected in place; the row is read back from
    them, which spares XLA a second copy of it.
    """
    in_place = keep and base.dtype == dtype

    def correct(kept: Any, step: Index, added: RequestRows | None) -> tuple[Any, RequestRows]:
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


def in_kernels(
    head: DSparkHead,
    rows: Rows,
    anchor: RequestInts,
    hidden: StepHidden | None,
    sampling: DraftSampling | None,
    *,
    options: DraftOptions,
    interpret: bool,
) -> Steps:
    """Take the steps with Pallas kernels: one a dense step; one a walk where the latent is the embedding."""
    S, B, _ = rows.base.shape
    keep, dtype, markov = options.keeps_rows, options.logits_dtype, head.markov
    assert markov is not None
    w1, w2 = markov.markov_w1[...], markov.markov_w2[...]
    score = None if sampling is None else Score(draw_scores, inverse_temperature)
    shared = {"keep": keep, "dtype": dtype, "sampling": sampling, "score": score, "interpret": interpret}
    # Where the latent is the embedding itself, the kernels look it up by the previous token.
    table = markov.kind.latent_is_embedding and w1.dtype == w2.dtype
    if isinstance(rows, DenseRows):
        call = partial(dense_step, base=rows.base, live=rows.live, target_ids=rows.target_ids, **shared)
    else:
        named = None if rows.target_ids is rows.draft_ids else rows.target_ids
        call = partial(walk, base=rows.base, ids=rows.draft_ids, target_ids=named, **shared)
        if table:
            return call(out=None, prev=anchor, latents=w1, w2=w2)

    in_place = keep and isinstance(rows, DenseRows) and rows.base.dtype == dtype

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev, kept = carry
        step, hoisted = xs
        latents, lookup = w1, prev
        if not table:
            state, latents = markov.step(state, markov.embed(prev), hoisted)
            latents, lookup = latents.astype(w2.dtype), jnp.arange(B, dtype=jnp.int32)
        if in_place:
            kept, token, valid = call(base=kept, out=None, step=step, prev=lookup, latents=latents, w2=w2)
        else:
            kept, token, valid = call(out=kept, step=step, prev=lookup, latents=latents, w2=w2)
        token, valid = token.reshape(B), valid.reshape(B)
        return (state, token, kept), (token, valid)

    kept = None if not keep else rows.base if in_place else jnp.zeros(rows.base.shape, dtype)
    # Steps are NumPy constants: a traced range would cost a launch a step to slice.
    xs = (np.arange(S, dtype=np.int32), markov.hoist(hidden))
    # Unrolled: a loop would add slices and counters, each a launch of its own, to two or three kernels a step.
    (_, _, kept), (tokens, valid) = lax.scan(body, (markov.start(B), anchor, kept), xs, unroll=not interpret)
    return kept, tokens, valid
