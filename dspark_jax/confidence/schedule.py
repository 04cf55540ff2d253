"""How much of each block to verify: survival probabilities, the prefix scheduler and a static threshold.

Survival of step j is a_j = c_1 * ... * c_j with conditional confidences c. A batch of R requests that verifies m
drafted tokens runs R + m tokens through the target and commits R + (sum of their survivals) tokens in expectation. The
scheduler (DSpark, arXiv 2607.05147, algorithm 1) admits tokens in descending order of survival while the throughput

    theta(m) = tau(m) * SPS(R + m),     tau(m) = R + sum of the m largest survivals,     SPS = target steps per second

grows, and stops at its first drop. A token's survival is at most that of the tokens before it, so what is admitted is a
prefix of every block; and whether (r, j) is admitted depends on nothing that request r drafted at or after step j. This
keeps verification lossless: picking the best m of all would let later tokens decide whether earlier ones are verified.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..checks import invalid
from ..types import DraftBlock
from .calibration import Calibration
from .costs import CostTable


def survival(confidence: jax.Array) -> jax.Array:
    """Return the running product of conditional confidences [..., S], float32; NaN counts as 0."""
    confidence = jnp.nan_to_num(jnp.asarray(confidence).astype(jnp.float32), nan=0.0)
    return jnp.cumprod(jnp.clip(confidence, 0.0, 1.0), axis=-1)


def calibrated_confidence(confidence_logits: jax.Array, temperatures: jax.Array | None) -> jax.Array:
    """Return sigmoid(confidence_logits / temperatures), float32 [B, S]; None means temperatures of 1."""
    if temperatures is None:
        return jax.nn.sigmoid(confidence_logits)
    S = confidence_logits.shape[-1]
    if temperatures.shape[0] < S:
        raise invalid("calibration.temperatures", temperatures.shape[0], f"one for each of the {S} draft steps")
    return jax.nn.sigmoid(confidence_logits / temperatures[:S])


def admit(chances: jax.Array, limit: jax.Array, active: jax.Array, costs: CostTable) -> jax.Array:
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
    requests = active.sum()
    tokens = requests + jnp.arange(B * S + 1)
    expected = requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(jnp.maximum(value, 0.0))])
    throughput = expected / costs.seconds_at(tokens)
    grows = (throughput[1:] > throughput[:-1]) & (value >= 0)
    admitted = jnp.cumprod(grows.astype(jnp.int32))
    return jnp.zeros(B, jnp.int32).at[request].add(admitted)


def admit_reference(chances: Any, limit: Any, active: Any, costs: CostTable) -> list[int]:
    """Run algorithm 1 in plain Python, one token after the other: the readable form of `admit`."""
    chances, active = np.asarray(chances, np.float64).tolist(), [bool(flag) for flag in active]
    lengths = [0] * len(chances)
    queue = [
        (-chances[r][j], j, r)
        for r in range(len(chances))
        if active[r]
        for j in range(min(int(limit[r]), len(chances[r])))
    ]
    requests = sum(active)
    seconds = np.asarray(costs.seconds_at(np.arange(1 + sum(1 + len(row) for row in chances))), np.float64)
    expected, tokens = float(requests), requests
    for minus_chance, _, r in sorted(queue):
        more = expected - minus_chance
        if more / seconds[tokens + 1] <= expected / seconds[tokens]:
            break
        expected, tokens = more, tokens + 1
        lengths[r] += 1
    return lengths


def _temperatures(calibration: Calibration | None) -> jax.Array | None:
    if calibration is not None and not isinstance(calibration, Calibration):
        raise invalid("calibration", type(calibration).__name__, "a Calibration or None")
    return None if calibration is None else jnp.asarray(calibration.temperatures, jnp.float32)


def _confidence_logits(block: DraftBlock) -> jax.Array:
    if block.confidence_logits is None:
        raise invalid("block.confidence_logits", None, "a drafter with a confidence head")
    return block.confidence_logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefixScheduler:
    """Algorithm 1 as a policy: `scheduler(block, active)` gives the `num_draft` of verify_block. A pytree; see `make`.

    Attributes:
        costs: what a target step costs by its number of tokens.
        temperatures: float32 [>= S] of a calibration, or None.
    """

    costs: CostTable
    temperatures: jax.Array | None = None

    @classmethod
    def make(cls, costs: CostTable, calibration: Calibration | None = None) -> PrefixScheduler:
        """Build a scheduler from a cost table (see CostTable.load, profile_sps) and a calibration."""
        if not isinstance(costs, CostTable):
            raise invalid("costs", type(costs).__name__, "a CostTable")
        return cls(costs, _temperatures(calibration))

    def __call__(self, block: DraftBlock, active: jax.Array | None = None) -> jax.Array:
        """Return how many steps of each block to verify, int32 [B]; one jitted call.

        Args:
            block: a drafted block with confidence logits.
            active: bool [B], requests that take part; None means all.
        """
        return _schedule(self, _confidence_logits(block), block.num_draft, active)


@jax.jit
def _schedule(scheduler: PrefixScheduler, logits: jax.Array, limit: jax.Array, active: jax.Array | None) -> jax.Array:
    active = jnp.ones(logits.shape[0], bool) if active is None else active
    return admit(survival(calibrated_confidence(logits, scheduler.temperatures)), limit, active, scheduler.costs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThresholdPolicy:
    """The static policy: verify a block up to its first step whose survival is below a threshold. A pytree; see `make`.

    Attributes:
        threshold: float32 []; temperatures: float32 [>= S] of a calibration, or None.
    """

    threshold: jax.Array
    temperatures: jax.Array | None = None

    @classmethod
    def make(cls, threshold: float, calibration: Calibration | None = None) -> ThresholdPolicy:
        """Build a policy from a survival threshold in [0, 1] and a calibration."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise invalid("threshold", threshold, "a number from 0 to 1")
        return cls(jnp.asarray(threshold, jnp.float32), _temperatures(calibration))

    def __call__(self, block: DraftBlock, active: jax.Array | None = None) -> jax.Array:
        """Return how many steps of each block to verify, int32 [B]; 0 for requests that are not active."""
        length = _threshold_length(self, _confidence_logits(block), block.num_draft)
        return length if active is None else jnp.where(active, length, 0)


@jax.jit
def _threshold_length(policy: ThresholdPolicy, logits: jax.Array, limit: jax.Array) -> jax.Array:
    chances = survival(calibrated_confidence(logits, policy.temperatures))
    length = jnp.sum(lax.cumprod((chances >= policy.threshold).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return jnp.minimum(length, limit)
