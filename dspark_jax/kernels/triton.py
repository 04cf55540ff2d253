"""The few Pallas-Triton pieces that all kernels share.

Kernels take their operands and results as dicts of references (a value may be a pytree), each a pointer to the whole
array. Triton's backend is imported where a kernel is built, so that this package imports where JAX has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array

from ..linear import round_to
from ..types import Bools, Floats


def pallas_call(
    kernel: Callable[[Any, Any], None],
    operands: Mapping[str, Any],
    results: Mapping[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    interpret: bool,
    num_warps: int = 4,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Array]:
    """Run a Triton kernel, or its interpretation in plain JAX.

    Args:
        kernel: called with two dicts of references, shaped like `operands` and `results`.
        operands: name -> array or pytree of arrays; None values are left out.
        results: name -> shape and dtype.
        grid: the programs.
        aliases: name of an operand (one array) -> name of the result that takes its memory.
    """
    parameters: dict[str, Any] = {}
    if not interpret:
        from jax.experimental.pallas import triton

        parameters = {"compiler_params": triton.CompilerParams(num_warps=num_warps)}
    operands = {key: value for key, value in operands.items() if value is not None}
    counts = [len(jax.tree.leaves(value)) for value in operands.values()]
    first = dict(zip(operands, np.cumsum([0, *counts[:-1]]), strict=True))  # number of each operand's first leaf
    places = list(results)

    def body(*refs: Any) -> None:
        given, made = refs[: len(operands)], refs[len(operands) :]
        kernel(dict(zip(operands, given, strict=True)), dict(zip(results, made, strict=True)))

    outputs = pl.pallas_call(
        body,
        name=name,
        grid=grid,
        interpret=interpret,
        # The kernel gets a pointer to the whole array and indexes it itself.
        in_specs=[jax.tree.map(lambda _: pl.no_block_spec, value) for value in operands.values()],
        out_specs=[pl.no_block_spec] * len(results),
        out_shape=list(results.values()),
        input_output_aliases={int(first[source]): places.index(to) for source, to in (aliases or {}).items()},
        **parameters,
    )(*operands.values())
    return dict(zip(results, outputs, strict=True))


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def rounded(x: Floats, dtype: Any, interpret: bool) -> Floats:
    """Round float32 to the values of `dtype` inside a kernel, staying float32."""
    # Triton keeps a cast to a narrower type and back, and knows no other way.
    return round_to(x, dtype) if interpret or dtype == jnp.float32 else x.astype(dtype).astype(jnp.float32)


def load(ref: Any, index: tuple[Any, ...], mask: Bools | None = None, other: Any = None) -> Array:
    """Load elements of a reference; masked lanes touch no memory and yield `other`."""
    from jax.experimental.pallas import triton

    return triton.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, index: tuple[Any, ...], value: Array, mask: Bools | None = None) -> None:
    """Store elements; masked lanes touch no memory (on a GPU: the interpreter rewrites what stands there)."""
    from jax.experimental.pallas import triton

    triton.store(ref.at[index], value, mask=mask)
