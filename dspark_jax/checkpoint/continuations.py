"""The table of continuations on disk, beside a checkpoint's tensors: built once, read by every later run.

The file is named so that no server takes it for weights (they read every *.safetensors file). It carries a digest of
the markov_w1 and markov_w2 it was made from, in the dtype it was made in: a table of other weights is refused.
"""

from __future__ import annotations

import hashlib
import os
import pathlib

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..atomic_files import open_replacing
from ..checks import invalid
from ..drafting.continuations import Continuations
from ..drafting.head import DSparkHead

FILE_NAME = "dspark_continuations.table"
_FORMAT = "dspark-continuations-1"
_PARTS = ("ids", "largest", "last", "slack")


def weights_digest(head: DSparkHead) -> str:
    """Return a SHA-256 of the Markov head's weights, with their names, shapes and dtypes."""
    if head.markov is None:
        raise invalid("markov", None, "a Markov head, whose biases make the continuations")
    found = hashlib.sha256()
    for part in head.markov.kind.parameters:
        array = np.asarray(jax.device_get(getattr(head.markov, part.attribute)[...]))
        found.update(f"{part.tensor} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()


def save_continuations(head: DSparkHead, directory: str | os.PathLike[str]) -> pathlib.Path:
    """Write the head's table into a checkpoint's directory; the file appears whole. Returns its path."""
    table = head.continuations
    if table is None:
        raise invalid("head.continuations", None, "a table (head.with_continuations makes one)")
    arrays = {name: np.asarray(jax.device_get(getattr(table, name)[...])) for name in _PARTS}
    path = pathlib.Path(directory) / FILE_NAME
    with open_replacing(path, "wb") as file:
        file.write(save(arrays, {"format": _FORMAT, "weights": weights_digest(head)}))
    return path


def load_continuations(head: DSparkHead, directory: str | os.PathLike[str]) -> DSparkHead:
    """Return the head with the table that stands in a checkpoint's directory.

    Raises:
        ValueError: there is none, it is damaged, or it was made from other weights (or the same in another dtype).
    """
    path = pathlib.Path(directory) / FILE_NAME
    if not path.is_file():
        raise invalid("continuations", str(path), "a file that `dspark-jax convert --continuations M` writes")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata, arrays = file.metadata() or {}, {name: file.get_tensor(name) for name in _PARTS}
    except SafetensorError as error:
        raise invalid("continuations", str(path), f"a whole table ({error})") from None
    if metadata.get("format") != _FORMAT:
        raise invalid("continuations format", metadata.get("format"), _FORMAT)
    if metadata.get("weights") != weights_digest(head):
        raise invalid("continuations", str(path), "a table of this head's weights in the dtype they are loaded in")
    for name, array in arrays.items():
        wanted = "int32" if name == "ids" else "float32"
        if array.dtype != wanted:
            raise invalid(f"continuations {name}.dtype", str(array.dtype), wanted)
    ids = arrays["ids"]
    if ids.ndim != 2 or (ids.size and (ids.min() < 0 or ids.max() >= head.config.draftable)):
        raise invalid("continuations ids", str(path), f"draft ids below {head.config.draftable}, [V, m]")
    return head.replace_continuations(Continuations(*(jax.numpy.asarray(arrays[name]) for name in _PARTS)))
