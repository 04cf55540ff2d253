"""Order-preserving unsigned keys of floats: one integer order for bfloat16, float16 and float32.

    key(x) < key(y)  exactly when  x < y;     key(-0) = key(+0);     key(NaN) of either sign is the largest

No float has the key 0: it marks what is not there.
Comparing keys instead of floats makes the order total, so that selection needs no special cases.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .types import Floats, Keys


def key_dtype(dtype: Any) -> Any:
    """Return the unsigned integer dtype as wide as a float dtype."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def to_keys(x: Floats) -> Keys:
    """Map floats to keys of the same width, elementwise; usable inside kernels."""
    info = jnp.finfo(x.dtype)
    word = key_dtype(x.dtype)
    bits = lax.bitcast_convert_type(x, word)
    if info.bits == 16:  # 32-bit arithmetic everywhere: GPUs have no faster one
        bits = bits.astype(jnp.uint32)
    sign = jnp.uint32(1 << (info.bits - 1))
    infinity = jnp.uint32(((1 << info.nexp) - 1) << info.nmant)
    magnitude = bits & (sign - jnp.uint32(1))
    # Negative numbers in descending order of magnitude below `sign`, then zero, then the positive ones.
    key = jnp.where((bits & sign) != 0, sign - magnitude, sign + magnitude)
    return jnp.where(magnitude > infinity, sign + (sign - jnp.uint32(1)), key).astype(word)


def to_values(keys: Keys, dtype: Any) -> Floats:
    """Invert `to_keys`; zeros come back as +0 and NaN as the quiet positive NaN."""
    info = jnp.finfo(dtype)
    sign = jnp.uint32(1 << (info.bits - 1))
    wide = keys.astype(jnp.uint32)
    bits = jnp.where(wide >= sign, wide - sign, sign | (sign - wide))
    return lax.bitcast_convert_type(bits.astype(keys.dtype), jnp.dtype(dtype))
