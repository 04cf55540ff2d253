"""Orbax trees with Flax-side names and orientation: written tensor by tensor, read leaf by leaf.

    name in the checkpoint                              path in the tree                                 shape
    X.weight, two-dimensional                           X / kernel                                       [in, out]
    embed_tokens, markov_w1, markov_w2 .weight          X / embedding                                    [rows, columns]
    X.weight, one-dimensional                           X / scale                                        as stored
    X.bias and others                                   X / bias, ...                                    as stored
    d2t (offsets, I64)                                  draft_to_target (absolute target ids, int32)     [Vd]

Layers are under string indices ("layers" / "0"), unstacked. markov_w2 keeps its rows, which the head multiplies by and
gathers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...optional import require
from ..family.names import D2T, EMBEDDING, W1, W2
from .header import DTYPE_NAMES, TensorInfo
from .tensor_files import Files, stamp

CHUNK = 1 << 26  # bytes of a block on disk
SMALL = 1 << 20
TABLE = "draft_to_target"
_MARKERS = ("_METADATA", "_CHECKPOINT_METADATA")


def is_orbax(path: str) -> bool:
    """Say whether a directory is an Orbax checkpoint."""
    return any(os.path.exists(os.path.join(path, name)) for name in _MARKERS)


def tree_path(name: str, ndim: int) -> tuple[str, ...]:
    """Return the path of a canonical tensor in the tree."""
    if name == D2T:
        return (TABLE,)
    *stem, leaf = name.split(".")
    if leaf == "weight":
        leaf = "embedding" if name in (EMBEDDING, W1, W2) else "kernel" if ndim == 2 else "scale"
    return (*stem, leaf)


def is_transposed(name: str, ndim: int) -> bool:
    """Say whether the tree holds a tensor transposed, [in, out]."""
    return tree_path(name, ndim)[-1] == "kernel"


class Lazy:
    """A leaf that is read while it is written: shape, dtype, and a function for rows of the stored orientation."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], transposed: bool, rows: Callable[..., np.ndarray]):
        self.shape, self.dtype, self.transposed, self.rows = shape, dtype, transposed, rows
        self.ndim, self.size = len(shape), int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize

    def block(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read one block of the leaf."""
        if not index:
            return self.rows(0, 1)
        outer = index[1] if self.transposed else index[0]
        part = self.rows(outer.start, outer.stop)
        return part[:, index[0]].T if self.transposed else part[(slice(None), *index[1:])]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.block(tuple(slice(0, n) for n in self.shape)), dtype)


def write_tree(path: str, leaves: Mapping[str, Lazy]) -> None:
    """Write an Orbax checkpoint of canonical name -> leaf, one block of one tensor in memory at a time.

    Args:
        path: an existing directory; the checkpoint's files are added to it.
        leaves: what is written. The result is what StandardCheckpointer reads.
    """
    import jax

    ocp = require("orbax.checkpoint", "orbax", "writing and reading Orbax trees")

    class Streaming(ocp.type_handlers.NumpyHandler):
        """Writes leaves one after the other, block by block; the usual handler would hold all of them at once."""

        def __init__(self) -> None:
            super().__init__(deepcopy_host_arrays=False)
            self._turn = asyncio.Lock()

        async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
            import tensorstore

            # Small leaves overlap their waits for the disk; of the large ones one is in memory at a time.
            async with self._turn if value.nbytes > SMALL else contextlib.nullcontext():
                store = await tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
                grid: Any = store.chunk_layout.write_chunk.shape
                for index in blocks(value.shape, grid):
                    await store[index].write(np.ascontiguousarray(value.block(index)))

    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *stem, last = tree_path(name, leaf.ndim)
        node = tree
        for key in stem:
            node = node.setdefault(key, {})
        node[last] = leaf
    handlers = ((Lazy, Streaming()), (jax.Array, ocp.type_handlers.ArrayHandler()))
    registry = ocp.type_handlers.create_type_handler_registry(*handlers)
    save_args = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=CHUNK), tree)
    # Orbax makes the directory itself.
    inner = os.path.join(os.path.abspath(path), "tree")
    try:
        with (
            _without_logs(),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer,
        ):
            checkpointer.save(inner, args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except (ValueError, OSError) as error:
        # TensorStore reports a full or failing disk as a ValueError of many lines.
        words = " ".join(str(error).split())
        if "NaN" in words and isinstance(error, ValueError):
            raise
        full = re.search(r"No space left|RESOURCE_EXHAUSTED|Disk quota|File too large", words)
        code = errno.ENOSPC if full else errno.EIO
        raise OSError(code, f"Orbax could not write the tree ({words[:200]})", path) from None
    for entry in os.listdir(inner):
        os.rename(os.path.join(inner, entry), os.path.join(path, entry))
    os.rmdir(inner)


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Keep Orbax's threads from logging the tracebacks of an error that is raised here as well."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def blocks(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of a regular grid of blocks over an array."""
    axes = [range(0, n, max(1, b)) for n, b in zip(shape, block, strict=True)]
    for starts in itertools.product(*axes):
        yield tuple(slice(a, min(a + b, n)) for a, b, n in zip(starts, block, shape, strict=True))


class OrbaxFiles(Files):
    """The leaves of an Orbax tree under canonical names and in stored orientation: the interface of TensorFiles."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._ocp = require("orbax.checkpoint", "orbax", "writing and reading Orbax trees")
        self._last: tuple[str, np.ndarray] | None = None
        self._stamps = {file: stamp(file) for file in self.paths}
        try:
            with self._ocp.StandardCheckpointer() as checkpointer:
                metadata = checkpointer.metadata(self.path)
        except Exception as error:  # a damaged directory makes Orbax raise whatever its parsers do
            raise ValueError(f"{path}: not a readable Orbax checkpoint ({str(error)[:200]})") from None
        tree = getattr(getattr(metadata, "item_metadata", metadata), "tree", None)
        if not isinstance(tree, Mapping):
            raise ValueError(f"{path}: not a readable Orbax checkpoint (no tree of arrays)")
        self._paths: dict[str, tuple[str, ...]] = {}
        self._infos: dict[str, TensorInfo] = {}
        for keys, leaf in _leaves(tree):
            self._add(keys, leaf)

    def _add(self, keys: tuple[str, ...], leaf: Any) -> None:
        name, where = ".".join(keys), f"{self.path}: leaf {'/'.join(keys)}"
        *stem, last = keys
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if shape is None or dtype is None or np.dtype(dtype) not in DTYPE_NAMES:
            raise ValueError(f"{where}: found {type(leaf).__name__} {dtype}, expected an array")
        if keys == (TABLE,):
            name = D2T
        elif last in ("kernel", "embedding", "scale"):
            name = ".".join([*stem, "weight"])
        if keys != tree_path(name, len(shape)):
            raise ValueError(f"{where}: found shape {list(shape)}, which does not fit the name {last!r}")
        if name in self._infos:
            raise ValueError(f"{where}: second spelling of {name}")
        shape = tuple(shape)[::-1] if last == "kernel" else tuple(shape)
        kind = "I64" if name == D2T else DTYPE_NAMES[np.dtype(dtype)]
        self._paths[name], self._infos[name] = keys, TensorInfo(kind, shape, self.path, 0, 0)

    def __len__(self) -> int:
        return len(self._infos)

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    @property
    def opened(self) -> list[str]:
        """The one directory it reads."""
        return [os.path.basename(self.path)]

    @property
    def paths(self) -> list[str]:
        """Every file of the directory."""
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names)

    def check_unchanged(self) -> None:
        """Raise a ValueError if a file of the tree has changed since it was opened."""
        for file, before in self._stamps.items():
            if stamp(file) != before:
                raise ValueError(f"{file}: has changed since it was opened; nothing of it can be trusted")

    def available(self, name: str) -> bool:
        """Say whether a tensor is there."""
        return name in self._infos

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Restore one leaf, in the orientation of the canonical name; the last one read is kept for its other rows."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._restore(name))
        array = self._last[1]
        return array if stop is None or not array.ndim else array[start:stop]

    def _restore(self, name: str) -> np.ndarray:
        ocp, path = self._ocp, self._paths[name]
        item: Any = np.zeros(())
        restore: Any = ocp.RestoreArgs(restore_type=np.ndarray)
        for key in reversed(path):
            item, restore = {key: item}, {key: restore}
        args = ocp.args.PyTreeRestore(item=item, restore_args=restore, partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                tree = checkpointer.restore(self.path, args=args)
        except Exception as error:  # missing or damaged files: Orbax and TensorStore raise many kinds
            raise ValueError(f"{self.path}: {name} cannot be restored ({str(error)[:200]})") from None
        for key in path:
            tree = tree[key]
        array = np.asarray(tree)
        if name == D2T:
            return array.astype(np.int64) - np.arange(array.shape[0], dtype=np.int64)
        return array.T if path[-1] == "kernel" else array


def _leaves(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, str(key)))
    else:
        yield keys, tree
