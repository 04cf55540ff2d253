"""Checks of what verify_block is handed, beside those of coerce.py: the block's q, draft lengths and stop tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..checks import invalid
from ..coerce import as_array, coerce_floats, coerce_ids
from ..types import DraftBlock


def coerce_q(block: DraftBlock, shape: tuple[int, int, int], rule: str) -> dict[str, Any]:
    """Keep of a block's logits and candidates what the rule reads; refuse a block without it."""
    fields: dict[str, Any] = {"logits": None, "candidate_ids": None, "candidate_logits": None}
    if rule == "target_only" or block.method == "greedy":
        return fields
    if block.candidate_ids is not None and block.candidate_logits is not None:
        S, B, _ = shape
        ids = coerce_ids("block.candidate_ids", block.candidate_ids, (S, B, None), "[S, B, k]")
        logits = coerce_floats("block.candidate_logits", block.candidate_logits, ids.shape, "[S, B, k]")
        return fields | {"candidate_ids": ids, "candidate_logits": logits}
    if block.logits is None:
        need = 'a probabilistic block drafted with outputs="logits" or "candidates" (rule="target_only" needs neither)'
        raise invalid("block.logits", None, need)
    return fields | {"logits": coerce_floats("block.logits", block.logits, shape, "[S, B, V]")}


def coerce_num_draft(value: Any, of_block: jax.Array, batch: int) -> jax.Array:
    """Return the caller's draft lengths int32 [B] (one number serves all), or the block's."""
    if value is None:
        return of_block
    array = as_array("num_draft", value)
    if array.ndim == 0:
        array = jnp.broadcast_to(jnp.asarray(array), (batch,))
    return coerce_ids("num_draft", array, (batch,), "[B]")


def coerce_stop(value: Any, batch: int) -> jax.Array | None:
    """Return stop tokens int32 [B, n], or None where there are none; one list serves all requests."""
    if value is None:
        return None
    array = as_array("stop_ids", value)
    if array.size == 0:
        return None
    if array.ndim == 1:
        array = jnp.broadcast_to(coerce_ids("stop_ids", array, (None,), "[n]"), (batch, array.shape[0]))
    return coerce_ids("stop_ids", array, (batch, None), "[n] or [B, n]")
