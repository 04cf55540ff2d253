"""The public drafting functions: they coerce and check their arguments, then call one jitted program over draft.py.

Weights are arguments of that program, never constants of it. One trace serves all values of temperatures, seeds,
positions and thresholds: a trace belongs to (shapes, dtypes, DraftOptions, and whether there is sampling).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from ..coerce import coerce_ids, coerce_sampling
from ..config import DraftOptions
from ..sharding.axes import MeshAxes
from ..trace_count import Program
from ..types import DraftBlock, DraftBuffer, DraftLogits, DraftSampling, Hidden, RequestInts, Scalar, Tokens
from .draft import draft, teacher_forced
from .head import DSparkHead
from .inputs import check_head, check_threshold, coerce_hidden, prepare_hidden, prepare_logits, resolve_options
from .split import axes_of_call, draft_over_mesh, is_on_mesh, teacher_forced_over_mesh, with_axes


def from_hidden(
    head: DSparkHead,
    hidden: Hidden,
    anchor: RequestInts,
    sampling: DraftSampling | None,
    buffer: DraftBuffer | None,
    min_confidence: Scalar | None,
    *,
    options: DraftOptions,
) -> tuple[DraftBlock, DraftBuffer | None]:
    """Draft from batch-major hidden states [B, S, H]; the base logits are produced step-major, never transposed."""

    def core(head: DSparkHead, base: None, hidden: Hidden, anchor: RequestInts, *rest: Any) -> Any:
        del base
        hidden = jnp.swapaxes(hidden, 0, 1)
        return draft(head, head.base_logits(hidden, options.logits_dtype), anchor, hidden, *rest, options=options)

    args = (head, None, hidden, anchor, sampling, buffer, min_confidence)
    return draft_over_mesh(core, *args, options=options) if is_on_mesh(options) else core(*args)


def from_logits(
    head: DSparkHead,
    base_logits: DraftLogits,
    anchor: RequestInts,
    hidden: Hidden | None,
    sampling: DraftSampling | None,
    min_confidence: Scalar | None,
    *,
    options: DraftOptions,
) -> DraftBlock:
    """Draft from step-major base logits [S, B, Vd]."""

    def core(head: DSparkHead, base: DraftLogits, hidden: Hidden | None, anchor: RequestInts, *rest: Any) -> Any:
        hidden = None if hidden is None else jnp.swapaxes(hidden, 0, 1)
        return draft(head, base, anchor, hidden, *rest, options=options)

    args = (head, base_logits, hidden, anchor, sampling, None, min_confidence)
    return (draft_over_mesh(core, *args, options=options) if is_on_mesh(options) else core(*args))[0]


_HIDDEN = Program(from_hidden, static=("options",))
_LOGITS = Program(from_logits, static=("options",))


def draft_block(
    head: DSparkHead,
    hidden: ArrayLike,
    anchor_ids: ArrayLike,
    *,
    sampling: DraftSampling | None = None,
    topk: int | None = None,
    outputs: str = "tokens",
    logits_dtype: Any = None,
    min_confidence: float | None = None,
    implementation: str | None = None,
    markov_topk: int = 0,
    batch_axes: tuple[str, ...] | None = None,
    vocab_axis: str | None = None,
) -> DraftBlock:
    """Draft a block of S tokens for each of B requests from backbone hidden states, in one jitted call.

    Args:
        head: the drafter's head (see load_head).
        hidden: [B, S, H] float, hidden states of the S draft slots.
        anchor_ids: int [B], the token before the first draft position; an id outside [0, V) makes its request invalid.
        sampling: None drafts greedily; a DraftSampling draws each token from softmax(logits / temperature).
        topk: k candidates per step, chosen from the base logits, 1 <= k <= Vd; None uses the whole draft vocabulary.
            Padding (Vd > V) is no candidate: k beyond V is V.
        outputs: "tokens"; "logits" adds block.logits [S, B, V]; "candidates" adds candidate ids and logits [S, B, k].
        logits_dtype: dtype of the corrected logits that tokens are drawn from; None takes the head's.
        min_confidence: prune at the first step whose conditional confidence is below it (block.num_draft).
        implementation: "xla" (plain operations), "pallas" (the kernels of kernels/: compiled on NVIDIA GPUs,
            interpreted elsewhere) or None: a kernel on GPUs only where it is known to have passed its checks on one.
        markov_topk: m candidates beside the k: the previous token's strongest continuations, which the bias alone knows
            (head.with_continuations(m) finds them); 0 for none. Candidate rows then have k + m slots.
        batch_axes, vocab_axis: mesh axes that split the requests, and lm_head and markov_w2 by vocabulary. None reads
            them off the arrays, which show them everywhere but inside a caller's jit over axes of type Auto. The
            tokens are those of one device (docs/servers.md).

    Returns:
        DraftBlock.

    Raises:
        ValueError: wrong shape, dtype, range or option; the message names the field, the value and what was expected.
    """
    options = resolve_options(check_head(head), topk, outputs, logits_dtype, implementation, markov_topk=markov_topk)
    hidden, anchor = prepare_hidden(head, hidden, anchor_ids)
    sampling = None if sampling is None else coerce_sampling(sampling, hidden.shape[0])
    threshold = check_threshold(head, min_confidence, has_hidden=True)
    batch = [(hidden, 0), (anchor, 0)]
    axes = axes_of_call(head, batch, sampling, batch_axes=batch_axes, vocab_axis=vocab_axis)
    with axes.context():
        return _HIDDEN(head, hidden, anchor, sampling, None, threshold, options=with_axes(options, axes))[0]


def draft_from_logits(
    head: DSparkHead,
    base_logits: ArrayLike,
    anchor_ids: ArrayLike,
    *,
    hidden: ArrayLike | None = None,
    sampling: DraftSampling | None = None,
    topk: int | None = None,
    outputs: str = "tokens",
    logits_dtype: Any = None,
    min_confidence: float | None = None,
    implementation: str | None = None,
    markov_topk: int = 0,
    batch_axes: tuple[str, ...] | None = None,
    vocab_axis: str | None = None,
) -> DraftBlock:
    """Draft like `draft_block`, from step-major base logits [S, B, Vd] (scaled and softcapped) of the caller.

    Args:
        base_logits: [S, B, Vd] float; kept, not donated (see make_draft_from_logits_fn).
        hidden: [B, S, H], which gated and rnn heads and the confidence head read; None otherwise (without it
            block.confidence_logits is None).
    """
    options = resolve_options(check_head(head), topk, outputs, logits_dtype, implementation, markov_topk=markov_topk)
    base, anchor, hidden = prepare_logits(head, base_logits, anchor_ids, hidden)
    sampling = None if sampling is None else coerce_sampling(sampling, base.shape[1])
    threshold = check_threshold(head, min_confidence, has_hidden=hidden is not None)
    batch = [(base, 1), (anchor, 0), (hidden, 0)]
    axes = axes_of_call(head, batch, sampling, base=base, batch_axes=batch_axes, vocab_axis=vocab_axis)
    with axes.context():
        return _LOGITS(head, base, anchor, hidden, sampling, threshold, options=with_axes(options, axes))


@jax.jit(static_argnames=("axes",))
def _teacher_forced(head: DSparkHead, hidden: Hidden, prev: Tokens, *, axes: MeshAxes) -> DraftLogits:
    def core(head: DSparkHead, hidden: Hidden, prev: Tokens) -> DraftLogits:
        return teacher_forced(head, jnp.swapaxes(hidden, 0, 1), prev.T)

    return teacher_forced_over_mesh(core, head, hidden, prev, axes)


def teacher_forced_logits(
    head: DSparkHead,
    hidden: ArrayLike,
    prev_ids: ArrayLike,
    *,
    batch_axes: tuple[str, ...] | None = None,
    vocab_axis: str | None = None,
) -> DraftLogits:
    """Return corrected logits [S, B, Vd] in the head's dtype for given previous tokens.

    Args:
        hidden: [B, S, H] float; prev_ids: int [B, S], the target id before each step (prev_ids[:, 0] is the anchor).
        batch_axes, vocab_axis: as in draft_block.
    """
    hidden = coerce_hidden(check_head(head), hidden)
    prev = coerce_ids("prev_ids", prev_ids, hidden.shape[:2], "[B, S]")
    axes = axes_of_call(head, [(hidden, 0), (prev, 0)], batch_axes=batch_axes, vocab_axis=vocab_axis)
    with axes.context():
        return _teacher_forced(head, hidden, prev, axes=dataclasses.replace(axes, mesh=None))
