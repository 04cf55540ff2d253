"""The public verification: it coerces and checks its arguments, then calls one jitted program over verify.py.

The program verifies all requests at once, or a chunk of them at a time, which bounds its memory and changes no result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from ..checks import check_choice, check_int, invalid
from ..coerce import ANY, as_array, cast, check_shape, coerce_floats, coerce_ids, coerce_sampling
from ..config import METHODS
from ..sharding.axes import find_axes
from ..sharding.run import cut_requests, missing_requests, over_mesh, pad_requests
from ..trace_count import Program
from ..types import DraftBlock, DraftSampling, Index
from .filter import TargetFilter
from .inputs import coerce_filter, coerce_num_draft, coerce_q, coerce_stop
from .verify import RULES, Verified, verify


def _slice_requests(block: DraftBlock, rest: Any, start: Index, size: int) -> tuple[DraftBlock, Any]:
    """Cut `size` requests from `start` on out of a block (its large arrays are step-major) and batch-major arrays."""

    def cut(axis: int) -> Callable[[jax.Array], jax.Array]:
        return partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=axis)

    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {name: jax.tree.map(cut(1 if name in wide else 0), value) for name, value in fields.items()}
    return DraftBlock(method=block.method, **fields), jax.tree.map(cut(0), rest)


def _verify_chunks(
    block: DraftBlock, rest: Any, *, rule: str, chunk_size: int | None, batch_axes: tuple[str, ...] = ()
) -> Verified:
    run = partial(_chunks, rule=rule, chunk_size=chunk_size)
    if not batch_axes and AxisType.Explicit not in get_abstract_mesh().axis_types:
        return run(block, rest)
    # Requests never meet: each device verifies its own, in chunks of its own.
    lacking, rows, steps = missing_requests(block.tokens.shape[0], batch_axes), P(batch_axes), P(None, batch_axes)
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    padded = {name: pad_requests(value, lacking, 1 if name in wide else 0) for name, value in fields.items()}
    at = {name: None if value is None else steps if name in wide else rows for name, value in fields.items()}
    specs = (DraftBlock(method=block.method, **at), rows)  # type: ignore[arg-type]  # specs stand for arrays
    block = DraftBlock(method=block.method, **padded)
    out = over_mesh(run, (block, pad_requests(rest, lacking, 0)), specs, rows)
    return cut_requests(out, lacking, 0)


def _chunks(block: DraftBlock, rest: Any, *, rule: str, chunk_size: int | None) -> Verified:
    B = block.tokens.shape[0]
    logits, draw, *others = rest
    if draw is None:  # made here: a warmed call hands nothing from the host to the device
        zeros = jnp.zeros((B,), jnp.int32)
        draw = DraftSampling(zeros.astype(jnp.float32), zeros.astype(jnp.uint32), zeros)
    rest = (logits, draw, *others)
    if chunk_size is None or chunk_size >= B:
        return verify(block, *rest, rule=rule)
    # Whole requests only. The last chunk starts early enough to be full: the few requests that it repeats come out the
    # same, and nothing has to be padded (a copy of the target logits).
    starts = np.minimum(np.arange(0, B, chunk_size), B - chunk_size).astype(np.int32)

    def one_chunk(start: Index) -> Verified:
        part, part_rest = _slice_requests(block, rest, start, chunk_size)
        return verify(part, *part_rest, rule=rule)

    parts = lax.map(one_chunk, jnp.asarray(starts))
    request = np.arange(B)
    chunk = np.minimum(request // chunk_size, len(starts) - 1)
    flat = jnp.asarray(chunk * chunk_size + request - starts[chunk])
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[flat], parts)


VERIFY = Program(_verify_chunks, static=("rule", "chunk_size", "batch_axes"))


def verify_block(
    block: DraftBlock,
    target_logits: Any,
    sampling: DraftSampling | None,
    *,
    num_draft: Any = None,
    target_filter: TargetFilter | None = None,
    stop_ids: Any = None,
    rule: str = "token",
    chunk_size: int | None = None,
    batch_axes: tuple[str, ...] | None = None,
) -> Verified:
    """Verify a drafted block against the target's logits, in one jitted call without a host sync.

    Args:
        block: from draft_block; a probabilistic one needs its logits or candidates, unless the rule is "target_only".
        target_logits: [B, S+1, V] float; row s is the target's for index position + s of the sequence, so row 0
            belongs to the first drafted token.
        sampling: what the block was drafted with; its temperature is the target's too. None: all requests are greedy.
        num_draft: int [B] or a number, verifies fewer steps than block.num_draft (it never adds any); decide it before
            looking at what was drafted beyond it (see confidence/schedule.py).
        target_filter: restricts the target's distribution (allowed tokens, min-p, top-k, top-p), per request.
        stop_ids: int [n], or [B, n] padded with -1; nothing is committed after the first of them. A stop token among
            the accepted ones ends the block: no further token is drawn.
        rule: "token" accepts each step with probability min(1, p/q); "target_only" with probability p; "block" weighs
            the block as a whole and accepts at least as many tokens in expectation. All keep the target's distribution.
        chunk_size: process this many requests at a time to bound memory; None does all at once. Results are the same.
        batch_axes: mesh axes that split the requests; None reads them off the arrays, as draft_block does. Each device
            verifies its own requests; target logits that are split by vocabulary are gathered for it.

    Returns:
        Verified.

    Raises:
        ValueError: wrong shape, dtype or option, or a block without the q that the rule needs.
    """
    check_choice("rule", rule, RULES)
    if not isinstance(block, DraftBlock):
        raise invalid("block", type(block).__name__, "a DraftBlock (draft_block returns one)")
    check_choice("block.method", block.method, METHODS)
    if chunk_size is not None:
        chunk_size = check_int("chunk_size", chunk_size, 1)
    tokens = coerce_ids("block.tokens", block.tokens, (ANY, None), "[B, S]")
    B, S = tokens.shape
    logits = coerce_floats("target_logits", target_logits, (B, S + 1, None), "[B, S+1, V]")
    V = logits.shape[2]
    valid = as_array("block.valid", block.valid)
    check_shape("block.valid", valid, (B,), "[B]")
    block = dataclasses.replace(
        block,
        tokens=tokens,
        num_draft=coerce_ids("block.num_draft", block.num_draft, (B,), "[B]"),
        valid=cast(valid, jnp.bool_),  # not read: num_draft ends before the first invalid step
        confidence_logits=None,
        certified=None,
        **coerce_q(block, (S, B, V), rule),
    )
    if sampling is None and block.method == "probabilistic":
        raise invalid("sampling", None, "the DraftSampling that the probabilistic block was drafted with")
    draw = None if sampling is None else coerce_sampling(sampling, B)
    limit = coerce_num_draft(num_draft, block.num_draft, B)
    rest = (logits, draw, limit, coerce_filter(target_filter, B, S + 1, V), coerce_stop(stop_ids, B))
    sampled = [] if draw is None else [(draw.temperature, 0)]
    axes = find_axes([(tokens, 0), (logits, 0), *sampled], batch_axes=batch_axes)
    with axes.context():
        return VERIFY(block, rest, rule=rule, chunk_size=chunk_size, batch_axes=axes.batch)
