"""Targets: which architectures the one decoder covers, and what each fixes that its config.json does not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checks import check_int, invalid
from ...transformer.geometry import BackboneConfig
from .read_config import flatten_target

# Architecture -> (model_type, what it fixes about the geometry).
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen2ForCausalLM": ("qwen2", {"qk_norm": False, "qkv_bias": True, "attention_bias": False}),
    "LlamaForCausalLM": ("llama", {"qk_norm": False}),
    "MistralForCausalLM": ("mistral", {"qk_norm": False, "attention_bias": False}),
}
# Parts of other models that keep these architectures' names: (key, the value that means "absent").
UNSUPPORTED = (
    ("mlp_bias", False),
    ("num_experts", 0),
    ("num_local_experts", 0),
    ("partial_rotary_factor", 1),
    ("quantization_config", None),
)
MISTRAL_WINDOW = 4096  # transformers' default where the key is absent; null means none


def read_target_geometry(raw: Mapping[str, Any]) -> BackboneConfig:
    """Return the geometry of a target from its config.json.

    Raises:
        ValueError: an architecture or a part that is not supported, or a field missing or out of range, by name.
    """
    architecture = _architecture(raw)
    _, fixed = TARGETS[architecture]
    for key, absent in UNSUPPORTED:
        if raw.get(key, absent) not in (absent, None):
            raise invalid(key, raw[key], f"{absent!r} or no such key: no target of load_target has it")
    flat = flatten_target(raw)
    variant = dict(fixed)
    if architecture == "MistralForCausalLM":
        window = raw.get("sliding_window", MISTRAL_WINDOW)
        for key in ("layer_types", "sliding_window", "use_sliding_window"):
            flat.pop(key, None)
        if raw.get("layer_types") is not None:
            raise invalid("layer_types", raw["layer_types"], "no such key in a MistralForCausalLM")
        depth = check_int("num_hidden_layers", flat.get("num_hidden_layers"), 1)
        variant["windows"] = (window if window is None else check_int("sliding_window", window, 1),) * depth
    return BackboneConfig.from_flat(flat, causal=True, **variant)


def _architecture(raw: Mapping[str, Any]) -> str:
    """Return which of TARGETS a config names, by `architectures` or, without that, by model_type."""
    expected = f"one of {', '.join(TARGETS)}; other targets come in through the Target protocol"
    names, kind = raw.get("architectures"), raw.get("model_type")
    if not names:
        found = [name for name, (model_type, _) in TARGETS.items() if model_type == kind]
        if not found:
            raise invalid("model_type", kind, expected)
        return found[0]
    found = [name for name in TARGETS if isinstance(names, list) and name in names]
    if len(found) != 1:
        raise invalid("architectures", names, expected)
    if kind is not None and kind != TARGETS[found[0]][0]:
        raise invalid("model_type", kind, f"{TARGETS[found[0]][0]!r}, as architectures name {found[0]}")
    return found[0]
