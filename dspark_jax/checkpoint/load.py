"""From directories to modules: `load_head`, `load_drafter`, `load_target`, one way for all three."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..checks import dtype_name, invalid
from ..confidence.calibration import find_calibration
from ..drafting.confidence_head import ConfidenceHead
from ..drafting.drafter import Drafter
from ..drafting.head import DSparkHead
from ..head_kinds import head_kind
from ..json_files import read_config
from ..transformer.backbone import Backbone
from ..transformer.target import DecoderTarget
from .family.names import CONFIDENCE, CONFIDENCE_BIAS, D2T, EMBEDDING, LM_HEAD, T2D, is_head
from .family.targets import read_target_geometry
from .open import Checkpoint, open_checkpoint
from .storage.tensor_files import TensorFiles
from .weights import Sharding, WeightReader, check_sharding

Path = str | os.PathLike[str]


def load_head(path: Path, *, dtype: Any = None, target: Path | None = None, sharding: Sharding = None) -> DSparkHead:
    """Load the LM head, Markov head, confidence head and draft-to-target table of a checkpoint, without PyTorch.

    The directory may hold a whole drafter (its backbone is not read) or the head's tensors alone. A calibration.json
    beside the tensors becomes `head.calibration` (see confidence/schedule.py).

    Args:
        path: directory with config.json and model.safetensors, shards with an index, or one safetensors file.
        dtype: "float32", "bfloat16" or "float16" for all weights; None keeps the stored ones.
        target: directory of the target, which supplies an LM head that the checkpoint does not store (the embedding
            matrix where the target ties them).
        sharding: where arrays are placed: None for the default device; one jax Sharding for all arrays; or a mapping or
            function from tensor name ("lm_head.weight", "markov_head.markov_w2.weight", ..., "d2t") to a Sharding
            or None. Each device's part is read from the file alone.

    Raises:
        FileNotFoundError, ValueError: as open_checkpoint; or no LM head and no target; or weights with NaN.
    """
    dtype = None if dtype is None else dtype_name("dtype", dtype)  # refused before any file is opened
    checkpoint = open_checkpoint(path, target, head_only=True)
    if LM_HEAD not in checkpoint:
        raise ValueError(
            f"{LM_HEAD}: {checkpoint.path} stores no LM head; pass target=, the directory of the target model"
            f"{checkpoint.named_target}"
        )
    return build_head(checkpoint, dtype, sharding)


def load_drafter(path: Path, *, dtype: Any = None, target: Path | None = None, sharding: Sharding = None) -> Drafter:
    """Load backbone and head of a checkpoint directory, without PyTorch.

    Args:
        path: directory of the drafter (DeepSpec layout or a family that is mapped to it).
        dtype: "float32", "bfloat16" or "float16" for all weights; None keeps the stored ones.
        target: directory of the target, which supplies the embedding or LM head that the checkpoint does not store.
        sharding: as in load_head; names are canonical ("layers.0.self_attn.q_proj.weight", ...).

    Raises:
        FileNotFoundError, ValueError: as load_head; or the backbone's tensors are missing or misshapen (all listed).
    """
    dtype = None if dtype is None else dtype_name("dtype", dtype)
    checkpoint = open_checkpoint(path, target)
    checkpoint.check_supported()
    if EMBEDDING not in checkpoint:
        raise ValueError(f"{EMBEDDING}: {checkpoint.path} stores no embedding; pass target=, the target's directory")
    if LM_HEAD not in checkpoint:
        raise ValueError(f"{LM_HEAD}: {checkpoint.path} stores no LM head; pass target=, the target's directory")
    if "fc.weight" not in checkpoint:
        raise ValueError(f"fc.weight: {checkpoint.path} holds no backbone; load_head reads a head alone")
    if isinstance(checkpoint.geometry, str):
        raise ValueError(f"{checkpoint.path}: {checkpoint.geometry}")
    shape = checkpoint.shapes["fc.weight"]
    taps, width = len(checkpoint.config.target_layer_ids), shape[-1]
    if taps == 0 or width % taps:
        raise invalid("fc.weight", list(shape), f"columns for {taps} target_layer_ids")
    checkpoint.check_backbone(width // taps)  # claimed sizes are compared with the tensors before anything is built
    names = [name for name in checkpoint.names if not is_head(name)]
    take = WeightReader(checkpoint.path, names, checkpoint.get, dtype, _part(sharding, checkpoint, names))
    backbone = Backbone(checkpoint.geometry, width, take)
    take.finish()
    return Drafter(backbone, build_head(checkpoint, dtype, sharding))


def load_target(path: Path, *, dtype: Any = None, sharding: Sharding = None) -> DecoderTarget:
    """Load a Llama, Mistral, Qwen2 or Qwen3 directory (config.json and safetensors).

    Args:
        path: the directory.
        dtype: of all weights and activations; None keeps the stored one.
        sharding: as in load_head; names are those of the file without the prefix "model.".

    Raises:
        FileNotFoundError: no config.json or weights.
        ValueError: another architecture or a part that is not supported (by name), or tensors missing, unknown or of
            wrong shapes (all listed).
    """
    dtype = None if dtype is None else dtype_name("dtype", dtype)
    raw = read_config(path)
    config = read_target_geometry(raw)
    files = TensorFiles(path)
    sources = {name.removeprefix("model."): name for name in files}
    tied = raw.get("tie_word_embeddings", LM_HEAD not in sources) is True
    if tied:  # some exporters write the tied head as well
        sources.pop(LM_HEAD, None)
    take = WeightReader(os.fspath(path), sources, lambda name: files.read(sources[name]), dtype, sharding)
    model = DecoderTarget(config, take, tied=tied)
    take.finish()
    return model


def build_head(checkpoint: Checkpoint, dtype: str | None = None, sharding: Sharding = None) -> DSparkHead:
    """Build the head of an open checkpoint; without an LM head in it, one for callers that bring base logits."""
    config, table = checkpoint.config, checkpoint.draft_to_target()
    names = [name for name in checkpoint.names if is_head(name)]
    take = WeightReader(checkpoint.path, names, checkpoint.get, dtype, _part(sharding, checkpoint, names))
    take.taken |= {D2T, T2D}  # read above
    sizes = {"V": config.vocab_size, "Vd": config.Vd, "H": config.hidden_size, "r": config.markov_rank}
    lm_head = take(LM_HEAD, (sizes["Vd"], sizes["H"])) if LM_HEAD in checkpoint else None
    markov = confidence = None
    if config.markov_head_type is not None:
        kind = head_kind(config.markov_head_type)
        markov = kind.module(**{part.attribute: take(part.tensor, part.sizes(sizes)) for part in kind.parameters})
    if config.enable_confidence_head:
        width = sizes["H"] + (sizes["r"] if config.confidence_head_with_markov else 0)
        bias = take(CONFIDENCE_BIAS, (1,), ()) if CONFIDENCE_BIAS in checkpoint else None
        confidence = ConfidenceHead(take(CONFIDENCE, (1, width), (width,)), bias)
    take.finish()
    draft_to_target = None if table is None else take.place(D2T, table)
    return DSparkHead(config, lm_head, markov, confidence, draft_to_target, find_calibration(checkpoint.path))


def _part(sharding: Sharding, checkpoint: Checkpoint, names: list[str]) -> Sharding:
    """Return what a mapping says of these names (a drafter's backbone or its head)."""
    check_sharding(sharding, checkpoint.names)
    return {name: sharding[name] for name in names if name in sharding} if isinstance(sharding, Mapping) else sharding
