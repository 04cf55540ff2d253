"""The one reader of weights: by canonical name and expected shape, onto devices; one error lists all faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import DTYPES, LARGEST, dtype_name, invalid

CHUNK = 1 << 24  # elements looked at or converted at once: no second copy of a large tensor is made

Sharding = jax.sharding.Sharding | Mapping[str, Any] | Callable[[str], Any] | None


class WeightReader:
    """Hands out weights, as `Take` in transformer/layers.py wants; faults are collected until `finish`.

    Args:
        where: names the checkpoint in errors.
        names: all tensors that belong to the model; one that nobody takes is a fault.
        read: name -> array (it may be memory mapped; a copy is made).
        dtype: of the weights; None keeps the stored one.
        sharding: where arrays are placed: None for the default device; one jax Sharding for all; or a mapping or
            function from tensor name to a Sharding or None. Each device's part is read from the file alone.
    """

    def __init__(
        self,
        where: str,
        names: Iterable[str],
        read: Callable[[str], np.ndarray],
        dtype: Any = None,
        sharding: Sharding = None,
    ) -> None:
        self.where, self.names, self.read, self.sharding = where, set(names), read, sharding
        self.dtype = None if dtype is None else jnp.dtype(dtype_name("dtype", dtype))
        self.taken: set[str] = set()
        self.faults: list[str] = []
        check_sharding(sharding, self.names)

    def __call__(self, name: str, shape: tuple[int, ...], reshape: tuple[int, ...] | None = None) -> jax.Array:
        """Return the weight; a missing or misshapen one is noted, and no memory stands for it until `finish` raises.

        Args:
            shape: of the stored tensor; reshape: of the result, None for the same.
        """
        self.taken.add(name)
        reshape = shape if reshape is None else reshape
        nothing: Any = np.broadcast_to(np.float32(0), reshape)
        if name not in self.names:
            self.faults.append(f"{name}: missing, expected shape {list(shape)}")
            return nothing
        array = self.read(name)
        if array.shape != shape:
            self.faults.append(f"{name}: found shape {list(array.shape)}, expected {list(shape)}")
        elif array.dtype.name not in DTYPES:
            self.faults.append(f"{name}: found dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}")
        elif fault := self._values(array):
            self.faults.append(f"{name}: {fault}")
        else:
            return self.place(name, array.reshape(reshape))
        return nothing

    def finish(self) -> None:
        """Raise a ValueError that lists every missing, misshapen, unusable and left-over tensor, if there is one."""
        left = sorted(self.names - self.taken)
        if faults := self.faults + [f"{name}: not a tensor of this model" for name in left]:
            raise ValueError(f"{self.where}: " + "; ".join(faults))

    def place(self, name: str, array: np.ndarray) -> jax.Array:
        """Put an array where the sharding says, in the dtype asked for (integers keep theirs)."""
        dtype = array.dtype if self.dtype is None or array.dtype.kind == "i" else self.dtype
        sharding = self.sharding
        if isinstance(sharding, Mapping):
            sharding = sharding.get(name)
        elif callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
            sharding = sharding(name)
        if sharding is None:
            # A private copy: JAX may alias host memory or read it after this returns, and this memory is a mapped file.
            return jnp.asarray(np.array(array, dtype, order="C"))
        # Only a device's own part is read; the copy keeps the mapped file out of the result.
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: np.array(array[index], dtype, order="C")
        )

    def _values(self, array: np.ndarray) -> str | None:
        """Say what is wrong with the numbers: exporters mark weights that were never written with NaN."""
        flat, narrow = array.reshape(-1), self.dtype == np.float16 and array.dtype != np.float16
        top = LARGEST["float16"]
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            if np.isnan(part).any():
                return "holds NaN (a mark of weights that were never written), expected numbers"
            if narrow and (largest := float(np.abs(part.astype(np.float32)).max())) > top:
                return f"holds {largest:g}, expected at most {top:g} for dtype float16"
        return None


def check_sharding(sharding: Sharding, names: Iterable[str]) -> None:
    """Refuse a mapping to shardings that names something else than a tensor."""
    if isinstance(sharding, Mapping) and (unknown := sorted(set(sharding) - set(names))):
        raise invalid("sharding", unknown, "names of tensors: " + ", ".join(sorted(names)))
