"""What is known of a part of a row, and how parts combine: the token choice of kernels that see a row in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32

from ..types import Floats, Index, RequestFlags, RequestInts

Block = Float32[Array, "b m"]  # m columns of b rows
BlockIds = Int32[Array, "b m"]


class Score(NamedTuple):
    """How rows are scored, relative to a maximum that a block alone cannot know.

    Attributes:
        of: (rows float32 [b, m], ids int32 [b, m], step, sampling, maxima [b, 1] of these rows) -> scores float32
            [b, m], relative to the maxima; sampling is a pytree of leaves [b].
        inverse_temperature: sampling -> [b], by how much scores rise for each unit by which the maximum they are
            relative to falls.
    """

    of: Callable[[Block, BlockIds, Index, Any, Float32[Array, "b 1"]], Block]
    inverse_temperature: Callable[[Any], Floats]


NO_ID = (1 << 29) - 1  # ids share a word with two flags


class Summary(NamedTuple):
    """What is known of some columns of rows [b]: their maximum, the best score relative to it, its id, and flags.

    flags = 2 * (holds NaN) + (holds something finite). The maximum is 0 where scores are the values themselves.
    """

    maximum: Floats
    score: Floats
    id: Int[Array, "..."]
    flags: Int[Array, "..."]


def summarize(
    x: Block, ids: Int32[Array, "#b m"], counted: Bool[Array, "#b m"], step: Index, sampling: Any, score: Score | None
) -> Summary:
    """Reduce rows [b, m] to their summary.

    Scores of NaN count as -inf; among equals the lowest id wins; columns that are not `counted` count for nothing.
    """
    ids = jnp.broadcast_to(ids, x.shape)
    x = jnp.where(counted, x, -jnp.inf)
    maximum = jnp.zeros(x.shape[:1], jnp.float32)
    if score is not None:
        maximum = jnp.max(jnp.where(x == x, x, -jnp.inf), axis=1)
    scores = x if score is None else score.of(x, ids, step, sampling, maximum[:, None])
    scores = jnp.where(counted & (scores == scores), scores, -jnp.inf)
    top = jnp.max(scores, axis=1)
    lowest = jnp.min(jnp.where(counted & (scores == top[:, None]), ids, NO_ID), axis=1)
    finite = jnp.max((counted & (jnp.abs(x) < jnp.inf)).astype(jnp.int32), axis=1)
    broken = jnp.max((counted & (x != x)).astype(jnp.int32), axis=1)
    return Summary(maximum, top, lowest, 2 * broken + finite)


def nothing() -> Summary:
    """Return the summary of no columns."""
    return Summary(jnp.float32(-jnp.inf), jnp.float32(-jnp.inf), jnp.int32(NO_ID), jnp.int32(0))


def relative_to(maximum: Floats, score: Floats, common: Floats, inverse_temperature: Floats) -> Floats:
    """Bring scores that are relative to `maximum` to a common, larger one."""
    # Equal infinities differ by nothing, and nothing times infinity is nothing here.
    unchanged = (maximum == common) | (inverse_temperature == 0)
    return score + jnp.where(unchanged, 0.0, (maximum - common) * inverse_temperature)


def better(a: tuple, b: tuple) -> tuple:
    """Combine (score, id, flags) of two parts: the higher score, then the lower id; flags of both."""
    (score_a, id_a, flags_a), (score_b, id_b, flags_b) = a, b
    take_b = (score_b > score_a) | ((score_b == score_a) & (id_b < id_a))
    return jnp.maximum(score_a, score_b), jnp.where(take_b, id_b, id_a), flags_a | flags_b


def merge(a: Summary, b: Summary, inverse_temperature: Floats | None) -> Summary:
    """Combine the summaries of two parts of a row; None for the slope where scores are the values themselves."""
    if inverse_temperature is None:
        return Summary(a.maximum, *better(a[1:], b[1:]))
    common = jnp.maximum(a.maximum, b.maximum)
    slope = inverse_temperature
    parts = [(relative_to(part.maximum, part.score, common, slope), part.id, part.flags) for part in (a, b)]
    return Summary(common, *better(*parts))


def best_of_blocks(blocks: Summary, inverse_temperature: Floats | None = None) -> tuple[RequestInts, RequestFlags]:
    """Reduce the summaries [blocks, B] of a row's blocks to (token [B], valid [B]), in one reduction."""
    # Id and flags are what the kernel wrote: anything computed from them first would be written out again.
    low, flag = jnp.float32(-jnp.inf), jnp.zeros((), blocks.flags.dtype)
    if inverse_temperature is None:
        _, token, flags = lax.reduce((*blocks[1:],), (low, jnp.int32(NO_ID), flag), better, (0,))
        return token, flags == 1

    def combine(a: tuple, b: tuple) -> tuple:
        slope = jnp.maximum(a[-1], b[-1])  # one of them, where the other is the reduction's start
        return (*merge(Summary(*a[:-1]), Summary(*b[:-1]), slope), slope)

    operands = (*blocks, jnp.broadcast_to(inverse_temperature, blocks.score.shape))
    _, _, token, flags, _ = lax.reduce(operands, (low, low, jnp.int32(NO_ID), flag, jnp.float32(0)), combine, (0,))
    return token, flags == 1
