"""The draft of a block: selection of candidates where asked for, the steps (steps.py), and the outputs wanted.

Tokens are drawn from the rounded corrected rows, so that what a verifier reads is what was drawn from, whatever the
`outputs`. `draft` is pure; the entry points around it (api.py) coerce and jit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import DraftOptions
from ..types import (
    CandidateIds,
    DraftBlock,
    DraftBuffer,
    DraftLogits,
    DraftSampling,
    Latents,
    RequestInts,
    Scalar,
    StepConfidence,
    StepFlags,
    StepHidden,
    StepLogits,
    StepTokens,
)
from . import candidates
from .head import DSparkHead
from .heads import bias
from .rows import CandidateRows, DenseRows
from .split_rows import SplitCandidateRows, SplitDenseRows, own_part, select_split
from .steps import Rows, take_steps
from .union_steps import certifies, union_steps


def draft(
    head: DSparkHead,
    base: DraftLogits,
    anchor: RequestInts,
    hidden: StepHidden | None,
    sampling: DraftSampling | None,
    buffer: DraftBuffer | None = None,
    min_confidence: Scalar | None = None,
    *,
    options: DraftOptions,
) -> tuple[DraftBlock, DraftBuffer | None]:
    """Draft a block from step-major base logits; the pure core under every entry point.

    Args:
        base: [S, B, Vd] base logits; anchor: int32 [B]; hidden: [S, B, H], or None where the head needs none.
        sampling: None for greedy, else the per-request parameters.
        buffer: rows to write into for topk with outputs="logits", or None to make new ones.
        min_confidence: float32 [] threshold, or None.
        options: what is static; see `api.draft_block`.

    Returns:
        The block, and the refilled buffer (None without one). With a buffer the block's `logits` is None: the caller
        reads the buffer's, since returning one array twice would copy it.
    """
    S, B, _ = base.shape
    topk, outputs, V = options.topk, options.outputs, head.config.vocab_size
    rows, ids = _rows(head, base, options)
    certified, sparse = None, options.markov_topk > 0
    with jax.named_scope("draft_steps"):
        if type(rows) is CandidateRows and (sparse or certifies(head, sampling)):
            steps = union_steps(head, base, rows, anchor, hidden, sampling, options=options)
            corrected, tokens, valid, certified = steps.logits, steps.tokens, steps.valid, steps.certified
            ids = steps.ids
        else:
            corrected, tokens, valid = take_steps(head, rows, anchor, hidden, sampling, options=options)
            # A dense draft is its own proof; devices that share a vocabulary give none for candidates.
            certified = valid if topk is None and certifies(head, sampling) else None
    if corrected is not None and isinstance(rows, SplitCandidateRows):
        corrected = rows.whole(corrected)

    fields = {}
    if corrected is None:  # outputs == "tokens"
        pass
    elif outputs == "candidates":
        fields = {"candidate_ids": ids, "candidate_logits": corrected}
    elif ids is None:  # rows of the whole draft vocabulary
        fields = {"logits": _to_target_columns(head, corrected, options.vocab_axis)}
    elif buffer is not None:
        buffer = candidates.refill(buffer, V, ids, corrected, sparse=sparse, axis=options.vocab_axis)
    else:
        width, columns = candidates.own_columns(V, ids, options.vocab_axis)
        empty = jnp.full((S, B, width), -jnp.inf, options.logits_dtype)
        sparse = sparse or options.vocab_axis is not None
        fields = {"logits": candidates.scatter(empty, columns, corrected, sparse=sparse)}

    known = ((anchor >= 0) & (anchor < V))[None]
    valid &= known
    confidence = _confidence(head, hidden, jnp.concatenate([anchor[None], tokens[:-1]]))
    block = DraftBlock(
        tokens=tokens.T,
        num_draft=_num_draft(valid, confidence, min_confidence),
        valid=valid.all(axis=0),
        confidence_logits=None if confidence is None else confidence.T,
        certified=None if certified is None else (certified & known).T,
        method="greedy" if sampling is None else "probabilistic",
        **fields,
    )
    return block, buffer


def teacher_forced(head: DSparkHead, hidden: StepHidden, prev: StepTokens) -> DraftLogits:
    """Return corrected logits [S, B, Vd] where the previous tokens prev [S, B] are given; hidden [S, B, H]."""
    base, markov = head.base_logits(hidden), head.markov
    if markov is None:
        return base

    def body(state: Any, xs: Any) -> tuple[Any, Latents]:
        return markov.step(state, *xs)

    _, latents = lax.scan(body, markov.start(prev.shape[1]), (markov.embed(prev), markov.hoist(hidden)))
    return (base.astype(jnp.float32) + bias(latents, markov.markov_w2[...])).astype(base.dtype)


def _rows(head: DSparkHead, base: DraftLogits, options: DraftOptions) -> tuple[Rows, CandidateIds | None]:
    """Return what tokens are drawn from, and the candidates' target ids [S, B, k] of a top-k draft."""
    axis, k, V = options.vocab_axis, options.topk, head.config.vocab_size
    width, table = base.shape[-1], head.target_ids
    if k is None:
        live = V if table is None and head.config.Vd > V else None
        if axis is None:
            return DenseRows(base, table, live), None
        return SplitDenseRows(base, own_part(table, width, axis), live, axis), None
    with jax.named_scope("select"):
        base = _mask_padding(head, base, axis)
        if axis is None:
            values, draft_ids = candidates.select(base, k, implementation=options.implementation)
        else:
            values, draft_ids = select_split(base, k, axis, implementation=options.implementation)
    ids = draft_ids if table is None else jnp.take(table, draft_ids)
    if axis is None:
        return CandidateRows(values, draft_ids, ids), ids
    return SplitCandidateRows(values, draft_ids, ids, axis, width), ids


