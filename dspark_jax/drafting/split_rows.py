"""Rows whose vocabulary is split over the devices of one mesh axis: what the scan asks of rows, and what is exchanged.

Each device corrects and scores the columns that it owns. A step then exchanges, per request, the row's maximum (sampled
drafts score relative to it) and one triple (best score, its target id, flags): a few numbers, whatever V is. Rows of
markov_w2 never travel. All functions here run inside shard_map (sharding/run.py).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from .. import noise
from ..types import (
    CandidateIds,
    CandidateLogits,
    DraftLogits,
    DraftSampling,
    Index,
    Latents,
    MarkovW2,
    RequestFlags,
    RequestInts,
    RequestRows,
    RowIds,
    StepRows,
    TargetIds,
)
from .candidates import select
from .heads import bias_at
from .rows import CandidateRows, DenseRows, draw_scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitDenseRows(DenseRows):
    """This device's columns of rows over the whole draft vocabulary.

    Attributes:
        base: [S, B, width], base logits of the device's columns.
        target_ids: int32 [width], ascending target ids of those columns; None where columns are target ids.
        live: global columns from here on are padding; None for all.
        axis: the mesh axis that splits the columns.
    """

    axis: str = dataclasses.field(default="", metadata={"static": True})

    def columns(self) -> RowIds:
        """Return the global columns that this device owns, int32 [1, width]."""
        width = self.base.shape[-1]
        return (lax.axis_index(self.axis) * width + jnp.arange(width, dtype=jnp.int32))[None]

    def mask(self, logits: RequestRows) -> RequestRows:
        """Set padding columns of a corrected row [B, width] to -inf."""
        return logits if self.live is None else jnp.where(self.columns() < self.live, logits, -jnp.inf)

    def choose(
        self, logits: RequestRows, sampling: DraftSampling | None, step: Index
    ) -> tuple[RequestInts, RequestFlags]:
        """Return the drafted target ids int32 [B] of corrected rows float32 [B, width], and which rows are valid."""
        ids = self.columns() if self.target_ids is None else self.target_ids[None]
        ids = jnp.broadcast_to(ids, logits.shape)
        return _choose(logits, ids, sampling, step, self.axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitCandidateRows(CandidateRows):
    """All candidates, of which this device owns those whose rows of markov_w2 it holds.

    Attributes:
        base, draft_ids, target_ids: [S, B, k], the same on all devices of the axis.
        axis: the mesh axis that splits the columns; width: columns of the draft vocabulary per device.
    """

    axis: str = dataclasses.field(default="", metadata={"static": True})
    width: int = dataclasses.field(default=0, metadata={"static": True})

    def bias(self, latent: Latents, markov_w2: MarkovW2, step: Index) -> RequestRows:
        """Return the bias of the step's candidates that this device owns, float32 [B, k]; others' are arbitrary."""
        local = self.draft_ids[step] - lax.axis_index(self.axis) * self.width
        return bias_at(latent, markov_w2, jnp.clip(local, 0, self.width - 1))

    def choose(
        self, logits: RequestRows, sampling: DraftSampling | None, step: Index
    ) -> tuple[RequestInts, RequestFlags]:
        """Return the drafted target ids int32 [B] of corrected rows float32 [B, k], and which rows are valid."""
        logits = jnp.where(self._owned()[step], logits, -jnp.inf)
        return _choose(logits, self.target_ids[step], sampling, step, self.axis)

    def whole(self, corrected: StepRows) -> StepRows:
        """Return the corrected logits [S, B, k] of all owners, the same on every device: one sum at the end."""
        owned = jnp.where(self._owned(), corrected.astype(jnp.float32), 0.0)
        return lax.psum(owned, self.axis).astype(corrected.dtype)

    def _owned(self) -> Bool[Array, "S B k"]:
        return self.draft_ids // self.width == lax.axis_index(self.axis)


def _choose(
    logits: RequestRows, ids: RowIds, sampling: DraftSampling | None, step: Index, axis: str
) -> tuple[RequestInts, RequestFlags]:
    """Choose among all devices' columns: logits float32 [B, n] with target ids int32 [B, n] of this one."""
    score = logits
    if sampling is not None:
        top = lax.pmax(jnp.max(logits, axis=1, keepdims=True), axis)
        held, step = lax.optimization_barrier((sampling, step))
        score = draw_scores(logits, ids, step, held, top)
    slot = noise.choose(score, ids)[:, None]
    best, chosen = (jnp.take_along_axis(x, slot, axis=1)[:, 0] for x in (score, ids))
    flags = jnp.isfinite(logits).any(axis=1).astype(jnp.int32) + 2 * jnp.isnan(logits).any(axis=1).astype(jnp.int32)
    triples = lax.all_gather(jnp.stack([lax.bitcast_convert_type(best, jnp.int32), chosen, flags]), axis)
    scores, theirs, flags = (triples[:, n].T for n in range(3))  # [B, devices]
    slot = noise.choose(lax.bitcast_convert_type(scores, jnp.float32), theirs)[:, None]
    valid = (flags & 1 == 1).any(axis=1) & ~(flags & 2 == 2).any(axis=1)
    return jnp.take_along_axis(theirs, slot, axis=1)[:, 0], valid


def select_split(
    base: DraftLogits, k: int, axis: str, *, implementation: str | None
) -> tuple[CandidateLogits, CandidateIds]:
    """Return the k largest base logits over all devices' columns [S, B, width] and their global columns, as `select`.

    Each device selects min(k, width) of its own; the pairs, 8 bytes each, are gathered and the best k of them kept.
    """
    width = base.shape[-1]
    values, ids = select(base, min(k, width), implementation=implementation)
    ids = ids + lax.axis_index(axis) * width
    values, ids = (lax.all_gather(x, axis, axis=2, tiled=True) for x in (values, ids))
    # Devices lie in the order of their columns, so places order equal values as ids do.
    values, places = select(values, k, implementation=implementation)
    return values, jnp.take_along_axis(ids, places, axis=2)


def own_part(table: TargetIds | None, width: int, axis: str) -> Int32[Array, " n"] | None:
    """Return the target ids int32 [width] of this device's columns."""
    return None if table is None else lax.dynamic_slice_in_dim(table, lax.axis_index(axis) * width, width)
