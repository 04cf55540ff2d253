"""Key/value caches with fixed capacity: slot p of a request's row holds position p.

In the shapes below B is the batch, C the capacity (slots per request), L layers. Batch is the leading axis of every
array, so that rows can be replaced one request at a time. A slot at or beyond a request's length holds leftovers that
masks hide and later writes replace: rejecting drafts costs nothing but a smaller length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import check_int
from ..types import CachedStates, HeadStates, RequestInts
from .geometry import BackboneConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of L layers, after norms and rotation.

    Attributes:
        keys, values: tuples of L arrays [B, C, num_kv_heads, head_dim].
    """

    keys: tuple[CachedStates, ...]
    values: tuple[CachedStates, ...]

    @property
    def capacity(self) -> int:
        """Slots per request."""
        return self.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def written(self, layer: int, start: RequestInts, keys: HeadStates, values: HeadStates) -> KVCache:
        """Return the cache with keys and values [B, T, ...] of one layer in slots start .. start + T - 1.

        Args:
            start: int32 [B], each request's first slot. What falls beyond the capacity is dropped, never wrapped.
        """
        batch, steps = keys.shape[:2]
        index = (jnp.arange(batch)[:, None], start[:, None] + jnp.arange(steps)[None])

        def put(buffers: tuple[CachedStates, ...], new: HeadStates) -> tuple[CachedStates, ...]:
            # A negative start would wrap, so it is sent beyond the end.
            slots = jnp.where(index[1] < 0, self.capacity, index[1])
            changed = buffers[layer].at[index[0], slots].set(new.astype(buffers[layer].dtype), mode="drop")
            return (*buffers[:layer], changed, *buffers[layer + 1 :])

        return KVCache(put(self.keys, keys), put(self.values, values))


def make_kv_cache(config: BackboneConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """Return an empty cache (zeros) for a stack of layers."""
    batch, capacity = check_int("batch", batch, 1), check_int("capacity", capacity, 1)
    shape = (batch, capacity, config.num_kv_heads, config.head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)) for _ in range(2))
    return KVCache(keys, values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContextCache:
    """A drafter's memory of the accepted context: keys and values of the projected target features.

    Attributes:
        kv: the keys and values.
        lengths: int32 [B], positions 0 .. lengths - 1 are held.
    """

    kv: KVCache
    lengths: RequestInts
