"""Writing safetensors files tensor by tensor, and directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .header import DTYPE_NAMES

MANIFEST = "dspark_manifest.json"


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


def check_destination(path: str, force: bool) -> None:
    """Refuse a destination that exists, unless `force` and it is an earlier result or an empty directory.

    Raises:
        FileExistsError: it exists.
    """
    if not os.path.lexists(path):
        return
    if not force:
        raise FileExistsError(f"{path}: exists already; --force replaces it")
    if not os.path.isdir(path) or os.path.islink(path) or (os.listdir(path) and MANIFEST not in os.listdir(path)):
        raise FileExistsError(f"{path}: is not the result of an earlier conversion, so --force does not replace it")


@contextlib.contextmanager
def appearing_directory(path: str) -> Iterator[str]:
    """Give a temporary directory beside `path`, renamed to it at the end and removed when anything goes wrong.

    An earlier result in its place is moved aside first and removed last: at each moment one whole result exists.
    """
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix=f".{name}.partial-", dir=parent)
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        yield temporary
        old = None
        if os.path.lexists(path):
            old = tempfile.mkdtemp(prefix=f".{name}.old-", dir=parent)
            os.rename(path, os.path.join(old, name))
        try:
            os.rename(temporary, path)
        except BaseException:
            if old is not None:
                os.rename(os.path.join(old, name), path)
            raise
        finally:
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
