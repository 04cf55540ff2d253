"""The config of any family as one flat dict with DeepSpec keys.

Every fact has one canonical key and a list of spellings; a fact that is given twice with different values is an error.
The backbone's geometry stays as it is. Configs are raw JSON, never read through a model class, which rewrites fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...checks import check_int, invalid
from ...transformer.geometry import read_rope_theta
from . import arithmetic

Raw = Mapping[str, Any]

NESTED = ("dspark_config", "dflash_config")
GEOMETRY = ("transformer_layer_config", "text_config")

# canonical key -> other spellings.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "block_size": ("dspark_block_size",),
    "target_layer_ids": ("dspark_target_layer_ids",),
    "mask_token_id": ("dspark_noise_token_id",),
    "markov_rank": ("dspark_markov_rank",),
    "markov_head_type": ("dspark_markov_head_type",),
    "dtype": ("torch_dtype",),
}
# Read only where the key above is missing: these name related tokens of other drafting methods too.
MASK_FALLBACKS = ("pard_token", "ptd_token_id")
# These count hidden_states[k], which is the output of layer k - 1.
SHIFTED_IDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
DROPPED = (*NESTED, *GEOMETRY, *SHIFTED_IDS, *MASK_FALLBACKS, "auto_map", "has_embed_tokens", "has_lm_head")

# speculators writes transformer_layer_config as a difference from these defaults in some versions.
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip
_LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {"qwen3": _QWEN3, "llama": _LLAMA}
DEFAULT_ROPE_THETA = 10000.0


def flatten(raw: Raw, family: str, stages: int = 0) -> dict[str, Any]:
    """Return the config as one flat dict with canonical keys and without nulls.

    Args:
        raw: config.json as it is.
        family: the family's name.
        stages: number of draft layers of a drafter inside its target's shards.

    Raises:
        ValueError: a value of the wrong type, or a fact given twice with different values.
    """
    flat = _drop_nulls({key: value for key, value in raw.items() if key not in DROPPED and key != "speculators_config"})
    _merge_geometry(flat, raw)
    for outer in NESTED:
        for key, value in _object(raw, outer).items():
            _put(flat, key, value, f"the value that {outer} has")
    for key, others in SPELLINGS.items():
        for other in others:
            if (value := flat.pop(other, None)) is not None:
                _put(flat, key, value, f"the value of {other}")
    for key in MASK_FALLBACKS:
        if "mask_token_id" not in flat and raw.get(key) is not None:
            flat["mask_token_id"] = raw[key]
    for key in SHIFTED_IDS:
        if (ids := raw.get(key)) is not None:
            _put(flat, "target_layer_ids", _shift(key, ids), f"{key} - 1")
    if flat.get("markov_head_type") == "classical":  # TorchSpec's word
        flat["markov_head_type"] = "vanilla"
    _target_depth(flat, family, stages)
    flat["sample_from_anchor"] = _anchor(flat, raw, family)
    if (theta := read_rope_theta(flat)) is not None:
        flat["rope_theta"] = theta
    flat |= arithmetic.take_arithmetic(flat)
    if family == "speculators":  # absent counts as false, as in the code that trained these files
        flat.setdefault("sliding_window_non_causal", False)
    if (cap := flat.get("final_logit_softcapping")) == 0 and not isinstance(cap, bool):
        del flat["final_logit_softcapping"]  # no cap
    return flat


def flatten_target(raw: Raw) -> dict[str, Any]:
    """Return a target's config as one flat dict: the language model's part at the top level, without nulls."""
    flat = _drop_nulls({key: value for key, value in raw.items() if key not in GEOMETRY})
    _merge_geometry(flat, raw)
    return flat


def _object(raw: Raw, key: str) -> Raw:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid(key, value, "an object")
    return value


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def _put(flat: dict[str, Any], key: str, value: Any, source: str) -> None:
    if value is None:
        return
    if key in flat and (flat[key] != value or isinstance(flat[key], bool) != isinstance(value, bool)):
        raise invalid(key, flat[key], f"{source} ({value!r}), or the fact in one place only")
    flat[key] = value


def _merge_geometry(flat: dict[str, Any], raw: Raw) -> None:
    """Bring the layers' own config to the top level, with its model type's defaults where it leaves values out."""
    for outer in GEOMETRY:
        if not (inner := _drop_nulls(_object(raw, outer))):
            continue
        if outer == "transformer_layer_config":
            kind = str(inner.get("model_type", "qwen3"))
            inner = {**LAYER_DEFAULTS.get(kind, {}), **inner}
            if kind in LAYER_DEFAULTS and "rope_parameters" not in inner:
                inner.setdefault("rope_theta", DEFAULT_ROPE_THETA)
        for key, value in inner.items():
            # The wrapper's own words win where they are not geometry (architectures, dtype, versions, tying).
            if (key in LAYER_DEFAULTS["qwen3"] and key != "model_type") or key in arithmetic.KEYS:
                _put(flat, key, value, f"the value that {outer} has")
            elif key not in flat or key == "model_type":
                flat[key] = value


def _shift(key: str, ids: Any) -> list[int]:
    if not isinstance(ids, list):
        raise invalid(key, ids, "a list of layer numbers")
    return [check_int(key, i, 0) - 1 for i in ids]


def _target_depth(flat: dict[str, Any], family: str, stages: int) -> None:
    """Make num_target_layers the target's depth and num_hidden_layers the drafter's."""
    depth = flat.pop("target_num_hidden_layers", None)
    if family == "torchspec":
        flat.pop("num_target_layers", None)  # the number of taps there
    if depth is not None:
        flat["num_target_layers"] = depth
    if stages and family.startswith("deepseek-v4"):
        # The config is the target's: its depth, and a num_nextn_predict_layers that does not count the stages.
        _put(flat, "num_target_layers", flat.pop("num_hidden_layers", None), "the target's num_hidden_layers")
        flat["num_hidden_layers"] = stages
        flat.pop("num_nextn_predict_layers", None)
        for key in ("n_routed_experts", "num_experts_per_tok"):  # a drafter may have fewer than its target
            if (own := flat.pop("dspark_" + key, None)) is not None:
                flat[key] = own


def _anchor(flat: Raw, raw: Raw, family: str) -> Any:
    """Say whether slot 0 drafts: the flag, else block_size - speculative_tokens, else the family's rule.

    The meaning of slot 0 is not in the tensors, and the wrong one gives 1% acceptance without any error.
    """
    flag, block = flat.get("sample_from_anchor"), flat.get("block_size")
    proposals = _object(raw, "speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals and isinstance(proposals[0], Mapping) else {}
    tokens = first.get("speculative_tokens")
    if tokens is None or block is None:
        return (family != "speculators") if flag is None else flag
    dropped = check_int("block_size", block, 1) - check_int("speculative_tokens", tokens, 1)
    if dropped not in (0, 1) or (flag is not None and flag != (dropped == 0)):
        raise invalid(
            "speculative_tokens", tokens,
            f"block_size {block} (sample_from_anchor true) or {block - 1} (false), and sample_from_anchor is {flag!r}; "
            "correct config.json: nothing else tells what slot 0 means",
        )  # fmt: skip
    return dropped == 0
