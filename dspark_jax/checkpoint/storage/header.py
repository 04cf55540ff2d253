"""The header of a safetensors file, read without PyTorch and without trusting it.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes. Every
claim of the header is checked against the file's size before anything is allocated; errors name file and tensor.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...json_files import open_regular, parse_json_object

# 8 MiB hold about 70 thousand tensors, more than any released file has; longer headers cost seconds to parse.
MAX_HEADER = 1 << 23
MAX_DIMS = 32

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorInfo(NamedTuple):
    """Where one tensor lies: header dtype name, shape, file, and first and last (exclusive) byte in that file."""

    dtype: str
    shape: tuple[int, ...]
    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.stop - self.start


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a regular file, not safetensors, truncated, or a claim that contradicts the file: the message
            names the file and the tensor.
    """
    path = os.fspath(path)
    try:
        mode, size = (status := os.stat(path)).st_mode, status.st_size
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path!r}: cannot be read ({error})") from None
    if not stat.S_ISREG(mode):  # opening a pipe or a device would hang
        raise ValueError(f"{path}: not a regular file")
    if size < 8:
        raise ValueError(f"{path}: found {size} bytes, expected a safetensors file (8 bytes of header length first)")
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(
                f"{path}: header length {length} lies beyond the file ({size} bytes); truncated or not safetensors"
            )
        if length > MAX_HEADER:
            raise ValueError(f"{path}: header length {length}, expected at most {MAX_HEADER}")
        header = parse_json_object(path, file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__: expected an object of strings")
    data_start = 8 + length
    infos = {name: _tensor_info(path, name, entry, data_start, size) for name, entry in header.items()}
    _check_coverage(path, infos, data_start, size)
    return infos


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


_KEYS = {"dtype", "shape", "data_offsets"}


def _tensor_info(path: str, name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    """Check one entry of a header."""

    def bad(what: str) -> ValueError:
        return ValueError(f"{path}: tensor {name[:200]!r}: {what}")

    if not name or not name.isprintable():
        raise bad("expected a name of printable characters")
    if not isinstance(entry, dict) or set(entry) != _KEYS:
        raise bad("expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad(f"found dtype {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise bad(f"found shape {str(shape)[:80]}, expected at most {MAX_DIMS} sizes >= 0")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise bad(f"found data_offsets {str(offsets)[:80]}, expected [begin, end]")
    start, stop = data_start + offsets[0], data_start + offsets[1]
    if not start <= stop <= size:
        raise bad(f"bytes {start} to {stop} do not lie in the file ({size} bytes); truncated?")
    wanted = math.prod(shape) * DTYPES[dtype].itemsize
    if wanted != stop - start:
        raise bad(f"{dtype} {shape} needs {wanted} bytes, data_offsets give {stop - start}")
    return TensorInfo(dtype, tuple(shape), path, start, stop)


def _check_coverage(path: str, infos: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """The format allows neither overlaps nor holes: each byte of the data belongs to one tensor."""
    end, previous = data_start, "the header"
    for name, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != end:
            word = "overlaps" if info.start < end else "leaves a hole after"
            raise ValueError(
                f"{path}: tensor {name!r} (bytes {info.start} to {info.stop}) {word} {previous} (ends at {end})"
            )
        end, previous = info.stop, repr(name)
    if end != size:
        raise ValueError(f"{path}: {size - end} bytes after the last tensor belong to none")


def some(names: Any, limit: int = 20) -> str:
    """List names in order, at most `limit` of them and a count of the others."""
    ordered = sorted(names)
    tail = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + tail
