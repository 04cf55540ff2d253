"""Memory of an interpreted Triton kernel: buffers that know who wrote and who read each element."""

from __future__ import annotations

from typing import Any

import numpy as np

NOBODY, MANY = -1, -2


class KernelFault(Exception):
    """A kernel did what would be undefined, or touch foreign memory, on a GPU."""


class UnsupportedKernel(Exception):
    """A kernel uses what this interpreter does not know; nothing is said about the kernel."""


class Buffer:
    """One array of a kernel; operands that alias a result share the buffer.

    Programs of a grid have no order, so an element written by one may be neither written nor read by another.
    """

    def __init__(self, array: np.ndarray, name: str, written: bool) -> None:
        self.flat = np.array(array).reshape(-1)
        self.shape, self.name = array.shape, name
        self.written = np.full(self.flat.size, written)
        self.writer = np.full(self.flat.size, NOBODY)
        self.reader = np.full(self.flat.size, NOBODY)

    def _check(self, at: np.ndarray, what: str) -> None:
        outside = (at < 0) | (at >= self.flat.size)
        if outside.any():
            raise KernelFault(f"{what} outside {self.name} of {self.flat.size} elements: offset {at[outside][0]}")

    def read(self, at: np.ndarray, program: np.ndarray) -> np.ndarray:
        """Return the elements at flat offsets `at`, each read by its program."""
        self._check(at, "load")
        if not self.written[at].all():
            raise KernelFault(f"load of {self.name}[{at[~self.written[at]][0]}], which nobody wrote")
        foreign = (self.writer[at] != NOBODY) & (self.writer[at] != program)
        if foreign.any():
            raise KernelFault(f"race: {self.name}[{at[foreign][0]}] is read and written by two programs")
        before = self.reader[at]
        self.reader[at] = program
        differs = ((before != NOBODY) & (before != program)) | (self.reader[at] != program)
        self.reader[at[differs]] = MANY
        return self.flat[at]

    def write(self, at: np.ndarray, value: Any, program: np.ndarray) -> None:
        """Store `value` at flat offsets `at`, each written by its program."""
        self._check(at, "store")
        if np.unique(at).size != at.size:
            raise KernelFault(f"race: two lanes store to one element of {self.name}")
        for who, what in ((self.writer, "written by"), (self.reader, "read and written by")):
            foreign = (who[at] != NOBODY) & (who[at] != program)
            if foreign.any():
                raise KernelFault(f"race: {self.name}[{at[foreign][0]}] is {what} two programs")
        self.flat[at], self.written[at], self.writer[at] = value, True, program
