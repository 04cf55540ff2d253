"""The products, gathers and roundings that every layer shares."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from .types import Floats


def product(
    x: Float[Array, "*rows n"], weight: Float[Array, "m n"], dtype: Any = jnp.float32
) -> Float[Array, "*rows m"]:
    """Return x [..., n] @ weight[m, n].T with float32 accumulation, rounded once to `dtype`: [..., m].

    x is cast to the weight's dtype first (a half-precision product runs on tensor cores; float32 ones are exact float32
    also where the default would be TF32).
    """
    contract = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return lax.dot_general(x.astype(weight.dtype), weight, contract, precision=precision, preferred_element_type=dtype)


def gather_rows(table: Num[Array, "m n"], ids: Int[Array, " *rows"]) -> Num[Array, "*rows n"]:
    """Gather table rows at ids of any shape; an id outside the table gives a row of zeros (never a wrapped row)."""
    # mode="fill" still wraps negative ids, so they are sent beyond the table.
    return jnp.take(table, jnp.where(ids < 0, table.shape[0], ids), axis=0, mode="fill", fill_value=0)


def as_last_axis(vector: Float[Array, " n"], ndim: int) -> Float[Array, "... n"]:
    """Return a vector with unit axes before it, [1, ..., 1, n], so that it broadcasts along arrays of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


def round_to(x: Floats, dtype: Any) -> Floats:
    """Round float32 to the values of `dtype`, staying float32.

    XLA may drop a cast to a narrower type and back; it must keep an explicit reduction of precision.
    """
    info = jnp.finfo(dtype)
    if info.bits == 32:
        return x
    reduced = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if dtype != jnp.float16:
        return reduced
    # The reduction flushes float16's subnormal numbers, the multiples of 2**-24 below 2**-14; float32 numbers from 1/2
    # to 1 have that spacing.
    return jnp.where(jnp.abs(x) < 2.0**-14, (x + 0.75) - 0.75, reduced)
