"""The two distributions that verification compares: the target's p, and the q that a block's tokens were drawn from.

Both answer the same two questions, and neither holds a normalised copy of its rows:

    at(tokens)   probabilities of one token for each step         [B, S]
    row(step)    the whole distribution of one step per request   [B, V]
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from ..noise import choose, is_greedy
from ..types import (
    CandidateIds,
    CandidateLogits,
    Confidence,
    DraftBlock,
    DraftSampling,
    RequestFloats,
    RequestInts,
    RequestRows,
    StepLogits,
    TargetLogits,
    Tokens,
)
from .filter import RowSummary, TargetFilter, log_prob, summarise, temper


@dataclasses.dataclass(frozen=True)
class TargetDistribution:
    """The processed target: filtered rows at a temperature, one-hot in greedy requests.

    Attributes:
        logits: [B, R, V]; allowed: bool [B, 1 or R, V] or None; temperature: float32 [B].
        rows: summaries of the rows, fields [B, R, 1]; best: int32 [B, R], the largest allowed logit's token.
    """

    logits: TargetLogits
    allowed: Bool[Array, " B #R V"] | None
    temperature: RequestFloats
    rows: RowSummary
    best: Int32[Array, "B R"]

    @classmethod
    def of(
        cls, logits: TargetLogits, temperature: RequestFloats, target_filter: TargetFilter | None
    ) -> TargetDistribution:
        """Process rows [B, R, V] (any float dtype) in the order: allowed tokens, temperature, min-p, top-k, top-p."""
        allowed = None
        if target_filter is not None:
            allowed = target_filter.allowed
            allowed = allowed[:, None] if allowed is not None and allowed.ndim == 2 else allowed

            def thin(x: RequestFloats | RequestInts | None) -> Array | None:
                return None if x is None else x[:, None, None]

            filters = (target_filter.min_p, target_filter.top_k, target_filter.top_p)
            target_filter = TargetFilter(None, *map(thin, filters))
        values = temper(logits, temperature[:, None, None], allowed)
        best = choose(values.reshape(-1, values.shape[-1])).reshape(values.shape[:-1])
        return cls(logits, allowed, temperature, summarise(values, target_filter), best)

    def log_at(self, tokens: Tokens) -> Confidence:
        """Return log p of tokens int32 [B, S] at rows 0 to S-1, float32 [B, S]; -inf for ids outside [0, V)."""
        B, S = tokens.shape
        V = self.logits.shape[-1]
        inside = (tokens >= 0) & (tokens < V)
        ids = jnp.where(inside, tokens, 0)[..., None]
        allowed = self.allowed
        if allowed is not None:
            allowed = jnp.take_along_axis(jnp.broadcast_to(allowed, (B, allowed.shape[1], V))[:, :S], ids, axis=2)
        logits = jnp.take_along_axis(self.logits[:, :S], ids, axis=2)
        values = temper(logits, self.temperature[:, None, None], allowed)
        log_p = log_prob(values, jax.tree.map(lambda x: x[:, :S], self.rows))[..., 0]
        one_hot = jnp.where(tokens == self.best[:, :S], 0.0, -jnp.inf)
        log_p = jnp.where(is_greedy(self.temperature)[:, None], one_hot, log_p)
        return jnp.where(inside, log_p, -jnp.inf)

    def log_row(self, step: RequestInts) -> RequestRows:
        """Return the log-probabilities of one row for each request, step int32 [B]: float32 [B, V]."""
        pick = partial(_row_of, step=step)
        allowed = self.allowed
        if allowed is not None:
            allowed = allowed[:, 0] if allowed.shape[1] == 1 else pick(allowed)
        values = temper(pick(self.logits), self.temperature[:, None], allowed)
        one_hot = jnp.arange(values.shape[1])[None] == pick(self.best)[:, None]
        log_p = log_prob(values, jax.tree.map(pick, self.rows))
        return jnp.where(is_greedy(self.temperature)[:, None], jnp.where(one_hot, 0.0, -jnp.inf), log_p)


@dataclasses.dataclass(frozen=True)
class OneHotDraft:
    """q of a greedy block: all mass on each drafted token. tokens: int32 [B, S]; V: size of a row."""

    tokens: Tokens
    V: int

    def at(self, tokens: Tokens) -> Confidence:
        """Return q of the block's own tokens: ones [B, S]."""
        return jnp.ones(tokens.shape, jnp.float32)

    def row(self, step: RequestInts) -> RequestRows:
        """Return the one-hot rows of a step per request, float32 [B, V]."""
        return (jnp.arange(self.V)[None] == _row_of(self.tokens, step)[:, None]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class DenseDraft:
    """q = softmax(logits / T) over rows of the target vocabulary, logits [S, B, V]; one-hot where T is below 1e-5."""

    one_hot: OneHotDraft
    logits: StepLogits
    temperature: RequestFloats

    def at(self, tokens: Tokens) -> Confidence:
        """Return q of the block's tokens int32 [B, S], float32 [B, S]."""
        ids = jnp.clip(tokens, 0, self.logits.shape[-1] - 1).T[..., None]
        values = temper(jnp.take_along_axis(self.logits, ids, axis=2), self.temperature[None, :, None])
        q = jnp.exp(log_prob(values, self._rows()))[..., 0].T
        return jnp.where(is_greedy(self.temperature)[:, None], self.one_hot.at(tokens), q)

    def row(self, step: RequestInts) -> RequestRows:
        """Return the rows of a step per request, float32 [B, V]."""
        pick = partial(_slab_of, step=step)
        values = temper(pick(self.logits), self.temperature[:, None])
        q = jnp.exp(log_prob(values, jax.tree.map(pick, self._rows())))
        return jnp.where(is_greedy(self.temperature)[:, None], self.one_hot.row(step), q)

    def _rows(self) -> RowSummary:
        return summarise(temper(self.logits, self.temperature[None, :, None]))


@dataclasses.dataclass(frozen=True)
class CandidateDraft:
    """q over k candidates, zero elsewhere: ids int32 [S, B, k] (distinct in a row), logits [S, B, k]."""

    one_hot: OneHotDraft
    ids: CandidateIds
    logits: CandidateLogits
    temperature: RequestFloats

    def at(self, tokens: Tokens) -> Confidence:
        """Return q of the block's tokens int32 [B, S], float32 [B, S]; 0 for a token that is no candidate."""
        q = jnp.where(self.ids == tokens.T[..., None], self._prob(), 0.0).sum(axis=-1).T
        return jnp.where(is_greedy(self.temperature)[:, None], self.one_hot.at(tokens), q)

    def row(self, step: RequestInts) -> RequestRows:
        """Return the rows of a step per request, float32 [B, V]: the only place where candidates meet V columns."""
        ids, q = _slab_of(self.ids, step), _slab_of(self._prob(), step)
        B = ids.shape[0]
        wide = jnp.zeros((B, self.one_hot.V), jnp.float32).at[jnp.arange(B)[:, None], ids].add(q, mode="drop")
        return jnp.where(is_greedy(self.temperature)[:, None], self.one_hot.row(step), wide)

    def _prob(self) -> Float32[Array, "S B k"]:
        values = temper(self.logits, self.temperature[None, :, None])
        return jnp.exp(log_prob(values, summarise(values)))


Draft = OneHotDraft | DenseDraft | CandidateDraft


def draft_distribution(block: DraftBlock, draw: DraftSampling, V: int, *, target_only: bool) -> Draft:
    """Return the q of a block; with `target_only` the one-hot q, which is right for a token from any distribution."""
    one_hot = OneHotDraft(block.tokens, V)
    if target_only or block.method == "greedy":
        return one_hot
    if block.candidate_ids is not None and block.candidate_logits is not None:
        return CandidateDraft(one_hot, block.candidate_ids, block.candidate_logits, draw.temperature)
    assert block.logits is not None
    return DenseDraft(one_hot, block.logits, draw.temperature)


def _row_of(x: Shaped[Array, "B R *n"], step: RequestInts) -> Shaped[Array, " B *n"]:
    """Return x[b, step[b]] of batch-major x [B, R, ...]: [B, ...]."""
    return x[jnp.arange(x.shape[0]), step]


def _slab_of(x: Shaped[Array, "S B *n"], step: RequestInts) -> Shaped[Array, " B *n"]:
    """Return x[step[b], b] of step-major x [S, B, ...]: [B, ...]."""
    return x[step, jnp.arange(x.shape[1])]