def _mask_padding(head: DSparkHead, logits: DraftLogits, axis: str | None) -> DraftLogits:
    """Set the columns [..., Vd] beyond the target vocabulary to -inf, where the draft vocabulary is padded."""
    V = head.config.vocab_size
    if head.target_ids is not None or head.config.Vd <= V:
        return logits
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    if axis is not None:
        column = column + lax.axis_index(axis) * logits.shape[-1]
    return jnp.where(column < V, logits, jnp.array(-jnp.inf, logits.dtype))


def _to_target_columns(head: DSparkHead, logits: DraftLogits, axis: str | None) -> StepLogits:
    """Bring logits [S, B, Vd] to the target vocabulary [S, B, V]; -inf where no draft id stands for a target id."""
    V = head.config.vocab_size
    if axis is not None and keeps_split(head):
        return logits  # the device's own columns
    if axis is not None:
        logits = lax.all_gather(logits, axis, axis=2, tiled=True)
    if head.target_ids is None:
        return logits[..., :V]
    empty = jnp.full((*logits.shape[:2], V), -jnp.inf, logits.dtype)
    return empty.at[..., head.target_ids].set(logits, unique_indices=True, indices_are_sorted=True)


def keeps_split(head: DSparkHead) -> bool:
    """Say whether the corrected dense rows of a split vocabulary are columns of the target as they are."""
    return head.target_ids is None and head.config.Vd == head.config.vocab_size


def _confidence(head: DSparkHead, hidden: StepHidden | None, prev: StepTokens) -> StepConfidence | None:
    """Return confidence logits float32 [S, B] for previous tokens [S, B]; None without a head or hidden states."""
    if head.confidence is None or hidden is None:
        return None
    read = head.markov if head.config.confidence_head_with_markov else None
    return head.confidence(hidden, None if read is None else read.embed(prev))


def _num_draft(valid: StepFlags, confidence: StepConfidence | None, min_confidence: Scalar | None) -> RequestInts:
    """Return int32 [B]: steps before the first that is invalid or whose confidence is below the threshold."""
    go_on = valid
    if min_confidence is not None and confidence is not None:
        go_on &= jax.nn.sigmoid(confidence) >= min_confidence
    return jnp.cumprod(go_on.astype(jnp.int32), axis=0).sum(axis=0, dtype=jnp.int32)
