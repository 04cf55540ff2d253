"""The tensors of a file or a sharded directory by name, memory mapped one at a time."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np

from ...json_files import MAX_LISTING, read_json
from .header import DTYPES, TensorInfo, read_header, some

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


Stamp = tuple[int, int, int, int]  # device, inode, size, modification time in nanoseconds


def stamp(path: str) -> Stamp | None:
    """Return what tells a file from a changed one, or None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Files(Mapping[str, TensorInfo]):
    """What a store of tensors offers: name -> TensorInfo as a mapping, and reading by name."""

    path: str

    @property
    @abstractmethod
    def opened(self) -> list[str]:
        """Names of the files that have been opened so far."""

    @property
    @abstractmethod
    def paths(self) -> list[str]:
        """The files that have been opened so far, and the index if there is one."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise a ValueError if an opened file is no longer the one whose header was read."""

    @abstractmethod
    def available(self, name: str) -> bool:
        """Say whether the file that holds a tensor is there (opens nothing)."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read one tensor, or its rows start .. stop."""


class TensorFiles(Files):
    """The tensors of a checkpoint: name -> TensorInfo, and `read` for the data.

    One file, a directory with model.safetensors.index.json (then only the shards that hold asked-for names are opened,
    and stray files beside them are not looked at), a directory with model.safetensors, or with exactly one other
    safetensors file. Names come from the index without opening a shard.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._stamps: dict[str, Stamp | None] = {}
        if not os.path.isdir(self.path):
            self.directory = os.path.dirname(self.path) or "."
            if self.path.endswith(".index.json"):
                self._shard_of = self._read_index(self.path)
                return
        else:
            self.directory = self.path
            if os.path.exists(index := os.path.join(self.path, INDEX_FILE)):
                self._shard_of = self._read_index(index)
                return
            self.path = _only_file(self.path)
        shard = os.path.basename(self.path)
        self._headers[shard] = self._read_header(self.path)
        self._shard_of = dict.fromkeys(self._headers[shard], shard)

    def __len__(self) -> int:
        return len(self._shard_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def __getitem__(self, name: str) -> TensorInfo:
        shard = self._shard_of[name]
        if shard not in self._headers:
            self._headers[shard] = self._open_shard(shard, name)
        return self._headers[shard][name]

    @property
    def opened(self) -> list[str]:
        """Names of the files whose headers have been read so far."""
        return sorted(self._headers)

    @property
    def paths(self) -> list[str]:
        """The files that have been opened so far, and the index if there is one."""
        return sorted(self._stamps)

    def check_unchanged(self) -> None:
        """Raise a ValueError if a file has changed since its header was read."""
        for path in self._stamps:
            self._check(path)

    def _check(self, path: str) -> None:
        if self._stamps[path] != stamp(path):
            raise ValueError(f"{path}: has changed since it was opened; nothing of it can be trusted")

    @functools.cached_property
    def _names_of(self) -> dict[str, set[str]]:
        """The names that the index places in each shard, gathered in one pass."""
        found: dict[str, set[str]] = {}
        for name, shard in self._shard_of.items():
            found.setdefault(shard, set()).add(name)
        return found

    def _read_header(self, path: str) -> dict[str, TensorInfo]:
        self._stamps[path] = stamp(path)
        return read_header(path)

    def _read_index(self, path: str) -> dict[str, str]:
        self._stamps[path] = stamp(path)
        return _read_index(path)

    def _file(self, shard: str) -> str:
        return os.path.join(self.directory, shard)

    def _open_shard(self, shard: str, wanted: str) -> dict[str, TensorInfo]:
        path = self._file(shard)
        listed = self._names_of[shard]
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"{path}: missing shard; the index places {wanted} in it, and {len(listed) - 1} other tensors"
            )
        header = self._read_header(path)
        if missing := listed - set(header):
            raise ValueError(f"{path}: lacks tensors that the index places in it: {some(missing)}")
        if extra := set(header) - listed:
            raise ValueError(f"{path}: holds tensors that the index does not place in it: {some(extra)}")
        return header

    def available(self, name: str) -> bool:
        """Say whether the file that holds a tensor is there (opens nothing)."""
        return self._shard_of[name] in self._headers or os.path.exists(self._file(self._shard_of[name]))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Map one tensor, or its rows start .. stop, read-only: pages are read when touched, freed when dropped."""
        info = self[name]
        dtype, shape, first, last = DTYPES[info.dtype], info.shape, info.start, info.stop
        if shape and stop is not None:
            row = info.nbytes // shape[0] if shape[0] else 0
            stop = min(stop, shape[0])
            first, last, shape = info.start + start * row, info.start + stop * row, (stop - start, *shape[1:])
        if first == last:
            return np.zeros(shape, dtype)
        self._check(info.path)  # touching pages beyond a shortened file's end would kill the process
        # One map per read: a map of the whole file would keep every page touched so far resident.
        raw = np.memmap(info.path, np.uint8, "r", first, (last - first,)).view(np.ndarray)
        if info.dtype == "BOOL" and raw.max() > 1:
            raise ValueError(f"{info.path}: tensor {name!r}: BOOL bytes other than 0 and 1")
        return raw.view(dtype).reshape(shape)


def _only_file(directory: str) -> str:
    if os.path.exists(path := os.path.join(directory, SINGLE_FILE)):
        return path
    found = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    if len(found) != 1:
        what = f"{len(found)} safetensors files without an index ({some(found, 5)})" if found else "no safetensors file"
        raise FileNotFoundError(f"{directory}: found {what}, expected {SINGLE_FILE} or {INDEX_FILE}")
    return os.path.join(directory, found[0])


def _read_index(path: str) -> dict[str, str]:
    """Read name -> shard; shard names must be plain file names of the index's own directory."""
    weight_map = read_json(path, MAX_LISTING).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path}: weight_map: found {type(weight_map).__name__}, expected an object")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and shard.isprintable()
        if not plain or os.path.basename(shard) != shard or "\\" in shard or not name.isprintable():
            where = f"{path}: weight_map[{name[:200]!r}]"
            raise ValueError(f"{where}: found {str(shard)[:200]!r}, expected a plain .safetensors file name")
    return weight_map
