"""From prompts to a batch in flight: the checks of options, target, drafter and prompts, and the prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from ..checks import check_bool, check_choice, check_int, invalid
from ..coerce import coerce_sampling
from ..config import METHODS
from ..drafting.drafter import Drafter
from ..transformer.target import Target
from ..types import DraftSampling, Scalar
from ..verification.filter import TargetFilter
from ..verification.inputs import coerce_filter
from ..verification.verify import RULES
from . import loop
from .loop import DecodeState, LoopOptions
from .processors import LogitsProcessor

MAX_POSITIONS = 2**24  # what a request may ask for: beyond it lies no model's context, and int32 arithmetic
# Prompt tokens per prefill program, whatever the prompts: one width, so that a request's numbers do not depend on the
# lengths of the others (a product's rows may round otherwise at another width), and one trace.
PREFILL_CHUNK = 64
BUCKET = 32  # capacities are multiples of it, which bounds the number of traces


def prepare_options(
    target: Target,
    drafter: Drafter | None,
    *,
    sampled: bool,
    draft_topk: Any = None,
    num_speculative_tokens: Any = None,
    draft_sample_method: Any = None,
    logits_dtype: Any = None,
    min_confidence: Any = None,
    rule: str = "token",
    implementation: str | None = None,
    draft_markov_topk: Any = 0,
    processor: LogitsProcessor | None = None,
    logprobs: bool = False,
) -> tuple[LoopOptions, Scalar | None]:
    """Check how to decode; return the static options and the confidence threshold."""
    if processor is not None and not isinstance(processor, LogitsProcessor):
        raise invalid("processor", type(processor).__name__, "a LogitsProcessor (decoding/processors.py) or None")
    check_bool("logprobs", logprobs)
    if drafter is None:
        given = {"draft_topk": draft_topk, "min_confidence": min_confidence, "implementation": implementation}
        for name, value in given.items():
            if value is not None:
                raise invalid(name, value, "None, since there is no drafter")
        if draft_markov_topk:
            raise invalid("draft_markov_topk", draft_markov_topk, "0, since there is no drafter")
        return LoopOptions(sampled=sampled, processor=processor, logprobs=logprobs), None
    check_pair(target, drafter)
    check_choice("rule", rule, RULES)
    method = "probabilistic" if sampled else "greedy"
    if draft_sample_method is not None:
        method = check_choice("draft_sample_method", draft_sample_method, METHODS)
    if method == "probabilistic" and not sampled:
        raise invalid("draft_sample_method", method, "'greedy', since sampling is None")
    needs_q = method == "probabilistic" and rule != "target_only"
    outputs = "tokens" if not needs_q else "logits" if draft_topk is None else "candidates"
    draft = drafter.resolve_options(
        num_speculative_tokens, draft_topk, outputs, logits_dtype, implementation, draft_markov_topk
    )
    taps = drafter.config.target_layer_ids
    options = LoopOptions(
        taps=taps, sampled=sampled, method=method, rule=rule, draft=draft, processor=processor, logprobs=logprobs
    )
    return options, drafter.check_threshold(min_confidence)


def as_prompts(prompts: Any) -> list[Any]:
    """Return prompts as a list; generators, of prompts and of token ids, are read once."""
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__"):
        raise invalid("prompts", prompts, "a non-empty list of token-id lists")
    lazy = (str, bytes, int)
    return [
        p if hasattr(p, "__len__") or isinstance(p, lazy) or not hasattr(p, "__iter__") else list(p) for p in prompts
    ]


def check_pair(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter made for another target: vocabulary, tapped layers, depth and hidden size must agree."""
    config = drafter.config
    if config.vocab_size != target.vocab_size:
        raise invalid("drafter vocab_size", config.vocab_size, f"the target's, {target.vocab_size}")
    if config.num_target_layers not in (None, target.num_layers):
        raise invalid("drafter num_target_layers", config.num_target_layers, f"the target's depth, {target.num_layers}")
    if max(config.target_layer_ids) >= target.num_layers:
        expected = f"layers below the target's depth, {target.num_layers}"
        raise invalid("drafter target_layer_ids", list(config.target_layer_ids), expected)
    width = len(config.target_layer_ids) * target.hidden_size
    if drafter.backbone.feature_size != width:
        expected = f"{len(config.target_layer_ids)} taps of the target's hidden_size {target.hidden_size} = {width}"
        raise invalid("drafter fc input", drafter.backbone.feature_size, expected)


