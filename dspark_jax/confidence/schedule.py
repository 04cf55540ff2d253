"""How much of each block to verify: survival probabilities and the algorithm of the prefix scheduler.

Survival of step j is a_j = c_1 * ... * c_j with conditional confidences c. A batch of R requests that verifies m
drafted tokens runs R + m tokens through the target and commits R + (sum of their survivals) tokens in expectation. The
scheduler (DSpark, arXiv 2607.05147, algorithm 1) admits tokens in descending order of survival while the throughput

    theta(m) = tau(m) * SPS(R + m),     tau(m) = R + sum of the m largest survivals,     SPS = target steps per second

grows, and stops at its first drop. A token's survival is at most that of the tokens before it, so what is admitted is a
prefix of every block; and whether (r, j) is admitted depends on nothing that request r drafted at or after step j. This
keeps verification lossless: picking the best m of all would let later tokens decide whether earlier ones are verified.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32
from numpy.typing import ArrayLike

from ..checks import invalid
from ..types import Confidence, RequestFlags, RequestInts
from .costs import CostTable

Temperatures = Float32[Array, " n"]  # of a calibration, one for each of n >= S steps


def survival(confidence: Float[Array, "*rows S"]) -> Float32[Array, "*rows S"]:
    """Return the running product of conditional confidences [..., S], float32; NaN counts as 0."""
    confidence = jnp.nan_to_num(confidence.astype(jnp.float32), nan=0.0)
    return jnp.cumprod(jnp.clip(confidence, 0.0, 1.0), axis=-1)


def calibrated_confidence(confidence_logits: Confidence, temperatures: Temperatures | None) -> Confidence:
    """Return sigmoid(confidence_logits / temperatures), float32 [B, S]; None means temperatures of 1."""
    if temperatures is None:
        return jax.nn.sigmoid(confidence_logits)
    S = confidence_logits.shape[-1]
    if temperatures.shape[0] < S:
        raise invalid("calibration.temperatures", temperatures.shape[0], f"one for each of the {S} draft steps")
    return jax.nn.sigmoid(confidence_logits / temperatures[None, :S])


def admit(chances: Confidence, limit: RequestInts, active: RequestFlags, costs: CostTable) -> RequestInts:
    """Run algorithm 1: how many steps of each block to verify, int32 [B]. Pure; O(BS log BS), one sort.

    Args:
        chances: float32 [B, S], survival of each step, not increasing along a block.
        limit: int32 [B], steps that may be verified at most (block.num_draft).
        active: bool [B], requests that take part; the others get 0 and cost nothing.
        costs: seconds of a target step by its number of tokens.
    """
    B, S = chances.shape
    step, request = jnp.meshgrid(jnp.arange(S), jnp.arange(B), indexing="ij")
    open_ = (step < limit[request]) & active[request]
    value = jnp.where(open_, chances.T, -1.0).reshape(-1)
    # Step-major order and a stable sort put an earlier step before a later one of the same survival.
    order = jnp.argsort(-value, stable=True)
    value, request = value[order], request.reshape(-1)[order]
    requests = active.sum(dtype=jnp.int32)
    tokens = requests + jnp.arange(B * S + 1, dtype=jnp.int32)
    expected = requests.astype(jnp.float32) + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.maximum(value, 0.0))])
    throughput = expected / costs.seconds_at(tokens)
    grows = (throughput[1:] > throughput[:-1]) & (value >= 0)
    admitted = jnp.cumprod(grows.astype(jnp.int32))
    return jnp.zeros(B, jnp.int32).at[request].add(admitted)


def admit_reference(chances: ArrayLike, limit: ArrayLike, active: ArrayLike, costs: CostTable) -> list[int]:
    """Run algorithm 1 in plain Python, one token after the other: the readable form of `admit`."""
    rows, limits = np.asarray(chances, np.float64).tolist(), np.asarray(limit).tolist()
    flags = np.asarray(active, bool).tolist()
    lengths = [0] * len(rows)
    queue = [(-rows[r][j], j, r) for r in range(len(rows)) if flags[r] for j in range(min(limits[r], len(rows[r])))]
    requests = sum(flags)
    seconds = np.asarray(costs.seconds_at(np.arange(1 + sum(1 + len(row) for row in rows))), np.float64)
    expected, tokens = float(requests), requests
    for minus_chance, _, r in sorted(queue):
        more = expected - minus_chance
        if more / seconds[tokens + 1] <= expected / seconds[tokens]:
            break
        expected, tokens = more, tokens + 1
        lengths[r] += 1
    return lengths
