"""What a conversion writes about a drafter: the explicit flat config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checks import invalid
from .open import Checkpoint

ARCHITECTURES = {"qwen3": "Qwen3DSparkModel", "gemma4": "Gemma4DSparkModel"}


def explicit_config(checkpoint: Checkpoint, dtype: str) -> tuple[dict[str, Any], str | None]:
    """Return config.json for DeepSpec names: flat, without nulls, every fact that readers guess written out.

    Args:
        checkpoint: the source.
        dtype: name of the dtype that most weights are written in.

    Returns:
        The config, and why the backbone cannot be built here (None if it can).
    """
    flat, config = dict(checkpoint.flat), checkpoint.config
    for key in [key for key in flat if key.startswith(("speculators_", "_torchspec", "_name_or_path"))]:
        del flat[key]
    flat.pop("quantization_config", None)  # quantised weights are written decoded
    if checkpoint.family.name.startswith("deepseek-v4"):
        flat["architectures"] = ["DeepseekV4DSparkModel"]  # no longer the target's
    if flat.get("model_type") == "qwen3_dspark":
        flat["model_type"] = "qwen3"  # the other name marks TorchSpec's own key meanings
    flat |= {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "sample_from_anchor": config.sample_from_anchor,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    if config.markov_head_type is not None:
        flat["markov_head_type"] = config.markov_head_type
    # Equal vocabularies are said by silence: some readers expect a d2t wherever the key stands.
    flat.pop("draft_vocab_size", None)
    if config.Vd != config.vocab_size:
        flat["draft_vocab_size"] = config.Vd
    flat.setdefault("target_hidden_size", config.hidden_size)
    _write_rope(flat)
    return flat, _write_backbone(flat, checkpoint)


def _write_rope(flat: dict[str, Any]) -> None:
    """Write the rotary base at the top level and in rope_parameters; scaling goes into rope_parameters."""
    theta = flat.get("rope_theta")
    if theta is None:
        return
    found = flat.get("rope_parameters")
    if found is None:
        scaling = flat.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            raise invalid("rope_scaling", scaling, "an object")
        found = dict(scaling)
        if "type" in found:
            found.setdefault("rope_type", found.pop("type"))
    if isinstance(found, Mapping) and not isinstance(found.get("full_attention"), Mapping):
        flat["rope_parameters"] = {"rope_type": "default", **found, "rope_theta": theta}


def _write_backbone(flat: dict[str, Any], checkpoint: Checkpoint) -> str | None:
    """Write what a backbone's builder would guess; return why there is none here, if so."""
    if checkpoint.family.support != "full":
        return checkpoint.family.note
    geometry = checkpoint.geometry
    if isinstance(geometry, str):
        return geometry
    flat["architectures"] = [ARCHITECTURES[geometry.style]]
    if geometry.style == "qwen3":
        flat["model_type"] = "qwen3"
    flat |= {
        "head_dim": flat.get("head_dim", geometry.head_dim),
        "attention_bias": geometry.attention_bias,
        "rms_norm_eps": geometry.rms_norm_eps,
        "rope_is_neox_style": not geometry.rope_interleaved,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in geometry.windows],
    }
    for key in ("causal", "layer_causal", "sliding_window_non_causal"):
        flat.pop(key, None)
    if len(set(geometry.layer_causal)) == 1:
        flat["causal"] = geometry.layer_causal[0]
    else:
        flat["layer_causal"] = list(geometry.layer_causal)
    foreign = [name for name in checkpoint.names if name.startswith("log_snr_embed.") or name.endswith("_sink_bias")]
    return f"no JAX counterpart of {', '.join(foreign)}" if foreign else None
