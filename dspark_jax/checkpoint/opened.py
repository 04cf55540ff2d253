"""A checkpoint of any supported family, opened under canonical names: `open_checkpoint`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..config import DSparkConfig, read_json_config
from . import families, normalise
from .read import DTYPES, TensorFiles
from .target import find_in_target

LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclasses.dataclass
class Checkpoint:
    """Tensors under canonical (DeepSpec) names, read on demand, and the config that describes them.

    Attributes:
        path: where it came from.
        family: the family's name.
        raw: config.json as it is.
        flat: the same as one flat dict with DeepSpec keys, completed from the tensors; the backbone's geometry is kept.
        config: `flat` as a checked DSparkConfig.
        shapes: canonical name -> shape, head and backbone.
        dtypes: canonical name -> NumPy dtype that `get` returns.
        left_out: source name -> why it is not used.
        origins: canonical name -> "draft", "target" or "target, tied to the embedding".
    """

    path: str
    family: str
    raw: dict[str, Any]
    flat: dict[str, Any]
    config: DSparkConfig
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype[Any]]
    left_out: dict[str, str]
    origins: dict[str, str]
    _readers: Mapping[str, tuple[TensorFiles, str]] = dataclasses.field(repr=False)

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in order."""
        return sorted(self.shapes)

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def get(self, name: str) -> np.ndarray:
        """Read one tensor by its canonical name: a read-only, memory-mapped array (copy it to keep or change it).

        The LM head of a reduced draft vocabulary that comes from the target is cut to the draft's rows.
        """
        if name not in self._readers:
            raise KeyError(f"{self.path}: no tensor {name}")
        files, source = self._readers[name]
        array = files.read(source)
        if name == LM_HEAD and self.origins[name] != "draft" and (ids := self.draft_to_target()) is not None:
            array = array[ids]
        return array

    def draft_to_target(self) -> np.ndarray | None:
        """Return the target id of each draft id, int32 [Vd], or None where the two vocabularies are the same.

        `d2t` stores offsets: draft id d stands for target id d + d2t[d].

        Raises:
            ValueError: the ids are not strictly increasing inside [0, V), or t2d marks other ids.
        """
        if "d2t" not in self._readers:
            return None
        files, source = self._readers["d2t"]
        offsets = files.read(source)
        if offsets.dtype.kind != "i":
            raise ValueError(f"d2t: found dtype {offsets.dtype}, expected integers (offsets, I64)")
        ids = np.arange(len(offsets), dtype=np.int64) + offsets.astype(np.int64)
        V = self.config.vocab_size
        if len(ids) and (ids.min() < 0 or ids.max() >= V or (np.diff(ids) <= 0).any()):
            wrong = int(np.argmax((ids < 0) | (ids >= V) | (np.diff(ids, prepend=-1) <= 0)))
            raise ValueError(
                f"d2t: draft id {wrong} stands for target id {int(ids[wrong])}, expected strictly increasing ids below "
                f"vocab_size {V} (d2t holds offsets: target id = draft id + d2t[draft id])"
            )
        if "t2d" in self._readers:
            files, source = self._readers["t2d"]
            if not np.array_equal(np.flatnonzero(files.read(source)), ids):
                raise ValueError("t2d: marks other target ids than draft id + d2t[draft id] gives")
        return ids.astype(np.int32)


def open_checkpoint(path: str | os.PathLike[str], target: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Open a checkpoint directory: detect its family, map every tensor name, resolve its config against the shapes.

    Only headers are read. A missing embedding or LM head is taken from `target`, the target's directory, when given.

    Raises:
        FileNotFoundError: a file or shard is missing.
        ValueError: malformed files; unknown, missing or misshapen tensors (all listed in one error); a config that
            contradicts itself or the tensors.
    """
    path = os.fspath(path)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: no such checkpoint directory")
    raw, files = read_json_config(path), TensorFiles(path)
    family = families.detect(files, raw)
    mapped = families.map_names(family, files)
    readers = {name: (files, source) for name, source in mapped.sources.items()}
    origins = dict.fromkeys(readers, "draft")
    shapes = {name: files[source].shape for name, source in mapped.sources.items()}
    flat = normalise.flatten(raw)
    if target is not None and not {LM_HEAD, EMBEDDING} <= set(readers):
        for name, borrowed in find_in_target(target).items():
            if name in readers:
                continue
            readers[name], origins[name] = (borrowed.files, borrowed.name), borrowed.origin
            shape = borrowed.files[borrowed.name].shape
            # Rows are chosen by d2t when the tensor is read.
            shapes[name] = (*shapes["d2t"], *shape[1:]) if name == LM_HEAD and "d2t" in shapes else shape
    problems = mapped.problems + normalise.resolve(flat, shapes)
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    dtypes = {name: DTYPES[store[source].dtype] for name, (store, source) in readers.items()}
    config = DSparkConfig.from_dict(flat)
    return Checkpoint(path, family.name, raw, flat, config, shapes, dtypes, mapped.left_out, origins, readers)
