"""Verification: which drafted tokens the target keeps, without changing what it would have written by itself.

    accept x_s while u_s * q_s(x_s) < p_s(x_s), strictly; a = the first step that fails, or num_draft
    then draw token a from max(p_a - q_a, 0), normalised, or from p_a where all num_draft steps were accepted

(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). u_s comes from the stream ACCEPT at (seed,
position, step, x_s), the last token from the stream RESIDUAL at step a: what a request commits depends on no other one.
The rule "target_only" accepts with probability p_s(x_s) and leaves q out; it is as exact but accepts less often.
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

from ..checks import check_choice, check_int, invalid
from ..coerce import coerce_floats, coerce_ids, coerce_sampling
from ..config import METHODS
from ..noise import ACCEPT, RESIDUAL, choose, gumbel_from_bits, noise_bits, row_is_valid, uniform_from_bits
from ..trace_count import Program
from ..types import DraftBlock, DraftSampling
from .distributions import TargetDistribution, draft_distribution
from .filter import TargetFilter, coerce_filter
from .inputs import coerce_num_draft, coerce_q, coerce_stop

RULES = ("token", "target_only")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What a verified block commits.

    Attributes:
        num_accepted: int32 [B], committed tokens that were drafted (0 to num_draft).
        tokens: int32 [B, S+1], the committed tokens: accepted, then the corrected or bonus token, then -1.
        accept_prob: float32 [B, S], probability of accepting each proposed step after those before it, else 0.
        logprobs: float32 [B, S+1], log-probability of each committed token under the processed target; 0 elsewhere.
        valid: bool [B], False where a target row up to num_draft held NaN or nothing finite, or the filter left no
            token in the row of the last committed one: such a request commits nothing.
        stopped: bool [B], whether the last committed token is one of the stop ids.
    """

    num_accepted: jax.Array
    tokens: jax.Array
    accept_prob: jax.Array
    logprobs: jax.Array
    valid: jax.Array
    stopped: jax.Array

    @property
    def num_committed(self) -> jax.Array:
        """Number of committed tokens, int32 [B]: what a sequence grows by."""
        return (self.tokens >= 0).sum(axis=1, dtype=jnp.int32)


def verify(
    block: DraftBlock,
    target_logits: jax.Array,
    draw: DraftSampling,
    num_draft: jax.Array,
    target_filter: TargetFilter | None,
    stop_ids: jax.Array | None,
    *,
    rule: str,
) -> Verified:
    """Verify a block; the pure core of `verify_block`, on arrays of the final shapes and dtypes.

    Args:
        num_draft: int32 [B], at most the block's; stop_ids: int32 [B, n] padded with -1, or None.
    """
    tokens, (B, S) = block.tokens, block.tokens.shape
    V = target_logits.shape[-1]
    target = TargetDistribution.of(target_logits, draw.temperature, target_filter)
    draft = draft_distribution(block, draw, V, target_only=rule == "target_only")
    n = jnp.clip(jnp.minimum(num_draft, block.num_draft), 0, S)
    step = jnp.arange(S, dtype=jnp.int32)[None]
    proposed = step < n[:, None]

    with jax.named_scope("accept"):
        log_p = target.log_at(tokens)
        p, q = jnp.exp(log_p), draft.at(tokens)
        u = uniform_from_bits(noise_bits(draw.seed[:, None], draw.position[:, None], step, ACCEPT, tokens))
        # Strict, so that p = 0 is rejected for every u; a comparison with NaN rejects too.
        accept = (u * q < p) & proposed
        accepted = jnp.cumprod(accept.astype(jnp.int32), axis=1).sum(axis=1)

    with jax.named_scope("residual"):
        log_row = target.log_row(accepted)
        p_row, q_row = jnp.exp(log_row), draft.row(jnp.minimum(accepted, S - 1))
        left = jnp.where((accepted < n)[:, None], jnp.maximum(p_row - q_row, 0.0), p_row)
        # Rounding can reject although p = q everywhere; what is then left of p is p.
        left = jnp.where((left > 0).any(axis=1, keepdims=True), left, p_row)
        ids = jnp.arange(V, dtype=jnp.int32)[None]
        bits = noise_bits(draw.seed[:, None], draw.position[:, None], accepted[:, None], RESIDUAL, ids)
        last = choose(jnp.log(left) + gumbel_from_bits(bits))

    rows = jnp.arange(S + 1, dtype=jnp.int32)[None]
    valid = (row_is_valid(target_logits) | (rows > n[:, None])).all(axis=1) & (p_row > 0).any(axis=1)
    end = accepted[:, None]

    def fill(x: jax.Array, value: float) -> jax.Array:
        return jnp.concatenate([x, jnp.full((B, 1), value, x.dtype)], axis=1)

    committed = jnp.where(rows < end, fill(tokens, -1), jnp.where(rows == end, last[:, None], -1))
    committed = jnp.where(valid[:, None], committed, -1)
    committed, stopped = _cut_after_stop(committed, stop_ids)
    log_last = jnp.take_along_axis(log_row, last[:, None], axis=1)
    logprobs = jnp.where(rows == end, log_last, fill(log_p, 0.0))
    return Verified(
        num_accepted=((committed >= 0) & (rows < end)).sum(axis=1, dtype=jnp.int32),
        tokens=committed,
        accept_prob=jnp.where(proposed & valid[:, None] & (p > 0), jnp.minimum(p / jnp.maximum(q, 1e-38), 1.0), 0.0),
        logprobs=jnp.where(committed >= 0, logprobs, 0.0),
        valid=valid,
        stopped=stopped,
    )


