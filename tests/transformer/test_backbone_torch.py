"""Random drafters' backbones against a plain PyTorch implementation without caches, written from the equations.

Skipped without PyTorch, which only Python 3.11 environments have here.
"""

import numpy as np
import pytest
from tiny import block_hidden, build_drafter, drafter_weights, random_features, raw_config

torch = pytest.importorskip("torch", reason="compares with PyTorch")


def norm(x, weight=None):
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x if weight is None else x * weight


def rotate(x, positions, raw, gemma):
    """Rotate x [T, N, D] at positions [T], pair by pair."""
    D = x.shape[-1]
    rope = raw["rope_parameters"]["full_attention"] if gemma else raw["rope_parameters"]
    angles = rope["rope_theta"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if gemma:
        angles[int(rope["partial_rotary_factor"] * D // 2) :] = 0
    if rope["rope_type"] == "linear":
        angles = angles / rope["factor"]
    angles = (positions[:, None].double() * angles)[:, None].float()
    out = x.clone()
    interleaved = not raw.get("rope_is_neox_style", True)
    first = slice(0, D, 2) if interleaved else slice(0, D // 2)
    second = slice(1, D, 2) if interleaved else slice(D // 2, D)
    out[..., first] = x[..., first] * angles.cos() - x[..., second] * angles.sin()
    out[..., second] = x[..., second] * angles.cos() + x[..., first] * angles.sin()
    return out


def reference(weights, raw, features, ids):
    """Return the block's hidden states [block, H] for one request: features [n, T * Ht], ids [block]."""
    w = {name: torch.tensor(array) for name, array in weights.items()}
    gemma, H, n = raw["model_type"] == "gemma4_text", raw["hidden_size"], len(features)
    heads, D = raw["num_attention_heads"], raw["global_head_dim"] if gemma else raw["head_dim"]
    where = torch.arange(n + len(ids))
    context = norm(torch.tensor(features) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][torch.tensor(ids).long()] * (H**0.5 if gemma else 1)
    act = (lambda v: torch.nn.functional.gelu(v, approximate="tanh")) if gemma else torch.nn.functional.silu

    def linear(name, value):
        out = value @ w[name + ".weight"].T
        return out + w[name + ".bias"] if name + ".bias" in w else out

    for number in range(raw["num_hidden_layers"]):
        at = f"layers.{number}."
        h = norm(x, w[at + "input_layernorm.weight"])
        q = norm(linear(at + "self_attn.q_proj", h).view(len(ids), heads, D), w[at + "self_attn.q_norm.weight"])
        both = torch.cat([context, h])
        k = linear(at + "self_attn.k_proj", both).view(len(where), -1, D)
        v = linear(at + "self_attn.v_proj", both).view(len(where), -1, D) if at + "self_attn.v_proj.weight" in w else k
        v = norm(v) if gemma else v
        q = rotate(q, where[n:], raw, gemma)
        k = rotate(norm(k, w[at + "self_attn.k_norm.weight"]), where, raw, gemma)
        groups = heads // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) * (1.0 if gemma else D**-0.5)
        distance = where[n:][:, None] - where[None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if raw.get("causal"):
            hidden |= distance < 0
        if raw.get("layer_types", ["full"] * 9)[number] == "sliding_attention":
            hidden |= distance.abs() >= raw["sliding_window"]
        mixed = torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, -torch.inf).softmax(-1), v)
        mixed = linear(at + "self_attn.o_proj", mixed.reshape(len(ids), -1))
        x = x + (norm(mixed, w[at + "post_attention_layernorm.weight"]) if gemma else mixed)
        h = norm(x, w[at + ("pre_feedforward" if gemma else "post_attention") + "_layernorm.weight"])
        h = linear(at + "mlp.down_proj", act(linear(at + "mlp.gate_proj", h)) * linear(at + "mlp.up_proj", h))
        h = norm(h, w[at + "post_feedforward_layernorm.weight"]) if gemma else h
        x = (x + h) * w.get(at + "layer_scalar", 1)
    return norm(x, w["norm.weight"]).numpy()


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
CASES = {
    "plain": ("qwen3", {}),
    "bias, one key head, linear rope": (
        "qwen3",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        },
    ),
    "sliding window": ("qwen3", WINDOWS),
    "causal sliding window, interleaved rope": ("qwen3", {**WINDOWS, "causal": True, "rope_is_neox_style": False}),
    "gemma4": ("gemma4", {}),
    "gemma4 with values, three layers": (
        "gemma4",
        {"attention_k_eq_v": False, "num_hidden_layers": 3, "num_key_value_heads": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_pytorch(name):
    """Two rounds with growing context, two requests of different lengths, against the uncached reference."""
    style, fields = CASES[name]
    raw = raw_config(style, **fields)
    weights = drafter_weights(raw, seed=3)
    drafter = build_drafter(raw, weights)
    features = random_features(drafter, 2, 11, seed=4)
    cache = drafter.make_cache(2, 24)
    held = np.zeros(2, np.int32)
    for lengths, anchors in (([6, 2], [5, 8]), ([11, 3], [9, 30])):
        lengths = np.array(lengths, np.int32)
        new = np.stack([np.roll(features[b], -held[b], axis=0)[:7] for b in range(2)])
        cache, held = drafter.extend(cache, new, lengths), lengths
        ids = np.full((2, raw["block_size"]), raw["mask_token_id"], np.int32)
        ids[:, 0] = anchors
        found, _ = block_hidden(drafter, cache, ids)
        for b in range(2):
            expected = reference(weights, raw, np.asarray(features[b, : lengths[b]]), ids[b])
            np.testing.assert_allclose(found[b], expected, atol=2e-5)
