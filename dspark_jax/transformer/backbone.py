"""The drafter's parallel backbone: one pass over anchor and mask tokens gives the hidden states of all draft steps.

    context  = hidden_norm(fc([target taps]))                            one row per accepted position
    K_l, V_l = k_proj_l, v_proj_l of [context ; block]                   l = 0 .. L - 1, keys normed and rotated
    hidden   = norm(layers(embed(block)))                                bidirectional inside the block

The context's keys and values do not depend on the block, so they are computed once per accepted position and cached
(`extend`); the block's own are written behind them each round and overwritten by the next.
Source: DSpark (arXiv 2607.05147), whose backbone is DFlash's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..linear import gather_rows, product
from ..types import Activations, Features, RequestInts, Sequences
from .cache import ContextCache, KVCache, make_kv_cache
from .geometry import BackboneConfig
from .layers import DecoderLayer, Take, rms_norm, run_layers
from .rope import rope_tables


class Backbone(nnx.Module):
    """Token embedding, feature projection and draft layers; weights come from `take(name, shape)` by canonical names.

    Args:
        config: geometry (static).
        feature_size: width of the concatenated target taps, T * Ht.
        take: returns a weight of the given name and shape.
    """

    def __init__(self, config: BackboneConfig, feature_size: int, take: Take) -> None:
        self.config = config
        H = config.hidden_size
        self.embed_tokens = nnx.Param(take("embed_tokens.weight", (config.vocab_size, H)))
        self.fc = nnx.Param(take("fc.weight", (H, feature_size)))
        self.hidden_norm = nnx.Param(take("hidden_norm.weight", (H,)))
        self.layers = nnx.List([DecoderLayer(config, take, f"layers.{n}") for n in range(config.num_layers)])
        self.norm = nnx.Param(take("norm.weight", (H,)))

    @property
    def dtype(self) -> Any:
        """Dtype of weights and activations."""
        return self.fc.dtype

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target taps."""
        return self.fc.shape[1]

    def make_cache(self, batch: int, capacity: int) -> ContextCache:
        """Return an empty context cache; `capacity` must hold the longest context and one block behind it."""
        kv = make_kv_cache(self.config, batch, capacity, self.dtype)
        return ContextCache(kv, jnp.zeros((batch,), jnp.int32))

    def extend(self, cache: ContextCache, features: Features, lengths: RequestInts) -> ContextCache:
        """Append context: features [B, F, T * Ht] of positions cache.lengths .. lengths - 1; further rows are ignored.

        Args:
            cache: the context so far.
            features: the target's taps, concatenated in the order of target_layer_ids.
            lengths: int32 [B], the new lengths, at most cache.lengths + F.
        """
        with jax.named_scope("context"):
            context = product(features.astype(self.dtype), self.fc[...], self.dtype)
            context = rms_norm(context, self.hidden_norm[...], self.config.rms_norm_eps)
            start, kv = cache.lengths, cache.kv
            positions = start[:, None] + jnp.arange(features.shape[1], dtype=jnp.int32)[None]
            tables = rope_tables(self.config, positions)
            for number, layer in enumerate(self.layers):
                kv = kv.written(number, start, *layer.attention.keys_values(context, tables))
        return dataclasses.replace(cache, kv=kv, lengths=lengths)

    def __call__(self, cache: ContextCache, block_ids: Sequences) -> tuple[Activations, KVCache]:
        """Return the block's hidden states [B, block, H], and the keys and values with the block behind the context.

        Args:
            cache: the context; the block's first token stands at position cache.lengths.
            block_ids: int32 [B, block], anchor then mask tokens; ids outside [0, V) embed as zeros.
        """
        table = self.embed_tokens[...]
        x = gather_rows(table, block_ids)
        x = x * jnp.asarray(self.config.embed_scale, x.dtype)
        outputs, kv = run_layers(self.layers, self.config, x, cache.lengths, cache.kv)
        return rms_norm(outputs[-1], self.norm[...], self.config.rms_norm_eps), kv