def start(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    options: LoopOptions,
    *,
    sampling: DraftSampling | None = None,
    max_new_tokens: ArrayLike | None = 128,
    stop_ids: ArrayLike | None = None,
    target_filter: TargetFilter | None = None,
    capacity: int | None = None,
) -> tuple[DecodeState, loop.Round]:
    """Prefill prompts: return the state of their decoding and the round of their first tokens, int32 [B, 1].

    Raises:
        ValueError: as `stream`.
    """
    lengths = _check_prompts(prompts, target.vocab_size)
    batch = len(lengths)
    block = 1 if drafter is None else drafter.config.block_size + 1
    if max_new_tokens is None:
        max_new_tokens = _all_that_fits(lengths, capacity, block, target.max_length)
    limits = np.broadcast_to(np.asarray(max_new_tokens), (batch,))
    limits = np.array([check_int("max_new_tokens", _whole(n), 1, MAX_POSITIONS) for n in limits], np.int32)
    # The last committed token may stand at the end of length + limit; one more block is drafted behind it.
    needed = int((lengths + limits).max()) + block
    capacity = _capacity(capacity, needed, lengths, limits, block, target.max_length)
    size = PREFILL_CHUNK
    padded = np.zeros((batch, -(-int(lengths.max()) // size) * size), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = target.make_cache(batch, capacity)
    context = None if drafter is None else drafter.make_cache(batch, capacity)
    logits = jnp.zeros((batch, target.vocab_size), jnp.float32)
    ends = jnp.asarray(lengths)
    for at in range(0, padded.shape[1], size):
        chunk = jnp.asarray(padded[:, at : at + size])
        cache, context, logits = loop.prefill_chunk(
            target, drafter, cache, context, logits, chunk, jnp.int32(at), ends, taps=options.taps
        )
    zeros = jnp.zeros((batch,), jnp.int32)
    draw = DraftSampling(jnp.zeros((batch,)), zeros, zeros) if sampling is None else sampling
    draw = coerce_sampling(dataclasses.replace(draw, position=zeros), batch)
    features = None
    if drafter is not None:
        assert options.draft is not None
        assert options.draft.num_steps is not None
        features = jnp.zeros(
            (batch, options.draft.num_steps + 1, drafter.backbone.feature_size), drafter.backbone.dtype
        )
    written = jnp.asarray(np.where(np.arange(padded.shape[1]) < lengths[:, None], padded, -1))
    stops = stop_sets(stop_ids, batch)
    width = max(map(len, stops))
    state = DecodeState(
        target_cache=cache,
        context=context,
        features=features,
        anchor=jnp.zeros((batch,), jnp.int32),
        position=jnp.asarray(lengths - 1),
        remaining=jnp.asarray(limits),
        active=jnp.ones((batch,), bool),
        temperature=draw.temperature,
        seed=draw.seed,
        stop_ids=jnp.asarray([sorted(s) + [-1] * (width - len(s)) for s in stops], jnp.int32) if width else None,
        target_filter=coerce_filter(target_filter, batch, 1, target.vocab_size),
        processed=() if options.processor is None else options.processor.start(written, target.vocab_size),
    )
    return loop.first_token(state, logits, options=options)


def _whole(value: Any) -> Any:
    """Return a whole number as an int, and anything else as it is, for the check to refuse."""
    return int(value) if isinstance(value, int | float | np.number) and value == np.floor(value) else value


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> Int32[np.ndarray, " B"]:
    """Return the lengths int32 [B] of checked prompts."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or len(prompts) == 0:
        raise invalid("prompts", prompts, "a non-empty list of token-id lists")
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise invalid(f"prompts[{number}]", prompt, "a non-empty list of token ids")
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise invalid(f"prompts[{number}]", wrong, f"token ids below the target's vocab_size {vocab_size}")
    return np.array([len(prompt) for prompt in prompts], np.int32)


def _all_that_fits(lengths: np.ndarray, capacity: Any, block: int, max_length: int | None) -> np.ndarray:
    """Return the new tokens int [B] that cache and target leave room for."""
    ends = [] if max_length is None else [max_length]
    ends += [] if capacity is None else [check_int("capacity", capacity, 1) - block]
    if not ends:
        raise invalid("max_new_tokens", None, "a number, or a capacity, since this target has no limit of its own")
    room = min(ends) - lengths
    if room.min() < 1:
        raise invalid(
            "prompts", f"a prompt of {lengths.max()} tokens", f"at most {min(ends) - 1}, which leave room for one"
        )
    return room


def _capacity(
    capacity: Any,
    needed: int,
    lengths: Int32[np.ndarray, " B"],
    limits: Int32[np.ndarray, " B"],
    block: int,
    max_length: int | None,
) -> int:
    """Return cache slots per request, refusing prompts that do not fit them or the target."""
    chosen = -(-needed // BUCKET) * BUCKET if capacity is None else check_int("capacity", capacity, 1, MAX_POSITIONS)
    worst = int(np.argmax(lengths + limits))
    what = f"prompt {worst} of {lengths[worst]} tokens and max_new_tokens {limits[worst]}"
    if needed > chosen:
        raise invalid("capacity", chosen, f"at least {needed} slots, for {what} and {block} of a block")
    if max_length is not None and int((lengths + limits).max()) > max_length:
        raise invalid("prompts", what, f"at most {max_length} positions, the target's limit")
    return chosen


def stop_sets(stop_ids: ArrayLike | None, batch: int) -> list[set[int]]:
    """Return each request's stop tokens from ids [n] or [B, n] (negative ones are padding), or None."""
    if stop_ids is None:
        return [set()] * batch
    ids = np.asarray(stop_ids)
    if ids.size == 0:
        return [set()] * batch
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != batch):
        raise invalid("stop_ids", stop_ids, "token ids [n] or [B, n]")
    if ids.max() >= 2**31:
        raise invalid("stop_ids", int(ids.max()), "token ids below 2**31")
    return [{int(i) for i in row if i >= 0} for row in np.broadcast_to(ids, (batch, ids.shape[-1]))]
