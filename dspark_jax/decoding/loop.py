"""The decoding loop's jitted steps: prefill, one round of speculative or plain decoding, row replacement.

A round drafts behind the last committed token, runs the target once over that token and the draft, verifies, and moves
on by what was committed. Shapes never change, finished requests stay in their rows without committing, and the host
needs nothing but the committed tokens.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ..checks import invalid
from ..drafting.drafter import Drafter, propose_block
from ..noise import RESIDUAL, choose, gumbel_from_bits, noise_bits, row_is_valid
from ..transformer.cache import ContextCache
from ..transformer.target import Target
from ..types import (
    Committed,
    DraftSampling,
    Index,
    RequestFlags,
    RequestFloats,
    RequestInts,
    Scalar,
    Sequences,
    StopIds,
)
from ..verification.distributions import TargetDistribution
from ..verification.filter import TargetFilter
from ..verification.verify import verify
from .processors import raw_logprobs
from .state import DecodeState, LoopOptions, Round


def next_token(
    logits: Float32[Array, "B V"], draw: DraftSampling, target_filter: TargetFilter | None
) -> tuple[RequestInts, RequestFloats]:
    """Draw the token at index draw.position from the processed target row.

    Returns int32 [B], -1 where the row is invalid, and its log-probability float32 [B] (0 there).

    Args:
        logits: float32 [B, V].
    """
    rows = TargetDistribution.of(logits[:, None], draw.temperature, target_filter)
    log_p = rows.log_row(jnp.zeros_like(draw.position))
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    bits = noise_bits(draw.seed[:, None], draw.position[:, None], 0, RESIDUAL, ids)
    token = choose(log_p + gumbel_from_bits(bits))
    fine = row_is_valid(logits) & (log_p > -jnp.inf).any(axis=1)
    chosen = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
    return jnp.where(fine, token, -1), jnp.where(fine, chosen, 0.0)


def _process(
    state: DecodeState, logits: Float32[Array, "B R V"], drafts: Int32[Array, "B S"], options: LoopOptions
) -> Float32[Array, "B R V"]:
    """Apply the processor to target rows [B, R, V] along drafts [B, R-1]."""
    if options.processor is None:
        return logits
    with jax.named_scope("process"):
        return options.processor.apply(state.processed, logits, drafts)


def _logprobs(
    logits: Float32[Array, "B R V"], tokens: Committed, processed: Float32[Array, "B R"], options: LoopOptions
) -> dict[str, Any]:
    """Return the fields of a Round about log-probabilities, of raw logits [B, R, V] and committed tokens [B, R]."""
    if not options.logprobs:
        return {}
    return {"logprobs": jnp.where(tokens >= 0, processed, 0.0), "raw_logprobs": raw_logprobs(logits, tokens)}


def _advance(
    state: DecodeState, tokens: Committed, stopped: RequestFlags, options: LoopOptions
) -> tuple[DecodeState, Committed]:
    """Commit tokens [B, n] (padded with -1) in active requests; return the state and the tokens that were committed."""
    kept = (jnp.arange(tokens.shape[1])[None] < state.remaining[:, None]) & state.active[:, None]
    tokens = jnp.where(kept, tokens, -1)
    count = (tokens >= 0).sum(axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - count
    processed = state.processed if options.processor is None else options.processor.advance(state.processed, tokens)
    state = dataclasses.replace(
        state,
        processed=processed,
        anchor=jnp.where(count > 0, last, state.anchor),
        position=state.position + count,
        remaining=remaining,
        active=state.active & (remaining > 0) & (count > 0) & ~stopped,
    )
    return state, tokens


def _is_stop(tokens: RequestInts, stop_ids: StopIds | None) -> RequestFlags:
    if stop_ids is None:
        return jnp.zeros(tokens.shape, bool)
    return (tokens[:, None] == stop_ids).any(axis=1) & (tokens >= 0)


@partial(jax.jit, static_argnames=("taps",), donate_argnames=("cache", "context", "logits"))
def prefill_chunk(
    target: Target,
    drafter: Drafter | None,
    cache: Any,
    context: ContextCache | None,
    logits: Float32[Array, "B V"],
    tokens: Sequences,
    start: Index,
    lengths: RequestInts,
    *,
    taps: tuple[int, ...],
) -> tuple[Any, ContextCache | None, Float32[Array, "B V"]]:
    """Run prompt tokens [B, n] at positions start .. start + n - 1; keep the logits behind each prompt's last token.

    Args:
        logits: float32 [B, V], filled in for the requests whose prompts (lengths int32 [B]) end in this chunk.
    """
    size = tokens.shape[1]
    begin = jnp.full_like(lengths, start)
    hidden, features, cache = target.forward(tokens, begin, cache, taps)
    slot = lengths - 1 - begin
    last = jnp.take_along_axis(hidden, jnp.clip(slot, 0, size - 1)[:, None, None], axis=1)[:, 0]
    ends_here = (slot >= 0) & (slot < size)
    logits = jnp.where(ends_here[:, None], target.logits(last), logits)
    if drafter is not None:
        assert context is not None
        context = drafter.backbone.extend(context, features, jnp.minimum(lengths, begin + size))
    return cache, context, logits


@partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def first_token(
    state: DecodeState, logits: Float32[Array, "B V"], *, options: LoopOptions
) -> tuple[DecodeState, Round]:
    """Commit the token behind each prompt, drawn from logits [B, V]; return the state and a Round of tokens [B, 1].

    Before the call `position` is the index of the prompt's last token.
    """
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    state, tokens, extra = _one_token(state, logits, draw, options)
    nothing = jnp.zeros_like(state.anchor)
    return state, Round(tokens, nothing, nothing, (tokens[:, 0] >= 0).astype(jnp.int32), None, **extra)


def _one_token(
    state: DecodeState, logits: Float32[Array, "B V"], draw: DraftSampling, options: LoopOptions
) -> tuple[DecodeState, Committed, dict[str, Any]]:
    """Commit one token of each request from raw rows [B, V]: (state, tokens [B, 1], fields about log-probabilities)."""
    rows = _process(state, logits[:, None], jnp.zeros((logits.shape[0], 0), jnp.int32), options)
    token, log_p = next_token(rows[:, 0], draw, state.target_filter)
    state, tokens = _advance(state, token[:, None], _is_stop(token, state.stop_ids), options)
    return state, tokens, _logprobs(logits[:, None], tokens, log_p[:, None], options)


@partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def speculative_round(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    min_confidence: Scalar | None,
    scheduler: Any,
    *,
    options: LoopOptions,
) -> tuple[DecodeState, Round]:
    """Draft, verify, commit: one round for every request, in one program that updates the state in place.

    Args:
        min_confidence: float32 [] threshold, or None.
        scheduler: a pytree called as scheduler(block, active) -> int32 [B], the steps to verify, or None for all.
    """
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    assert state.context is not None
    assert state.features is not None
    assert options.draft is not None
    with jax.named_scope("draft"):
        block, context = propose_block(
            drafter, state.context, state.features, state.anchor, state.position,
            draw if options.method == "probabilistic" else None, min_confidence,
            options=options.draft,
        )  # fmt: skip
    num_draft = jnp.where(state.active, block.num_draft, 0)
    if scheduler is not None:
        num_draft = jnp.minimum(num_draft, scheduler(block, state.active))
    with jax.named_scope("target"):
        ids = jnp.concatenate([state.anchor[:, None], block.tokens], axis=1)
        hidden, features, cache = target.forward(ids, state.position, state.target_cache, options.taps)
        logits = target.logits(hidden)
    with jax.named_scope("verify"):
        rows = _process(state, logits, block.tokens, options)
        out = verify(block, rows, draw, num_draft, state.target_filter, state.stop_ids, rule=options.rule)
    features = features.astype(state.features.dtype)
    state = dataclasses.replace(state, target_cache=cache, context=context, features=features)
    committed = jnp.where(state.active, out.num_committed, 0)
    accepted = jnp.where(state.active, out.num_accepted, 0)
    state, tokens = _advance(state, out.tokens, out.stopped, options)
    extra = _logprobs(logits, tokens, out.logprobs, options)
    return state, Round(tokens, num_draft, accepted, committed, block.confidence_logits, **extra)


@partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def plain_round(target: Target, state: DecodeState, *, options: LoopOptions) -> tuple[DecodeState, Round]:
    """Commit one token per request by the target alone: the baseline.

    In a state with a drafter's context the taps are kept for it (see auto.py): `features` must have a free row, so
    fewer than S+1 positions may stand behind the context's end.
    """
    taps = () if state.features is None else options.taps
    hidden, tapped, cache = target.forward(state.anchor[:, None], state.position, state.target_cache, taps)
    if state.features is not None:
        assert state.context is not None
        where = (jnp.arange(tapped.shape[0], dtype=jnp.int32), state.position - state.context.lengths)
        features = state.features.at[where].set(tapped[:, 0].astype(state.features.dtype), mode="drop")
        state = dataclasses.replace(state, features=features)
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    state, tokens, extra = _one_token(
        dataclasses.replace(state, target_cache=cache), target.logits(hidden[:, 0]), draw, options
    )
    nothing = jnp.zeros_like(state.anchor)
    return state, Round(tokens, nothing, nothing, (tokens[:, 0] >= 0).astype(jnp.int32), None, **extra)


def replace_rows(state: DecodeState, rows: Any, fresh: DecodeState) -> DecodeState:
    """Put new requests into some rows of a running batch (continuous batching); `state` is donated.

    Args:
        rows: int [b], distinct rows of the batch, below B.
        fresh: the b new requests (of `start`), with the batch's capacity, stop-token width and filters.

    Raises:
        ValueError: rows out of range or given twice, or states that do not fit together.
    """
    batch, count = state.anchor.shape[0], fresh.anchor.shape[0]
    numbers = np.asarray(rows)
    if numbers.shape != (count,) or numbers.dtype.kind not in "iu":
        raise invalid("rows", f"{numbers.dtype} {list(numbers.shape)}", f"integers [{count}], one for each new request")
    if (numbers < 0).any() or (numbers >= batch).any() or len(set(numbers.tolist())) != count:
        raise invalid("rows", numbers.tolist(), f"distinct rows from 0 to {batch - 1}")
    old, new = (dict(jax.tree_util.tree_leaves_with_path(one)) for one in (state, fresh))
    for path in dict.fromkeys((*old, *new)):
        have, want = (
            f"{x.dtype} {list(x.shape[1:])}" if x is not None else None for x in (new.get(path), old.get(path))
        )
        if have != want:
            field = "fresh" + jax.tree_util.keystr(path)
            raise invalid(field, have, f"{want} for each request, as the batch has it")
    return _replace_rows(state, jnp.asarray(numbers, jnp.int32), fresh)


@partial(jax.jit, donate_argnames=("state",))
def _replace_rows(state: DecodeState, rows: Int32[Array, " b"], fresh: DecodeState) -> DecodeState:
    return jax.tree.map(lambda old, new: old.at[rows].set(new), state, fresh)
