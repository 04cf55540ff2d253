"""From a checkpoint directory to a DSparkHead: `load_head`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import dtype_name, invalid
from ..confidence.calibration import find_calibration
from ..drafting.confidence_head import ConfidenceHead
from ..drafting.head import DSparkHead
from ..head_kinds import head_kind
from .family.names import CONFIDENCE, CONFIDENCE_BIAS, D2T, LM_HEAD
from .open import Checkpoint, open_checkpoint

FLOATS = ("float32", "bfloat16", "float16")
CHUNK = 1 << 24  # elements looked at or converted at once: no second copy of a large tensor is made

Sharding = jax.sharding.Sharding | Mapping[str, Any] | Callable[[str], Any] | None


def load_head(
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    target: str | os.PathLike[str] | None = None,
    sharding: Sharding = None,
) -> DSparkHead:
    """Load the LM head, Markov head, confidence head and draft-to-target table of a checkpoint, without PyTorch.

    The directory may hold a whole drafter (its backbone is not read) or the head's tensors alone. A calibration.json
    beside the tensors becomes `head.calibration` (see schedule.py).

    Args:
        path: directory with config.json and model.safetensors, shards with an index, or one safetensors file.
        dtype: "float32", "bfloat16" or "float16" for all weights; None keeps the stored ones.
        target: directory of the target, which supplies an LM head that the checkpoint does not store (the embedding
            matrix where the target ties them).
        sharding: where arrays are placed: None for the default device; one jax Sharding for all arrays; or a mapping or
            function from tensor name ("lm_head.weight", "markov_head.markov_w2.weight", ..., "d2t") to a Sharding
            or None. Each device's part is read from the file alone.

    Raises:
        FileNotFoundError, ValueError: as open_checkpoint; or no LM head and no target; or NaN weights.
    """
    dtype = None if dtype is None else dtype_name("dtype", dtype)  # refused before any file is opened
    checkpoint = open_checkpoint(path, target, head_only=True)
    if LM_HEAD not in checkpoint:
        raise ValueError(
            f"{LM_HEAD}: {checkpoint.path} stores no LM head; pass target=, the directory of the target model"
            f"{checkpoint.named_target}"
        )
    return build_head(checkpoint, dtype, sharding)


def build_head(checkpoint: Checkpoint, dtype: str | None = None, sharding: Sharding = None) -> DSparkHead:
    """Build the head of an open checkpoint; without an LM head in it, one for callers that bring base logits."""
    table = checkpoint.draft_to_target()
    get = _Placer(checkpoint, None if dtype is None else jnp.dtype(dtype), sharding)
    kind = checkpoint.config.markov_head_type
    markov = None
    if kind is not None:
        parts = {part.attribute: get(part.tensor) for part in head_kind(kind).parameters}
        markov = head_kind(kind).module(**parts)
    return DSparkHead(
        checkpoint.config,
        get(LM_HEAD) if LM_HEAD in checkpoint else None,
        markov,
        _confidence(checkpoint, get),
        None if table is None else get.place(D2T, table),
        find_calibration(checkpoint.path),
    )


def _confidence(checkpoint: Checkpoint, get: _Placer) -> ConfidenceHead | None:
    if not checkpoint.config.enable_confidence_head:
        return None
    bias = CONFIDENCE_BIAS
    return ConfidenceHead(get(CONFIDENCE, (-1,)), get(bias, ()) if bias in checkpoint else None)


class _Placer:
    """Reads a tensor, checks it, changes its dtype and puts it where the sharding says."""

    def __init__(self, checkpoint: Checkpoint, dtype: Any, sharding: Sharding) -> None:
        self.checkpoint, self.dtype, self.sharding = checkpoint, dtype, sharding
        if isinstance(sharding, Mapping):
            known = {*checkpoint.names}
            if unknown := sorted(set(sharding) - known):
                raise invalid("sharding", unknown, "names of tensors: " + ", ".join(sorted(known)))

    def __call__(self, name: str, shape: tuple[int, ...] | None = None) -> jax.Array:
        array = self.checkpoint.get(name)
        if array.dtype.name not in FLOATS:
            raise ValueError(f"{name}: found dtype {array.dtype.name}, expected one of {', '.join(FLOATS)}")
        refuse_nan(name, array)
        return self.place(name, array if shape is None else array.reshape(shape))

    def place(self, name: str, array: np.ndarray) -> jax.Array:
        dtype = array.dtype if self.dtype is None or array.dtype.kind == "i" else self.dtype
        if dtype == np.float16 and array.dtype != dtype:
            refuse_overflow(name, array)
        sharding = self.sharding
        if isinstance(sharding, Mapping):
            sharding = sharding.get(name)
        elif callable(sharding) and not isinstance(sharding, jax.sharding.Sharding):
            sharding = sharding(name)
        if sharding is None:
            # A private copy: JAX may alias host memory or read it after this returns, and this memory is a mapped file.
            return jnp.asarray(np.array(array, dtype, order="C"))
        # Only a device's own part is read; the copy keeps the mapped file out of the result.
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: np.array(array[index], dtype, order="C")
        )


def refuse_overflow(name: str, array: np.ndarray) -> None:
    """Refuse weights that float16 cannot hold."""
    flat, top = array.reshape(-1), float(np.finfo(np.float16).max)
    for start in range(0, flat.size, CHUNK):
        largest = float(np.abs(flat[start : start + CHUNK].astype(np.float32)).max())
        if largest > top:
            raise ValueError(f"{name}: holds {largest:g}, expected at most {top:g} for dtype float16")


def refuse_nan(name: str, array: np.ndarray) -> None:
    """Refuse weights with NaN: exporters mark weights that were never written with it."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        if np.isnan(flat[start : start + CHUNK]).any():
            raise ValueError(f"{name}: holds NaN (a mark of weights that were never written), expected numbers")
