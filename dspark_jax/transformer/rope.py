"""Rotary positions: pairs of a head's entries are turned by an angle that grows with the token's position.

Source: RoFormer (arXiv 2104.09864); the scaled variants are those that checkpoints name in rope_parameters.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from ..linear import as_last_axis
from ..types import HeadStates, Sequences
from .geometry import BackboneConfig

RopeTables = tuple[Float32[Array, "B T 1 P"], Float32[Array, "B T 1 P"]]  # cosines and sines of P pairs


def rope_frequencies(config: BackboneConfig) -> np.ndarray:
    """Return the angle per position of each rotary pair, float32 [head_dim / 2].

    theta^(-2i / head_dim); "linear" divides by the factor; "proportional" keeps the fastest partial_rotary_factor of
    the pairs and leaves the others unrotated (the exponent's divisor stays head_dim); "llama3" divides by the factor
    what turns fewer than low_freq_factor times within the original context, keeps what turns more than
    high_freq_factor times, and goes linearly (in turns) from one to the other between them.
    """
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
    if config.rope_type == "llama3":
        low, high, original = config.rope_llama3
        turns = original * frequencies / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (frequencies * (kept + (1 - kept) / config.rope_factor)).astype(np.float32)
    frequencies = frequencies / np.float32(config.rope_factor)
    if config.rope_type == "proportional":
        frequencies[int(config.partial_rotary_factor * half) :] = 0
    return frequencies.astype(np.float32)


def rope_tables(config: BackboneConfig, positions: Sequences) -> RopeTables:
    """Return cosines and sines, float32 [B, T, 1, head_dim / 2], of absolute positions [B, T]."""
    angles = positions.astype(jnp.float32)[..., None, None] * as_last_axis(jnp.asarray(rope_frequencies(config)), 4)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: HeadStates, tables: RopeTables, interleaved: bool) -> HeadStates:
    """Rotate the pairs of x [B, T, N, D] by the tables' angles; halves are paired, or neighbours where interleaved."""
    cos, sin = tables
    wide = x.astype(jnp.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack(turned, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(turned, axis=-1)
    return out.astype(x.dtype)
