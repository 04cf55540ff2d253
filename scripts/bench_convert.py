#!/usr/bin/env python3
"""Peak memory and speed of converting a synthetic checkpoint of Gemma4-12B's drafter (6.86 GB).

    python scripts/bench_convert.py [--directory DIR] [--format safetensors|orbax] [--dtype keep|bf16|f32]

Needs 7 GB of disk for the source and 7 (f32: 14) for the result; both are deleted afterwards. The conversion runs in a
process of its own, whose peak resident memory is compared with 1.3 x the largest tensor + 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
V, H, I, R, L, T, HEADS, HEAD = 262144, 3840, 15360, 256, 5, 5, 16, 512

CONFIG = {
    "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "vocab_size": V, "hidden_size": H,
    "intermediate_size": I, "num_hidden_layers": L, "num_attention_heads": HEADS, "num_key_value_heads": 8,
    "head_dim": 256, "global_head_dim": HEAD, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention"] * L, "sliding_window": 1024, "dtype": "bfloat16", "tie_word_embeddings": False,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    },
    "block_size": 7, "mask_token_id": 4, "target_layer_ids": [5, 17, 29, 41, 46], "num_target_layers": 48,
    "markov_rank": R, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of the release."""
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, H), "lm_head.weight": (V, H), "fc.weight": (H, T * H), "hidden_norm.weight": (H,),
        "norm.weight": (H,), "markov_head.markov_w1.weight": (V, R), "markov_head.markov_w2.weight": (V, R),
        "confidence_head.proj.weight": (1, H + R), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for n in range(L):
        stem = f"layers.{n}."
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            found[f"{stem}{name}_layernorm.weight"] = (H,)
        found |= {
            stem + "self_attn.q_proj.weight": (HEADS * HEAD, H), stem + "self_attn.k_proj.weight": (HEAD, H),
            stem + "self_attn.o_proj.weight": (H, HEADS * HEAD), stem + "self_attn.q_norm.weight": (HEAD,),
            stem + "self_attn.k_norm.weight": (HEAD,), stem + "mlp.gate_proj.weight": (I, H),
            stem + "mlp.up_proj.weight": (I, H), stem + "mlp.down_proj.weight": (H, I), stem + "layer_scalar": (1,),
        }  # fmt: skip
    return found


def write_source(path: pathlib.Path) -> int:
    """Write the checkpoint with random finite bf16 weights; return the bytes of its largest tensor."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    header, end = {}, 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Random signs and mantissas, magnitudes from 2**-8 to 1: as hard to compress as real weights.
    block = np.random.default_rng(0).integers(0, 1 << 16, 1 << 24, np.uint16)
    block = (block & 0x83FF) | 0x3C00
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = end
        while left:
            left -= file.write(block.view(np.uint8).data[: min(left, block.nbytes)])
    return max(2 * int(np.prod(shape)) for shape in shapes().values())


def convert_and_measure(arguments: list[str]) -> int:
    """Convert in this process and print seconds and peak resident KiB."""
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from dspark_jax.checkpoint import convert

    source, destination, format, dtype = arguments
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    manifest = convert(source, destination, format=format, dtype=dtype)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak": peak, "before": before, "parameters": manifest["parameters"]}))
    return 0


def main() -> int:
    """Write, convert, report, delete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", help="where the files go for the time being (default: the system's)")
    parser.add_argument("--format", default="safetensors", choices=("safetensors", "orbax"))
    parser.add_argument("--dtype", default="keep", choices=("keep", "bf16", "f32"))
    args = parser.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="bench_convert-", dir=args.directory))
    try:
        largest = write_source(directory / "source")
        command = [sys.executable, __file__, "--child", str(directory / "source"), str(directory / "out"), args.format]
        result = subprocess.run([*command, args.dtype], capture_output=True, text=True, check=False)
        if result.returncode:
            print(result.stderr, file=sys.stderr)
            return 1
        found = json.loads(result.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    allowed = 1.3 * largest + 300e6
    peak = 1024 * found["peak"]
    print(f"converted {found['parameters']:,} parameters to {args.format} ({args.dtype}) in {found['seconds']:.1f} s")
    print(f"peak resident memory {peak / 1e6:,.0f} MB, {1024 * found['before'] / 1e6:,.0f} MB of it the imports")
    print(f"allowed 1.3 x the largest tensor ({largest / 1e6:,.0f} MB) + 300 MB = {allowed / 1e6:,.0f} MB")
    return 0 if peak <= allowed else 1


if __name__ == "__main__":
    sys.exit(convert_and_measure(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main())