def _cut_after_stop(tokens: jax.Array, stop_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Replace what follows the first stop token by -1; also return whether there is one, bool [B]."""
    if stop_ids is None:
        return tokens, jnp.zeros(tokens.shape[0], bool)
    stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(axis=2) & (tokens >= 0)
    after = jnp.cumsum(stop, axis=1) - stop > 0
    return jnp.where(after, -1, tokens), stop.any(axis=1)


def _slice_requests(block: DraftBlock, rest: Any, start: jax.Array, size: int) -> tuple[DraftBlock, Any]:
    """Cut `size` requests from `start` on out of a block (its large arrays are step-major) and batch-major arrays."""

    def cut(axis: int) -> Callable[[jax.Array], jax.Array]:
        return partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=axis)

    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {name: jax.tree.map(cut(1 if name in wide else 0), value) for name, value in fields.items()}
    return DraftBlock(method=block.method, **fields), jax.tree.map(cut(0), rest)


def _verify_chunks(block: DraftBlock, rest: Any, *, rule: str, chunk_size: int | None) -> Verified:
    B = block.tokens.shape[0]
    if chunk_size is None or chunk_size >= B:
        return verify(block, *rest, rule=rule)
    # Whole requests only. The last chunk starts early enough to be full: the few requests that it repeats come out the
    # same, and nothing has to be padded (a copy of the target logits).
    starts = np.minimum(np.arange(0, B, chunk_size), B - chunk_size).astype(np.int32)

    def one_chunk(start: jax.Array) -> Verified:
        part, part_rest = _slice_requests(block, rest, start, chunk_size)
        return verify(part, *part_rest, rule=rule)

    parts = lax.map(one_chunk, jnp.asarray(starts))
    request = np.arange(B)
    chunk = np.minimum(request // chunk_size, len(starts) - 1)
    flat = jnp.asarray(chunk * chunk_size + request - starts[chunk])
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[flat], parts)


VERIFY = Program(_verify_chunks, static=("rule", "chunk_size"))


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
        rule: "token" accepts with probability min(1, p/q); "target_only" with probability p.
        chunk_size: process this many requests at a time to bound memory; None does all at once. Results are the same.

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
    tokens = coerce_ids("block.tokens", block.tokens, (None, None), "[B, S]")
    B, S = tokens.shape
    logits = coerce_floats("target_logits", target_logits, (B, S + 1, None), "[B, S+1, V]")
    V = logits.shape[2]
    block = dataclasses.replace(
        block,
        tokens=tokens,
        num_draft=coerce_ids("block.num_draft", block.num_draft, (B,), "[B]"),
        valid=jnp.ones((B,), bool),  # not read: num_draft ends before the first invalid step
        confidence_logits=None,
        **coerce_q(block, (S, B, V), rule),
    )
    if sampling is None:
        if block.method == "probabilistic":
            raise invalid("sampling", None, "the DraftSampling that the probabilistic block was drafted with")
        zeros = np.zeros(B, np.int32)
        sampling = DraftSampling(zeros.astype(np.float32), zeros.astype(np.uint32), zeros)  # type: ignore[arg-type]
    draw, limit = coerce_sampling(sampling, B), coerce_num_draft(num_draft, block.num_draft, B)
    rest = (logits, draw, limit, coerce_filter(target_filter, B, S + 1, V), coerce_stop(stop_ids, B))
    return VERIFY(block, rest, rule=rule, chunk_size=chunk_size)
