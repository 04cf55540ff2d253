"""The rule "block": verification of a block as a whole (Sun et al., arXiv 2403.10444, algorithm 2).

    w_0 = 1;  w_i = min(1, w_{i-1} * p_i(x_i) / q_i(x_i))                    i = 1 .. n, n = num_draft
    R_i = sum over x of max(w_i * p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = R_i / (R_i + 1 - w_i)  for i < n;   h_n = w_n
    a = the largest i with u_i < h_i, or 0
    then draw the next token from max(w_a * p_{a+1} - q_{a+1}, 0), normalised, or from p_{n+1} where a = n

Lossless as the rule "token" is, and it accepts at least as many tokens in expectation: a step that alone would be
rejected stays when those before it were likelier under the target than under the draft. The module counts steps from 0:
row s of the target and of the draft belongs to token s, and w has one more entry than the block has steps.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

from ..types import Confidence, Index, RequestFloats, RequestInts
from .distributions import Draft, TargetDistribution
from .filter import steady_sum

Weights = Float32[Array, "B R"]


def running_weights(p: Confidence, q: Confidence) -> Weights:
    """Return w float32 [B, S+1] from the probabilities of the drafted tokens [B, S]."""
    ratio = jnp.where(p > 0, p / jnp.maximum(q, 1e-38), 0.0)

    def extend(w: RequestFloats, one: RequestFloats) -> tuple[RequestFloats, RequestFloats]:
        w = jnp.minimum(w * one, 1.0)
        return w, w

    start = jnp.ones_like(p[:, 0])
    _, w = lax.scan(extend, start, ratio.T)
    return jnp.concatenate([start[:, None], w.T], axis=1)


def chances(target: TargetDistribution, draft: Draft, w: Weights, n: RequestInts) -> Confidence:
    """Return h float32 [B, S]: h[:, s] of keeping the block up to token s, 0 from step n on.

    One step's rows are formed at a time, so that memory is that of one row per request.
    """
    B, S = w.shape[0], w.shape[1] - 1

    def one(step: Index) -> RequestFloats:
        behind = jnp.full((B,), step + 1, jnp.int32)  # the row after token `step`
        rows = jnp.exp(target.log_row(behind)), draft.row(jnp.minimum(behind, S - 1))
        weight = w[jnp.arange(B), behind]
        left = steady_sum(jnp.maximum(weight[:, None] * rows[0] - rows[1], 0.0))[:, 0]
        # Nothing left and w = 1: both rows are the same, and whatever comes next is kept as well.
        total = left + (1.0 - weight)
        h = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0)
        h = jnp.where(behind == n, weight, h)
        return jnp.where(behind <= n, h, 0.0)

    return lax.map(one, jnp.arange(S, dtype=jnp.int32)).T


def conditional(h: Confidence, proposed: Bool[Array, "B S"]) -> Confidence:
    """Return the chance [B, S] that token s is kept given that those before it are: its products are P(a > s)."""
    survive = 1.0 - jnp.flip(jnp.cumprod(jnp.flip(1.0 - h, axis=1), axis=1), axis=1)
    before = jnp.concatenate([jnp.ones_like(survive[:, :1]), survive[:, :-1]], axis=1)
    return jnp.where(proposed & (before > 0), jnp.minimum(survive / jnp.where(before > 0, before, 1.0), 1.0), 0.0)
