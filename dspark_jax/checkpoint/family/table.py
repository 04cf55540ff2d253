"""The table of checkpoint families: how each is recognised, and which rows of names it has.

Detection looks at tensor names first and at the config second, because labels and contents of published files disagree.
A name that no row matches is an error: nothing is dropped by default, and a pattern matches the whole name or nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import names as canonical_names
from .name_rules import (
    ALIASES,
    BACKBONE,
    FOREIGN,
    HEAD,
    LEFT_OUT,
    TORCHSPEC,
    V4_BACKBONE,
    V4_HEADS,
    V4_SHAPES,
    Rule,
    identity,
)

Names = frozenset[str]
Raw = Mapping[str, Any]
Shapes = dict[str, tuple[str, ...]]

# What a family's backbone can become here.
FULL, TENSORS, HEAD_ONLY, REFUSED = "full", "tensors", "head only", "refused"


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint family.

    Attributes:
        name: what errors, manifests and `inspect` call it.
        detect: (tensor names, config) -> whether a checkpoint is of this family.
        rules: its rows, first match wins.
        shapes: pattern of canonical backbone names -> symbolic shape.
        support: FULL, TENSORS (converts, but no JAX backbone here), HEAD_ONLY or REFUSED.
        note: for other than FULL, why.
        prefixes: wrapper prefixes removed from names before matching.
    """

    name: str
    detect: Callable[[Names, Raw], bool]
    rules: tuple[Rule, ...] = ()
    shapes: Shapes = dataclasses.field(default_factory=lambda: canonical_names.BACKBONE_SHAPES)
    support: str = FULL
    note: str = ""
    prefixes: tuple[str, ...] = ("_orig_mod.", "model.", "logit_head.")


def _any(pattern: str) -> Callable[[Names, Raw], bool]:
    regex = re.compile(pattern)
    return lambda names, raw: any(map(regex.search, names))


def _says(raw: Raw, key: str, *values: str) -> bool:
    found = raw.get(key)
    return any(value in values for value in (found if isinstance(found, list | tuple) else [found]))


_PLAIN = HEAD + BACKBONE + ALIASES + LEFT_OUT
_V4_NOTE = "the DeepSeek-V4 block (latent attention, experts, hyper-connections) has no JAX counterpart here"


def _is_v4(names: Names, raw: Raw) -> bool:
    return any(re.match(r"mtp\.\d+\.main_proj\.", name) for name in names)


def _is_nested(names: Names, raw: Raw) -> bool:
    return any(isinstance(raw.get(key), Mapping) for key in ("dflash_config", "dspark_config"))


FAMILIES: tuple[Family, ...] = (
    Family(
        "nvfp4",
        _any(r"\.weight_scale_2$"),
        support=REFUSED,
        note="NVFP4 weights (U8 with weight_scale and weight_scale_2) are not supported",
    ),
    Family(
        "compressed-tensors",
        _any(r"\.weight_packed$"),
        support=REFUSED,
        note="packed quantised weights (weight_packed, weight_scale) are not supported",
    ),
    Family(
        "mlx",
        lambda names, raw: any(n.endswith(".scales") and n[:-6] + "biases" in names for n in names),
        support=REFUSED,
        note="MLX quantised weights (U32 with scales and biases) are not supported",
    ),
    Family(
        "gptq-awq",
        _any(r"\.(qweight|qzeros)$"),
        support=REFUSED,
        note="GPTQ and AWQ weights (qweight, qzeros) are not supported",
    ),
    Family(
        "deepseek-v4.1",
        lambda names, raw: _is_v4(names, raw) and any(".markov_head.embed." in name for name in names),
        V4_HEADS + V4_BACKBONE,
        V4_SHAPES,
        TENSORS,
        _V4_NOTE,
        ("_orig_mod.",),
    ),
    Family("deepseek-v4", _is_v4, V4_HEADS + V4_BACKBONE, V4_SHAPES, TENSORS, _V4_NOTE, ("_orig_mod.",)),
    # What a conversion of the two above writes: canonical names around the V4 block.
    Family(
        "deepseek-v4-flat",
        _any(r"^layers\.\d+\.attn\.wq_a\.weight$"),
        HEAD + identity(V4_SHAPES),
        V4_SHAPES,
        TENSORS,
        _V4_NOTE,
    ),
    Family(
        "minimax",
        _any(r"(^|\.)dspark\.layers\.\d+\.decoder_layer\."),
        support=REFUSED,
        note="MiniMax-M3 drafters (model.dspark.*) are not supported",
    ),
    Family(
        "k3-mla",
        _any(r"self_attn\.(kv_a_proj_with_mqa|fused_qkv_a_proj)\."),
        support=REFUSED,
        note="drafters with multi-head latent attention (Kimi-K3, GLM) are not supported",
    ),
    Family(
        "automodel-v4",
        _any(r"layers\.\d+\.self_attn\.wq_a\.weight$"),
        HEAD + BACKBONE + identity(canonical_names.AUTOMODEL_V4_SHAPES) + ALIASES + LEFT_OUT,
        canonical_names.AUTOMODEL_V4_SHAPES | canonical_names.BACKBONE_SHAPES,
        TENSORS,
        "NeMo Automodel's dense DeepSeek-V4 block has no JAX counterpart here",
    ),
    Family(
        "speculators",
        lambda names, raw: "speculators_model_type" in raw or "transformer_layer_config" in raw,
        _PLAIN + FOREIGN,
        canonical_names.BACKBONE_SHAPES | canonical_names.FOREIGN_SHAPES,
    ),
    Family("specforge", _is_nested, _PLAIN + FOREIGN, canonical_names.BACKBONE_SHAPES | canonical_names.FOREIGN_SHAPES),
    Family(
        "torchspec",
        lambda names, raw: (
            _any(r"(^|\.)(context_proj|midlayer)\.")(names, raw)
            or "_torchspec_version" in raw
            or raw.get("model_type") == "qwen3_dspark"
        ),
        TORCHSPEC + _PLAIN,
    ),
    Family(
        "ornith",
        lambda names, raw: _says(raw, "architectures", "Qwen35DSparkModel") or "enable_qwen35_gated_q_proj" in raw,
        _PLAIN,
        support=HEAD_ONLY,
        note="its layers store norms as w - 1 and gate their queries; only the head converts (--head-only)",
    ),
    # NeMo Automodel writes the same for Qwen3 and Gemma4.
    Family(
        "deepspec",
        lambda names, raw: True,
        _PLAIN + FOREIGN,
        canonical_names.BACKBONE_SHAPES | canonical_names.FOREIGN_SHAPES,
    ),
)


def detect(names: Iterable[str], raw: Raw) -> Family:
    """Return the first family whose test holds."""
    known = frozenset(names)
    return next(family for family in FAMILIES if family.detect(known, raw))
