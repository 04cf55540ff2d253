"""Small random models for tests of the backbone, the target and the loop: weights under the checkpoints' own names.

One dictionary of weights and one raw config feed the library, PyTorch references and files on disk.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import Weights, build_head, make_weights
from safetensors.numpy import save_file

from dspark_jax.checkpoint.family.targets import read_target_geometry
from dspark_jax.checkpoint.weights import WeightReader
from dspark_jax.drafting.drafter import Drafter
from dspark_jax.transformer.backbone import Backbone
from dspark_jax.transformer.geometry import BackboneConfig
from dspark_jax.transformer.target import DecoderTarget

QWEN3 = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": 37, "hidden_size": 12,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "block_size": 5, "mask_token_id": 1, "target_layer_ids": [0, 1], "num_target_layers": 3,
}  # fmt: skip
GEMMA4 = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": True, "global_head_dim": 8, "num_global_key_value_heads": 1, "head_dim": 4,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    },
}  # fmt: skip


def raw_config(style: str = "qwen3", **fields: Any) -> dict[str, Any]:
    """Return a drafter's config.json; `fields` overrides."""
    return {**QWEN3, **(GEMMA4 if style == "gemma4" else {}), **fields}


def layer_weights(config: BackboneConfig, rng: np.random.Generator) -> Weights:
    """Draw the weights of a stack of layers; norms spread around 1, products keep their inputs' size."""
    weights: Weights = {}

    def put(name: str, *shape: int) -> None:
        spread = rng.standard_normal(shape).astype(np.float32)
        norm = len(shape) == 1 and not name.endswith(".bias")
        weights[name] = np.float32(1) + np.float32(0.3) * spread if norm else spread / np.float32(shape[-1] ** 0.5)

    H, D, wide = config.hidden_size, config.head_dim, config.intermediate_size
    for n in range(config.num_layers):
        at = f"layers.{n}."
        outputs = {"q": config.num_heads * D, "k": config.num_kv_heads * D, "v": config.num_kv_heads * D, "o": H}
        for name, out in outputs.items():
            if name == "v" and config.key_is_value:
                continue
            put(f"{at}self_attn.{name}_proj.weight", out, config.num_heads * D if name == "o" else H)
            if config.attention_bias or (config.qkv_bias and name != "o"):
                put(f"{at}self_attn.{name}_proj.bias", out)
        for name in ("q", "k") if config.qk_norm else ():
            put(f"{at}self_attn.{name}_norm.weight", D)
        sandwich = ["pre_feedforward", "post_feedforward"] if config.style == "gemma4" else []
        for name in ["input", "post_attention", *sandwich]:
            put(f"{at}{name}_layernorm.weight", H)
        if config.style == "gemma4":
            put(f"{at}layer_scalar", 1)
        put(f"{at}mlp.gate_proj.weight", wide, H)
        put(f"{at}mlp.up_proj.weight", wide, H)
        put(f"{at}mlp.down_proj.weight", H, wide)
    put("norm.weight", H)
    return weights


def drafter_weights(raw: dict[str, Any], *, target_hidden: int = 10, seed: int = 0, kind: str = "vanilla") -> Weights:
    """Draw the weights of a whole drafter with a Markov head of rank 6 and a confidence head."""
    config, rng = BackboneConfig.from_flat(raw), np.random.default_rng(seed)
    weights = layer_weights(config, rng)
    H, width = config.hidden_size, len(raw["target_layer_ids"]) * target_hidden
    weights["embed_tokens.weight"] = rng.standard_normal((config.vocab_size, H)).astype(np.float32)
    weights["fc.weight"] = (rng.standard_normal((H, width)) / width**0.5).astype(np.float32)
    weights["hidden_norm.weight"] = (1 + 0.3 * rng.standard_normal(H)).astype(np.float32)
    return weights | make_weights(kind, V=config.vocab_size, H=H, r=6, seed=seed + 1)


