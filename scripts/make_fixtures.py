#!/usr/bin/env python3
"""Write small checkpoints of every DSpark family, with the names, dtypes and config nesting of the real ones.

    python scripts/make_fixtures.py DIRECTORY [FAMILY ...]

The weights are random. Files are written byte by byte here, sharing nothing with the reader that is tested on them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.head_kinds import head_kind

Tensor = tuple[str, np.ndarray]  # header dtype, raw array
Tensors = dict[str, Tensor]

H, I, V, VD, R = 64, 96, 160, 48, 8
HEADS, KV_HEADS, HEAD = 4, 2, 16
TAPS = (0, 2, 4)
DEPTH = 6
MASK = 7
STD = 0.3

RNG = np.random.default_rng(0)


def bf16(*shape: int, std: float = STD, mean: float = 0.0) -> Tensor:
    """Draw a bfloat16 tensor."""
    return "BF16", (mean + std * RNG.standard_normal(shape)).astype(ml_dtypes.bfloat16)


def f32(*shape: int, std: float = STD) -> Tensor:
    """Draw a float32 tensor."""
    return "F32", (std * RNG.standard_normal(shape)).astype(np.float32)


def norm(*shape: int) -> Tensor:
    """Draw norm weights around one."""
    return bf16(*shape, std=0.1, mean=1.0)


def fp8(rows: int, columns: int, block: int = 128) -> tuple[Tensor, Tensor]:
    """Draw an e4m3 weight without NaN codes, and its e8m0 block scales."""
    codes = RNG.integers(0, 256, (rows, columns), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    blocks = (-(-rows // block), -(-columns // block))
    return ("F8_E4M3", codes), ("F8_E8M0", RNG.integers(112, 120, blocks).astype(np.uint8))


def fp4(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Draw packed FP4 (two codes a byte, low nibble first) and its e8m0 scales of 32 columns."""
    packed = RNG.integers(-128, 128, (rows, columns // 2)).astype(np.int8)
    return ("I8", packed), ("F8_E8M0", RNG.integers(112, 126, (rows, columns // 32)).astype(np.uint8))


def write_file(path: pathlib.Path, tensors: Tensors) -> None:
    """Write one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def write(path: pathlib.Path, config: dict[str, Any], *shards: Tensors) -> pathlib.Path:
    """Write a checkpoint directory: one file, or shards with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if len(shards) == 1:
        write_file(path / "model.safetensors", shards[0])
        return path
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        write_file(path / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for shard in shards for _, array in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def qwen3_geometry(layers: int) -> dict[str, Any]:
    """Return the geometry keys that transformers 5 writes for a Qwen3 drafter."""
    return {
        "model_type": "qwen3", "vocab_size": V, "hidden_size": H, "intermediate_size": I, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * layers, "sliding_window": None, "use_sliding_window": False,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "transformers_version": "5.10.2",
    }  # fmt: skip


def head_keys(kind: str | None) -> dict[str, Any]:
    """Return the flat DSpark keys of the head."""
    if kind is None:
        return {"markov_rank": 0, "enable_confidence_head": False}
    return {
        "markov_rank": R, "markov_head_type": kind, "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip


def block_keys() -> dict[str, Any]:
    """Return the flat DSpark keys of the block and its taps."""
    return {"block_size": 5, "mask_token_id": MASK, "target_layer_ids": list(TAPS), "num_target_layers": DEPTH}


def backbone(layers: int, embed: bool = True, head: bool = True, vd: int | None = None) -> Tensors:
    """Draw a Qwen3 backbone under DeepSpec names, with or without the target's two matrices."""
    tensors: Tensors = {}
    if embed:
        tensors["embed_tokens.weight"] = bf16(V, H)
    if head:
        tensors["lm_head.weight"] = bf16(vd or V, H)
    tensors |= {"fc.weight": bf16(H, len(TAPS) * H), "hidden_norm.weight": norm(H), "norm.weight": norm(H)}
    for n in range(layers):
        tensors |= {
            f"layers.{n}.input_layernorm.weight": norm(H),
            f"layers.{n}.post_attention_layernorm.weight": norm(H),
            f"layers.{n}.self_attn.q_proj.weight": bf16(HEADS * HEAD, H),
            f"layers.{n}.self_attn.k_proj.weight": bf16(KV_HEADS * HEAD, H),
            f"layers.{n}.self_attn.v_proj.weight": bf16(KV_HEADS * HEAD, H),
            f"layers.{n}.self_attn.o_proj.weight": bf16(H, HEADS * HEAD),
            f"layers.{n}.self_attn.q_norm.weight": norm(HEAD),
            f"layers.{n}.self_attn.k_norm.weight": norm(HEAD),
            f"layers.{n}.mlp.gate_proj.weight": bf16(I, H),
            f"layers.{n}.mlp.up_proj.weight": bf16(I, H),
            f"layers.{n}.mlp.down_proj.weight": bf16(H, I),
        }
    return tensors


def sequential_head(kind: str | None, vd: int | None = None, confidence: bool = True) -> Tensors:
    """Draw Markov and confidence head under DeepSpec names."""
    tensors: Tensors = {}
    if kind is not None:
        sizes = {"V": V, "Vd": vd or V, "H": H, "r": R}
        tensors |= {part.tensor: bf16(*part.sizes(sizes)) for part in head_kind(kind).parameters}
    if kind is not None and confidence:
        tensors |= {"confidence_head.proj.weight": bf16(1, H + R), "confidence_head.proj.bias": bf16(1)}
    return tensors


def draft_table(rng_seed: int = 3) -> Tensors:
    """Return d2t (I64 offsets) and t2d (BOOL mask) of a reduced vocabulary."""
    ids = np.sort(np.random.default_rng(rng_seed).choice(V, VD, replace=False))
    mask = np.zeros(V, np.uint8)
    mask[ids] = 1
    return {"d2t": ("I64", (ids - np.arange(VD)).astype(np.int64)), "t2d": ("BOOL", mask)}


def deepspec(
    path: pathlib.Path, layers: int = 2, kind: str | None = "vanilla", confidence: bool = True
) -> pathlib.Path:
    """Write a DeepSpec release; kind None is the DFlash release of the same class."""
    config = qwen3_geometry(layers) | block_keys() | head_keys(kind if kind else None)
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "num_anchors": 512,
    }
    if not confidence and kind:
        config |= {"enable_confidence_head": False}
        del config["confidence_head_with_markov"]
    return write(path, config, backbone(layers) | sequential_head(kind, confidence=confidence))


def gemma4(path: pathlib.Path, layers: int = 2) -> pathlib.Path:
    """Write a DeepSpec Gemma4 release: sandwich norms, layer_scalar, key = value attention, softcap."""
    config = qwen3_geometry(layers) | block_keys() | head_keys("vanilla")
    for key in ("hidden_act", "use_sliding_window"):
        del config[key]
    config |= {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "target_model_type": "gemma4_unified",
        "target_text_model_type": "gemma4_unified_text", "head_dim": 8, "global_head_dim": 32,
        "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 512, "top_k_experts": None,
        "dtype": "bfloat16", "tie_word_embeddings": False,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "rope_theta": None, "rope_type": "default",
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }  # fmt: skip
    tensors = backbone(layers)
    for n in range(layers):
        del tensors[f"layers.{n}.self_attn.v_proj.weight"]
        tensors |= {
            f"layers.{n}.self_attn.q_proj.weight": bf16(HEADS * 32, H),
            f"layers.{n}.self_attn.k_proj.weight": bf16(32, H),
            f"layers.{n}.self_attn.o_proj.weight": bf16(H, HEADS * 32),
            f"layers.{n}.self_attn.q_norm.weight": norm(32),
            f"layers.{n}.self_attn.k_norm.weight": norm(32),
            f"layers.{n}.pre_feedforward_layernorm.weight": norm(H),
            f"layers.{n}.post_feedforward_layernorm.weight": norm(H),
            f"layers.{n}.layer_scalar": bf16(1),
        }
    return write(path, config, tensors | sequential_head("vanilla"))


def speculators(
    path: pathlib.Path, layers: int = 2, reduced: bool = False, old: bool = False, verifier: str = "org/target"
) -> pathlib.Path:
    """Write a speculators export: 0.9 (no embedding; LM head only when reduced), or an earlier one (both, no flag)."""
    vd = VD if reduced else V
    geometry = qwen3_geometry(layers)
    for key in ("transformers_version", "attention_bias", "rms_norm_eps"):  # written as a difference from defaults
        del geometry[key]
    config: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"], "auto_map": {"": "config.DSparkSpeculatorConfig"},
        "speculators_model_type": "dspark", "speculators_version": "0.8.0" if old else "0.9.0",
        "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": 4 if old else 5, "accept_tolerance": 0.0,
                "verifier_accept_k": 1,
            }],
            "verifier": {"name_or_path": verifier, "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": geometry, "draft_vocab_size": vd, "block_size": 5,
        "aux_hidden_state_layer_ids": [k + 1 for k in TAPS], "mask_token_id": MASK, "target_hidden_size": None,
        "sliding_window_non_causal": False, "tie_word_embeddings": False, "dtype": "bfloat16",
        **head_keys("vanilla"),
    }  # fmt: skip
    if not old:
        config["sample_from_anchor"] = True
    tensors = backbone(layers, embed=old, head=old or reduced, vd=vd) | sequential_head("vanilla", vd)
    if reduced:
        tensors |= draft_table()
    return write(path, config, tensors)


def specforge(
    path: pathlib.Path, layers: int = 2, prefix: str = "", nested: str = "dflash_config", kind: str = "vanilla"
) -> pathlib.Path:
    """Write a SpecForge export: keys nested, neither embedding nor LM head; early files prefix the two heads."""
    inner = {
        "mask_token_id": MASK,
        "target_layer_ids": list(TAPS),
        "projector_type": "dspark",
        "attention_mode": "full",
    }
    config = qwen3_geometry(layers) | {
        "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "dtype": "bfloat16", "block_size": 5, "num_target_layers": DEPTH, "target_hidden_size": None,
        nested: inner | head_keys(kind),
    }  # fmt: skip
    heads = {prefix + name: tensor for name, tensor in sequential_head(kind).items()}
    return write(path, config, backbone(layers, embed=False, head=False) | heads)


def torchspec(path: pathlib.Path, layers: int = 1) -> pathlib.Path:
    """Write a raw TorchSpec export: context_* names, `midlayer` for a single layer, its own key meanings."""
    config = qwen3_geometry(layers) | head_keys("classical") | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3_dspark", "dtype": "bfloat16", "block_size": 5,
        "mask_token_id": MASK, "target_layer_ids": list(TAPS), "num_target_layers": len(TAPS),
        "target_num_hidden_layers": DEPTH, "draft_vocab_size": V, "_torchspec_version": "0.3",
    }  # fmt: skip
    names = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    if layers == 1:
        names["layers.0."] = "midlayer."
    tensors: Tensors = {}
    for name, tensor in (backbone(layers, head=False) | sequential_head("vanilla")).items():
        old = next((prefix for prefix in names if name.startswith(prefix)), None)
        tensors[name if old is None else names[old] + name.removeprefix(old)] = tensor
    return write(path, config, tensors)


def automodel_v4(path: pathlib.Path, layers: int = 2) -> pathlib.Path:
    """Write NeMo Automodel's dense DeepSeek-V4 drafter."""
    config = qwen3_geometry(layers) | block_keys() | head_keys("vanilla")
    config |= {"architectures": ["DeepseekV4DSparkModel"], "model_type": "deepseek_v4", "dtype": "bfloat16"}
    tensors: Tensors = {}
    for name, tensor in (backbone(layers) | sequential_head("vanilla")).items():
        if ".self_attn." not in name:
            tensors[name] = tensor
    for n in range(layers):
        stem = f"layers.{n}.self_attn."
        tensors |= {
            stem + "wq_a.weight": bf16(32, H), stem + "q_norm.weight": norm(32), stem + "wq_b.weight": bf16(64, 32),
            stem + "wkv.weight": bf16(HEAD, H), stem + "kv_norm.weight": norm(HEAD), stem + "wo_a.weight": bf16(32, 32),
            stem + "wo_b.weight": bf16(H, 32), stem + "sinks_param": f32(HEADS),
        }  # fmt: skip
    return write(path, config, tensors)


V4 = {
    "D": 256,
    "q": 128,
    "heads": 2,
    "head": 128,
    "groups": 2,
    "o": 64,
    "m": 128,
    "experts": 4,
    "stages": 3,
    "depth": 5,
}


def v4_stage(n: int, experts: int, block: int) -> Tensors:
    """Draw one stage of a DeepSeek-V4 drafter."""
    D, q, m = V4["D"], V4["q"], V4["m"]
    wide, out = V4["heads"] * V4["head"], V4["groups"] * V4["o"]
    stem = f"mtp.{n}."
    tensors: Tensors = {}

    def put(name: str, pair: tuple[Tensor, Tensor]) -> None:
        tensors[f"{stem}{name}.weight"], tensors[f"{stem}{name}.scale"] = pair

    tensors[stem + "attn.attn_sink"] = f32(V4["heads"])
    put("attn.wq_a", fp8(q, D))
    put("attn.wq_b", fp8(wide, q))
    put("attn.wkv", fp8(V4["head"], D))
    put("attn.wo_a", fp8(out, wide // V4["groups"]))
    put("attn.wo_b", fp8(D, out))
    tensors |= {stem + "attn.q_norm.weight": norm(q), stem + "attn.kv_norm.weight": norm(V4["head"])}
    tensors |= {stem + "attn_norm.weight": norm(D), stem + "ffn_norm.weight": norm(D)}
    tensors |= {stem + "ffn.gate.weight": bf16(experts, D), stem + "ffn.gate.bias": f32(experts)}
    for name, shape in (("w1", (m, D)), ("w2", (D, m)), ("w3", (m, D))):
        put(f"ffn.shared_experts.{name}", fp8(*shape))
        for x in range(experts):
            put(f"ffn.experts.{x}.{name}", fp4(*shape))
    for part in ("attn", "ffn"):
        tensors |= {stem + f"hc_{part}_fn": f32(24, 4 * D), stem + f"hc_{part}_base": f32(24)}
        tensors[stem + f"hc_{part}_scale"] = f32(3)
    if n == 0:
        put("main_proj", fp8(D, 3 * D, block))
        tensors[stem + "main_norm.weight"] = norm(D)
    return tensors


def deepseek_v4(path: pathlib.Path, experts: int = V4["experts"], v41: bool = False) -> pathlib.Path:
    """Write a combined DeepSeek-V4 or V4.1 checkpoint: target shards, then the drafter's under mtp.*."""
    D, last, depth = V4["D"], V4["stages"] - 1, V4["depth"]
    drafter: Tensors = {}
    for n in range(V4["stages"]):
        drafter |= v4_stage(n, experts, 32 if v41 else 128)
    stem = f"mtp.{last}."
    drafter[stem + "norm.weight"] = norm(D)
    names = ("embed", "head") if v41 else ("markov_w1", "markov_w2")
    drafter |= {f"{stem}markov_head.{name}.weight": bf16(V, R) for name in names}
    drafter[stem + "confidence_head.proj.weight"] = bf16(1, D + R)
    if v41:
        drafter |= {f"mtp.{n}.ffn.gate.bias_vl": f32(experts) for n in range(V4["stages"])}
    else:
        drafter |= {stem + "hc_head_fn": f32(4, 4 * D), stem + "hc_head_base": f32(4), stem + "hc_head_scale": f32(1)}
    first = {"embed.weight": bf16(V, D), "layers.0.attn.wq_a.weight": fp8(V4["q"], D)[0]}
    first["layers.0.attn.wq_a.scale"] = fp8(V4["q"], D)[1]
    second = {"layers.4.attn_norm.weight": norm(D), "norm.weight": norm(D), "head.weight": bf16(V, D)}
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": V, "hidden_size": D,
        "num_hidden_layers": depth, "num_attention_heads": V4["heads"], "num_key_value_heads": 1,
        "head_dim": V4["head"],
        "q_lora_rank": V4["q"], "o_groups": V4["groups"], "o_lora_rank": V4["o"], "moe_intermediate_size": V4["m"],
        "n_routed_experts": experts, "hc_mult": 4, "sliding_window": 128, "expert_dtype": "fp4",
        "num_nextn_predict_layers": 1, "rope_theta": 10000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        },
        "dspark_block_size": 5, "dspark_noise_token_id": MASK, "dspark_target_layer_ids": [2, 3, 4],
        "dspark_markov_rank": R,
    }  # fmt: skip
    stages = [{k: v for k, v in drafter.items() if k.startswith(f"mtp.{n}.")} for n in range(V4["stages"])]
    return write(path, config, first, second, *stages)


def target(path: pathlib.Path, tied: bool = False, hidden: int = H) -> pathlib.Path:
    """Write a Qwen3 target in two shards: enough of it to supply embedding and LM head."""
    config = qwen3_geometry(DEPTH) | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "tie_word_embeddings": tied, "dtype": "bfloat16",
    }  # fmt: skip
    first = {"model.embed_tokens.weight": bf16(V, hidden), "model.layers.0.input_layernorm.weight": norm(hidden)}
    second = {"model.norm.weight": norm(hidden)} | ({} if tied else {"lm_head.weight": bf16(V, hidden)})
    return write(path, config, first, second)


def lfm2(path: pathlib.Path, layers: int = 2) -> pathlib.Path:
    """Write an LFM2 drafter: SpecForge nesting without projector_type, interleaved rotary pairs."""
    specforge(path, layers)
    config = json.loads((path / "config.json").read_text())
    del config["dflash_config"]["projector_type"]
    config |= {"architectures": ["Lfm2DSparkDraftModel"], "rope_is_neox_style": False}
    (path / "config.json").write_text(json.dumps(config))
    return path


def with_extra(extra: Callable[[], Tensors], **keys: Any) -> Callable[..., pathlib.Path]:
    """Return a maker of a DeepSpec drafter with more tensors and config keys."""

    def make(path: pathlib.Path, layers: int = 2) -> pathlib.Path:
        config = qwen3_geometry(layers) | block_keys() | head_keys("vanilla")
        config |= {"architectures": ["Qwen3DSparkModel"], "dtype": "bfloat16"} | keys
        return write(path, config, backbone(layers) | sequential_head("vanilla") | extra())

    return make


def nvfp4_extra() -> Tensors:
    """Return one NVFP4 linear."""
    return {
        "layers.0.mlp.gate_proj.weight": ("U8", RNG.integers(0, 256, (I, H // 2)).astype(np.uint8)),
        "layers.0.mlp.gate_proj.weight_scale": ("F8_E4M3", np.full((I, H // 16), 0x38, np.uint8)),
        "layers.0.mlp.gate_proj.weight_scale_2": f32(1),
    }


FAMILIES: dict[str, Callable[..., pathlib.Path]] = {
    "deepspec-vanilla": deepspec,
    "deepspec-gated": lambda path, layers=2: deepspec(path, layers, "gated"),
    "deepspec-rnn": lambda path, layers=2: deepspec(path, layers, "rnn"),
    "deepspec-no-confidence": lambda path, layers=2: deepspec(path, layers, confidence=False),
    "deepspec-dflash": lambda path, layers=2: deepspec(path, layers, None),
    "deepspec-gemma4": gemma4,
    "speculators-full": speculators,
    "speculators-reduced": lambda path, layers=2: speculators(path, layers, reduced=True),
    "speculators-old-full": lambda path, layers=2: speculators(path, layers, old=True),
    "speculators-old-reduced": lambda path, layers=2: speculators(path, layers, reduced=True, old=True),
    "specforge": specforge,
    "specforge-early": lambda path, layers=2: specforge(path, layers, prefix="logit_head."),
    "specforge-dspark-config": lambda path, layers=2: specforge(path, layers, nested="dspark_config", kind="gated"),
    "lfm2": lfm2,
    "torchspec": lambda path, layers=2: torchspec(path, layers),
    "torchspec-midlayer": lambda path, layers=1: torchspec(path, layers),
    "automodel-v4": automodel_v4,
    "deepseek-v4": lambda path, layers=0: deepseek_v4(path),
    "deepseek-v4.1": lambda path, layers=0: deepseek_v4(path, v41=True),
    "nemotron-bf16": with_extra(lambda: {f"layers.{n}.self_attn.attention_sink_bias": bf16(HEADS) for n in (0, 1)}),
    "bonsai": with_extra(
        lambda: {
            "log_snr_embed.fc1.weight": bf16(H, 128), "log_snr_embed.fc1.bias": bf16(H),
            "log_snr_embed.fc2.weight": bf16(H, H), "log_snr_embed.fc2.bias": bf16(H),
        },
        log_snr_conditioning=True,
    ),
    "ornith": with_extra(dict, architectures=["Qwen35DSparkModel"], model_type="qwen3_5"),
}  # fmt: skip

REFUSED: dict[str, Callable[..., pathlib.Path]] = {
    "nvfp4": with_extra(nvfp4_extra),
    "k3-mla": with_extra(lambda: {"layers.0.self_attn.kv_a_proj_with_mqa.weight": bf16(24, H)}, model_type="k3_dspark"),
    "minimax": with_extra(
        lambda: {"model.dspark.layers.0.decoder_layer.mlp.gate_proj.weight": bf16(I, H)}, dspark_config={}
    ),
}

TARGETS: dict[str, Callable[..., pathlib.Path]] = {
    "target": target,
    "target-tied": lambda path: target(path, tied=True),
}


def main(arguments: list[str]) -> int:
    """Write the named fixtures, or all."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    makers = FAMILIES | REFUSED | TARGETS
    for name in arguments[1:] or makers:
        if name not in makers:
            print(f"{name}: unknown family; known are {', '.join(makers)}", file=sys.stderr)
            return 2
        print(makers[name](pathlib.Path(arguments[0]) / name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
