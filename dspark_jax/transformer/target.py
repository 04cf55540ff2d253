"""The target side of speculative decoding: the protocol that the decoding loop needs, and a dense decoder.

Any target works that keeps its state in a cache addressed by position: rejected positions are simply written again.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from ..checks import invalid
from ..linear import gather_rows, product
from ..types import Activations, Features, RequestInts, Sequences
from .cache import KVCache, make_kv_cache
from .geometry import BackboneConfig
from .layers import DecoderLayer, Take, rms_norm, run_layers


@runtime_checkable
class Target(Protocol):
    """What the decoding loop asks of a target. The object is a pytree, since it is an argument of jitted functions."""

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width Ht of one tapped hidden state."""
        ...

    @property
    def num_layers(self) -> int:
        """Depth; taps are layer numbers below it, or -1 for the embedding's output."""
        ...

    @property
    def max_length(self) -> int | None:
        """The most positions, or None for no limit."""
        ...

    def make_cache(self, batch: int, capacity: int) -> Any:
        """Return an empty cache: a pytree whose every leaf has the batch as its leading axis."""
        ...

    def forward(
        self, tokens: Sequences, start: RequestInts, cache: Any, taps: tuple[int, ...]
    ) -> tuple[Activations, Features, Any]:
        """Run tokens int32 [B, T] at positions start .. start + T - 1 (start int32 [B]) over the cached ones before.

        What the cache holds at or beyond `start` is ignored and replaced.

        Returns:
            hidden [B, T, n] that `logits` takes; the outputs of layers `taps` (static), concatenated on the last axis:
            [B, T, len(taps) * Ht]; the cache with these positions written.
        """
        ...

    def logits(self, hidden: Float[Array, "*rows H"]) -> Float32[Array, "*rows V"]:
        """Return float32 logits [..., V] from hidden [..., n]; row p predicts the token at position p + 1."""
        ...


class DecoderTarget(nnx.Module):
    """A dense causal language model over a KV cache: Llama, Mistral, Qwen2 or Qwen3, as its geometry says.

    Args:
        config: geometry, causal.
        take: returns a weight of the given canonical name and shape.
        tied: whether the LM head is the token embedding.
    """

    def __init__(self, config: BackboneConfig, take: Take, *, tied: bool) -> None:
        if not all(config.layer_causal) or config.style != "qwen3":
            raise invalid("config", (config.style, config.layer_causal), "style 'qwen3' and every layer causal")
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(take("embed_tokens.weight", shape))
        self.layers = nnx.List([DecoderLayer(config, take, f"layers.{n}") for n in range(config.num_layers)])
        self.norm = nnx.Param(take("norm.weight", (config.hidden_size,)))
        self.lm_head = nnx.data(None if tied else nnx.Param(take("lm_head.weight", shape)))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of one tapped hidden state."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Depth."""
        return self.config.num_layers

    @property
    def max_length(self) -> int | None:
        """The most positions."""
        return self.config.max_position_embeddings

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache."""
        return make_kv_cache(self.config, batch, capacity, self.embed_tokens.dtype)

    def forward(
        self, tokens: Sequences, start: RequestInts, cache: KVCache, taps: tuple[int, ...]
    ) -> tuple[Activations, Features, KVCache]:
        """Run tokens over the cache; see Target.forward. Ids outside [0, V) embed as zeros."""
        table = self.embed_tokens[...]
        x = gather_rows(table, tokens)
        outputs, cache = run_layers(self.layers, self.config, x, start, cache)
        tapped = [x if number == -1 else outputs[number] for number in taps]
        features = jnp.concatenate(tapped, axis=-1) if tapped else jnp.zeros((*x.shape[:2], 0), x.dtype)
        return rms_norm(outputs[-1], self.norm[...], self.config.rms_norm_eps), features, cache

    def logits(self, hidden: Float[Array, "*rows H"]) -> Float32[Array, "*rows V"]:
        """Return float32 logits [..., V]."""
        weight = self.embed_tokens if self.lm_head is None else self.lm_head
        return product(hidden, weight[...])
