"""Policies of how much of a block to verify, as pytrees that the decoding loop calls inside its round."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ..checks import invalid
from ..types import Confidence, DraftBlock, RequestFlags, RequestInts, Scalar
from .calibration import Calibration
from .costs import CostTable
from .schedule import Temperatures, admit, calibrated_confidence, survival


def _temperatures(calibration: Calibration | None) -> Temperatures | None:
    if calibration is not None and not isinstance(calibration, Calibration):
        raise invalid("calibration", type(calibration).__name__, "a Calibration or None")
    return None if calibration is None else jnp.asarray(calibration.temperatures, jnp.float32)


def _confidence_logits(block: DraftBlock) -> Confidence:
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
    temperatures: Temperatures | None = None

    @classmethod
    def make(cls, costs: CostTable, calibration: Calibration | None = None) -> PrefixScheduler:
        """Build a scheduler from a cost table (see CostTable.load, profile_sps) and a calibration."""
        if not isinstance(costs, CostTable):
            raise invalid("costs", type(costs).__name__, "a CostTable")
        return cls(costs, _temperatures(calibration))

    def __call__(self, block: DraftBlock, active: RequestFlags | None = None) -> RequestInts:
        """Return how many steps of each block to verify, int32 [B]; one jitted call.

        Args:
            block: a drafted block with confidence logits.
            active: bool [B], requests that take part; None means all.
        """
        return _schedule(self, _confidence_logits(block), block.num_draft, active)


@jax.jit
def _schedule(
    scheduler: PrefixScheduler, logits: Confidence, limit: RequestInts, active: RequestFlags | None
) -> RequestInts:
    active = jnp.ones(logits.shape[0], bool) if active is None else active
    return admit(survival(calibrated_confidence(logits, scheduler.temperatures)), limit, active, scheduler.costs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThresholdPolicy:
    """The static policy: verify a block up to its first step whose survival is below a threshold. A pytree; see `make`.

    Attributes:
        threshold: float32 []; temperatures: float32 [>= S] of a calibration, or None.
    """

    threshold: Scalar
    temperatures: Temperatures | None = None

    @classmethod
    def make(cls, threshold: float, calibration: Calibration | None = None) -> ThresholdPolicy:
        """Build a policy from a survival threshold in [0, 1] and a calibration."""
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise invalid("threshold", threshold, "a number from 0 to 1")
        return cls(jnp.asarray(threshold, jnp.float32), _temperatures(calibration))

    def __call__(self, block: DraftBlock, active: RequestFlags | None = None) -> RequestInts:
        """Return how many steps of each block to verify, int32 [B]; 0 for requests that are not active."""
        length = _threshold_length(self, _confidence_logits(block), block.num_draft)
        return length if active is None else jnp.where(active, length, 0)


@jax.jit
def _threshold_length(policy: ThresholdPolicy, logits: Confidence, limit: RequestInts) -> RequestInts:
    chances = survival(calibrated_confidence(logits, policy.temperatures))
    length = jnp.sum(lax.cumprod((chances >= policy.threshold).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return jnp.minimum(length, limit)
