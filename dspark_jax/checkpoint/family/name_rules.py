"""Rows of source names: which canonical tensor a stored name is, or why it is left out.

Patterns match whole names, in order, after wrapper prefixes are removed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from . import names as canonical_names


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row: source names that match `pattern` become `canonical`, or are left out for `reason`.

    Attributes:
        pattern: regular expression for the whole name without prefixes; <last> is the number of the last stage.
        canonical: template of the canonical name (as in re.Match.expand); None leaves the tensor out.
        reason: why it is left out.
        scale: the source holds the block scales of `canonical`, not the tensor itself.
        fallback: used only where no other source gives `canonical` (the target's matrices beside a drafter's own).
    """

    pattern: str
    canonical: str | None
    reason: str = ""
    scale: bool = False
    fallback: bool = False


def identity(shapes: Iterable[str]) -> tuple[Rule, ...]:
    """Return rows that keep names as they are."""
    return tuple(Rule(pattern, r"\g<0>") for pattern in shapes)


_LAYER = r"layers\.\d+\."
# Which tensors of a Markov head there are depends on the kinds that are registered when a file is read: see map_names.
HEAD = identity([r"markov_head\..+", *(re.escape(name) for name in canonical_names.OTHER_HEAD_SHAPES)])
BACKBONE = identity(canonical_names.BACKBONE_SHAPES)
FOREIGN = identity(canonical_names.FOREIGN_SHAPES)
ALIASES = (
    Rule(r"confidence_head\.(weight|bias)", r"confidence_head.proj.\1"),
    Rule(r"encoder\.fc\.weight", "fc.weight"),
    Rule(r"encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
)
LEFT_OUT = (
    Rule(
        r"mask_embedding(\.weight)?", None, "embedding of the mask slot used in training; drafting embeds mask_token_id"
    ),
    Rule(r"(.*\.)?rotary_emb\.[a-z_]+", None, "rotary table, recomputed from the config"),
    Rule(r"verifier_(lm_head|norm)\..+", None, "copy of the verifier's weights, used in training only"),
)
TORCHSPEC = (
    Rule(r"context_proj\.weight", "fc.weight"),
    Rule(r"context_norm\.weight", "hidden_norm.weight"),
    Rule(r"final_norm\.weight", "norm.weight"),
    *(
        Rule(r"midlayer\." + f"({pattern.removeprefix(_LAYER)})", r"layers.0.\1")
        for pattern in canonical_names.BACKBONE_SHAPES
        if pattern.startswith(_LAYER)
    ),
)

_STAGE = r"mtp\.(\d+)\."
V4_HEADS = (
    Rule(r"mtp\.<last>\.markov_head\.(markov_w1|markov_w2)\.weight", r"markov_head.\1.weight"),
    Rule(r"mtp\.<last>\.markov_head\.(gate_proj|joint_proj)\.(weight|bias)", r"markov_head.\1.\2"),
    Rule(r"mtp\.<last>\.markov_head\.embed\.weight", canonical_names.W1),
    Rule(r"mtp\.<last>\.markov_head\.head\.weight", canonical_names.W2),
    Rule(r"mtp\.<last>\.confidence_head\.proj\.(weight|bias)", r"confidence_head.proj.\1"),
    # Some repacks carry the two matrices inside the drafter; these go before the target's own.
    Rule(r"mtp\.0\.embed\.weight", canonical_names.EMBEDDING),
    Rule(r"mtp\.<last>\.head\.weight", canonical_names.LM_HEAD),
    Rule(r"embed\.weight", canonical_names.EMBEDDING, fallback=True),
    Rule(r"head\.weight", canonical_names.LM_HEAD, fallback=True),
)
V4_BACKBONE = (
    Rule(r"(?!mtp\.).+", None, "tensor of the target, not of the drafter"),
    Rule(r"mtp\.0\.main_proj\.weight", "fc.weight"),
    Rule(r"mtp\.0\.main_proj\.scale", "fc.weight", scale=True),
    Rule(r"mtp\.0\.main_norm\.weight", "hidden_norm.weight"),
    Rule(r"mtp\.<last>\.norm\.weight", "norm.weight"),
    Rule(r"mtp\.<last>\.(hc_head_(?:fn|base|scale))", r"\1"),
    Rule(_STAGE + r"ffn\.gate\.bias_vl", None, "router bias of image tokens, which a drafter never sees"),
    *(
        Rule(_STAGE + f"({pattern.removeprefix(_LAYER)})", r"layers.\1.\2")
        for pattern in canonical_names.V4_SHAPES
        if pattern.startswith(_LAYER)
    ),
    Rule(
        _STAGE + r"(attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.(?:shared_experts|experts\.\d+)\.w[123])\.scale",
        r"layers.\1.\2.weight",
        scale=True,
    ),
)
V4_SHAPES = canonical_names.V4_SHAPES | {
    pattern: canonical_names.BACKBONE_SHAPES[pattern]
    for pattern in (r"embed_tokens\.weight", r"fc\.weight", r"(?:hidden_norm|norm)\.weight")
}
