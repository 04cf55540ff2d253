"""Which form of a kernel runs where.

Every kernel stands beside a plain-XLA form. `implementation` is "xla", "pallas" or None; None means the XLA form unless
`VERIFIED` says that scripts/gpu_check.sh has passed for the kernel on a real card. "pallas" runs the compiled kernel on
NVIDIA GPUs and the interpreter elsewhere. The choice between platforms is made when a program is lowered, so one traced
function serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from jax import ShapeDtypeStruct, lax
from jaxtyping import Array

from ..config import IMPLEMENTATIONS

T = TypeVar("T")

# kernel -> (card, date) of the run of scripts/gpu_check.sh that passed; what is not listed is no default.
VERIFIED: dict[str, tuple[str, str]] = {}


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


def addressable(*arrays: Array | ShapeDtypeStruct) -> bool:
    """Say whether kernels can index the arrays: their offsets are 32 bits wide."""
    return all(array.size < 2**31 for array in arrays)
