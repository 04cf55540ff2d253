"""One tensor of a checkpoint under its canonical name, read a few rows at a time whatever its storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import dequantize
from .header import DTYPES
from .tensor_files import Files

CHUNK = 1 << 25  # bytes of result decoded at once


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a canonical tensor comes from and how it is read.

    Attributes:
        name: canonical name.
        files, source: the files and the name there.
        shape, dtype: of the result (after decoding).
        transform: "copy"; "fp8" or "fp4" (block scales in `scale`); "rows" (only the rows `select`).
        origin: "draft", "target" or "target, tied to the embedding".
        scale: source name of the block scales.
        block: FP8 block size.
        select: row numbers, for the LM head of a reduced vocabulary cut out of the target's.
    """

    name: str
    files: Files
    source: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    transform: str = "copy"
    origin: str = "draft"
    scale: str | None = None
    block: int = 0
    select: np.ndarray | None = dataclasses.field(default=None, repr=False)

    @property
    def sources(self) -> list[str]:
        """Names of all source tensors it is made of."""
        return [self.source] if self.scale is None else [self.source, self.scale]

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Read rows start .. stop of the result (the whole of a scalar)."""
        if self.transform == "rows":
            assert self.select is not None
            return self.files.read(self.source)[self.select[start:stop]]
        part = self.files.read(self.source, start, stop)
        if self.scale is None:
            return part
        if self.transform == "fp4":
            return dequantize.fp4_rows(self.name, part, self.files.read(self.scale, start, stop))
        return dequantize.fp8_rows(self.name, part, self.files.read(self.scale), self.block, start)

    def chunks(self, limit: int = CHUNK) -> Iterator[np.ndarray]:
        """Yield the tensor's rows in order, about `limit` bytes at a time."""
        if not self.shape or self.nbytes <= limit:
            yield self.rows(0, self.shape[0] if self.shape else 1)
            return
        step = max(1, limit * self.shape[0] // self.nbytes)
        for start in range(0, self.shape[0], step):
            yield self.rows(start, min(start + step, self.shape[0]))

    def array(self) -> np.ndarray:
        """Read the whole tensor; a plain copy in the file is mapped, not loaded."""
        if self.transform == "copy":
            return self.files.read(self.source)
        result = np.empty(self.shape, self.dtype)
        done = 0
        for chunk in self.chunks():
            result[done : done + len(chunk)] = chunk
            done += len(chunk)
        return result


def make_tensor(
    name: str, files: Files, source: str, scale: str | None, origin: str, stated_block: int | None
) -> Tensor:
    """Describe one tensor from its header entry and that of its scales.

    Raises:
        ValueError: a quantised weight without scales, scales without one, or shapes that do not fit together.
    """
    info = files[source]
    dtype = DTYPES[info.dtype]
    if scale is None:
        if info.dtype.startswith("F8") or (info.dtype in ("I8", "U8") and source.endswith(".weight")):
            raise ValueError(f"{source}: found dtype {info.dtype} without block scales, expected a float dtype")
        return Tensor(name, files, source, info.shape, dtype, origin=origin)
    found = files[scale]
    if found.dtype != "F8_E8M0":
        raise ValueError(f"{scale}: found dtype {found.dtype}, expected F8_E8M0")
    if info.dtype == "F8_E4M3":
        block = dequantize.block_size(source, info.shape, found.shape, stated_block)
        return Tensor(name, files, source, info.shape, dequantize.BF16, "fp8", origin, scale, block)
    if info.dtype in ("I8", "U8"):
        shape = (info.shape[0], 2 * info.shape[1]) if len(info.shape) == 2 else ()
        if len(shape) != 2 or found.shape != (shape[0], shape[1] // dequantize.GROUP) or shape[1] % dequantize.GROUP:
            raise ValueError(
                f"{source}: found packed FP4 {list(info.shape)} with scales {list(found.shape)}, "
                f"expected [n, c / 2] with [n, c / {dequantize.GROUP}]"
            )
        return Tensor(name, files, source, shape, dequantize.BF16, "fp4", origin, scale)
    raise ValueError(f"{source}: found dtype {info.dtype} beside block scales, expected F8_E4M3 or packed FP4 in I8")
