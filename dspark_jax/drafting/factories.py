"""Drafting functions of a serving loop: made once from a DraftConfig, they reuse the memory that they are handed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..checks import check_int, invalid
from ..coerce import check_shape, coerce_sampling
from ..config import DraftConfig, DraftOptions
from ..trace_count import Program
from ..types import DraftBlock, DraftBuffer, DraftSampling
from .api import from_hidden, from_logits
from .candidates import empty_buffer
from .head import DSparkHead
from .inputs import check_head, check_steps, check_threshold, prepare_hidden, prepare_logits, resolve_options
from .split import axes_of_call, with_axes


def make_buffer(head: DSparkHead, config: DraftConfig, batch: int) -> DraftBuffer | None:
    """Return the DraftBuffer for a function of make_draft_fn: for top-k rows with outputs="logits", else None."""
    _check_config(config)
    check_steps(check_head(head), config.num_speculative_tokens, "num_speculative_tokens")
    options = resolve_options(
        head, config.draft_topk, config.outputs, config.logits_dtype, None, markov_topk=config.draft_markov_topk
    )
    if config.draft_topk is None or config.outputs != "logits":
        return None
    batch = check_int("batch", batch, 1)
    V = head.config.vocab_size
    return empty_buffer(config.num_speculative_tokens, batch, V, options.num_candidates, options.logits_dtype)


class DraftFunction:
    """A jitted drafting function for one DraftConfig: call it, `lower` it, or ask for its `trace_count`."""

    def __init__(
        self,
        config: DraftConfig,
        prepare: Callable[..., Any],
        finish: Callable[[Any], Any],
        programs: tuple[Program, ...],
    ) -> None:
        self.config = config
        self._prepare, self._finish, self._programs = prepare, finish, programs

    def __call__(self, head: DSparkHead, *args: Any, **named: Any) -> Any:
        """Coerce, check and run; see make_draft_fn and make_draft_from_logits_fn for the arguments."""
        program, operands, options, axes = self._prepare(head, *args, **named)
        with axes.context():
            return self._finish(program(*operands, options=options))

    def lower(self, head: DSparkHead, *args: Any, **named: Any) -> jax.stages.Lowered:
        """Lower the program that these arguments (arrays or jax.ShapeDtypeStruct) would run."""
        program, operands, options, axes = self._prepare(head, *args, **named)
        with axes.context():
            return program.lower(*operands, options=options)

    def trace_count(self) -> int:
        """Return how often this function was traced."""
        return sum(program.traces for program in self._programs)


def _options(
    config: DraftConfig, head: DSparkHead, steps: int, field: str, batch: int, sampling: Any, implementation: str | None
) -> tuple[DraftOptions, DraftSampling | None]:
    """Check a call against its DraftConfig; return the options and the coerced sampling."""
    if steps != config.num_speculative_tokens:
        raise invalid(field, steps, f"{config.num_speculative_tokens} (num_speculative_tokens)")
    method = config.draft_sample_method
    if (sampling is None) != (method == "greedy"):
        wanted = "None" if method == "greedy" else "a DraftSampling"
        raise invalid("sampling", type(sampling).__name__, f"{wanted}, since draft_sample_method is {method}")
    options = resolve_options(
        head,
        config.draft_topk,
        config.outputs,
        config.logits_dtype,
        implementation,
        markov_topk=config.draft_markov_topk,
    )
    return options, None if sampling is None else coerce_sampling(sampling, batch)


def _check_config(config: Any) -> DraftConfig:
    if not isinstance(config, DraftConfig):
        raise invalid("config", type(config).__name__, "a DraftConfig")
    return config


def _named_axes(config: DraftConfig) -> dict[str, Any]:
    return {"batch_axes": config.batch_axes, "vocab_axis": config.vocab_axis}


def _check_alive(field: str, array: Any) -> None:
    """Refuse an array that an earlier call was given and has overwritten."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
        raise invalid(field, "a donated array", "the one that the last call returned, or a new one")


