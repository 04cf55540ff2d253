"""Which form of a kernel runs where, and the few Pallas pieces that all kernels share.

Every kernel stands beside a plain-XLA form. `implementation` is "xla", "pallas" or None; None means the XLA form unless
`VERIFIED` says that scripts/gpu_check.sh has passed for the kernel on a real card. "pallas" runs the compiled kernel on
NVIDIA GPUs and the interpreter elsewhere. The choice between platforms is made when a program is lowered, so one traced
function serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from ..linear import round_to

T = TypeVar("T")

IMPLEMENTATIONS = ("xla", "pallas")

# kernel -> (card, date) of the run of scripts/gpu_check.sh that passed; what is not listed is no default.
VERIFIED: dict[str, tuple[str, str]] = {}

WHOLE = pl.no_block_spec  # the kernel gets a pointer to the whole array and indexes it itself


def run(kernel: str, implementation: str | None, *, xla: Callable[[], T], pallas: Callable[..., T]) -> T:
    """Run one of the two forms of a kernel.

    Args:
        kernel: its name in `VERIFIED`.
        implementation: "xla", "pallas" or None.
        xla: the plain form; pallas: the kernel, which takes `interpret`.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation: found {implementation!r}, expected 'xla', 'pallas' or None")
    if implementation is None and kernel in VERIFIED:
        return lax.platform_dependent(cuda=partial(pallas, interpret=False), default=xla)
    if implementation == "pallas":
        return lax.platform_dependent(cuda=partial(pallas, interpret=False), default=partial(pallas, interpret=True))
    return xla()


def addressable(*arrays: jax.Array) -> bool:
    """Say whether kernels can index the arrays: their offsets are 32 bits wide."""
    return all(array.size < 2**31 for array in arrays)


def pallas_call(kernel: Callable[..., None], *, name: str, interpret: bool, num_warps: int = 4, **options: Any) -> Any:
    """Build a Triton kernel, or its interpretation in plain JAX."""
    parameters = {} if interpret else {"compiler_params": plt.CompilerParams(num_warps=num_warps)}
    return pl.pallas_call(kernel, name=name, interpret=interpret, **parameters, **options)


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def rounded(x: jax.Array, dtype: Any, interpret: bool) -> jax.Array:
    """Round float32 to the values of `dtype` inside a kernel, staying float32."""
    # Triton keeps a cast to a narrower type and back, and knows no other way.
    return round_to(x, dtype) if interpret or dtype == jnp.float32 else x.astype(dtype).astype(jnp.float32)


def load(ref: Any, index: tuple[Any, ...], mask: jax.Array | None = None, other: Any = None) -> jax.Array:
    """Load elements of a reference; masked lanes touch no memory and yield `other`."""
    return plt.load(ref.at[index], mask=mask, other=other)


def store(ref: Any, index: tuple[Any, ...], value: jax.Array, mask: jax.Array | None = None) -> None:
    """Store elements; masked lanes touch no memory (on a GPU: the interpreter rewrites what stands there)."""
    plt.store(ref.at[index], value, mask=mask)
