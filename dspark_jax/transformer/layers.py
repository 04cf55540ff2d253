"""Transformer layers shared by the drafter's backbone and the target: norms, attention, MLP, a stack of layers.

T tokens per request, N heads, D head size. Weights keep the stored orientation [out, in]; products accumulate in
float32 and round once to the activations' dtype; norms, rotation and softmax are float32 inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..linear import as_last_axis, product
from ..types import Activations, Floats, HeadStates, RequestInts, Sequences, Visible
from .attention import attention
from .cache import KVCache
from .geometry import BackboneConfig
from .rope import RopeTables, rope_tables, rotate

Take = Callable[[str, tuple[int, ...]], Floats]  # (tensor's name, expected shape) -> weight


def rms_norm(x: Float[Array, "*rows n"], weight: Float[Array, " n"] | None, eps: float) -> Float[Array, "*rows n"]:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        normed = normed * as_last_axis(weight.astype(jnp.float32), x.ndim)
    return normed.astype(x.dtype)


def visible(positions: Sequences, capacity: int, *, causal: bool, window: int | None) -> Visible:
    """Say which cache slots each token sees, bool [B, 1, T, C].

    Causal: slots up to the token's own position. Otherwise all slots up to the block's last position, so the whole
    context and the whole block. A window hides what is `window` or more positions away.

    Args:
        positions: int32 [B, T], ascending in each row.
    """
    slot = jnp.arange(capacity)[None, None]
    own, last = positions[:, :, None], positions[:, -1:, None]
    seen = jnp.broadcast_to(slot <= (own if causal else last), (*positions.shape, capacity))
    if window is not None:
        seen = seen & (jnp.abs(slot - own) < window)
    return seen[:, None]


class Attention(nnx.Module):
    """Grouped-query attention; queries and keys are normed per head if `qk_norm` (Gemma4: values too, unscaled)."""

    def __init__(self, config: BackboneConfig, take: Take, prefix: str) -> None:
        self.config = config
        H, D = config.hidden_size, config.head_dim
        outputs = {"q": (config.num_heads * D, H), "k": (config.num_kv_heads * D, H), "o": (H, config.num_heads * D)}
        if not config.key_is_value:
            outputs["v"] = outputs["k"]
        self.weights = nnx.Dict({n: nnx.Param(take(f"{prefix}.{n}_proj.weight", s)) for n, s in outputs.items()})
        with_bias = {n: s for n, s in outputs.items() if config.attention_bias or (config.qkv_bias and n != "o")}
        self.biases = nnx.Dict({n: nnx.Param(take(f"{prefix}.{n}_proj.bias", s[:1])) for n, s in with_bias.items()})
        names = ("q", "k") if config.qk_norm else ()
        self.norms = nnx.Dict({n: nnx.Param(take(f"{prefix}.{n}_norm.weight", (D,))) for n in names})

    def _project(self, name: str, x: Float[Array, "B T n"]) -> Float[Array, "B T m"]:
        if name not in self.biases:
            return product(x, self.weights[name][...], x.dtype)
        bias = as_last_axis(self.biases[name][...].astype(jnp.float32), x.ndim)
        return (product(x, self.weights[name][...]) + bias).astype(x.dtype)

    def _heads(self, x: Float[Array, "B T n"]) -> HeadStates:
        return x.reshape(*x.shape[:-1], -1, self.config.head_dim)

    def _normed(self, name: str, x: HeadStates) -> HeadStates:
        return rms_norm(x, self.norms[name][...], self.config.rms_norm_eps) if name in self.norms else x

    def queries(self, x: Activations, tables: RopeTables) -> HeadStates:
        """Return normed, rotated queries [B, T, num_heads, D] of x [B, T, H]."""
        return rotate(self._normed("q", self._heads(self._project("q", x))), tables, self.config.rope_interleaved)

    def keys_values(self, x: Activations, tables: RopeTables) -> tuple[HeadStates, HeadStates]:
        """Return normed, rotated keys and values [B, T, num_kv_heads, D] of x [B, T, H]."""
        raw = self._heads(self._project("k", x))
        values = raw if self.config.key_is_value else self._heads(self._project("v", x))
        if self.config.style == "gemma4":
            values = rms_norm(values, None, self.config.rms_norm_eps)
        return rotate(self._normed("k", raw), tables, self.config.rope_interleaved), values

    def attend(
        self, queries: HeadStates, keys: Float[Array, "B C M D"], values: Float[Array, "B C M D"], mask: Visible
    ) -> Activations:
        """Return o_proj(softmax(scale * q.k) v): [B, T, H] from queries [B, T, ...], keys and values [B, C, ...]."""
        mixed = attention(queries, keys, values, mask, self.config.attention_scale)
        return self._project("o", mixed.reshape(*mixed.shape[:2], -1))


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: BackboneConfig, take: Take, prefix: str) -> None:
        H, wide = config.hidden_size, config.intermediate_size
        self.gate = nnx.Param(take(f"{prefix}.gate_proj.weight", (wide, H)))
        self.up = nnx.Param(take(f"{prefix}.up_proj.weight", (wide, H)))
        self.down = nnx.Param(take(f"{prefix}.down_proj.weight", (H, wide)))
        self.activation = config.activation

    def __call__(self, x: Activations) -> Activations:
        """Return [..., H] from x [..., H]."""
        gate = product(x, self.gate[...], x.dtype)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return product(gate * product(x, self.up[...], x.dtype), self.down[...], x.dtype)


class DecoderLayer(nnx.Module):
    """One layer over a cache. Llama, Mistral, Qwen2 and Qwen3: x + attention(norm(x)), then x + mlp(norm(x)).

    Gemma4: each branch is normed before and after, and the sum is multiplied by layer_scalar.
    """

    def __init__(self, config: BackboneConfig, take: Take, prefix: str) -> None:
        self.config = config
        self.attention = Attention(config, take, f"{prefix}.self_attn")
        self.mlp = MLP(config, take, f"{prefix}.mlp")
        gemma = config.style == "gemma4"
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        H = config.hidden_size
        self.norms = nnx.Dict({name: nnx.Param(take(f"{prefix}.{name}.weight", (H,))) for name in names})
        self.layer_scalar = nnx.data(nnx.Param(take(f"{prefix}.layer_scalar", (1,))) if gemma else None)

    def norm(self, name: str, x: Activations) -> Activations:
        """Return x normed by one of the layer's norms."""
        return rms_norm(x, self.norms[name][...], self.config.rms_norm_eps)

    def __call__(
        self, x: Activations, layer: int, cache: KVCache, start: RequestInts, tables: RopeTables, mask: Visible
    ) -> tuple[Activations, KVCache]:
        """Write the tokens' keys and values to slots start.. and attend to the visible slots.

        Args:
            x: [B, T, H]; layer: the layer's number in the cache; start: int32 [B]; tables: of the tokens' positions;
            mask: bool [B, 1, T, C].
        """
        gemma = self.layer_scalar is not None
        normed = self.norm("input_layernorm", x)
        queries = self.attention.queries(normed, tables)
        cache = cache.written(layer, start, *self.attention.keys_values(normed, tables))
        mixed = self.attention.attend(queries, cache.keys[layer], cache.values[layer], mask)
        x = x + (self.norm("post_attention_layernorm", mixed) if gemma else mixed)
        if not gemma:
            return x + self.mlp(self.norm("post_attention_layernorm", x)), cache
        mixed = self.mlp(self.norm("pre_feedforward_layernorm", x))
        x = x + self.norm("post_feedforward_layernorm", mixed)
        return x * as_last_axis(self.layer_scalar[...].astype(x.dtype), 3), cache  # pyright: ignore[reportOptionalSubscript]


def run_layers(
    layers: Any, config: BackboneConfig, x: Activations, start: RequestInts, cache: KVCache
) -> tuple[list[Activations], KVCache]:
    """Run tokens at positions start .. start + T - 1 through all layers.

    Returns:
        The output of each layer, L arrays [B, T, H], and the cache with the tokens written.
    """
    positions = start[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    tables = rope_tables(config, positions)
    kinds = list(zip(config.windows, config.layer_causal, strict=True))
    masks = {kind: visible(positions, cache.capacity, causal=kind[1], window=kind[0]) for kind in set(kinds)}
    outputs = []
    for number, layer in enumerate(layers):
        with jax.named_scope(f"layer{number}"):
            x, cache = layer(x, number, cache, start, tables, masks[kinds[number]])
        outputs.append(x)
    return outputs, cache
