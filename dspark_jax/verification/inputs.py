"""Checks of what verify_block is handed, beside those of coerce.py: q, lengths, filter and stop tokens."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checks import invalid
from ..coerce import as_array, check_shape, coerce_floats, coerce_ids
from ..types import DraftBlock, RequestFloats, RequestInts, StopIds
from .filter import TargetFilter


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


def coerce_num_draft(value: Any, of_block: RequestInts, batch: int) -> RequestInts:
    """Return the caller's draft lengths int32 [B] (one number serves all), or the block's."""
    if value is None:
        return of_block
    array = as_array("num_draft", value)
    if array.ndim == 0:
        array = jnp.broadcast_to(jnp.asarray(array), (batch,))
    return coerce_ids("num_draft", array, (batch,), "[B]")


def coerce_stop(value: Any, batch: int) -> StopIds | None:
    """Return stop tokens int32 [B, n], or None where there are none; one list serves all requests."""
    if value is None:
        return None
    array = as_array("stop_ids", value)
    if array.size == 0:
        return None
    if array.ndim == 1:
        array = jnp.broadcast_to(coerce_ids("stop_ids", array, (None,), "[n]"), (batch, array.shape[0]))
    return coerce_ids("stop_ids", array, (batch, None), "[n] or [B, n]")


def coerce_filter(value: Any, batch: int, rows: int, vocab: int) -> TargetFilter | None:
    """Return a filter with bool, float32 and int32 arrays of the documented shapes; ValueError names what is wrong."""
    if value is None:
        return None
    if not isinstance(value, TargetFilter):
        raise invalid("target_filter", type(value).__name__, "a TargetFilter or None")
    allowed = value.allowed
    if allowed is not None:
        allowed = as_array("target_filter.allowed", allowed)
        if allowed.dtype != bool:
            raise invalid("target_filter.allowed.dtype", str(allowed.dtype), "bool")
        if allowed.ndim == 3:
            check_shape("target_filter.allowed", allowed, (batch, rows, vocab), "[B, V] or [B, S+1, V]")
        else:
            check_shape("target_filter.allowed", allowed, (batch, vocab), "[B, V] or [B, S+1, V]")
        allowed = jnp.asarray(allowed)
    return TargetFilter(
        allowed,
        _per_request("target_filter.min_p", value.min_p, batch, jnp.float32),
        _per_request("target_filter.top_k", value.top_k, batch, jnp.int32),
        _per_request("target_filter.top_p", value.top_p, batch, jnp.float32),
    )


def _per_request(field: str, value: Any, batch: int, dtype: Any) -> RequestFloats | RequestInts | None:
    if value is None:
        return None
    array = as_array(field, value)
    kind = jnp.integer if dtype == jnp.int32 else jnp.number
    if not jnp.issubdtype(array.dtype, kind) or array.dtype == bool:
        raise invalid(f"{field}.dtype", str(array.dtype), "integers" if dtype == jnp.int32 else "numbers")
    if isinstance(array, np.ndarray):  # values of arrays on a device are taken as they are
        if dtype == jnp.int32 and array.size and (array.min() < -(2**31) or array.max() >= 2**31):
            raise invalid(field, value, "integers of 32 bits")
        if np.isnan(array.astype(np.float64)).any():
            raise invalid(field, value, "numbers, not NaN")
    if array.ndim == 0:
        array = jnp.broadcast_to(jnp.asarray(array), (batch,))
    check_shape(field, array, (batch,), "[B]")
    return jnp.asarray(array, dtype=dtype)
