"""What a step's tokens are drawn from: whole rows of the draft vocabulary, or rows of candidates.

Both kinds offer the scan the same four things: the base logits of a step, the bias of its columns, which columns count,
and the choice of a token with the row's validity. Steps S, requests B, columns n (Vd of a dense row, k candidates).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from .. import noise
from ..types import (
    CandidateIds,
    CandidateLogits,
    DraftLogits,
    DraftSampling,
    Floats,
    Index,
    Latents,
    MarkovW2,
    RequestFlags,
    RequestInts,
    RequestRows,
    TargetIds,
)
from .heads import bias, bias_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseRows:
    """Rows over the whole draft vocabulary.

    Attributes:
        base: [S, B, Vd], base logits.
        target_ids: int32 [Vd], ascending target ids of the columns; None where columns are target ids.
        live: columns from here on are padding and never win; None for all.
    """

    base: DraftLogits
    target_ids: TargetIds | None = None
    live: int | None = dataclasses.field(default=None, metadata={"static": True})

    def bias(self, latent: Latents, markov_w2: MarkovW2, step: Index) -> RequestRows:
        """Return the bias of every column, float32 [B, Vd], from latent [B, r]."""
        del step
        return bias(latent, markov_w2)

    def mask(self, logits: RequestRows) -> RequestRows:
        """Set padding columns of a corrected row [B, Vd] to -inf."""
        if self.live is None:
            return logits
        column = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        return jnp.where(column < self.live, logits, -jnp.inf)

    def choose(
        self, logits: RequestRows, sampling: DraftSampling | None, step: Index
    ) -> tuple[RequestInts, RequestFlags]:
        """Return the drafted target ids int32 [B] of corrected rows float32 [B, Vd], and which rows are valid."""
        score = logits
        if sampling is not None:
            # Without the barrier XLA hoists a [B, Vd] part of the generator out of the scan and keeps it.
            held, step = lax.optimization_barrier((sampling, step))
            ids = jnp.arange(logits.shape[1], dtype=jnp.int32) if self.target_ids is None else self.target_ids
            score = draw_scores(logits, ids[None], step, held)
        slot = noise.choose(score)
        return slot if self.target_ids is None else self.target_ids[slot], noise.row_is_valid(logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CandidateRows:
    """Rows over k candidates per step and request.

    Attributes:
        base: [S, B, k], the candidates' base logits.
        draft_ids: int32 [S, B, k], their rows of markov_w2, distinct within a row.
        target_ids: int32 [S, B, k], the target ids they stand for.
    """

    base: CandidateLogits
    draft_ids: CandidateIds
    target_ids: CandidateIds

    def bias(self, latent: Latents, markov_w2: MarkovW2, step: Index) -> RequestRows:
        """Return the bias of the step's candidates, float32 [B, k], from latent [B, r]."""
        return bias_at(latent, markov_w2, self.draft_ids[step])

    def mask(self, logits: RequestRows) -> RequestRows:
        """Return the row: padding is never a candidate."""
        return logits

    def choose(
        self, logits: RequestRows, sampling: DraftSampling | None, step: Index
    ) -> tuple[RequestInts, RequestFlags]:
        """Return the drafted target ids int32 [B] of corrected rows float32 [B, k], and which rows are valid."""
        ids, score = self.target_ids[step], logits
        if sampling is not None:
            held, step = lax.optimization_barrier((sampling, step))
            score = draw_scores(logits, ids, step, held)
        slot = noise.choose(score, ids)
        return jnp.take_along_axis(ids, slot[:, None], axis=1)[:, 0], noise.row_is_valid(logits)


def draw_scores(
    logits: RequestRows,
    ids: Int32[Array, "#B n"],
    step: Index,
    sampling: DraftSampling,
    top: Float32[Array, "B 1"] | None = None,
) -> RequestRows:
    """Return what a draw maximises over rows [B, n] of target ids [B, n] or [1, n]; kernels call it on their blocks."""
    bits = noise.noise_bits(sampling.seed[:, None], sampling.position[:, None], step, noise.DRAFT, ids)
    return noise.scores(logits, sampling.temperature, bits, top)


def inverse_temperature(sampling: DraftSampling) -> Floats:
    """Return 1 / T, 0 for greedy rows: how much scores rise per unit by which the maximum they refer to falls."""
    greedy = noise.is_greedy(sampling.temperature)
    return jnp.where(greedy, 0.0, 1.0 / noise.safe_temperature(sampling.temperature))
