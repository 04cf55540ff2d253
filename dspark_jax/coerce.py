"""Coercion and checks of what callers hand to entry points, before anything is traced.

Lists, NumPy and JAX arrays of any width come out as one dtype without weak types, so that they share one trace; shapes,
kinds and (where they can be read without waiting for a device) values that cannot be right raise ValueError here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .checks import DTYPES, LARGEST, invalid
from .types import DraftSampling

ANY = -1  # in shapes: any size, also none at all (an empty batch)


def as_array(field: str, value: Any) -> np.ndarray | jax.Array:
    """Return `value` as a NumPy or JAX array; ragged or non-numeric input is refused."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value  # type: ignore[return-value]  # an abstract array passes through, for lowering without data
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError):
        raise invalid(field, value, "an array of numbers") from None
    # Python floats come as float64 and Python ints as int64; the callers below choose the width.
    if array.dtype == object or array.dtype.kind in "USMm":
        raise invalid(field, value, "an array of numbers")
    return array


def cast(array: Any, dtype: Any) -> jax.Array:
    """Return a JAX array of exactly `dtype`, without a weak type; abstract arrays stay abstract."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=array.sharding)  # type: ignore[return-value]  # as above
    return jnp.asarray(array, dtype=dtype)


def check_shape(field: str, array: Any, shape: tuple[int | None, ...], names: str) -> None:
    """Refuse an array whose shape differs from `shape`; None matches any size of at least 1, ANY also 0."""
    fits = len(array.shape) == len(shape) and all(
        size >= (0 if want == ANY else 1) if want in (None, ANY) else size == want
        for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want in (None, ANY) else str(want) for want in shape)
        raise invalid(f"{field}.shape", tuple(array.shape), f"{names} = [{wanted}]")


def coerce_floats(field: str, value: Any, shape: tuple[int | None, ...], names: str, dtype: Any = None) -> jax.Array:
    """Return a float array of the given shape, cast to `dtype` (None keeps it; float64 becomes float32)."""
    array = as_array(field, value)
    if str(array.dtype) not in (*DTYPES, "float64"):
        raise invalid(f"{field}.dtype", str(array.dtype), "a float dtype (" + ", ".join(DTYPES) + ")")
    check_shape(field, array, shape, names)
    if dtype is None:
        dtype = jnp.float32 if array.dtype == np.float64 else array.dtype
    return cast(array, dtype)


def coerce_ids(field: str, value: Any, shape: tuple[int | None, ...], names: str) -> jax.Array:
    """Return token ids as int32; host values beyond int32 become -1, which every gather treats as out of range."""
    array = as_array(field, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise invalid(f"{field}.dtype", str(array.dtype), "an integer dtype")
    check_shape(field, array, shape, names)
    if isinstance(array, np.ndarray) and array.dtype != np.int32:
        fits = (array >= -(2**31)) & (array < 2**31)
        array = np.where(fits, array.astype(np.int32), np.int32(-1))
    elif isinstance(array, jax.Array) and array.dtype.itemsize > 4:  # only with x64 enabled
        array = jnp.where((array >= -(2**31)) & (array < 2**31), array, -1)
    return cast(array, jnp.int32)


def _host_values(array: np.ndarray | jax.Array, free: Any) -> np.ndarray | None:
    """Return the values where checking costs nothing or cannot be skipped; None for tracers and the `free` dtype."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, Tracer | jax.ShapeDtypeStruct) or array.dtype == free:
        return None
    return np.asarray(array)


def _coerce_range(field: str, value: Any, batch: int, dtype: Any, high: int) -> jax.Array:
    array = as_array(field, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise invalid(f"{field}.dtype", str(array.dtype), "an integer dtype")
    check_shape(field, array, (batch,), "[B]")
    values = _host_values(array, dtype)
    if values is not None and values.size and (int(values.min()) < 0 or int(values.max()) > high):
        worst = int(values.min()) if int(values.min()) < 0 else int(values.max())
        raise invalid(field, worst, f"integers from 0 to {high}")
    return cast(array.astype(dtype) if isinstance(array, np.ndarray) else array, dtype)


def coerce_sampling(sampling: Any, batch: int) -> DraftSampling:
    """Return `sampling` with float32, uint32 and int32 arrays of shape [B].

    Values are checked where the host has them: seeds and positions in range (a seed beyond 32 bits would collide
    silently), temperatures finite. JAX arrays of the final dtype are taken as they are, without waiting for a device.

    Raises:
        ValueError: wrong type, shape or range; the error names the field.
    """
    if not isinstance(sampling, DraftSampling):
        raise invalid("sampling", type(sampling).__name__, "a DraftSampling, or None for greedy")
    temperature = as_array("sampling.temperature", sampling.temperature)
    if not any(jnp.issubdtype(temperature.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise invalid("sampling.temperature.dtype", str(temperature.dtype), "a float dtype")
    if isinstance(temperature, np.ndarray):
        if not (np.abs(temperature.astype(np.float64)) <= LARGEST["float32"]).all():
            raise invalid("sampling.temperature", temperature.tolist(), "finite numbers that float32 holds")
        temperature = temperature.astype(np.float32)
    if temperature.ndim == 0 and isinstance(temperature, np.ndarray):
        temperature = np.broadcast_to(temperature, (batch,))
    elif temperature.ndim == 0 and isinstance(temperature, jax.Array):
        temperature = jnp.broadcast_to(temperature, (batch,))
    check_shape("sampling.temperature", temperature, (batch,), "[B]")
    return DraftSampling(
        temperature=cast(temperature, jnp.float32),
        seed=_coerce_range("sampling.seed", sampling.seed, batch, jnp.uint32, 2**32 - 1),
        position=_coerce_range("sampling.position", sampling.position, batch, jnp.int32, 2**31 - 1),
    )
