"""Options and operands of the drafting entry points, checked and coerced once for all of them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..checks import check_choice, check_int, check_min_confidence, check_topk, dtype_name, invalid
from ..coerce import ANY, coerce_floats, coerce_ids
from ..config import IMPLEMENTATIONS, OUTPUTS, DraftOptions
from ..types import DraftLogits, Hidden, RequestInts, Scalar
from .head import DSparkHead


def check_head(head: Any) -> DSparkHead:
    """Return `head`, which must be a DSparkHead."""
    if not isinstance(head, DSparkHead):
        raise invalid("head", type(head).__name__, "a DSparkHead (load_head returns one)")
    return head


def check_steps(head: DSparkHead, steps: int, field: str) -> None:
    """Refuse more draft steps than the checkpoint was trained for."""
    if steps > head.config.max_steps:
        anchor = "" if head.config.sample_from_anchor else " less one, since sample_from_anchor is false"
        raise invalid(field, steps, f"at most {head.config.max_steps} draft steps (block_size{anchor})")


def resolve_options(
    head: DSparkHead,
    topk: Any,
    outputs: str,
    logits_dtype: Any,
    implementation: str | None,
    num_steps: Any = None,
    markov_topk: Any = 0,
) -> DraftOptions:
    """Return what is static about a draft, checked against the head; `num_steps` where no array tells S."""
    check_choice("outputs", outputs, OUTPUTS)
    k = check_topk(topk, head.config.Vd)
    k = None if k is None else min(k, head.config.draftable)  # padding is never a candidate
    if outputs == "candidates" and k is None:
        raise invalid("outputs", "candidates", "a topk beside it (a dense draft has no candidates)")
    m = check_continuations(head, k, markov_topk)
    dtype = head.dtype if logits_dtype is None else dtype_name("logits_dtype", logits_dtype)
    if implementation is not None:
        check_choice("implementation", implementation, IMPLEMENTATIONS)
    if num_steps is not None:
        num_steps = check_int("num_steps", num_steps, 1, head.config.max_steps)
    return DraftOptions(
        logits_dtype=jnp.dtype(dtype), topk=k, outputs=outputs, implementation=implementation, num_steps=num_steps,
        markov_topk=m,
    )  # fmt: skip


def check_continuations(head: DSparkHead, k: int | None, markov_topk: Any) -> int:
    """Return m, the continuations that a step takes as candidates; the head must hold a table of as many."""
    m = min(check_int("markov_topk", markov_topk, 0, head.config.Vd), head.config.draftable)
    if m == 0:
        return 0
    if k is None:
        raise invalid("markov_topk", m, "a topk beside it (a dense draft has no candidates)")
    found = -1 if head.continuations is None else head.continuations.m
    if found < m:
        has = "no continuations" if found < 0 else f"{found} continuations"
        raise invalid(
            "markov_topk", m, f"a head with as many continuations (this one has {has}): head.with_continuations({m})"
        )
    return m


def check_threshold(head: DSparkHead, min_confidence: Any, *, has_hidden: bool) -> Scalar | None:
    """Return the confidence threshold as a float32 scalar (a new value is no new trace), or None."""
    value = check_min_confidence(min_confidence)
    if value is None:
        return None
    if head.confidence is None or not has_hidden:
        missing = "no confidence head in this checkpoint" if head.confidence is None else "no hidden states given"
        raise invalid("min_confidence", value, f"None ({missing})")
    return jnp.asarray(value, jnp.float32)


def coerce_hidden(head: DSparkHead, hidden: Any) -> Hidden:
    """Return hidden [B, S, H] in the head's dtype."""
    hidden = coerce_floats("hidden", hidden, (ANY, None, head.config.hidden_size), "[B, S, H]", head.dtype)
    check_steps(head, hidden.shape[1], "hidden.shape[1]")
    return hidden


def prepare_hidden(head: DSparkHead, hidden: Any, anchor_ids: Any) -> tuple[Hidden, RequestInts]:
    """Return hidden [B, S, H] in the head's dtype and anchors int32 [B]."""
    hidden = coerce_hidden(head, hidden)
    return hidden, coerce_ids("anchor_ids", anchor_ids, (hidden.shape[0],), "[B]")


def prepare_logits(
    head: DSparkHead, base_logits: Any, anchor_ids: Any, hidden: Any
) -> tuple[DraftLogits, RequestInts, Hidden | None]:
    """Return base logits [S, B, Vd], anchors int32 [B] and hidden [B, S, H] (None where the head needs none)."""
    base = coerce_floats("base_logits", base_logits, (None, ANY, head.config.Vd), "[S, B, Vd] (step-major)")
    S, B, _ = base.shape
    check_steps(head, S, "base_logits.shape[0]")
    if hidden is not None:
        hidden = coerce_floats("hidden", hidden, (B, S, head.config.hidden_size), "[B, S, H]", head.dtype)
    elif head.markov is not None and head.markov.kind.reads_hidden:
        raise invalid("hidden", None, f"hidden states [B, S, H], which a {head.config.markov_head_type} head reads")
    return base, coerce_ids("anchor_ids", anchor_ids, (B,), "[B]"), hidden
