"""What a drafter is (DSparkConfig, read from a checkpoint's config.json) and how to draft with it (DraftConfig)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from . import head_kinds
from .checks import check_bool, check_choice, check_float, check_int, check_min_confidence, dtype_name, invalid

METHODS = ("greedy", "probabilistic")
OUTPUTS = ("tokens", "logits", "candidates")
IMPLEMENTATIONS = ("xla", "pallas")
MAX_SIZE = 2**31 - 1  # ids are int32
MAX_BLOCK = 2**16  # steps that the noise tells apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A drafter's description: the facts of its head, independent of the checkpoint family they came from.

    Attributes:
        vocab_size: V, the target's vocabulary; anchors, previous tokens and emitted tokens are ids of it.
        draft_vocab_size: Vd, the rows of the LM head and of markov_w2. Vd < V needs a draft-to-target table; Vd > V
            without one is padding, whose columns are never drafted.
        hidden_size: H of the drafter's hidden states.
        block_size: slots of a block; with `sample_from_anchor` each slot drafts, else slot 0 (the anchor) does not.
        mask_token_id: the target id that stands in the block's undrafted slots.
        markov_rank: r; 0 means no Markov head (a plain parallel drafter).
        markov_head_type: "vanilla", "gated", "rnn" or another registered kind; None exactly when markov_rank is 0.
        enable_confidence_head, confidence_head_with_markov: the confidence head, and whether it reads markov_w1(prev).
        final_logit_softcapping: cap c of c * tanh(x / c) on base logits; None for no cap.
        logit_scale: factor on the base logits, before the cap.
        sample_from_anchor: whether slot 0 drafts.
        target_layer_ids: target layers whose outputs feed the drafter (id k = output of layer k); may be empty.
        num_target_layers: the target's depth; None where unknown.
        rope_theta: rotary base of the drafter's layers; None where unknown.
        dtype: the dtype that the checkpoint says it was stored in; the tensors decide.
    """

    vocab_size: int
    hidden_size: int
    block_size: int
    mask_token_id: int
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_head_type: str | None = None
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    sample_from_anchor: bool = True
    target_layer_ids: tuple[int, ...] = ()
    num_target_layers: int | None = None
    rope_theta: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        """Check every field; the errors name the field, the value found and what was expected."""
        put = partial(object.__setattr__, self)
        for name, most in (("vocab_size", MAX_SIZE), ("hidden_size", MAX_SIZE), ("block_size", MAX_BLOCK)):
            put(name, check_int(name, getattr(self, name), 1, most))
        put("mask_token_id", check_int("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1))
        size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        put("draft_vocab_size", check_int("draft_vocab_size", size, 1, MAX_SIZE))
        put("markov_rank", check_int("markov_rank", self.markov_rank, 0, MAX_SIZE))
        if self.markov_rank == 0 and self.markov_head_type is not None:
            raise invalid("markov_head_type", self.markov_head_type, "None, since markov_rank is 0")
        if self.markov_rank > 0:
            check_choice("markov_head_type", self.markov_head_type, head_kinds.names())
        for name in ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"):
            check_bool(name, getattr(self, name))
        if self.confidence_head_with_markov and not self.enable_confidence_head:
            raise invalid("confidence_head_with_markov", True, "false, since enable_confidence_head is false")
        if self.confidence_head_with_markov and self.markov_rank == 0:
            raise invalid("confidence_head_with_markov", True, "false, since markov_rank is 0 (there is no markov_w1)")
        if self.final_logit_softcapping is not None:
            cap = check_float(
                "final_logit_softcapping",
                self.final_logit_softcapping,
                above=0,
                expected="a number > 0 that float32 holds",
            )
            put("final_logit_softcapping", cap)
        put(
            "logit_scale",
            check_float("logit_scale", self.logit_scale, above=0, expected="a number > 0 that float32 holds"),
        )
        if self.rope_theta is not None:
            put(
                "rope_theta",
                check_float("rope_theta", self.rope_theta, above=0, expected="a number > 0 that float32 holds"),
            )
        if self.num_target_layers is not None:
            put("num_target_layers", check_int("num_target_layers", self.num_target_layers, 1))
        self._check_layer_ids()
        if self.max_steps < 1:
            raise invalid("block_size", self.block_size, "at least 2 when sample_from_anchor is false")
        if self.dtype is not None:
            put("dtype", dtype_name("dtype", self.dtype))

    def _check_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not isinstance(ids, list | tuple):
            raise invalid("target_layer_ids", ids, "a list of layer numbers")
        # -1 selects the embedding output; the last layer's output is not a tap (the reference refuses it as well).
        top = None if self.num_target_layers is None else self.num_target_layers - 1
        checked = tuple(check_int("target_layer_ids", i, -1, top) for i in ids)
        if any(b <= a for a, b in itertools.pairwise(checked)):
            raise invalid("target_layer_ids", list(ids), "strictly increasing layer numbers")
        object.__setattr__(self, "target_layer_ids", checked)

    @property
    def max_steps(self) -> int:
        """The most draft steps S that the checkpoint was trained for."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def Vd(self) -> int:
        """The draft vocabulary's size (never None after construction)."""
        assert self.draft_vocab_size is not None
        return self.draft_vocab_size

    @property
    def draftable(self) -> int:
        """Columns of the draft vocabulary that can be drafted: all but padding."""
        return min(self.Vd, self.vocab_size)

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> DSparkConfig:
        """Read a flat config of canonical keys (what checkpoint/family/read_config.py makes of any config.json).

        Raises:
            ValueError: a field is missing or out of range.
        """
        given = {field.name: flat[field.name] for field in dataclasses.fields(cls) if flat.get(field.name) is not None}
        for name in ("vocab_size", "hidden_size", "block_size", "mask_token_id"):
            if name not in given:
                raise invalid(name, None, "a value in the config.json of a DSpark drafter")
        rank = check_int("markov_rank", given.get("markov_rank", 0), 0)
        confidence = check_bool("enable_confidence_head", given.get("enable_confidence_head", False))
        with_markov = check_bool("confidence_head_with_markov", given.get("confidence_head_with_markov", False))
        if with_markov and rank == 0:
            raise invalid("confidence_head_with_markov", True, "false, since markov_rank is 0 (there is no markov_w1)")
        given["confidence_head_with_markov"] = with_markov and confidence
        given["markov_head_type"] = given.get("markov_head_type", "vanilla") if rank else None
        return cls(**given)


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """How a server drafts: everything static about one jitted drafting function.

    Attributes:
        num_speculative_tokens: S, drafted tokens per block.
        draft_topk: k candidates per step, or None for the full draft vocabulary.
        draft_markov_topk: m, the previous token's strongest continuations, candidates beside the k; 0 for none.
        draft_sample_method: "greedy" (argmax) or "probabilistic" (Gumbel-max at a per-request temperature).
        outputs: "tokens", "logits" (corrected rows over the target vocabulary) or "candidates" (k ids and logits).
        logits_dtype: dtype of the corrected logits; None takes the head's.
        min_confidence: prune a block at the first step whose confidence is below it; None keeps all steps.
        batch_axes: mesh axes that split the requests; None reads them off the arrays (docs/servers.md).
        vocab_axis: mesh axis that splits base logits, lm_head and markov_w2 by vocabulary; None as above.
    """

    num_speculative_tokens: int
    draft_topk: int | None = None
    draft_sample_method: str = "greedy"
    outputs: str = "tokens"
    logits_dtype: str | None = None
    min_confidence: float | None = None
    draft_markov_topk: int = 0
    batch_axes: tuple[str, ...] | None = None
    vocab_axis: str | None = None

    def __post_init__(self) -> None:
        """Check every field; the errors name the field, the value found and what was expected."""
        put = partial(object.__setattr__, self)
        put("num_speculative_tokens", check_int("num_speculative_tokens", self.num_speculative_tokens, 1))
        if self.draft_topk is not None:
            put("draft_topk", check_int("draft_topk", self.draft_topk, 1))
        put("draft_markov_topk", check_int("draft_markov_topk", self.draft_markov_topk, 0))
        if self.draft_markov_topk and self.draft_topk is None:
            raise invalid(
                "draft_markov_topk", self.draft_markov_topk, "a draft_topk beside it (a dense draft has no candidates)"
            )
        check_choice("draft_sample_method", self.draft_sample_method, METHODS)
        check_choice("outputs", self.outputs, OUTPUTS)
        if self.outputs == "candidates" and self.draft_topk is None:
            raise invalid("outputs", "candidates", "a draft_topk beside it")
        if self.logits_dtype is not None:
            put("logits_dtype", dtype_name("logits_dtype", self.logits_dtype))
        put("min_confidence", check_min_confidence(self.min_confidence))
        axes = self.batch_axes
        if axes is not None:
            axes = (axes,) if isinstance(axes, str) else axes
            if not isinstance(axes, list | tuple) or not all(isinstance(name, str) for name in axes):
                raise invalid("batch_axes", axes, "names of mesh axes, or None")
            put("batch_axes", tuple(axes))
        if self.vocab_axis is not None and not isinstance(self.vocab_axis, str):
            raise invalid("vocab_axis", self.vocab_axis, "the name of a mesh axis, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """All that is static about one draft, resolved against a head: the one static argument of the jitted programs.

    Built by drafting/inputs.resolve_options, which checks; a trace belongs to (shapes, dtypes, these options).

    Attributes:
        logits_dtype: numpy dtype that corrected logits are rounded to; tokens are drawn from the rounded values.
        topk: k candidates per step, at most the draftable columns, or None for the whole draft vocabulary.
        markov_topk: m continuations of the previous token beside them, 0 for none.
        outputs: "tokens", "logits" or "candidates".
        implementation: "xla", "pallas" or None (kernels/dispatch.py).
        num_steps: S where no array tells it (a drafter's whole block of hidden states), else None.
        batch_axes: mesh axes that split the requests; () for none.
        vocab_axis: mesh axis that splits the columns of the draft vocabulary, or None.
    """

    logits_dtype: Any
    topk: int | None = None
    outputs: str = "tokens"
    implementation: str | None = None
    num_steps: int | None = None
    markov_topk: int = 0
    batch_axes: tuple[str, ...] = ()
    vocab_axis: str | None = None

    @property
    def num_candidates(self) -> int:
        """Slots of a row of candidates, k + m."""
        return (self.topk or 0) + self.markov_topk

    @property
    def keeps_rows(self) -> bool:
        """Whether the corrected rows are part of the result."""
        return self.outputs != "tokens"

    @property
    def is_split(self) -> bool:
        """Whether a mesh splits the call."""
        return bool(self.batch_axes) or self.vocab_axis is not None
