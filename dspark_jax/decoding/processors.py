"""Processors of target logits: penalties, biases and masks that depend on what a request has written so far.

A processor is a static object (hashable; a trace belongs to it) with pure functions. They run inside the round, before
temperature and filters, at the prefill, in plain rounds and in speculative ones. Along a draft they are applied
position by position, row s as if the drafted tokens before it were committed, so that speculative output equals plain
output.

R rows: S + 1 of a speculative round, 1 of the prefill and of plain rounds.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ..checks import check_int, invalid
from ..types import Committed, RequestInts, Sequences, TargetLogits

Drafts = Int32[Array, "B S"]
Rows = Int32[Array, " b"]


class LogitsProcessor(abc.ABC):
    """What `generate(processor=...)` takes. The state is a pytree of arrays whose leading axis is the batch."""

    @abc.abstractmethod
    def start(self, prompts: Sequences, vocab_size: int) -> Any:
        """Return the state of new requests; prompts int32 [B, T] padded with -1."""

    @abc.abstractmethod
    def apply(self, state: Any, logits: TargetLogits, drafts: Drafts) -> TargetLogits:
        """Return processed logits [B, R, V]; row s stands behind the committed tokens and drafts[:, :s] (R = S + 1)."""

    @abc.abstractmethod
    def advance(self, state: Any, committed: Committed) -> Any:
        """Return the state behind newly committed tokens int32 [B, R], padded with -1."""

    @abc.abstractmethod
    def reset(self, state: Any, rows: Rows) -> Any:
        """Return the state with rows int32 [b] of the batch as if they had neither prompt nor output."""


def _drafted_before(drafts: Drafts, vocab_size: int) -> Int32[Array, "B R V"]:
    """Count each token among drafts[:, :s] for every row s, int32 [B, S+1, V]; elementwise, so that it fuses."""
    B, S = drafts.shape
    row, ids = jnp.arange(S + 1, dtype=jnp.int32)[None, :, None], jnp.arange(vocab_size, dtype=jnp.int32)[None, None]
    count = jnp.zeros((B, S + 1, vocab_size), jnp.int32)
    for j in range(S):
        count += ((row > j) & (ids == drafts[:, j][:, None, None])).astype(jnp.int32)
    return count


def _count(tokens: Int32[Array, "B n"], vocab_size: int) -> Int32[Array, "B V"]:
    """Count tokens [B, n], of which -1 is padding: int32 [B, V]."""
    rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    where = jnp.where(tokens < 0, vocab_size, tokens)
    return jnp.zeros((tokens.shape[0], vocab_size), jnp.int32).at[rows, where].add(1, mode="drop")


@dataclasses.dataclass(frozen=True)
class Penalties(LogitsProcessor):
    """Presence, frequency and repetition penalties, with the usual meanings.

    Attributes:
        presence: subtracted from the logits of tokens in the output.
        frequency: subtracted once for every time that a token stands in the output.
        repetition: positive logits of tokens in prompt or output are divided by it, negative ones multiplied; 1: none.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("presence", "frequency"):
            if not np.isfinite(getattr(self, name)):
                raise invalid(name, getattr(self, name), "a finite number")
        if not 0 < self.repetition < float("inf"):
            raise invalid("repetition", self.repetition, "a finite number > 0")

    def start(self, prompts: Sequences, vocab_size: int) -> tuple[Bool[Array, "B V"], Int32[Array, "B V"]]:
        """Return (tokens of the prompt, counts of the output)."""
        seen = _count(prompts, vocab_size) > 0
        return seen, jnp.zeros(seen.shape, jnp.int32)

    def apply(self, state: Any, logits: TargetLogits, drafts: Drafts) -> TargetLogits:
        """Repetition first, then frequency and presence."""
        seen, count = state
        count = count[:, None] + _drafted_before(drafts, logits.shape[-1])
        x = logits.astype(jnp.float32)
        repeated = jnp.where(x > 0, x / self.repetition, x * self.repetition)
        x = jnp.where(seen[:, None] | (count > 0), repeated, x)
        return x - self.frequency * count.astype(jnp.float32) - self.presence * (count > 0).astype(jnp.float32)

    def advance(self, state: Any, committed: Committed) -> Any:
        """Count the committed tokens."""
        seen, count = state
        return seen, count + _count(committed, count.shape[1])

    def reset(self, state: Any, rows: Rows) -> Any:
        """Forget."""
        seen, count = state
        return seen.at[rows].set(False), count.at[rows].set(0)


