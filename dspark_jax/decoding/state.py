"""What a decoding loop carries: its static options, the state of the requests in flight, and what a round did."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float32

from ..config import DraftOptions
from ..transformer.cache import ContextCache
from ..types import (
    Committed,
    Confidence,
    Features,
    RequestFlags,
    RequestFloats,
    RequestInts,
    RequestSeeds,
    StopIds,
)
from ..verification.filter import TargetFilter
from .processors import LogitsProcessor


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What is static about a loop: the drafting options, the tapped layers, and whether drafts and targets are sampled.

    Attributes:
        taps: the target's tapped layers.
        sampled: whether the target samples; a request with a temperature below 1e-5 is greedy all the same.
        draft: the drafting options; None for plain decoding.
        method: "greedy" or "probabilistic" drafts.
        rule: as in verify_block.
        processor: a processor of target logits (processors.py), or None.
        logprobs: whether rounds give the log-probabilities of committed tokens.
    """

    taps: tuple[int, ...] = ()
    sampled: bool = False
    draft: DraftOptions | None = None
    method: str = "greedy"
    rule: str = "token"
    processor: LogitsProcessor | None = None
    logprobs: bool = False


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
        processed: the state of the processor of target logits, if any.
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
    processed: Any = ()


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
        logprobs: float32 [B, S+1], log-probability of each committed token under the processed target; raw_logprobs:
            under the target's own logits, at temperature 1 and without any processing. 0 where there is no token; None
            unless asked for.
    """

    tokens: Committed
    num_draft: RequestInts
    num_accepted: RequestInts
    committed: RequestInts
    confidence_logits: Confidence | None
    logprobs: Float32[Array, "B R"] | None = None
    raw_logprobs: Float32[Array, "B R"] | None = None
