"""`inspect`: what a checkpoint is, on one screen."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .explicit_config import explicit_config
from .family.arithmetic import list_keys
from .family.names import EMBEDDING, LM_HEAD, is_head
from .hub import local_path
from .open import Checkpoint, open_checkpoint
from .storage.header import DTYPE_NAMES


def inspect(source: str | os.PathLike[str], *, target: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Describe a checkpoint without reading its weights.

    Returns:
        Title -> line or list of lines, in reading order, for people; `report["config"]` is the normalised config.

    Raises:
        FileNotFoundError, ValueError: as open_checkpoint.
    """
    checkpoint = open_checkpoint(local_path(source), target)
    config, no_backbone = explicit_config(checkpoint, checkpoint.config.dtype or "bfloat16")
    problem = None
    try:
        checkpoint.check_backbone()
    except ValueError as error:
        problem = str(error)
    return {
        "checkpoint": checkpoint.path,
        "family": f"{checkpoint.family.name} ({checkpoint.family.support})",
        "geometry": _geometry(checkpoint, config),
        "head": _head(checkpoint),
        "vocabulary": _vocabulary(checkpoint),
        "anchor": _anchor(checkpoint),
        "taps": f"after target layers {', '.join(map(str, checkpoint.config.target_layer_ids)) or 'unknown'}"
        + (f" of {checkpoint.config.num_target_layers}" if checkpoint.config.num_target_layers else ""),
        "tensors": _tensors(checkpoint),
        "embedding": _origin(checkpoint, EMBEDDING),
        "lm head": _origin(checkpoint, LM_HEAD),
        "backbone": problem or no_backbone or ("complete" if "fc.weight" in checkpoint else "none (a head alone)"),
        "arithmetic": list_keys(checkpoint.raw) or ["no key that changes it"],
        "left out": _left_out(checkpoint),
        "notes": checkpoint.notes or ["none"],
        "config": config,
    }


def to_text(report: dict[str, Any]) -> str:
    """Lay a report out as aligned lines."""
    lines = []
    for title, value in report.items():
        if title == "config":
            continue
        for number, line in enumerate(value if isinstance(value, list) else [value]):
            lines.append(f"{title if number == 0 else '':<12}{line}")
    return "\n".join(lines)


def _geometry(checkpoint: Checkpoint, config: dict[str, Any]) -> str:
    names = {"hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    names |= {"num_key_value_heads": "key heads", "head_dim": "head size", "intermediate_size": "MLP"}
    parts = [f"{word} {config[key]}" for key, word in names.items() if key in config]
    return ", ".join([*parts, f"block {checkpoint.config.block_size}", f"mask token {checkpoint.config.mask_token_id}"])


def _head(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    markov = (
        f"{config.markov_head_type} Markov head of rank {config.markov_rank}"
        if config.markov_rank
        else "no Markov head"
    )
    reads = "hidden states and previous token" if config.confidence_head_with_markov else "hidden states"
    confidence = f"confidence head on {reads}" if config.enable_confidence_head else "no confidence head"
    cap = f", softcap {config.final_logit_softcapping:g}" if config.final_logit_softcapping else ""
    scale = f", logit scale {config.logit_scale:g}" if config.logit_scale != 1 else ""
    return f"{markov}, {confidence}{cap}{scale}"


def _vocabulary(checkpoint: Checkpoint) -> str:
    V, Vd = checkpoint.config.vocab_size, checkpoint.config.Vd
    if Vd < V:
        return f"draft {Vd} of target {V} (d2t); markov_w1 over the target's, markov_w2 and LM head over the draft's"
    return f"target {V}" + (f", padded to {Vd} rows" if Vd > V else ", shared by draft and target")


def _anchor(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    stated = (
        "stated" if any("sample_from_anchor" in place for place in _places(checkpoint.raw)) else "by the family's rule"
    )
    slot = "slot 0 drafts" if config.sample_from_anchor else "slot 0 (the anchor) does not draft"
    return f"{slot}: {config.max_steps} drafts from a block of {config.block_size} (sample_from_anchor, {stated})"


def _places(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [raw, *(raw[key] for key in ("dspark_config", "dflash_config") if isinstance(raw.get(key), dict))]


def _tensors(checkpoint: Checkpoint) -> str:
    count = len(checkpoint.names)
    heads = sum(map(is_head, checkpoint.names))
    size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    parameters = sum(
        int(np.prod(t.shape, dtype=np.int64)) for t in checkpoint.tensors.values() if t.dtype.kind not in "bi"
    )
    kinds = sorted({DTYPE_NAMES[tensor.dtype] for tensor in checkpoint.tensors.values()})
    return f"{count} ({heads} of the head), {parameters:,} parameters, {size / 1e9:.3g} GB, {', '.join(kinds)}"


def _origin(checkpoint: Checkpoint, name: str) -> str:
    if name in checkpoint:
        return f"{checkpoint.tensors[name].origin}, {list(checkpoint.shapes[name])}"
    return f"missing: give --target, the target's directory{checkpoint.named_target}"


def _left_out(checkpoint: Checkpoint) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in checkpoint.left_out.items():
        reasons.setdefault(reason, []).append(name)
    lines = [
        f"{len(names)}: {reason} ({names[0]}{', ...' if len(names) > 1 else ''})" for reason, names in reasons.items()
    ]
    return lines or ["nothing"]
