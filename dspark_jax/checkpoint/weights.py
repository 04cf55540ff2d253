"""Taking weights out of a checkpoint by name and shape, with one error that lists everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import DTYPES, dtype_name


class WeightTaker:
    """Hands out weights by canonical name, as `Take` in layers.py wants; problems are collected until `finish`.

    Args:
        where: names the checkpoint in errors.
        names: all tensors that belong to the model; one that nobody takes is a problem.
        read: name -> array (it may be memory mapped; a copy is made).
        dtype: of the weights; None keeps the stored one.
    """

    def __init__(self, where: str, names: Iterable[str], read: Callable[[str], np.ndarray], dtype: Any = None) -> None:
        self.where, self.names, self.read = where, set(names), read
        self.dtype = None if dtype is None else jnp.dtype(dtype_name("dtype", dtype))
        self.taken: set[str] = set()
        self.problems: list[str] = []

    def __call__(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        """Return the weight; a missing or misshapen one is noted, and zeros stand for it until `finish` raises."""
        self.taken.add(name)
        if name not in self.names:
            self.problems.append(f"{name}: missing, expected shape {list(shape)}")
            return jnp.zeros(shape)
        array = self.read(name)
        if array.shape != shape:
            self.problems.append(f"{name}: found shape {list(array.shape)}, expected {list(shape)}")
        elif array.dtype.name not in DTYPES:
            self.problems.append(f"{name}: found dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}")
        elif np.isnan(array).any():
            self.problems.append(f"{name}: holds NaN (a mark of weights that were never written)")
        else:
            return jnp.array(array, self.dtype, copy=True)
        return jnp.zeros(shape)

    def finish(self) -> None:
        """Raise a ValueError that lists every missing, misshapen and left-over tensor, if there is one."""
        left = sorted(self.names - self.taken)
        if problems := self.problems + [f"{name}: not a tensor of this model" for name in left]:
            raise ValueError(f"{self.where}: " + "; ".join(problems))
