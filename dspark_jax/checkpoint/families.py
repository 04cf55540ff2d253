"""Which tensor of a checkpoint is which: an ordered table of families, and of name patterns inside each.

The canonical names are those of DeepSpec's released code; shapes are as PyTorch stores them, [out, in]. A name that no
pattern of its family matches is an error: nothing is dropped by default, and matching is exact, never by substring.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Canonical tensors of the head. Symbols: V target vocabulary, Vd draft vocabulary, H hidden, r Markov rank.
HEAD_SHAPES: dict[str, tuple[str, ...]] = {
    "lm_head.weight": ("Vd", "H"),
    "markov_head.markov_w1.weight": ("V", "r"),
    "markov_head.markov_w2.weight": ("Vd", "r"),
    "markov_head.gate_proj.weight": ("r", "H+r"),
    "markov_head.gate_proj.bias": ("r",),
    "markov_head.joint_proj.weight": ("3r", "2r+H"),
    "markov_head.joint_proj.bias": ("3r",),
    "confidence_head.proj.weight": ("1", "C"),
    "confidence_head.proj.bias": ("1",),
    "d2t": ("Vd",),
    "t2d": ("V",),
}

# Canonical tensors of the backbone, as patterns. T taps, I MLP width, Q = heads x head size, K = key heads x head size.
BACKBONE_SHAPES: dict[str, tuple[str, ...]] = {
    r"embed_tokens\.weight": ("V", "H"),
    r"fc\.weight": ("H", "T*Ht"),
    r"(hidden_norm|norm)\.weight": ("H",),
    r"layers\.\d+\.(input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight": ("H",),
    r"layers\.\d+\.layer_scalar": ("1",),
    r"layers\.\d+\.self_attn\.q_proj\.weight": ("Q", "H"),
    r"layers\.\d+\.self_attn\.(k|v)_proj\.weight": ("K", "H"),
    r"layers\.\d+\.self_attn\.o_proj\.weight": ("H", "Q"),
    r"layers\.\d+\.self_attn\.q_proj\.bias": ("Q",),
    r"layers\.\d+\.self_attn\.(k|v)_proj\.bias": ("K",),
    r"layers\.\d+\.self_attn\.o_proj\.bias": ("H",),
    r"layers\.\d+\.self_attn\.(q|k)_norm\.weight": ("hd",),
    r"layers\.\d+\.mlp\.(gate|up)_proj\.weight": ("I", "H"),
    r"layers\.\d+\.mlp\.down_proj\.weight": ("H", "I"),
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a family's table: source names that match `pattern` (whole) become `canonical`, or are left out.

    Attributes:
        pattern: regular expression over the name without its prefixes.
        canonical: template of the canonical name (groups as in re.Match.expand); None leaves the tensor out.
        reason: why it is left out.
    """

    pattern: str
    canonical: str | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint family: how it is recognised, its prefixes and its rows."""

    name: str
    detect: Callable[[frozenset[str], Mapping[str, Any]], bool]
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...] = ("_orig_mod.", "model.", "logit_head.")


_IDENTITY = tuple(
    Rule(pattern if raw else re.escape(pattern), r"\g<0>")
    for table, raw in ((HEAD_SHAPES, False), (BACKBONE_SHAPES, True))
    for pattern in table
)
_ALIASES = (
    Rule(r"confidence_head\.(weight|bias)", r"confidence_head.proj.\1"),
    Rule(r"encoder\.fc\.weight", "fc.weight"),
    Rule(r"encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
)
_LEFT_OUT = (
    Rule(r"mask_embedding(\.weight)?", None, "training-time mask embedding, not read when drafting"),
    Rule(r"(.*\.)?rotary_emb\.[a-z_]+", None, "rotary table, recomputed from the config"),
    Rule(r"verifier_(lm_head|norm)\..+", None, "copy of the verifier's weights, kept for training only"),
)

FAMILIES: tuple[Family, ...] = (Family("deepspec", lambda names, raw: True, _IDENTITY + _ALIASES + _LEFT_OUT),)


@dataclasses.dataclass
class Mapped:
    """Where each source tensor goes.

    Attributes:
        sources: canonical name -> source name.
        left_out: source name -> the named reason.
        problems: one sentence per unknown name and per name that is spelled twice.
    """

    sources: dict[str, str]
    left_out: dict[str, str]
    problems: list[str]


def detect(names: Iterable[str], raw: Mapping[str, Any]) -> Family:
    """Return the first family whose test holds; tensor names count before the config."""
    known = frozenset(names)
    return next(family for family in FAMILIES if family.detect(known, raw))


def strip_prefixes(name: str, prefixes: tuple[str, ...]) -> str:
    """Remove leading wrapper prefixes, in any order."""
    while prefix := next((p for p in prefixes if name.startswith(p)), None):
        name = name[len(prefix) :]
    return name


def map_names(family: Family, names: Iterable[str]) -> Mapped:
    """Send every source name through the family's table."""
    result = Mapped({}, {}, [])
    rules = [(re.compile(rule.pattern), rule) for rule in family.rules]
    for source in sorted(names):
        stripped = strip_prefixes(source, family.prefixes)
        match, rule = next(((m, rule) for regex, rule in rules if (m := regex.fullmatch(stripped))), (None, None))
        if match is None or rule is None:
            result.problems.append(f"{source}: unknown tensor of the {family.name} family")
        elif rule.canonical is None:
            result.left_out[source] = rule.reason
        elif (canonical := match.expand(rule.canonical)) in result.sources:
            other = result.sources[canonical]
            result.problems.append(f"{source}: second spelling of {canonical}, which {other} gives as well")
        else:
            result.sources[canonical] = source
    return result
