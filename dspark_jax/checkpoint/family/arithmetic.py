"""The table of config keys that change a drafter's arithmetic: each is read, or refused unless it is neutral.

A key that is ignored loads without a word and drafts from wrong hidden states, which shows only as low acceptance. So
every such key has a row here, and a test walks the rows. Backbone keys are refused where a backbone is built (a head
alone does not need them).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ...checks import check_bool, check_float, invalid
from ...transformer.geometry import BackboneConfig

Flat = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ReadKey:
    """A key that is read: its value, converted, becomes that of `canonical`."""

    canonical: str
    convert: Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class RefusedKey:
    """A key that has no counterpart here: only a value for which `neutral(value, flat)` holds is let pass."""

    neutral: Callable[[Any, Flat], bool]
    expected: str


def _positive(name: str, value: Any) -> float:
    return check_float(name, value, above=0, expected="a number > 0")


def _divisor(name: str, value: Any) -> float:
    return 1 / _positive(name, value)


READ: dict[str, ReadKey] = {
    "causal": ReadKey("causal", check_bool),
    "is_causal": ReadKey("causal", check_bool),
    "dflash_query_causal": ReadKey("causal", check_bool),
    "sliding_window_non_causal": ReadKey("sliding_window_non_causal", check_bool),
    "rope_is_neox_style": ReadKey("rope_is_neox_style", check_bool),
    "is_neox_style": ReadKey("rope_is_neox_style", check_bool),
    "input_embedding_scale": ReadKey("input_embedding_scale", _positive),
    "embedding_multiplier": ReadKey("input_embedding_scale", _positive),
    "logit_scale": ReadKey("logit_scale", _positive),
    "output_multiplier": ReadKey("logit_scale", _positive),
    "logits_scaling": ReadKey("logit_scale", _divisor),
}


def _off(value: Any, flat: Flat) -> bool:
    return value is False


def _no_number(value: Any, flat: Flat) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 0


def _one(value: Any, flat: Flat) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == 1


def _is_gemma4(flat: Flat) -> bool:
    return str(flat.get("model_type")).startswith("gemma4")


def _head_size(flat: Flat) -> Any:
    heads, hidden = flat.get("num_attention_heads"), flat.get("hidden_size")
    if flat.get("head_dim") is not None:
        return flat["head_dim"]
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None


def _own_scalar(value: Any, flat: Flat) -> bool:
    """Say whether query_pre_attn_scalar ** -0.5 is the factor that the layers apply anyway."""
    return not isinstance(value, bool) and value == (1 if _is_gemma4(flat) else _head_size(flat))


def _own_scale(value: Any, flat: Flat) -> bool:
    """Say whether a factor on the products of queries and keys is the one that the layers apply anyway."""
    size = 1 if _is_gemma4(flat) else _head_size(flat)
    number = isinstance(value, int | float) and not isinstance(value, bool) and isinstance(size, int) and size > 0
    return number and abs(value - size**-0.5) <= 1e-6 * size**-0.5


REFUSED: dict[str, RefusedKey] = {
    "norm_before_fc": RefusedKey(_off, "false: a norm before fc is not supported"),
    "fc_norm": RefusedKey(_off, "false: a norm of each tap before fc is not supported"),
    "attention_sink_bias": RefusedKey(_off, "false: attention sinks are not supported"),
    "use_attention_sinks": RefusedKey(_off, "false: attention sinks are not supported"),
    "enable_qwen35_gated_q_proj": RefusedKey(_off, "false: gated queries are not supported"),
    "attn_logit_softcapping": RefusedKey(_no_number, "0 or none: capped attention scores are not supported"),
    "residual_multiplier": RefusedKey(_one, "1: scaled residual branches are not supported"),
    "query_pre_attn_scalar": RefusedKey(_own_scalar, "head_dim (1 in Gemma4), the layers' own attention scale"),
    "attention_multiplier": RefusedKey(_own_scale, "head_dim ** -0.5 (1 in Gemma4), the layers' own attention scale"),
}

KEYS = frozenset(READ) | frozenset(REFUSED) | {"layer_causal", "final_logit_softcapping"}


def take_arithmetic(flat: dict[str, Any]) -> dict[str, Any]:
    """Remove the keys that are read from `flat` and return them under their canonical names.

    Raises:
        ValueError: a bad value, or two spellings of one fact that disagree.
    """
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for key, row in READ.items():
        if (value := flat.pop(key, None)) is None:
            continue
        value = row.convert(key, value)
        if row.canonical in found and found[row.canonical] != value:
            other = said[row.canonical]
            raise invalid(key, value, f"the {row.canonical} that {other} gives ({found[row.canonical]!r}), or one key")
        found[row.canonical] = value
        said.setdefault(row.canonical, key)
    return found


def check_refused(flat: Flat) -> None:
    """Check that no key without a counterpart here asks for other than what the layers compute.

    Raises:
        ValueError: one does; the message names it.
    """
    for key, row in REFUSED.items():
        value = flat.get(key)
        if value is not None and not row.neutral(value, flat):
            raise invalid(key, value, row.expected)


def list_keys(raw: Flat) -> list[str]:
    """Return one line per arithmetic key that a config.json holds at any depth: read as what, or neutral or refused."""
    lines = []
    for key, value in _all_items(raw):
        if key in READ:
            lines.append(f"{key} {value!r}: read as {READ[key].canonical}")
        elif key in REFUSED:
            lines.append(f"{key} {value!r}: no counterpart here, expected {REFUSED[key].expected}")
        elif key in KEYS:
            lines.append(f"{key} {value!r}: read")
    return sorted(set(lines))


def _all_items(raw: Flat) -> list[tuple[str, Any]]:
    items = [(key, value) for key, value in raw.items() if value is not None]
    return items + [item for _, value in items if isinstance(value, Mapping) for item in _all_items(value)]


def sliding_notes(raw: Flat, family: str, flat: Flat, geometry: BackboneConfig | str) -> list[str]:
    """Say by which rule sliding layers are causal or not, where the config does not say."""
    stated = any(key in ("causal", "layer_causal") and value is not None for key, value in flat.items())
    if stated or isinstance(geometry, str) or all(window is None for window in geometry.windows):
        return []
    if any(key == "sliding_window_non_causal" for key, _ in _all_items(raw)):
        return []
    if family == "speculators":
        return ["sliding_window_non_causal is absent and counts as false: sliding layers are causal"]
    return ["sliding layers without a flag of causality: taken as bidirectional; check acceptance"]
