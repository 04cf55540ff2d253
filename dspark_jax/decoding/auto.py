"""num_speculative_tokens="auto": before every round, draft a whole block or decode plainly, whichever pays.

    draft while   tokens per drafted round * seconds of a plain round >= seconds of a drafted round

Seconds are measured once per drafter, batch and options on copies of the state; tokens per round are a running mean
over the rounds that were drafted. Where drafting does not pay, a drafted round now and then (as often as costs
PROBE_COST of the time) finds out whether that changed. A decision reads only what earlier rounds committed, never what
the round itself will draft, so sampled output keeps the target's distribution. It does depend on the machine's speed
and on the neighbours in the batch, since noise is keyed by a block's start: replay `Generated.lengths` for the same
tokens.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import invalid
from ..drafting.drafter import Drafter
from ..transformer.backbone import Backbone
from ..transformer.target import Target
from ..types import Scalar
from . import loop
from .state import DecodeState, LoopOptions

PROBE_COST = 0.01  # share of plain decoding's speed that probing may cost
MEMORY = 0.1  # weight of a new round in the running mean, once ten rounds are in
TIMED = 3  # rounds of each kind that are timed; the fastest counts


@dataclasses.dataclass
class Pace:
    """What is known of a pair of models: seconds of a plain and of a drafted round, and tokens per drafted round."""

    plain: float
    drafted: float
    tokens: float
    rounds: int = 0

    @property
    def pays(self) -> bool:
        """Whether drafting is at least as fast as plain decoding."""
        return self.tokens * self.plain >= self.drafted

    @property
    def probe_every(self) -> float:
        """Plain rounds between two probes: what a probe loses, in plain rounds, over the share that it may cost."""
        return (self.drafted / self.plain - self.tokens) / PROBE_COST

    def record(self, tokens: float) -> None:
        """Add a drafted round's mean of committed tokens."""
        self.rounds += 1
        self.tokens += (tokens - self.tokens) * max(MEMORY, 1 / (self.rounds + 1))


_PACES: weakref.WeakKeyDictionary[Drafter, dict[Any, Pace]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class Pacer:
    """Chooses each round's length: 0 or `steps`, by a Pace, or as recorded.

    Attributes:
        pace: None where `recorded` says it all.
        recorded: lengths of an earlier run, one for each round.
    """

    steps: int
    pace: Pace | None
    recorded: Sequence[int] = ()
    number: int = 0
    plain_since: int = 0

    def next_length(self) -> int:
        """Return the next round's length."""
        self.number += 1
        if self.pace is None:
            if self.number > len(self.recorded):
                raise invalid("num_speculative_tokens", list(self.recorded), f"a length for round {self.number - 1}")
            return self.recorded[self.number - 1]
        if self.pace.pays or self.plain_since >= self.pace.probe_every:
            self.plain_since = 0
            return self.steps
        self.plain_since += 1
        return 0

    def record(self, length: int, committed: np.ndarray, active: np.ndarray) -> None:
        """Take note of what a round committed, int32 [B], in the requests that took part, bool [B]."""
        if length and self.pace is not None:
            self.pace.record(float(committed[active].mean()))


def make_pacer(
    lengths: Any, target: Target, drafter: Drafter, state: DecodeState, threshold: Scalar | None, scheduler: Any,
    options: LoopOptions,
) -> Pacer:  # fmt: skip
    """Return the pacer of "auto", measuring what is not known yet, or of recorded lengths (each 0 or all steps)."""
    assert options.draft is not None
    assert options.draft.num_steps is not None
    steps = options.draft.num_steps
    if not isinstance(lengths, str):
        recorded = [int(n) for n in lengths]
        wrong = [n for n in recorded if n not in (0, steps)]
        if wrong:
            raise invalid("num_speculative_tokens", wrong[0], f"lengths of 0 or {steps}, as Generated.lengths has them")
        return Pacer(steps, None, recorded)
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
    key = (id(target), shapes, options, threshold is None, type(scheduler))
    known = _PACES.setdefault(drafter, {})
    if key not in known:
        draft = partial(loop.speculative_round, target, drafter, options=options)
        drafted = _seconds(lambda copy: draft(copy, threshold, scheduler), state)
        plain = _seconds(lambda copy: loop.plain_round(target, copy, options=options), state)
        # Neutral, so that the first round is drafted and decides.
        known[key] = Pace(plain, drafted, drafted / plain)
    return Pacer(steps, known[key])


def _seconds(step: Any, state: DecodeState) -> float:
    """Return the least seconds of a round after the one that compiles it; the state is copied."""
    copy, found = jax.tree.map(jnp.copy, state), []
    for _ in range(TIMED + 1):
        clock = time.perf_counter()
        copy, done = step(copy)
        jax.block_until_ready((copy, done))
        found.append(time.perf_counter() - clock)
    return min(found[1:])


@partial(jax.jit, donate_argnames=("state",))
def absorb(backbone: Backbone, state: DecodeState) -> DecodeState:
    """Append the pending features to the drafter's context, which then ends where the anchor stands."""
    assert state.context is not None
    assert state.features is not None
    return dataclasses.replace(state, context=backbone.extend(state.context, state.features, state.position))
