"""Canonical tensor names (those of DeepSpec's released code) with their shapes as PyTorch stores them, [out, in].

Symbols: V target vocabulary, Vd draft vocabulary, H hidden, r Markov rank, C confidence inputs, T*Ht concatenated taps,
I MLP width, Q heads x head size, K key heads x head size, hd head size, nh heads; "*" is any size.
"""

from __future__ import annotations

from ... import head_kinds

LM_HEAD, EMBEDDING, D2T, T2D = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"

# The Markov head's tensors are those of its registered kind (head_kinds.py).
OTHER_HEAD_SHAPES: dict[str, tuple[str, ...]] = {
    LM_HEAD: ("Vd", "H"),
    CONFIDENCE: ("1", "C"),
    CONFIDENCE_BIAS: ("1",),
    D2T: ("Vd",),
    T2D: ("V",),
}

# Patterns; the layer number is spelled \d+.
BACKBONE_SHAPES: dict[str, tuple[str, ...]] = {
    r"embed_tokens\.weight": ("V", "H"),
    r"fc\.weight": ("H", "T*Ht"),
    r"(?:hidden_norm|norm)\.weight": ("H",),
    r"layers\.\d+\.(?:input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight": ("H",),
    r"layers\.\d+\.layer_scalar": ("1",),
    r"layers\.\d+\.self_attn\.q_proj\.weight": ("Q", "H"),
    r"layers\.\d+\.self_attn\.[kv]_proj\.weight": ("K", "H"),
    r"layers\.\d+\.self_attn\.o_proj\.weight": ("H", "Q"),
    r"layers\.\d+\.self_attn\.q_proj\.bias": ("Q",),
    r"layers\.\d+\.self_attn\.[kv]_proj\.bias": ("K",),
    r"layers\.\d+\.self_attn\.o_proj\.bias": ("H",),
    r"layers\.\d+\.self_attn\.[qk]_norm\.weight": ("hd",),
    r"layers\.\d+\.mlp\.(?:gate|up)_proj\.weight": ("I", "H"),
    r"layers\.\d+\.mlp\.down_proj\.weight": ("H", "I"),
}

# Known parts of other backbones: they convert as tensors, but nothing here computes with them.
FOREIGN_SHAPES: dict[str, tuple[str, ...]] = {
    r"layers\.\d+\.self_attn\.attention_sink_bias": ("nh",),
    r"log_snr_embed\.fc1\.weight": ("H", "*"),
    r"log_snr_embed\.fc2\.weight": ("H", "H"),
    r"log_snr_embed\.fc[12]\.bias": ("H",),
}

# The dense DeepSeek-V4 block that NeMo Automodel trains.
AUTOMODEL_V4_SHAPES: dict[str, tuple[str, ...]] = {
    r"layers\.\d+\.self_attn\.(?:wq_a|wq_b|wkv|wo_a|wo_b)\.weight": ("*", "*"),
    r"layers\.\d+\.self_attn\.(?:q_norm|kv_norm)\.weight": ("*",),
    r"layers\.\d+\.self_attn\.sinks_param": ("nh",),
}

# The DeepSeek-V4 block: D hidden, q query rank, G output groups, o output rank, m expert width, E experts.
V4_SHAPES: dict[str, tuple[str, ...]] = {
    r"layers\.\d+\.attn\.attn_sink": ("nh",),
    r"layers\.\d+\.attn\.wq_a\.weight": ("q", "H"),
    r"layers\.\d+\.attn\.wq_b\.weight": ("Q", "q"),
    r"layers\.\d+\.attn\.wkv\.weight": ("hd", "H"),
    r"layers\.\d+\.attn\.wo_a\.weight": ("G*o", "Q/G"),
    r"layers\.\d+\.attn\.wo_b\.weight": ("H", "G*o"),
    r"layers\.\d+\.attn\.q_norm\.weight": ("q",),
    r"layers\.\d+\.attn\.kv_norm\.weight": ("hd",),
    r"layers\.\d+\.(?:attn|ffn)_norm\.weight": ("H",),
    r"layers\.\d+\.ffn\.gate\.weight": ("E", "H"),
    r"layers\.\d+\.ffn\.gate\.bias": ("E",),
    r"layers\.\d+\.ffn\.(?:shared_experts|experts\.\d+)\.w[13]\.weight": ("m", "H"),
    r"layers\.\d+\.ffn\.(?:shared_experts|experts\.\d+)\.w2\.weight": ("H", "m"),
    r"layers\.\d+\.hc_(?:attn|ffn)_fn": ("*", "*"),
    r"layers\.\d+\.hc_(?:attn|ffn)_(?:base|scale)": ("*",),
    r"hc_head_fn": ("*", "*"),
    r"hc_head_(?:base|scale)": ("*",),
}


def head_shapes() -> dict[str, tuple[str, ...]]:
    """Return name -> symbolic shape of every tensor that a head may have, whatever its kind."""
    markov = {part.tensor: part.shape for kind in head_kinds.all_kinds() for part in kind.parameters}
    return markov | OTHER_HEAD_SHAPES


def is_head(name: str) -> bool:
    """Say whether a canonical name belongs to the head, not to the backbone."""
    if name.startswith(head_kinds.MARKOV_PREFIX):
        return name in head_shapes()
    return name in OTHER_HEAD_SHAPES
