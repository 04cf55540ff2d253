"""A checkpoint of any supported family, opened under canonical names: `open_checkpoint`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from ..config import DSparkConfig
from ..json_files import read_config
from ..transformer.geometry import BackboneConfig
from .family import complete
from .family.arithmetic import sliding_notes
from .family.mapping import Mapped, count_stages, map_names
from .family.names import D2T, EMBEDDING, LM_HEAD, T2D, is_head
from .family.read_config import flatten
from .family.table import FULL, REFUSED, Family, detect
from .storage.orbax_tree import OrbaxFiles, is_orbax
from .storage.tensor import Tensor, make_tensor
from .storage.tensor_files import Files, Stamp, TensorFiles, stamp
from .target_tensors import find_in_target, text_config

MAX_PROBLEMS = 200


@dataclasses.dataclass
class Checkpoint:
    """Tensors under canonical (DeepSpec) names, read on demand, and the config that describes them.

    Attributes:
        path, family: where it came from, and its family (a row of family/table.py).
        raw: config.json as it is.
        flat: the same as one flat dict with DeepSpec keys, completed from the tensors; the backbone's geometry is kept.
        config: `flat` as a checked DSparkConfig.
        tensors, files: canonical name -> Tensor (head and backbone), and the source files.
        geometry: of the backbone, or why there is none that this package can build.
        left_out: source name -> why it is not used.
        notes: sentences about guesses that the user should know of.
        config_stamp: of config.json when it was read.
    """

    path: str
    family: Family
    raw: dict[str, Any]
    flat: dict[str, Any]
    config: DSparkConfig
    tensors: dict[str, Tensor]
    files: Files
    geometry: BackboneConfig | str
    left_out: dict[str, str]
    notes: list[str]
    config_stamp: Stamp | None = None

    @property
    def directory(self) -> str:
        """The directory that holds config.json."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."

    @property
    def paths(self) -> list[str]:
        """Every file that belongs to it or that a tensor is read from, its target's among them."""
        stores = {id(files): files for files in [self.files, *(tensor.files for tensor in self.tensors.values())]}
        return [os.path.join(self.directory, "config.json"), *(path for f in stores.values() for path in f.paths)]

    def check_unchanged(self) -> None:
        """Raise a ValueError if a file that was read is no longer the one that was opened."""
        for files in {id(files): files for files in [self.files, *(t.files for t in self.tensors.values())]}.values():
            files.check_unchanged()
        if self.config_stamp != stamp(os.path.join(self.directory, "config.json")):
            raise ValueError(f"{os.path.join(self.directory, 'config.json')}: has changed since it was read")

    @property
    def names(self) -> list[str]:
        """Canonical names of all tensors, in order."""
        return sorted(self.tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Canonical name -> NumPy dtype that `get` returns."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    @property
    def origins(self) -> dict[str, str]:
        """Canonical name -> "draft", "target" or "target, tied to the embedding"."""
        return {name: tensor.origin for name, tensor in self.tensors.items()}

    @property
    def named_target(self) -> str:
        """What the config says of the target, as an addition to a message: " (the config names X)", or nothing."""
        config = self.raw.get("speculators_config")
        verifier = config.get("verifier") if isinstance(config, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        return f" (the config names {name!r})" if isinstance(name, str) else ""

    @property
    def missing(self) -> list[str]:
        """Which of embedding and LM head the checkpoint (with its target, if given) does not have."""
        return [name for name in (EMBEDDING, LM_HEAD) if name not in self.tensors]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> np.ndarray:
        """Read one tensor by its canonical name: read-only and memory mapped (copy it to keep or change it)."""
        if name not in self.tensors:
            raise KeyError(f"{self.path}: no tensor {name}")
        return self.tensors[name].array()

    def draft_to_target(self) -> Int32[np.ndarray, " Vd"] | None:
        """Return the target id of each draft id, int32 [Vd], or None where the two vocabularies are the same.

        Raises:
            ValueError: the ids are not strictly increasing inside [0, V), or t2d marks other ids.
        """
        return read_draft_to_target(self.tensors, self.config.vocab_size)

    def check_supported(self) -> None:
        """Check that this package can build the family's backbone (its head loads in any case).

        Raises:
            ValueError: it cannot; the message says why.
        """
        if self.family.support != FULL:
            raise ValueError(f"{self.path}: family {self.family.name}: {self.family.note}")

    def check_backbone(self, target_hidden_size: int | None = None) -> None:
        """Check that a drafter's backbone is whole and fits the config (a head alone passes).

        Args:
            target_hidden_size: Ht where the config does not say it; None takes the drafter's own width.

        Raises:
            ValueError: one sentence per missing or misshapen tensor.
        """
        flat = self.flat if target_hidden_size is None else {"target_hidden_size": target_hidden_size} | self.flat
        if problems := complete.check_backbone(flat, _own_shapes(self.tensors), self.family.shapes, self.geometry):
            raise ValueError(f"{self.path}: {_listed(problems)}")


def read_draft_to_target(tensors: Mapping[str, Tensor], vocab_size: Any) -> Int32[np.ndarray, " Vd"] | None:
    """Read `d2t`, which holds offsets (draft id d stands for target id d + d2t[d]), as absolute int32 ids."""
    if D2T not in tensors:
        return None
    offsets = tensors[D2T].array()
    if offsets.dtype.kind != "i" or offsets.ndim != 1:
        raise ValueError(f"d2t: found {offsets.dtype} {list(offsets.shape)}, expected I64 [draft vocabulary] offsets")
    ids = np.arange(len(offsets), dtype=np.int64) + offsets.astype(np.int64)
    top = vocab_size if isinstance(vocab_size, int) else 0
    wrong = (ids < 0) | (ids >= top) | (np.diff(ids, prepend=-1) <= 0)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"d2t: draft id {first} stands for target id {int(ids[first])}, expected strictly increasing ids below "
            f"vocab_size {vocab_size} (d2t holds offsets: target id = draft id + d2t[draft id])"
        )
    if T2D in tensors and not np.array_equal(np.flatnonzero(tensors[T2D].array()), ids):
        raise ValueError("t2d: marks other target ids than draft id + d2t[draft id]")
    return ids.astype(np.int32)


def open_checkpoint(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    head_only: bool = False,
) -> Checkpoint:
    """Open a checkpoint: detect its family, map every tensor name, resolve its config against the shapes.

    Only headers are read (and d2t, where the target's LM head is cut to its rows).

    Args:
        path: a directory with config.json, or one safetensors file or index beside a config.json.
        target: the target's directory, which supplies a missing embedding or LM head.
        head_only: leave the backbone out; shards without head tensors need not be there.

    Raises:
        FileNotFoundError: a file or shard is missing.
        ValueError: malformed files; a family that is refused; unknown, missing or misshapen tensors (all listed in one
            error); a config that contradicts itself or the tensors.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if path.endswith(".gguf") or (os.path.isdir(path) and _only_gguf(path)):
        raise ValueError(f"{path}: family gguf: GGUF files are not supported")
    directory = path if os.path.isdir(path) else os.path.dirname(path) or "."
    config_stamp = stamp(os.path.join(directory, "config.json"))
    raw = read_config(directory)
    files = OrbaxFiles(path) if is_orbax(path) else TensorFiles(path)
    family = detect(files, raw)
    if family.support == REFUSED:
        raise ValueError(f"{path}: family {family.name}: {family.note}")
    mapped = map_names(family, files)
    try:
        flat = flatten(raw, family.name, count_stages(files))
    except ValueError as error:
        raise ValueError(f"{path}: {_listed([str(error), *mapped.problems])}") from None
    problems, left_out, notes = list(mapped.problems), dict(mapped.left_out), []
    if head_only:
        for name in [name for name in mapped.sources if not is_head(name)]:
            for source in filter(None, (mapped.sources.pop(name), mapped.scales.pop(name, None))):
                left_out[source] = "backbone tensor (head only)"
    tensors = _own_tensors(files, mapped, raw, problems, left_out)
    if target is not None:
        if not os.path.isdir(target):
            raise FileNotFoundError(f"{os.fspath(target)}: no such target directory")
        problems += _borrow(tensors, target, {LM_HEAD} if head_only else {LM_HEAD, EMBEDDING}, flat)
    if family.name == "torchspec" and D2T in tensors:
        notes.append("TorchSpec's exporter is known to cut lm_head by offsets as if they were ids: check acceptance")
    problems += complete.resolve_head(flat, {name: tensor.shape for name, tensor in tensors.items()})
    geometry = complete.read_geometry(flat)
    if problems:
        if not head_only:  # all that is wrong in one error
            problems += complete.check_backbone(flat, _own_shapes(tensors), family.shapes, geometry)
        raise ValueError(f"{path}: {_listed(problems)}")
    try:
        config = DSparkConfig.from_flat(flat)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    notes += sliding_notes(raw, family.name, flat, geometry)
    return Checkpoint(path, family, raw, flat, config, tensors, files, geometry, left_out, notes, config_stamp)


def _own_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items() if tensor.origin == "draft"}


def _listed(problems: list[str]) -> str:
    """Join all problems in one line; a file that names a hundred thousand unknown tensors is not quoted in full."""
    tail = [f"and {len(problems) - MAX_PROBLEMS} more problems"] if len(problems) > MAX_PROBLEMS else []
    return "; ".join(problems[:MAX_PROBLEMS] + tail)


def _only_gguf(directory: str) -> bool:
    found = os.listdir(directory)
    return any(name.endswith(".gguf") for name in found) and not any(".safetensors" in name for name in found)


def _own_tensors(
    files: Files, mapped: Mapped, raw: Mapping[str, Any], problems: list[str], left_out: dict[str, str]
) -> dict[str, Tensor]:
    quantisation = raw.get("quantization_config")
    stated = quantisation.get("weight_block_size") if isinstance(quantisation, Mapping) else None
    block = stated[0] if isinstance(stated, list) and stated and isinstance(stated[0], int) else None
    tensors: dict[str, Tensor] = {}
    for name, source in mapped.sources.items():
        if name in mapped.borrowed and not files.available(source):
            left_out[source] = "tensor of the target, whose shard is not here"
            continue
        origin = "target" if name in mapped.borrowed else "draft"
        try:
            tensors[name] = make_tensor(name, files, source, mapped.scales.get(name), origin, block)
        except ValueError as error:
            problems.append(str(error))
    return tensors


def _borrow(
    tensors: dict[str, Tensor], target: str | os.PathLike[str], wanted: set[str], flat: dict[str, Any]
) -> list[str]:
    """Add what the drafter lacks from the target; return one sentence per misfit."""
    try:
        depth = text_config(read_config(target)).get("num_hidden_layers")
        if isinstance(depth, int):
            flat.setdefault("num_target_layers", depth)
        if wanted <= set(tensors):
            return []
        found = find_in_target(target)
        ids = read_draft_to_target(tensors, flat.get("vocab_size"))
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    for name, (files, source, origin) in found.items():
        if name in tensors or name not in wanted:
            continue
        tensor = make_tensor(name, files, source, None, origin, None)
        V, H = flat.get("vocab_size"), flat.get("hidden_size")
        if tensor.shape != (V, H):
            problems.append(
                f"{source} of the target: found shape {list(tensor.shape)}, expected [{V}, {H}] from the config"
            )
            continue
        if name == LM_HEAD and ids is not None:
            shape = (len(ids), *tensor.shape[1:])
            tensor = dataclasses.replace(tensor, shape=shape, transform="rows", select=ids)
        tensors[name] = tensor
    return problems


def head_names(checkpoint: Checkpoint) -> list[str]:
    """Return the canonical names of the head's tensors that the checkpoint has."""
    return [name for name in checkpoint.names if is_head(name)]