@dataclasses.dataclass(frozen=True)
class LogitBias(LogitsProcessor):
    """Numbers added to the logits of some tokens; -inf forbids them. bias: ((token id, number), ...)."""

    bias: tuple[tuple[int, float], ...]

    def start(self, prompts: Sequences, vocab_size: int) -> Any:
        """Return the empty state."""
        del prompts
        for token, _ in self.bias:
            check_int("bias", token, 0, vocab_size - 1)
        return ()

    def apply(self, state: Any, logits: TargetLogits, drafts: Drafts) -> TargetLogits:
        """Add the biases."""
        del state, drafts
        ids = np.array([token for token, _ in self.bias], np.int32)
        values = np.array([number for _, number in self.bias], np.float32)
        return logits.astype(jnp.float32) + jnp.zeros(logits.shape[-1]).at[ids].add(values)[None, None]

    def advance(self, state: Any, committed: Committed) -> Any:
        """Return the empty state."""
        del committed
        return state

    def reset(self, state: Any, rows: Rows) -> Any:
        """Return the empty state."""
        del rows
        return state


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton(LogitsProcessor):
    """Only tokens that an automaton allows: a grammar or a list of choices, compiled to a table by the caller.

    Attributes:
        transitions: int [Q, V], the next state after each token, -1 where it is forbidden; state 0 is the first. The
            table is a constant of the compiled program.
    """

    transitions: np.ndarray

    def __post_init__(self) -> None:
        """Check the table."""
        table = np.asarray(self.transitions)
        if table.ndim != 2 or table.dtype.kind not in "iu" or table.size == 0:
            raise invalid("transitions", (table.dtype.name, table.shape), "integers [Q, V]")
        if table.min() < -1 or table.max() >= len(table):
            raise invalid("transitions", [int(table.min()), int(table.max())], f"states from -1 to {len(table) - 1}")
        object.__setattr__(self, "transitions", table.astype(np.int32))

    def _next(self, state: RequestInts, token: RequestInts) -> RequestInts:
        """Follow a token [B]; -1 (no token) stays, and so does a request behind a forbidden token."""
        table = jnp.asarray(self.transitions)
        after = table[jnp.maximum(state, 0), jnp.clip(token, 0, table.shape[1] - 1)]
        return jnp.where(token < 0, state, jnp.where(state < 0, state, after))

    def start(self, prompts: Sequences, vocab_size: int) -> RequestInts:
        """Return state 0 for every request, int32 [B]: prompts are not read."""
        if self.transitions.shape[1] != vocab_size:
            raise invalid("transitions.shape[1]", self.transitions.shape[1], f"the vocabulary's size, {vocab_size}")
        return jnp.zeros(prompts.shape[0], jnp.int32)

    def apply(self, state: Any, logits: TargetLogits, drafts: Drafts) -> TargetLogits:
        """Set forbidden tokens to -inf; behind a forbidden draft, which is never kept, the rows stay as they are."""
        states = [state]
        for j in range(drafts.shape[1]):
            states.append(self._next(states[-1], drafts[:, j]))
        at = jnp.stack(states, axis=1)
        allowed = (jnp.asarray(self.transitions) >= 0)[jnp.maximum(at, 0)] | (at < 0)[..., None]
        return jnp.where(allowed, logits.astype(jnp.float32), -jnp.inf)

    def advance(self, state: Any, committed: Committed) -> Any:
        """Follow the committed tokens."""
        for j in range(committed.shape[1]):
            state = self._next(state, committed[:, j])
        return state

    def reset(self, state: Any, rows: Rows) -> Any:
        """Go back to state 0."""
        return state.at[rows].set(0)


@dataclasses.dataclass(frozen=True)
class Chain(LogitsProcessor):
    """Several processors, one after the other."""

    parts: tuple[LogitsProcessor, ...]

    def start(self, prompts: Sequences, vocab_size: int) -> Any:
        """Return the parts' states."""
        return tuple(part.start(prompts, vocab_size) for part in self.parts)

    def apply(self, state: Any, logits: TargetLogits, drafts: Drafts) -> TargetLogits:
        """Apply the parts in order."""
        for part, one in zip(self.parts, state, strict=True):
            logits = part.apply(one, logits, drafts)
        return logits

    def advance(self, state: Any, committed: Committed) -> Any:
        """Advance every part."""
        return tuple(part.advance(one, committed) for part, one in zip(self.parts, state, strict=True))

    def reset(self, state: Any, rows: Rows) -> Any:
        """Reset every part."""
        return tuple(part.reset(one, rows) for part, one in zip(self.parts, state, strict=True))


def raw_logprobs(logits: TargetLogits, tokens: Committed) -> Float32[Array, "B R"]:
    """Return log softmax of unprocessed logits [B, R, V] at committed tokens [B, R]; 0 where there is none (-1)."""
    x = logits.astype(jnp.float32)
    top = jnp.max(x, axis=-1, keepdims=True)
    mass = jnp.log(jnp.sum(jnp.exp(x - top), axis=-1))
    chosen = jnp.take_along_axis(x, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(tokens >= 0, chosen - top[..., 0] - mass, 0.0)
