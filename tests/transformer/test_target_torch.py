"""Targets of every supported architecture against transformers: logits, taps and the KV cache.

Skipped without PyTorch and transformers, which only Python 3.11 environments have here.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS
from tiny import target_config, target_weights, write_model

from dspark_jax.checkpoint.load import load_target

torch = pytest.importorskip("torch", reason="compares with PyTorch")
transformers = pytest.importorskip("transformers", reason="compares with transformers")

WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 3,
    "use_sliding_window": True,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "head_dim": 6}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": None, "hidden_size": 24}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "tie_word_embeddings": False}
CASES = {
    "untied": {"tie_word_embeddings": False},
    "tied, bias": {"tie_word_embeddings": True, "attention_bias": True},
    "sliding window": {"tie_word_embeddings": False, **WINDOWS},
    "llama": {**LLAMA, "tie_word_embeddings": True},
    "llama, bias": {**LLAMA, "tie_word_embeddings": False, "attention_bias": True},
    "llama 3": {
        **LLAMA,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**QWEN2, "tie_word_embeddings": True},
    "qwen2, sliding window": {**QWEN2, "tie_word_embeddings": False, **WINDOWS},
    "mistral": {**MISTRAL, "sliding_window": 3},
    "mistral without window": {**MISTRAL, "sliding_window": None},
}  # fmt: skip


def run(target, tokens, chunks, taps):
    """Run tokens [B, T] through the cache in chunks of the given sizes; return logits and features."""

    @jax.jit
    def step(target, chunk, at, cache):
        hidden, features, cache = target.forward(chunk, at, cache, taps)
        return target.logits(hidden), features, cache

    cache, at, outputs = target.make_cache(tokens.shape[0], 32), 0, []
    for size in chunks:
        start = jnp.full((tokens.shape[0],), at, jnp.int32)
        *out, cache = step(target, jnp.asarray(tokens[:, at : at + size]), start, cache)
        outputs.append(out)
        at += size
    return [np.concatenate(parts, axis=1) for parts in zip(*outputs, strict=True)]


def check(directory, tokens, chunks, atol):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        out = model(torch.tensor(tokens).long(), output_hidden_states=True)
    target = load_target(directory, dtype="float32")
    logits, features = run(target, tokens, chunks, (-1, 0, 1))
    np.testing.assert_allclose(logits, out.logits.numpy(), atol=atol)
    wanted = np.concatenate([state.numpy() for state in out.hidden_states[:3]], axis=-1)
    np.testing.assert_allclose(features, wanted, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_random_models_equal_transformers(name, tmp_path):
    raw = target_config(**CASES[name])
    raw = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    weights = target_weights(raw, tied=raw["tie_word_embeddings"])
    write_model(tmp_path, raw, weights, prefix="model.")
    tokens = np.random.default_rng(1).integers(0, raw["vocab_size"], (2, 10)).astype(np.int32)
    check(tmp_path, tokens, (6, 1, 3), 2e-5)


def test_bundled_target_equals_transformers():
    lines = (CHECKPOINTS / "prompts.jsonl").read_text().splitlines()
    tokens = np.array([json.loads(line)["prompt_ids"][:24] for line in lines[:2]], np.int32)
    check(CHECKPOINTS / "target", tokens, (24,), 2e-4)
