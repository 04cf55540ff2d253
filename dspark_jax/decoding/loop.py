"""The decoding loop's state and its jitted steps: prefill, one round of speculative or plain decoding, row replacement.

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
from jaxtyping import Array, Float32, Int32

from ..config import DraftOptions
from ..drafting.drafter import Drafter, propose_block
from ..noise import RESIDUAL, choose, gumbel_from_bits, noise_bits, row_is_valid
from ..transformer.cache import ContextCache
from ..transformer.target import Target
from ..types import (
    Committed,
    Confidence,
    DraftSampling,
    Features,
    Index,
    RequestFlags,
    RequestFloats,
    RequestInts,
    RequestSeeds,
    Scalar,
    Sequences,
    StopIds,
)
from ..verification.distributions import TargetDistribution
from ..verification.filter import TargetFilter
from ..verification.verify import verify


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What is static about a loop: the drafting options, the tapped layers, and whether drafts and targets are sampled.

    Attributes:
        taps: the target's tapped layers.
        sampled: whether the target samples; a request with a temperature below 1e-5 is greedy all the same.
        draft: the drafting options; None for plain decoding.
        method: "greedy" or "probabilistic" drafts.
        rule: as in verify_block.
    """

    taps: tuple[int, ...] = ()
    sampled: bool = False
    draft: DraftOptions | None = None
    method: str = "greedy"
    rule: str = "token"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything about B requests in flight. Every array has the batch as its leading axis.

    Attributes:
        target_cache: the target's cache; it holds positions below `position`.
        context: the drafter's context cache, or None for plain decoding.
        features: [B, S+1, T * Ht], the target's taps from the context's end on; None for plain decoding.
        anchor: int32 [B], the last committed token; position: int32 [B], its index in the sequence.
        remaining: int32 [B], tokens that a request may still commit; active: bool [B], whether it is not finished.
        temperature: float32 [B]; seed: uint32 [B].
        stop_ids: int32 [B, n] padded with -1, or None; target_filter: per-request restrictions, or None.
    """

    target_cache: Any
    context: ContextCache | None
    features: Features | None
    anchor: RequestInts
    position: RequestInts
    remaining: RequestInts
    active: RequestFlags
    temperature: RequestFloats
    seed: RequestSeeds
    stop_ids: StopIds | None
    target_filter: TargetFilter | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did.

    Attributes:
        tokens: int32 [B, S+1], newly committed tokens padded with -1, cut to what the request may still commit.
        num_draft: int32 [B], proposed tokens that were verified; num_accepted: int32 [B], those that were accepted.
        committed: int32 [B], tokens before the cut (accepted ones and the corrected or bonus token); 0 in a finished
            request, and in one whose target row was invalid, which is finished by it.
        confidence_logits: float32 [B, S], or None.
    """

    tokens: Committed
    num_draft: RequestInts
    num_accepted: RequestInts
    committed: RequestInts
    confidence_logits: Confidence | None


def next_token(logits: Float32[Array, "B V"], draw: DraftSampling, target_filter: TargetFilter | None) -> RequestInts:
    """Draw the token at index draw.position from the processed target row: int32 [B], -1 where the row is invalid.

    Args:
        logits: float32 [B, V].
    """
    rows = TargetDistribution.of(logits[:, None], draw.temperature, target_filter)
    log_p = rows.log_row(jnp.zeros_like(draw.position))
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    bits = noise_bits(draw.seed[:, None], draw.position[:, None], 0, RESIDUAL, ids)
    token = choose(log_p + gumbel_from_bits(bits))
    return jnp.where(row_is_valid(logits) & (log_p > -jnp.inf).any(axis=1), token, -1)


def _advance(state: DecodeState, tokens: Committed, stopped: RequestFlags) -> tuple[DecodeState, Committed]:
    """Commit tokens [B, n] (padded with -1) in active requests; return the state and the tokens that were committed."""
    kept = (jnp.arange(tokens.shape[1])[None] < state.remaining[:, None]) & state.active[:, None]
    tokens = jnp.where(kept, tokens, -1)
    count = (tokens >= 0).sum(axis=1, dtype=jnp.int32)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - count
    state = dataclasses.replace(
        state,
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
) -> tuple[DecodeState, Committed]:
    """Commit the token behind each prompt, drawn from logits [B, V]; return the state and the tokens int32 [B, 1].

    Before the call `position` is the index of the prompt's last token.
    """
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    token = next_token(logits, draw, state.target_filter)
    return _advance(state, token[:, None], _is_stop(token, state.stop_ids))


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
        out = verify(block, logits, draw, num_draft, state.target_filter, state.stop_ids, rule=options.rule)
    features = features.astype(state.features.dtype)
    state = dataclasses.replace(state, target_cache=cache, context=context, features=features)
    committed = jnp.where(state.active, out.num_committed, 0)
    accepted = jnp.where(state.active, out.num_accepted, 0)
    state, tokens = _advance(state, out.tokens, out.stopped)
    return state, Round(tokens, num_draft, accepted, committed, block.confidence_logits)


@partial(jax.jit, static_argnames=("options",), donate_argnames=("state",))
def plain_round(target: Target, state: DecodeState, *, options: LoopOptions) -> tuple[DecodeState, Round]:
    """Commit one token per request by the target alone: the baseline."""
    hidden, _, cache = target.forward(state.anchor[:, None], state.position, state.target_cache, ())
    draw = DraftSampling(state.temperature, state.seed, state.position + 1)
    token = next_token(target.logits(hidden[:, 0]), draw, state.target_filter)
    state = dataclasses.replace(state, target_cache=cache)
    committed = jnp.where(state.active, (token >= 0).astype(jnp.int32), 0)
    state, tokens = _advance(state, token[:, None], _is_stop(token, state.stop_ids))
    nothing = jnp.zeros_like(committed)
    return state, Round(tokens, nothing, nothing, committed, None)


@partial(jax.jit, donate_argnames=("state",))
def replace_rows(state: DecodeState, rows: Int32[Array, " b"], fresh: DecodeState) -> DecodeState:
    """Put new requests into rows int32 [b] of a running batch (continuous batching); `fresh` holds b requests."""
    return jax.tree.map(lambda old, new: old.at[rows].set(new), state, fresh)
