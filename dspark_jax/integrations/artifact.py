"""What an exported draft consists of, and running one: JAX, flatbuffers, NumPy and safetensors are all it needs.

DIR/draft.jax_export      the program (jax.export), for all its platforms and batch sizes
DIR/weights.safetensors   the head's weights, named as the program's leaves
DIR/signature.json        versions, platforms, batch bounds, and the shape and dtype of every operand
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np

from ..checks import invalid
from ..json_files import read_bytes, read_json
from ..optional import require

PROGRAM, WEIGHTS, SIGNATURE = "draft.jax_export", "weights.safetensors", "signature.json"
FORMAT = 1
MAX_PROGRAM = 1 << 28
INPUTS = ("hidden", "anchor_ids", "temperature", "seed", "position")


class ExportedDraft:
    """A drafting function read from files: call it with arrays, get a dictionary of arrays (see DraftBlock).

    Attributes:
        signature: the contents of signature.json.
    """

    def __init__(self, program: Any, weights: list[Any], signature: Mapping[str, Any]) -> None:
        self._call, self._weights, self.signature = jax.jit(program.call), weights, signature

    def __call__(
        self, hidden: Any, anchor_ids: Any, temperature: Any = None, seed: Any = None, position: Any = None
    ) -> dict[str, jax.Array]:
        """Draft for hidden [B, S, H] and anchors int32 [B]; sampled drafts take temperature, seed and position [B].

        Raises:
            ValueError: an operand is missing or superfluous, or has another shape or dtype than the signature says.
        """
        given = dict(zip(INPUTS, (hidden, anchor_ids, temperature, seed, position), strict=True))
        wanted, (low, high) = self.signature["inputs"], self.signature["batch"]
        batch, operands = None, []
        for name, value in given.items():
            if name not in wanted:
                if value is not None:
                    raise invalid(name, type(value).__name__, "None, since the exported draft is greedy")
                continue
            if value is None:
                raise invalid(name, None, "an array, since the exported draft is probabilistic")
            array, entry = value if isinstance(value, jax.Array) else np.asarray(value), wanted[name]
            if str(array.dtype) != entry["dtype"]:
                raise invalid(f"{name}.dtype", str(array.dtype), entry["dtype"])
            size = array.shape[0] if array.ndim else None
            batch = size if batch is None else batch
            shape = tuple(batch if n == "B" else n for n in entry["shape"])
            if tuple(array.shape) != shape:
                raise invalid(f"{name}.shape", tuple(array.shape), f"{entry['shape']} with one B for all")
            operands.append(array)
        if batch is None or not low <= batch <= high:
            raise invalid("hidden.shape[0]", batch, f"a batch from {low} to {high}, as exported")
        return dict(zip(self.signature["outputs"], self._call(self._weights, *operands), strict=True))


def load_exported(path: str | os.PathLike[str], weights: Mapping[str, Any] | None = None) -> ExportedDraft:
    """Read what export_draft_fn wrote.

    Args:
        path: the directory.
        weights: arrays by leaf name to use instead of the stored ones (already on a device, say).

    Raises:
        ImportError: safetensors or flatbuffers is missing.
        ValueError: the files are not an export of this format, or a weight is missing or has another shape or dtype.
    """
    path = os.fspath(path)
    signature = read_json(os.path.join(path, SIGNATURE))
    if signature.get("format") != FORMAT:
        raise invalid(f"{SIGNATURE}: format", signature.get("format"), f"{FORMAT}")
    require("flatbuffers", "export", "reading an exported draft")
    from jax import export

    program = export.deserialize(bytearray(read_bytes(os.path.join(path, PROGRAM), MAX_PROGRAM)))
    if weights is None:
        weights = require("safetensors.numpy", None, "reading weights").load_file(os.path.join(path, WEIGHTS))
    given, leaves = dict(weights or {}), []
    for entry in signature["weights"]:
        name = entry["name"]
        if name not in given:
            raise invalid("weights", sorted(given), f"an array {name!r}")
        found = (list(np.shape(given[name])), str(given[name].dtype))
        if found != (entry["shape"], entry["dtype"]):
            raise invalid(name, found, f"{entry['shape']} {entry['dtype']}")
        leaves.append(jnp.asarray(given[name]))
    return ExportedDraft(program, leaves, signature)
