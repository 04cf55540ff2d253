"""Conversion of any supported checkpoint into a normalised safetensors directory or an Orbax tree: `convert`."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .._version import __version__
from ..atomic_files import write_json
from ..checks import check_choice, invalid
from ..confidence.calibration import FILE_NAME as CALIBRATION
from ..confidence.calibration import find_calibration
from ..progress import Progress
from .explicit_config import explicit_config
from .family.names import D2T, EMBEDDING, LM_HEAD, T2D
from .family.table import HEAD_ONLY
from .hub import local_path
from .manifest import JSON_FILES, file_digest, has, manifest_digest
from .open import Checkpoint, open_checkpoint
from .storage import orbax_tree
from .storage.appear import MANIFEST, appearing_directory, check_destination, list_files, remove_leftovers
from .storage.header import DTYPE_NAMES, DTYPES
from .storage.tensor import Tensor
from .storage.write import digest, write_safetensors
from .target_tensors import differs_from_target, find_in_target

FORMATS = ("safetensors", "orbax")
DTYPE_CHOICES = ("keep", "bf16", "f32")
_CASTS = {"bf16": "BF16", "f32": "F32"}
_FLOATS = ("F64", "F32", "F16", "BF16")

HOW_TO_SUPPLY = "not in the checkpoint: convert with --target DIR, or load with target="


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: str = "safetensors",
    dtype: str = "keep",
    target: str | os.PathLike[str] | None = None,
    head_only: bool = False,
    force: bool = False,
    allow_gap: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Convert a checkpoint; every tensor of the source is written, or left out for a named reason.

    Tensors are streamed, one at a time and in parts; quantised weights are decoded to bfloat16. The destination appears
    under its name only when it is complete.

    Args:
        source: directory, safetensors file or Hugging Face repository id ("owner/name" or "owner/name@revision").
        destination: directory to make.
        format: "safetensors" (DeepSpec names, one file) or "orbax" (what StandardCheckpointer reads).
        dtype: "keep" the stored dtypes, or write all float weights as "bf16" or "f32".
        target: the target's directory, for an embedding or LM head that the checkpoint does not store.
        head_only: write the head's tensors alone.
        force: replace an earlier result: the two names are exchanged, and of the old one only the files that its
            manifest lists are removed.
        allow_gap: with `force`, where the file system cannot exchange names, move the old result away first.
        progress: show a bar when it takes over a second.

    Returns:
        The manifest, as written to dspark_manifest.json.

    Raises:
        FileExistsError: the destination exists, or appeared meanwhile, or holds files that no conversion wrote.
        FileNotFoundError, ValueError, ImportError: as open_checkpoint; NaN weights; a missing optional package.
    """
    check_choice("format", format, FORMATS)
    check_choice("dtype", dtype, DTYPE_CHOICES)
    destination = os.path.abspath(destination)
    remove_leftovers(os.path.dirname(destination))
    check_destination(destination, force)
    path = local_path(source, head_only=head_only)
    _refuse_inside(destination, [path] if target is None else [path, os.fspath(target)])
    checkpoint = open_checkpoint(path, target, head_only=head_only)
    _refuse_inside(destination, checkpoint.paths)
    ids = checkpoint.draft_to_target()  # checked against t2d before anything is written
    if not head_only:
        if checkpoint.family.support == HEAD_ONLY:
            raise ValueError(f"{checkpoint.path}: family {checkpoint.family.name}: {checkpoint.family.note}")
        checkpoint.check_backbone()
    if target is not None:
        found = find_in_target(target)
        for name in sorted({LM_HEAD, EMBEDDING} & set(checkpoint.tensors)):
            tensor = checkpoint.tensors[name]
            if tensor.origin == "draft" and differs_from_target(tensor, found, ids):
                checkpoint.notes.append(f"{name}: differs from the target's, of which drafters store a frozen copy")
    conversion = _Conversion(checkpoint, format, dtype, head_only)
    return conversion.write(os.fspath(source), destination, force=force, allow_gap=allow_gap, progress=progress)


def _refuse_inside(destination: str, paths: Iterable[str]) -> None:
    """Refuse a destination that holds, or is, something that is read; links are followed (as in hub caches)."""
    inside = os.path.join(os.path.realpath(destination), "")
    for path in paths:
        if os.path.join(os.path.realpath(path), "").startswith(inside):
            raise invalid("destination", destination, f"a directory that does not hold the source {path}")