def build_drafter(raw: dict[str, Any], weights: Weights, dtype: Any = "float32") -> Drafter:
    """Build the library's drafter from weights."""
    config = BackboneConfig.from_flat(raw)
    head_names = ("markov_head.", "confidence_head.", "lm_head.", "d2t")
    mine = {name: array for name, array in weights.items() if not name.startswith(head_names)}
    take = WeightReader("test", mine, mine.__getitem__, dtype)
    backbone = Backbone(config, weights["fc.weight"].shape[1], take)
    take.finish()
    names = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor")
    facts = {name: raw[name] for name in (*names, "final_logit_softcapping") if name in raw}
    head = {name: array for name, array in weights.items() if name.startswith(head_names)}
    return Drafter(backbone, build_head(head, dtype, vocab_size=config.vocab_size, **facts))


def make_drafter(style: str = "qwen3", *, target_hidden: int = 10, seed: int = 0, **fields: Any) -> Drafter:
    """Build a random drafter."""
    raw = raw_config(style, **fields)
    return build_drafter(raw, drafter_weights(raw, target_hidden=target_hidden, seed=seed))


def target_config(**fields: Any) -> dict[str, Any]:
    """Return a Qwen3 target's config.json that fits the drafters above."""
    facts = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 10, "num_hidden_layers": 3, "head_dim": 4}
    return {**QWEN3, **facts, **fields}


def target_weights(raw: dict[str, Any], seed: int = 0, tied: bool = False, sharpness: float = 2.0) -> Weights:
    """Draw a target's weights under canonical names; `sharpness` scales its logits."""
    config, rng = read_target_geometry(raw), np.random.default_rng(seed + 77)
    weights = layer_weights(config, rng)
    shape = (config.vocab_size, config.hidden_size)
    weights["embed_tokens.weight"] = rng.standard_normal(shape).astype(np.float32)
    if not tied:
        weights["lm_head.weight"] = (sharpness * rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
    return weights


def build_target(raw: dict[str, Any], weights: Weights, dtype: Any = "float32") -> DecoderTarget:
    """Build the library's target from weights."""
    take = WeightReader("test", weights, weights.__getitem__, dtype)
    model = DecoderTarget(read_target_geometry(raw), take, tied="lm_head.weight" not in weights)
    take.finish()
    return model


def make_target(seed: int = 0, **fields: Any) -> DecoderTarget:
    """Build a random target."""
    raw = target_config(**fields)
    return build_target(raw, target_weights(raw, seed))


def make_pair(**fields: Any) -> tuple[DecoderTarget, Drafter]:
    """Build a target of two layers and a drafter of one that drafts well: both are close to one bigram table."""
    raw = target_config(num_hidden_layers=2, **fields)
    weights = target_weights(raw, sharpness=3.0)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= np.float32(0.25)
    small = raw_config(num_hidden_layers=1, target_layer_ids=[-1, 0], num_target_layers=2, **fields)
    drafter = drafter_weights(small, target_hidden=raw["hidden_size"])
    embedding = weights["embed_tokens.weight"]
    normed = embedding / np.sqrt((embedding**2).mean(axis=1, keepdims=True)) * weights["norm.weight"]
    drafter["lm_head.weight"] *= np.float32(0.1)
    drafter["markov_head.markov_w1.weight"], drafter["markov_head.markov_w2.weight"] = normed, weights["lm_head.weight"]
    width = small["hidden_size"] + normed.shape[1]
    drafter["confidence_head.proj.weight"] = np.random.default_rng(9).standard_normal((1, width)).astype(np.float32) / 2
    return build_target(raw, weights), build_drafter(small, drafter)


def write_model(directory: pathlib.Path, raw: dict[str, Any], weights: Weights, prefix: str = "") -> pathlib.Path:
    """Write config.json and model.safetensors; `prefix` goes before every name but lm_head's."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    named = {name if name.startswith("lm_head") else prefix + name: array for name, array in weights.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in named.items()}, directory / "model.safetensors")
    return directory


def random_features(drafter: Drafter, batch: int, count: int, seed: int = 0) -> jnp.ndarray:
    """Draw target features [B, F, T * Ht]."""
    shape = (batch, count, drafter.backbone.feature_size)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def block_hidden(drafter: Drafter, cache: Any, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a block's hidden states [B, block, H] and base logits [block, B, Vd]; the cache is kept."""
    hidden, _ = drafter.backbone(cache, ids)
    return hidden, drafter.head.base_logits(jnp.swapaxes(hidden, 0, 1))