def _check_buffer(field: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct):
        raise invalid(field, type(array).__name__, "a JAX array (make_buffer returns them)")
    _check_alive(field, array)
    check_shape(field, array, shape, "[S, B, V or k]")
    if array.dtype != dtype:
        raise invalid(f"{field}.dtype", str(array.dtype), str(dtype))


def make_draft_fn(config: DraftConfig, *, implementation: str | None = None) -> DraftFunction:
    """Make fn(head, hidden, anchor_ids, sampling, buffer) -> (block, buffer) for a serving loop.

    hidden [B, S, H], anchor_ids [B], sampling (None when greedy) as in `draft_block`. For top-k rows (draft_topk with
    outputs="logits") `buffer` is the DraftBuffer of make_buffer or of the last call; it is donated, and block.logits
    views the returned one until the next call. Otherwise buffer is None, in and out. `implementation` as in
    draft_block.

    An outer jit drops the donation: call fn from Python, or call `draft` of drafting/draft.py inside a jit that
    donates for itself.
    """
    _check_config(config)
    program = Program(from_hidden, static=("options",), donate=("buffer",))
    buffered = config.draft_topk is not None and config.outputs == "logits"

    def prepare(head: Any, hidden: Any, anchor_ids: Any, sampling: Any = None, buffer: Any = None) -> tuple:
        hidden, anchor = prepare_hidden(check_head(head), hidden, anchor_ids)
        B, S, _ = hidden.shape
        options, draw = _options(config, head, S, "hidden.shape[1]", B, sampling, implementation)
        if buffered != isinstance(buffer, DraftBuffer):
            wanted = "the DraftBuffer of make_buffer(head, config, batch)" if buffered else "None"
            raise invalid("buffer", type(buffer).__name__, wanted)
        if buffered:
            _check_buffer("buffer.logits", buffer.logits, (S, B, head.config.vocab_size), options.logits_dtype)
            _check_buffer("buffer.ids", buffer.ids, (S, B, options.num_candidates), jnp.dtype(jnp.int32))
        threshold = check_threshold(head, config.min_confidence, has_hidden=True)
        axes = axes_of_call(head, [(hidden, 0), (anchor, 0)], draw, **_named_axes(config))
        return program, (head, hidden, anchor, draw, buffer, threshold), with_axes(options, axes), axes

    def finish(result: tuple[DraftBlock, DraftBuffer | None]) -> tuple[DraftBlock, DraftBuffer | None]:
        block, buffer = result
        return (block if buffer is None else dataclasses.replace(block, logits=buffer.logits)), buffer

    return DraftFunction(config, prepare, finish, (program,))


def make_draft_from_logits_fn(config: DraftConfig, *, implementation: str | None = None) -> DraftFunction:
    """Make fn(head, base_logits, anchor_ids, sampling, hidden) -> block that corrects base_logits in place.

    base_logits [S, B, Vd] step-major is donated, and block.logits takes its memory, where outputs="logits", Vd = V and
    base_logits has the logits dtype. Elsewhere no output can take its memory, so it is not donated and stays usable.
    `implementation` as in draft_block.
    """
    _check_config(config)
    donating = Program(from_logits, static=("options",), donate=("base_logits",))
    keeping = Program(from_logits, static=("options",))

    def prepare(head: Any, base_logits: Any, anchor_ids: Any, sampling: Any = None, hidden: Any = None) -> tuple:
        _check_alive("base_logits", base_logits)
        base, anchor, hidden = prepare_logits(check_head(head), base_logits, anchor_ids, hidden)
        S, B, Vd = base.shape
        options, draw = _options(config, head, S, "base_logits.shape[0]", B, sampling, implementation)
        same = Vd == head.config.vocab_size and base.dtype == options.logits_dtype
        program = donating if config.outputs == "logits" and same else keeping
        threshold = check_threshold(head, config.min_confidence, has_hidden=hidden is not None)
        batch = [(base, 1), (anchor, 0), (hidden, 0)]
        axes = axes_of_call(head, batch, draw, base=base, **_named_axes(config))
        return program, (head, base, anchor, hidden, draw, threshold), with_axes(options, axes), axes

    return DraftFunction(config, prepare, lambda block: block, (donating, keeping))
