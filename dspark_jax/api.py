"""The public drafting functions: they coerce and check their arguments, then call one jitted program over draft.py.

Weights are arguments of that program, never constants of it. One trace serves all values of temperatures, seeds,
positions and thresholds: a trace belongs to (shapes, dtypes, topk, method, outputs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .candidates import empty_buffer
from .config import OUTPUTS, DraftConfig, check_choice, check_int, check_min_confidence, check_topk, dtype_name, invalid
from .draft import draft, teacher_forced
from .entry import check_shape, coerce_floats, coerce_ids, coerce_sampling
from .heads import DSparkHead
from .kernels.dispatch import IMPLEMENTATIONS
from .types import DraftBlock, DraftBuffer, DraftSampling

_STATIC = ("topk", "outputs", "logits_dtype", "implementation")


def _from_hidden(head, hidden, anchor, draw, buffer, min_confidence, **static):
    """Draft from batch-major hidden states [B, S, H]; the base logits are produced step-major, never transposed."""
    hidden = jnp.swapaxes(hidden, 0, 1)
    base = head.base_logits(hidden, static["logits_dtype"])
    return draft(head, base, anchor, hidden, draw, buffer, min_confidence, **static)


def _from_logits(head, base_logits, anchor, draw, hidden, min_confidence, **static):
    """Draft from step-major base logits [S, B, Vd]."""
    hidden = None if hidden is None else jnp.swapaxes(hidden, 0, 1)
    return draft(head, base_logits, anchor, hidden, draw, None, min_confidence, **static)[0]


class _Program:
    """A jitted function that counts its traces."""

    def __init__(self, function: Callable[..., Any], donate: str | None = None) -> None:
        self.traces = 0

        def counted(*args: Any, **static: Any) -> Any:
            self.traces += 1
            return function(*args, **static)

        names = function.__code__.co_varnames
        donated = () if donate is None else (names.index(donate),)
        self.jitted = jax.jit(counted, static_argnames=_STATIC, donate_argnums=donated)


_HIDDEN = _Program(_from_hidden)
_LOGITS = _Program(_from_logits)


def _check_head(head: Any) -> DSparkHead:
    if not isinstance(head, DSparkHead):
        raise invalid("head", type(head).__name__, "a DSparkHead (load_head returns one)")
    return head


def _check_steps(head: DSparkHead, steps: int, field: str) -> None:
    if steps > head.config.max_steps:
        anchor = "" if head.config.sample_from_anchor else " less one, since sample_from_anchor is false"
        raise invalid(field, steps, f"at most {head.config.max_steps} draft steps (block_size{anchor})")


def _static(
    head: DSparkHead, topk: Any, outputs: str, logits_dtype: Any, implementation: str | None = None
) -> dict[str, Any]:
    check_choice("outputs", outputs, OUTPUTS)
    k = check_topk(topk, head.config.Vd)
    if outputs == "candidates" and k is None:
        raise invalid("outputs", "candidates", "a topk beside it (a dense draft has no candidates)")
    dtype = head.dtype if logits_dtype is None else dtype_name("logits_dtype", logits_dtype)
    if implementation is not None:
        check_choice("implementation", implementation, IMPLEMENTATIONS)
    return {"topk": k, "outputs": outputs, "logits_dtype": jnp.dtype(dtype), "implementation": implementation}


def _threshold(head: DSparkHead, min_confidence: Any, hidden: Any) -> jax.Array | None:
    value = check_min_confidence(min_confidence)
    if value is None:
        return None
    if head.confidence is None or hidden is None:
        missing = "no confidence head in this checkpoint" if head.confidence is None else "no hidden states given"
        raise invalid("min_confidence", value, f"None ({missing})")
    return jnp.asarray(value, jnp.float32)


def _prepare_hidden(head: DSparkHead, hidden: Any, anchor_ids: Any) -> tuple[jax.Array, jax.Array]:
    hidden = coerce_floats("hidden", hidden, (None, None, head.config.hidden_size), "[B, S, H]", head.dtype)
    _check_steps(head, hidden.shape[1], "hidden.shape[1]")
    return hidden, coerce_ids("anchor_ids", anchor_ids, (hidden.shape[0],), "[B]")


def _prepare_logits(
    head: DSparkHead, base_logits: Any, anchor_ids: Any, hidden: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    base = coerce_floats("base_logits", base_logits, (None, None, head.config.Vd), "[S, B, Vd] (step-major)")
    S, B, _ = base.shape
    _check_steps(head, S, "base_logits.shape[0]")
    if hidden is not None:
        hidden = coerce_floats("hidden", hidden, (B, S, head.config.hidden_size), "[B, S, H]", head.dtype)
    elif head.config.markov_head_type in ("gated", "rnn"):
        raise invalid("hidden", None, f"hidden states [B, S, H], which a {head.config.markov_head_type} head reads")
    return base, coerce_ids("anchor_ids", anchor_ids, (B,), "[B]"), hidden


def draft_block(
    head: DSparkHead,
    hidden: Any,
    anchor_ids: Any,
    *,
    sampling: DraftSampling | None = None,
    topk: int | None = None,
    outputs: str = "tokens",
    logits_dtype: Any = None,
    min_confidence: float | None = None,
    implementation: str | None = None,
) -> DraftBlock:
    """Draft a block of S tokens for each of B requests from backbone hidden states, in one jitted call.

    Args:
        head: the drafter's head (see load_head).
        hidden: [B, S, H] float, hidden states of the S draft slots.
        anchor_ids: int [B], the token before the first draft position; an id outside [0, V) makes its request invalid.
        sampling: None drafts greedily; a DraftSampling draws each token from softmax(logits / temperature).
        topk: k candidates per step, chosen from the base logits; None uses the whole draft vocabulary.
        outputs: "tokens"; "logits" adds block.logits [S, B, V]; "candidates" adds candidate ids and logits [S, B, k].
        logits_dtype: dtype of the corrected logits that tokens are drawn from; None takes the head's.
        min_confidence: prune at the first step whose conditional confidence is below it (block.num_draft).
        implementation: "xla" (plain operations), "pallas" (the kernels of kernels/: compiled on NVIDIA GPUs,
            interpreted elsewhere) or None: a kernel on GPUs only where it is known to have passed its checks on one.

    Returns:
        DraftBlock.

    Raises:
        ValueError: wrong shape, dtype, range or option; the message names the field, the value and what was expected.
    """
    static = _static(_check_head(head), topk, outputs, logits_dtype, implementation)
    hidden, anchor = _prepare_hidden(head, hidden, anchor_ids)
    draw = None if sampling is None else coerce_sampling(sampling, hidden.shape[0])
    return _HIDDEN.jitted(head, hidden, anchor, draw, None, _threshold(head, min_confidence, hidden), **static)[0]


def draft_from_logits(
    head: DSparkHead,
    base_logits: Any,
    anchor_ids: Any,
    *,
    hidden: Any = None,
    sampling: DraftSampling | None = None,
    topk: int | None = None,
    outputs: str = "tokens",
    logits_dtype: Any = None,
    min_confidence: float | None = None,
    implementation: str | None = None,
) -> DraftBlock:
    """Draft like `draft_block`, from step-major base logits [S, B, Vd] (scaled and softcapped) of the caller.

    Args:
        base_logits: [S, B, Vd] float; kept, not donated (see make_draft_from_logits_fn).
        hidden: [B, S, H], which gated and rnn heads and the confidence head read; None otherwise (without it
            block.confidence_logits is None).
    """
    static = _static(_check_head(head), topk, outputs, logits_dtype, implementation)
    base, anchor, hidden = _prepare_logits(head, base_logits, anchor_ids, hidden)
    draw = None if sampling is None else coerce_sampling(sampling, base.shape[1])
    return _LOGITS.jitted(head, base, anchor, draw, hidden, _threshold(head, min_confidence, hidden), **static)


@jax.jit
def _teacher_forced(head: DSparkHead, hidden: jax.Array, prev: jax.Array) -> jax.Array:
    return teacher_forced(head, jnp.swapaxes(hidden, 0, 1), prev.T)


def teacher_forced_logits(head: DSparkHead, hidden: Any, prev_ids: Any) -> jax.Array:
    """Return corrected logits [S, B, Vd] in the head's dtype for given previous tokens.

    Args:
        hidden: [B, S, H] float; prev_ids: int [B, S], the target id before each step (prev_ids[:, 0] is the anchor).
    """
    hidden = coerce_floats(
        "hidden", hidden, (None, None, _check_head(head).config.hidden_size), "[B, S, H]", head.dtype
    )
    _check_steps(head, hidden.shape[1], "hidden.shape[1]")
    return _teacher_forced(head, hidden, coerce_ids("prev_ids", prev_ids, hidden.shape[:2], "[B, S]"))


def make_buffer(head: DSparkHead, config: DraftConfig, batch: int) -> DraftBuffer | None:
    """Return the DraftBuffer for a function of make_draft_fn: for top-k rows with outputs="logits", else None."""
    _check_config(config)
    _check_steps(_check_head(head), config.num_speculative_tokens, "num_speculative_tokens")
    static = _static(head, config.draft_topk, config.outputs, config.logits_dtype)
    if config.draft_topk is None or config.outputs != "logits":
        return None
    batch = check_int("batch", batch, 1)
    V, k = head.config.vocab_size, static["topk"]
    return empty_buffer(config.num_speculative_tokens, batch, V, k, static["logits_dtype"])


class DraftFunction:
    """A jitted drafting function for one DraftConfig: call it, `lower` it, or ask for its `trace_count`."""

    def __init__(
        self, prepare: Callable[..., Any], finish: Callable[[Any], Any], programs: tuple[_Program, ...]
    ) -> None:
        self._prepare, self._finish, self._programs = prepare, finish, programs

    def __call__(self, head: DSparkHead, *args: Any) -> Any:
        """Coerce, check and run; see make_draft_fn and make_draft_from_logits_fn for the arguments."""
        program, operands, static = self._prepare(head, *args)
        return self._finish(program.jitted(*operands, **static))

    def lower(self, head: DSparkHead, *args: Any) -> jax.stages.Lowered:
        """Lower the program that these arguments (arrays or jax.ShapeDtypeStruct) would run."""
        program, operands, static = self._prepare(head, *args)
        return program.jitted.lower(*operands, **static)

    def trace_count(self) -> int:
        """Return how often this function was traced."""
        return sum(program.traces for program in self._programs)


def _options(
    config: DraftConfig, head: DSparkHead, steps: int, field: str, batch: int, sampling: Any, implementation: str | None
) -> tuple[dict[str, Any], DraftSampling | None]:
    """Check a call against its DraftConfig; return the static options and the coerced sampling."""
    if steps != config.num_speculative_tokens:
        raise invalid(field, steps, f"{config.num_speculative_tokens} (num_speculative_tokens)")
    method = config.draft_sample_method
    if (sampling is None) != (method == "greedy"):
        wanted = "None" if method == "greedy" else "a DraftSampling"
        raise invalid("sampling", type(sampling).__name__, f"{wanted}, since draft_sample_method is {method}")
    static = _static(head, config.draft_topk, config.outputs, config.logits_dtype, implementation)
    return static, None if sampling is None else coerce_sampling(sampling, batch)


def _check_config(config: Any) -> DraftConfig:
    if not isinstance(config, DraftConfig):
        raise invalid("config", type(config).__name__, "a DraftConfig")
    return config


def make_draft_fn(config: DraftConfig, *, implementation: str | None = None) -> DraftFunction:
    """Make fn(head, hidden, anchor_ids, sampling, buffer) -> (block, buffer) for a serving loop.

    hidden [B, S, H], anchor_ids [B], sampling (None when greedy) as in `draft_block`. For top-k rows (draft_topk with
    outputs="logits") `buffer` is the DraftBuffer of make_buffer or of the last call; it is donated, and block.logits
    views the returned one until the next call. Otherwise buffer is None, in and out. `implementation` as in
    draft_block.

    An outer jit drops the donation: call fn from Python, or call `draft.draft` inside a jit that donates for itself.
    """
    _check_config(config)
    program = _Program(_from_hidden, donate="buffer")
    buffered = config.draft_topk is not None and config.outputs == "logits"

    def prepare(head: Any, hidden: Any, anchor_ids: Any, sampling: Any = None, buffer: Any = None) -> tuple:
        hidden, anchor = _prepare_hidden(_check_head(head), hidden, anchor_ids)
        B, S, _ = hidden.shape
        static, draw = _options(config, head, S, "hidden.shape[1]", B, sampling, implementation)
        if buffered != isinstance(buffer, DraftBuffer):
            wanted = "the DraftBuffer of make_buffer(head, config, batch)" if buffered else "None"
            raise invalid("buffer", type(buffer).__name__, wanted)
        if buffered:
            check_shape("buffer.logits", buffer.logits, (S, B, head.config.vocab_size), "[S, B, V]")
            check_shape("buffer.ids", buffer.ids, (S, B, static["topk"]), "[S, B, k]")
            if buffer.logits.dtype != static["logits_dtype"]:
                raise invalid("buffer.logits.dtype", str(buffer.logits.dtype), str(static["logits_dtype"]))
        threshold = _threshold(head, config.min_confidence, hidden)
        return program, (head, hidden, anchor, draw, buffer, threshold), static

    def finish(result: tuple[DraftBlock, DraftBuffer | None]) -> tuple[DraftBlock, DraftBuffer | None]:
        block, buffer = result
        return (block if buffer is None else dataclasses.replace(block, logits=buffer.logits)), buffer

    return DraftFunction(prepare, finish, (program,))


def make_draft_from_logits_fn(config: DraftConfig, *, implementation: str | None = None) -> DraftFunction:
    """Make fn(head, base_logits, anchor_ids, sampling, hidden) -> block that corrects base_logits in place.

    base_logits [S, B, Vd] step-major is donated, and block.logits takes its memory, where outputs="logits", Vd = V and
    base_logits has the logits dtype. Elsewhere no output can take its memory, so it is not donated and stays usable.
    `implementation` as in draft_block.
    """
    _check_config(config)
    donating, keeping = _Program(_from_logits, donate="base_logits"), _Program(_from_logits)

    def prepare(head: Any, base_logits: Any, anchor_ids: Any, sampling: Any = None, hidden: Any = None) -> tuple:
        base, anchor, hidden = _prepare_logits(_check_head(head), base_logits, anchor_ids, hidden)
        S, B, Vd = base.shape
        static, draw = _options(config, head, S, "base_logits.shape[0]", B, sampling, implementation)
        same = Vd == head.config.vocab_size and base.dtype == static["logits_dtype"]
        program = donating if config.outputs == "logits" and same else keeping
        return program, (head, base, anchor, draw, hidden, _threshold(head, config.min_confidence, hidden)), static

    return DraftFunction(prepare, lambda block: block, (donating, keeping))
