"""From prompts to text: `generate` and `stream` run the decoding loop, with a drafter or (the baseline) without one."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32
from numpy.typing import ArrayLike

from ..drafting.drafter import Drafter
from ..transformer.target import Target
from ..types import DraftSampling
from ..verification.filter import TargetFilter
from . import loop
from .auto import absorb, make_pacer
from .inputs import as_prompts, prepare_options, start, stop_sets
from .processors import LogitsProcessor


@dataclasses.dataclass(frozen=True)
class RoundEvent:
    """One round as the host sees it, in NumPy. Round 0 is the prefill, which commits one token per request.

    Attributes:
        tokens: int32 [B, S+1] (or [B, 1]), newly committed tokens padded with -1.
        num_draft, num_accepted, committed: int32 [B], see loop.Round.
        confidence_logits, logprobs, raw_logprobs: see loop.Round, or None.
        active: bool [B], the requests that took part.
        finish_reason: B entries, why a request ended in this round: "length", "stop", "invalid" (the target gave NaN or
            no finite value), or None for one that goes on or had ended before.
        seconds: wall time of the round.
        length: S of a drafted round, 0 of a plain one.
    """

    tokens: Int32[np.ndarray, "B R"]
    num_draft: Int32[np.ndarray, " B"]
    num_accepted: Int32[np.ndarray, " B"]
    committed: Int32[np.ndarray, " B"]
    confidence_logits: Float32[np.ndarray, "B S"] | None
    active: Bool[np.ndarray, " B"]
    finish_reason: tuple[str | None, ...]
    seconds: float
    logprobs: np.ndarray | None = None
    raw_logprobs: np.ndarray | None = None
    length: int = 0


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` returns. R rounds after the prefill, B requests, S draft steps.

    Attributes:
        tokens: B arrays of int32, the new tokens of each request.
        finish_reason: B strings: "length", "stop", or "invalid" (the target gave NaN or no finite value).
        active: bool [R, B], the requests that took part in each round; the arrays below mean nothing elsewhere.
        num_draft, num_accepted: int32 [R, B], verified and accepted drafts.
        committed: int32 [R, B], tokens a round gave, before the last round was cut to max_new_tokens.
        lengths: int32 [R], S of drafted rounds and 0 of plain ones.
        confidence_logits: float32 [R, B, S] before the sigmoid (NaN in plain rounds), or None: with num_draft and
            num_accepted the records that calibration is fitted on.
        prefill_seconds, decode_seconds: wall time, compilation included.
    """

    tokens: list[Int32[np.ndarray, " n"]]
    finish_reason: list[str]
    active: Bool[np.ndarray, "R B"]
    num_draft: Int32[np.ndarray, "R B"]
    num_accepted: Int32[np.ndarray, "R B"]
    committed: Int32[np.ndarray, "R B"]
    confidence_logits: Float32[np.ndarray, "R B S"] | None
    lengths: Int32[np.ndarray, " R"]
    prefill_seconds: float
    decode_seconds: float

    @property
    def acceptance_lengths(self) -> list[Int32[np.ndarray, " n"]]:
        """Tokens per round of each request, B arrays (accepted drafts and the corrected or bonus token)."""
        return [self.committed[self.active[:, b], b] for b in range(self.active.shape[1])]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, over all rounds of all requests; NaN without a round."""
        return float(self.committed[self.active].mean()) if self.active.any() else float("nan")


def generate(target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]], **options: Any) -> Generated:
    """Decode prompts to the end; the arguments are those of `stream`.

    Returns:
        Generated. With the same seeds it does not depend on the batch, and greedy output is the target's own.
    """
    prompts = as_prompts(prompts)
    events = list(stream(target, drafter, prompts, **options))
    first, rounds = events[0], events[1:]
    batch = len(prompts)
    tokens = [np.concatenate([e.tokens[b][e.tokens[b] >= 0] for e in events]) for b in range(batch)]
    reasons = [next(reason for e in events if (reason := e.finish_reason[b]) is not None) for b in range(batch)]

    def stacked(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.stack([getattr(e, name) for e in rounds]) if rounds else np.zeros((0, *shape), dtype)

    known = [e.confidence_logits.shape for e in rounds if e.confidence_logits is not None]
    confidence = [
        np.full(known[0], np.nan, np.float32) if e.confidence_logits is None else e.confidence_logits
        for e in (rounds if known else ())
    ]
    return Generated(
        tokens=tokens,
        finish_reason=reasons,
        active=stacked("active", (batch,), bool),
        num_draft=stacked("num_draft", (batch,), np.int32),
        num_accepted=stacked("num_accepted", (batch,), np.int32),
        committed=stacked("committed", (batch,), np.int32),
        confidence_logits=np.stack(confidence) if known else None,
        lengths=stacked("length", (), np.int32).astype(np.int32),
        prefill_seconds=first.seconds,
        decode_seconds=sum(e.seconds for e in rounds),
    )


def stream(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: DraftSampling | None = None,
    draft_topk: int | None = None,
    max_new_tokens: int | Sequence[int] | None = 128,
    num_speculative_tokens: int | str | Sequence[int] | None = None,
    draft_sample_method: str | None = None,
    logits_dtype: Any = None,
    min_confidence: float | None = None,
    scheduler: Any = None,
    rule: str = "token",
    stop_ids: ArrayLike | None = None,
    target_filter: TargetFilter | None = None,
    capacity: int | None = None,
    implementation: str | None = None,
    draft_markov_topk: int = 0,
    processor: LogitsProcessor | None = None,
    logprobs: bool = False,
) -> Iterator[RoundEvent]:
    """Decode prompts round by round: yield what each round committed, the prefill first, until all are finished.

    Args:
        target: the model whose distribution is kept (see target.Target).
        drafter: None decodes plainly, one token per round: the baseline.
        prompts: B non-empty sequences of token ids; lengths may differ. Generators are read once.
        sampling: None is greedy; else temperature and seed per request. Its `position` is not read.
        draft_topk: k candidates per draft step; None drafts from the whole vocabulary.
        draft_markov_topk: m continuations of the previous token beside them (Drafter.with_continuations), 0 for none.
        max_new_tokens: per request, or one number for all; None writes until a stop token or the end of the cache.
        num_speculative_tokens: S; None takes the checkpoint's; "auto" drafts only in rounds where that is expected to
            be faster than plain decoding (auto.py); recorded lengths (Generated.lengths) repeat what "auto" did.
        draft_sample_method: "greedy" or "probabilistic" drafts; None follows `sampling`.
        logits_dtype, min_confidence, implementation: as in draft_block.
        scheduler: decides how many steps of each block are verified: a pytree called as scheduler(block, active [B])
            -> int32 [B] inside the round; None verifies all.
        rule: as in verify_block.
        processor: changes the target's logits by what a request has written: penalties, biases, masks (processors.py).
        logprobs: whether events give the log-probabilities of the committed tokens, processed and raw.
        stop_ids: token ids [n], or [B, n] padded with -1; a request ends with the first of them.
        target_filter: restricts the target's distribution per request; `allowed` is [B, V].
        capacity: cache slots per request; None takes what prompts and max_new_tokens need.

    Raises:
        ValueError: token ids outside the vocabulary, a prompt that does not fit, target and drafter that do not belong
            together, or a wrong option; the message names the field, the value and what was expected.
    """
    prompts = as_prompts(prompts)
    replayed = drafter is not None and num_speculative_tokens is not None and np.ndim(num_speculative_tokens) > 0
    paced = replayed or (isinstance(num_speculative_tokens, str) and num_speculative_tokens == "auto")
    options, threshold = prepare_options(
        target, drafter, sampled=sampling is not None, draft_topk=draft_topk, logits_dtype=logits_dtype, rule=rule,
        num_speculative_tokens=None if paced else num_speculative_tokens, draft_sample_method=draft_sample_method,
        min_confidence=min_confidence, implementation=implementation, draft_markov_topk=draft_markov_topk,
        processor=processor, logprobs=logprobs,
    )  # fmt: skip
    clock, active, batch = time.perf_counter(), np.ones(len(prompts), bool), len(prompts)
    state, first = start(
        target, drafter, prompts, options, sampling=sampling, max_new_tokens=max_new_tokens, stop_ids=stop_ids,
        target_filter=target_filter, capacity=capacity,
    )  # fmt: skip
    first, still_active, left = jax.device_get((first, state.active, state.remaining))
    stops = stop_sets(stop_ids, batch)
    yield _event(first, active, still_active, left, stops, time.perf_counter() - clock)
    pacer, pending = None, 0  # positions behind the end of the drafter's context
    if paced and drafter is not None and still_active.any():
        pacer = make_pacer(num_speculative_tokens, target, drafter, state, threshold, scheduler, options)
    while (active := still_active).any():
        clock = time.perf_counter()
        most = 0 if options.draft is None else options.draft.num_steps or 0
        length = most if pacer is None else pacer.next_length()
        if drafter is None or not length:
            if drafter is not None and state.features is not None and pending == state.features.shape[1]:
                state, pending = absorb(drafter.backbone, state), 0
            state, done = loop.plain_round(target, state, options=options)
        else:
            state, done = loop.speculative_round(target, drafter, state, threshold, scheduler, options=options)
        done, still_active, left = jax.device_get((done, state.active, state.remaining))
        pending = int(done.committed.max()) if length else pending + 1
        if pacer is not None:
            pacer.record(length, done.committed, active)
        yield _event(done, active, still_active, left, stops, time.perf_counter() - clock, length)


def _event(
    done: loop.Round, before: np.ndarray, after: np.ndarray, left: np.ndarray, stops: list[set[int]], seconds: float,
    length: int = 0,
) -> RoundEvent:  # fmt: skip
    """Return a round as the host sees it; before and after are the active requests, bool [B]."""
    fields = {field.name: getattr(done, field.name) for field in dataclasses.fields(done)}
    reasons = _finish_reasons(fields["tokens"], before, after, left, stops)
    return RoundEvent(**fields, active=before, finish_reason=reasons, seconds=seconds, length=length)


def _finish_reasons(
    tokens: np.ndarray, before: np.ndarray, after: np.ndarray, left: np.ndarray, stops: list[set[int]]
) -> tuple[str | None, ...]:
    """Return why each request ended between `before` and `after` (active, bool [B]); None for those that did not."""
    reasons: list[str | None] = []
    for b, row in enumerate(tokens):
        last = row[row >= 0][-1:].tolist()
        reason = "stop" if last and last[0] in stops[b] else "length" if left[b] == 0 else "invalid"
        reasons.append(reason if before[b] and not after[b] else None)
    return tuple(reasons)


# `generate` hands its options on; tools and readers see those of `stream`.
generate.__signature__ = inspect.signature(stream).replace(return_annotation=Generated)  # type: ignore[attr-defined]  # read by inspect
