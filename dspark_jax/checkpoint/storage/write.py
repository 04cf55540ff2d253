"""Writing safetensors files tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .header import DTYPE_NAMES


def write_safetensors(
    path: str,
    entries: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    chunks: Callable[[str], Iterable[np.ndarray]],
) -> dict[str, str]:
    """Write a file of which only one chunk of one tensor is in memory at a time.

    Args:
        path: of the new file.
        entries: name -> (shape, dtype).
        chunks: name -> the tensor's rows in order.

    Returns:
        name -> SHA-256 of its bytes.
    """
    # Larger elements first, so that every tensor is aligned.
    names = sorted(entries, key=lambda name: (-entries[name][1].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        shape, dtype = entries[name]
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests: dict[str, str] = {}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            sha, written = hashlib.sha256(), 0
            for chunk in chunks(name):
                data = row_bytes(chunk)
                sha.update(data)
                written += file.write(data)
            first, last = header[name]["data_offsets"]
            if written != last - first:
                raise ValueError(f"{name}: wrote {written} bytes, expected {last - first}")
            digests[name] = sha.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return digests


def row_bytes(array: np.ndarray) -> memoryview:
    """Return an array's bytes in the order of its shape, which a view's bytes in memory need not have."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def digest(chunks: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of a tensor's bytes, given its rows in order."""
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(row_bytes(chunk))
    return sha.hexdigest()
