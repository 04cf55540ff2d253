"""Embedding and LM head borrowed from the target's own shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..json_files import read_config
from .family.names import EMBEDDING, LM_HEAD
from .storage.header import some
from .storage.tensor import Tensor, make_tensor
from .storage.tensor_files import TensorFiles

# Exact names under which targets store the two matrices; multimodal wrappers nest the language model.
LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "head.weight")
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.embed.weight",
    "embed.weight",
)

Found = dict[str, tuple[TensorFiles, str, str]]


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a target's config."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, Mapping) else raw


def find_in_target(path: str | os.PathLike[str]) -> Found:
    """Find the target's LM head and embedding.

    Whether the head is the embedding matrix is read from the target's config and tensor names; a drafter's own
    tie_word_embeddings says nothing about the target. Only the shards that hold the two are opened.

    Returns:
        Canonical name -> (files, source name, origin).

    Raises:
        ValueError: neither an LM head nor tied embeddings, or two spellings of one of them.
    """
    raw, files = read_config(path), TensorFiles(path)
    text = text_config(raw)
    head, embedding = _one_of(files, LM_HEADS), _one_of(files, EMBEDDINGS)
    found: Found = {}
    if embedding is not None:
        found[EMBEDDING] = (files, embedding, "target")
    if head is not None:
        found[LM_HEAD] = (files, head, "target")
    elif embedding is not None and _is_tied(raw, text):
        found[LM_HEAD] = (files, embedding, "target, tied to the embedding")
    elif embedding is not None:
        raise ValueError(
            f"{os.fspath(path)}: tie_word_embeddings is false and there is no LM head tensor "
            f"(looked for {', '.join(LM_HEADS)})"
        )
    else:
        raise ValueError(f"{os.fspath(path)}: holds neither LM head nor embedding; its tensors are {some(files, 5)}")
    return found


def differs_from_target(tensor: Tensor, found: Found, ids: np.ndarray | None) -> bool | None:
    """Say whether a drafter's own embedding or LM head differs from the target's; None if that cannot be read.

    Args:
        tensor: the drafter's.
        found: what find_in_target found.
        ids: target ids of a reduced draft vocabulary, whose rows an LM head holds.
    """
    if tensor.name not in found:
        return None
    files, source, _ = found[tensor.name]
    if not files.available(source):
        return None
    theirs = make_tensor(tensor.name, files, source, None, "target", None)
    if ids is not None and tensor.name == LM_HEAD:
        theirs = dataclasses.replace(theirs, shape=(len(ids), *theirs.shape[1:]), transform="rows", select=ids)
    if (tensor.shape, tensor.dtype) != (theirs.shape, theirs.dtype):
        return True
    pairs = zip(tensor.chunks(), theirs.chunks(), strict=True)
    return not all(a.tobytes() == b.tobytes() for a, b in pairs)


def _one_of(files: TensorFiles, names: tuple[str, ...]) -> str | None:
    present = [name for name in names if name in files]
    if len(present) > 1:
        raise ValueError(f"{files.path}: two spellings of one tensor: {', '.join(present)}")
    return present[0] if present else None


def _is_tied(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Say whether the target ties its head; without the key, a target that stores no head can only be a tied one."""
    flags = (raw.get("tie_word_embeddings"), text.get("tie_word_embeddings"))
    return next((flag for flag in flags if isinstance(flag, bool)), True)