class _Conversion:
    """One run: which tensors are written, in which dtype, and the account of them."""

    def __init__(self, checkpoint: Checkpoint, format: str, dtype: str, head_only: bool) -> None:
        self.checkpoint, self.format, self.dtype, self.head_only = checkpoint, format, dtype, head_only
        self.left_out = dict(checkpoint.left_out)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint.tensors.items():
            if name == T2D:
                self.left_out[tensor.source] = "checked against d2t, which says the same"
            else:
                self.tensors[name] = tensor

    def out_dtype(self, tensor: Tensor) -> np.dtype[Any]:
        """Return the dtype that a tensor is written in."""
        if self.dtype == "keep" or DTYPE_NAMES[tensor.dtype] not in _FLOATS:
            return tensor.dtype
        return DTYPES[_CASTS[self.dtype]]

    def write(self, source: str, destination: str, *, force: bool, allow_gap: bool, progress: bool) -> dict[str, Any]:
        """Write everything into a directory that appears at the end; return the manifest."""
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        config, no_backbone = explicit_config(self.checkpoint, self._main_dtype())
        calibration = find_calibration(self.checkpoint.path)
        notes = self.checkpoint.notes
        with (
            appearing_directory(destination, force=force, allow_gap=allow_gap, say=notes.append) as directory,
            self._room(destination),
            Progress(total, progress) as bar,
        ):
            self.bar = bar
            digests = self._write_orbax(directory) if self.format == "orbax" else self._write_safetensors(directory)
            write_json(os.path.join(directory, "config.json"), config, sort_keys=True)
            if calibration is not None:
                shutil.copy(os.path.join(self.checkpoint.directory, CALIBRATION), directory)
            manifest = self._manifest(source, config, no_backbone, digests)
            manifest["files_written"] = sorted(list_files(directory))
            manifest["json"] = {name: file_digest(directory, name) for name in JSON_FILES if has(directory, name)}
            manifest["digest"] = manifest_digest(manifest)
            write_json(os.path.join(directory, MANIFEST), manifest, sort_keys=True)
            self.checkpoint.check_unchanged()
        return manifest

    @contextlib.contextmanager
    def _room(self, destination: str) -> Iterator[None]:
        """Check that there is room for the result; where writing fails all the same, say how much it takes."""
        needed = sum(math.prod(t.shape) * self.out_dtype(t).itemsize for t in self.tensors.values())
        needed = int(needed * 1.01) + (1 << 20)  # header, config and manifest
        free = shutil.disk_usage(os.path.dirname(destination)).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"needs {needed:,} bytes, and {free:,} are free", destination)
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            name = (
                destination if error.filename is None else os.path.join(destination, os.path.basename(error.filename))
            )
            raise OSError(error.errno, f"{error.strerror}; the result needs {needed:,} bytes", name) from None

    def _main_dtype(self) -> str:
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            name = self.out_dtype(tensor).name
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
        floats = {name: size for name, size in sizes.items() if "float" in name}
        return max(floats, key=lambda name: floats[name]) if floats else "bfloat16"

    def _chunks(self, name: str) -> Iterator[np.ndarray]:
        """Yield a tensor's rows in order, as they are written."""
        tensor = self.tensors[name]
        for chunk in tensor.chunks():
            if DTYPE_NAMES[tensor.dtype] in _FLOATS and np.isnan(chunk).any():
                raise ValueError(f"{tensor.source}: holds NaN (weights that were never written), expected numbers")
            self.bar.add(name, chunk.nbytes)
            yield chunk.astype(self.out_dtype(tensor), copy=False)

    def _write_safetensors(self, directory: str) -> dict[str, str]:
        entries = {name: (tensor.shape, self.out_dtype(tensor)) for name, tensor in self.tensors.items()}
        return write_safetensors(os.path.join(directory, "model.safetensors"), entries, self._chunks)

    def _write_orbax(self, directory: str) -> dict[str, str]:
        leaves = {name: self._leaf(tensor) for name, tensor in self.tensors.items()}
        # A pass of its own: Orbax asks for blocks in another order than the rows that are checked and hashed.
        digests = {name: digest(self._chunks(name)) for name in leaves}
        orbax_tree.write_tree(directory, leaves)
        return digests

    def _leaf(self, tensor: Tensor) -> orbax_tree.Lazy:
        if tensor.name == D2T:
            ids = self.checkpoint.draft_to_target()
            assert ids is not None
            return orbax_tree.Lazy(tensor.shape, ids.dtype, False, lambda start, stop: ids[start:stop])
        dtype, transposed = self.out_dtype(tensor), orbax_tree.is_transposed(tensor.name, len(tensor.shape))
        shape = tensor.shape[::-1] if transposed else tensor.shape
        return orbax_tree.Lazy(shape, dtype, transposed, lambda a, b: tensor.rows(a, b).astype(dtype, copy=False))

    def _manifest(
        self, source: str, config: dict[str, Any], no_backbone: str | None, digests: dict[str, str]
    ) -> dict[str, Any]:

        tensors, sources = {}, {}
        for name, tensor in sorted(self.tensors.items()):
            tensors[name] = {
                "sources": tensor.sources,
                "origin": tensor.origin,
                "transform": tensor.transform,
                "shape": list(tensor.shape),
                "dtype": DTYPE_NAMES[self.out_dtype(tensor)],
                "source_dtype": tensor.files[tensor.source].dtype,
                "sha256": digests[name],
            }
            if tensor.files is self.checkpoint.files:
                sources |= {origin: {"to": name} for origin in tensor.sources}
        sources |= {origin: {"left_out": reason} for origin, reason in self.left_out.items()}
        wanted = [LM_HEAD] if self.head_only else [EMBEDDING, LM_HEAD]
        how = HOW_TO_SUPPLY + self.checkpoint.named_target
        floats = [t for t in self.tensors.values() if DTYPE_NAMES[t.dtype] in _FLOATS]
        return {
            "made_by": f"dspark_jax {__version__}",
            "format": self.format,
            "family": self.checkpoint.family.name,
            "source": source,
            "files": self.checkpoint.files.opened,
            "dtype": self.dtype,
            "head_only": self.head_only,
            "config": config,
            "backbone": "left out" if self.head_only else no_backbone or "supported",
            "tensors": tensors,
            "sources": sources,
            "missing": {name: how for name in wanted if name not in self.tensors},
            "notes": self.checkpoint.notes,
            "parameters": sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in floats),
        }
