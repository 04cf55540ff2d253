"""Callers that hold weights as leaves and a tree definition, and merge them inside their own jit."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from ..drafting.inputs import check_head


def split_head(head: Any) -> tuple[tuple[jax.Array, ...], Any]:
    """Return (leaves, structure); jit the leaves as arguments and close over the structure.

    The calibration is left out: it is static, so structures of one checkpoint would differ with it, and drafting does
    not read it. Structures of the same checkpoint, dtype and options are equal and hash alike: no retrace.
    """
    bare = nnx.clone(check_head(head))
    bare.calibration = None
    leaves, structure = jax.tree.flatten(bare)
    return tuple(leaves), structure


def join_head(leaves: Any, structure: Any) -> Any:
    """Return the head of (leaves, structure), inside or outside a trace."""
    return jax.tree.unflatten(structure, leaves)
