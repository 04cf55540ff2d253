"""Verification: which drafted tokens the target keeps, without changing what it would have written by itself.

    accept x_s while u_s * q_s(x_s) < p_s(x_s), strictly; a = the first step that fails, or num_draft
    then draw token a from max(p_a - q_a, 0), normalised, or from p_a where all num_draft steps were accepted

(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). u_s comes from the stream ACCEPT at (seed,
position, step, x_s), the last token from the stream RESIDUAL at step a: what a request commits depends on no other one.
The rule "target_only" accepts with probability p_s(x_s) and leaves q out; it is as exact but accepts less often. The
rule "block" (block_rule.py) weighs the block as a whole; it is as exact and accepts at least as often.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Num

from ..noise import ACCEPT, RESIDUAL, choose, gumbel_from_bits, noise_bits, row_is_valid, uniform_from_bits
from ..types import (
    Committed,
    Confidence,
    DraftBlock,
    DraftSampling,
    RequestFlags,
    RequestInts,
    StopIds,
    TargetLogits,
)
from . import block_rule
from .distributions import TargetDistribution, draft_distribution
from .filter import TargetFilter

RULES = ("token", "target_only", "block")


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

    num_accepted: RequestInts
    tokens: Committed
    accept_prob: Confidence
    logprobs: Float32[Array, "B R"]
    valid: RequestFlags
    stopped: RequestFlags

    @property
    def num_committed(self) -> RequestInts:
        """Number of committed tokens, int32 [B]: what a sequence grows by."""
        return (self.tokens >= 0).sum(axis=1, dtype=jnp.int32)


def verify(
    block: DraftBlock,
    target_logits: TargetLogits,
    draw: DraftSampling,
    num_draft: RequestInts,
    target_filter: TargetFilter | None,
    stop_ids: StopIds | None,
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
        if rule == "block":
            weight = block_rule.running_weights(p, q)
            h = block_rule.chances(target, draft, weight, n)
            accepted = jnp.max(jnp.where((u < h) & proposed, step + 1, 0), axis=1)
            chance = block_rule.conditional(h, proposed)
        else:
            accept = (u * q < p) & proposed
            accepted = jnp.cumprod(accept.astype(jnp.int32), axis=1).sum(axis=1)
            chance = jnp.where(proposed & (p > 0), jnp.minimum(p / jnp.maximum(q, 1e-38), 1.0), 0.0)

    with jax.named_scope("residual"):
        log_row = target.log_row(accepted)
        p_row, q_row = jnp.exp(log_row), draft.row(jnp.minimum(accepted, S - 1))
        scaled = p_row if rule != "block" else p_row * jnp.take_along_axis(weight, accepted[:, None], axis=1)
        left = jnp.where((accepted < n)[:, None], jnp.maximum(scaled - q_row, 0.0), p_row)
        # Rounding can reject although p = q everywhere; what is then left of p is p.
        left = jnp.where((left > 0).any(axis=1, keepdims=True), left, p_row)
        ids = jnp.arange(V, dtype=jnp.int32)[None]
        bits = noise_bits(draw.seed[:, None], draw.position[:, None], accepted[:, None], RESIDUAL, ids)
        last = choose(jnp.log(left) + gumbel_from_bits(bits))

    rows = jnp.arange(S + 1, dtype=jnp.int32)[None]
    valid = (row_is_valid(target_logits) | (rows > n[:, None])).all(axis=1) & (p_row > 0).any(axis=1)
    end = accepted[:, None]

    def fill(x: Num[Array, "B S"], value: int | float) -> Num[Array, "B R"]:
        return jnp.concatenate([x, jnp.full((B, 1), value, x.dtype)], axis=1)

    committed = jnp.where(rows < end, fill(tokens, -1), jnp.where(rows == end, last[:, None], -1))
    committed = jnp.where(valid[:, None], committed, -1)
    committed, stopped = _cut_after_stop(committed, stop_ids)
    log_last = jnp.take_along_axis(log_row, last[:, None], axis=1)
    logprobs = jnp.where(rows == end, log_last, fill(log_p, 0.0))
    return Verified(
        num_accepted=((committed >= 0) & (rows < end)).sum(axis=1, dtype=jnp.int32),
        tokens=committed,
        accept_prob=jnp.where(valid[:, None], chance, 0.0),
        logprobs=jnp.where(committed >= 0, logprobs, 0.0),
        valid=valid,
        stopped=stopped,
    )


def _cut_after_stop(tokens: Committed, stop_ids: StopIds | None) -> tuple[Committed, RequestFlags]:
    """Replace what follows the first stop token by -1; also return whether there is one, bool [B]."""
    if stop_ids is None:
        return tokens, jnp.zeros(tokens.shape[0], bool)
    stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(axis=2) & (tokens >= 0)
    after = jnp.cumsum(stop, axis=1) - stop.astype(jnp.int32) > 0
    return jnp.where(after, -1, tokens), stop.any(axis=1)
