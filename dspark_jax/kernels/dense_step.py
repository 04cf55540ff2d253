"""One dense draft step in one pass: product, addition, rounding, store and the choice of the token.

    e[b]       = latents[prev[b]]                      zeros where prev is outside the table
    row[b, :]  = round(base[step, b, :] + e[b] @ w2.T)     f32 sum, rounded once to the dtype of the rows
    token[b]   = the id with the largest score; valid[b] = no NaN and something finite in the row

The kernel reads w2 once for all requests, its slab of base, and writes the slab in place in the whole [S, B, n] buffer
(a kernel called on a slice of it would be given a copy) and per block of columns one score, id and flags;
`best_of_blocks` reduces those. It knows of no head and no generator: `latents` is any table with a row per previous
token (markov_w1 for a vanilla head; the [B, r] latents with prev = arange(B) for others), `score` turns rows into what
is maximised. The plain form and reference is steps.in_xla.

S steps, B requests, n columns (draft ids), r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .dispatch import WHOLE, load, pallas_call, power_of_two, rounded, store


class Score(NamedTuple):
    """How rows are scored, relative to a maximum that a block alone cannot know.

    Attributes:
        of: (rows float32 [b, m], ids int32 [b, m], step, draw, maxima [b, 1] of these rows) -> scores float32 [b, m],
            relative to the maxima; draw is a pytree of leaves [b].
        rate: draw -> [b], by how much scores rise for each unit by which the maximum they are relative to falls.
    """

    of: Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], jax.Array]
    rate: Callable[[Any], jax.Array]


NO_ID = (1 << 29) - 1  # ids share a word with two flags
RANK_CHUNK = 256  # of the product's inner axis at a time
BATCH_TILE = 64


def dense_step(
    *,
    base: jax.Array,
    rows: jax.Array | None,
    step: jax.Array,
    prev: jax.Array,
    latents: jax.Array,
    w2: jax.Array,
    keep: bool,
    dtype: Any,
    live: int | None = None,
    target_ids: jax.Array | None = None,
    draw: Any = None,
    score: Score | None = None,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Correct rows[step] and choose a token per request.

    Args:
        base: [S, B, n] base logits.
        rows: [S, B, n] of `dtype` to write to, or None to write into base itself (which must have `dtype`).
        step: int32 [], the slab; prev: int32 [B], row of `latents` for each request.
        latents: [m, r] and w2: [n, r], of one dtype.
        keep: whether the corrected rows are written at all.
        dtype: what corrected values are rounded to.
        live: columns from here on never win and count for nothing (they are written as -inf); None for all.
        target_ids: int32 [n], ascending ids that columns stand for; None where they are the columns.
        draw, score: per-request leaves [B] and the function that scores with them.

    Returns:
        The written buffer (None unless keep), tokens int32 [B] (target ids), valid bool [B].
    """
    S, B, n = base.shape
    r = w2.shape[1]
    live = n if live is None else live
    block = 128 if w2.dtype.itemsize == 2 else 64
    blocks = pl.cdiv(n, block)
    tile = min(BATCH_TILE, power_of_two(B, 16))
    leaves, tree = jax.tree.flatten(draw)
    in_place = keep and rows is None
    operands = [jnp.asarray(step, jnp.int32)[None], prev, latents, w2, base, *leaves]
    if target_ids is not None:
        operands.append(target_ids)
    if keep and rows is not None:
        operands.append(rows)

    def kernel(*refs):
        inputs, outputs = refs[: len(operands)], refs[len(operands) :]
        step_ref, prev_ref, latent_ref, w2_ref, base_ref, *rest = inputs
        *maximum_ref, top_ref, id_ref, flag_ref = outputs[1:] if keep else outputs
        j, s = pl.program_id(0), step_ref[0]
        column = j * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
        inside = column < n
        ids = column if target_ids is None else load(rest[len(leaves)], (column,), inside, NO_ID)
        chunk = min(RANK_CHUNK, power_of_two(r, 16))
        parts = [q * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0) for q in range(pl.cdiv(r, chunk))]
        weights = [load(w2_ref, (column[:, None], p[None, :]), inside[:, None] & (p < r)[None, :], 0) for p in parts]

        def one_tile(i, _):
            b = i * tile + lax.broadcasted_iota(jnp.int32, (tile,), 0)
            row = load(prev_ref, (b,), b < B, -1)
            known = (row >= 0) & (row < latents.shape[0])
            mask = (b < B)[:, None] & inside[None, :]
            place = (s, b[:, None], column[None, :])
            x = load(base_ref, place, mask, 0).astype(jnp.float32)
            for p, weight in zip(parts, weights, strict=True):
                e = load(latent_ref, (row[:, None], p[None, :]), known[:, None] & (p < r)[None, :], 0)
                precision = lax.Precision.HIGHEST if w2.dtype == jnp.float32 else None
                x += jnp.dot(e, weight.T, preferred_element_type=jnp.float32, precision=precision)
            x = jnp.where((column < live)[None, :], rounded(x, dtype, interpret), -jnp.inf)
            if keep:
                store(outputs[0], place, x.astype(dtype), mask)
            drawn = jax.tree.unflatten(tree, [load(ref, (b,), b < B, 0) for ref in rest[: len(leaves)]])
            found = summarize(x, ids[None, :], (column < live)[None, :], s, drawn, score)
            for ref in maximum_ref:
                store(ref, (j, b), found.maximum, b < B)
            store(top_ref, (j, b), found.score, b < B)
            store(id_ref, (j, b), found.id, b < B)
            store(flag_ref, (j, b), found.flags.astype(jnp.int8), b < B)

        lax.fori_loop(0, pl.cdiv(B, tile), one_tile, None)

    kinds = [jnp.float32] * (1 if score is None else 2) + [jnp.int32, jnp.int8]
    summary = [jax.ShapeDtypeStruct((blocks, B), kind) for kind in kinds]
    written = [jax.ShapeDtypeStruct((S, B, n), dtype)] if keep else []
    aliases = {4 if in_place else len(operands) - 1: 0} if keep else {}
    results = pallas_call(
        kernel, name="dspark_dense_step", interpret=interpret, grid=(blocks,), num_warps=4 if tile < 64 else 8,
        in_specs=[WHOLE] * len(operands), out_specs=[WHOLE] * len(written + summary), out_shape=written + summary,
        input_output_aliases=aliases,
    )(*operands)  # fmt: skip
    buffer, blocks = results[: len(written)], results[len(written) :]
    if score is None:
        blocks = [jnp.zeros((), jnp.float32), *blocks]
    tokens, valid = best_of_blocks(Summary(*blocks), None if score is None else score.rate(draw))
    return (buffer[0] if keep else None), tokens, valid


class Summary(NamedTuple):
    """What is known of some columns of rows [b]: their maximum, the best score relative to it, its id, and flags.

    flags = 2 * (holds NaN) + (holds something finite). The maximum is 0 where scores are the values themselves.
    """

    maximum: jax.Array
    score: jax.Array
    id: jax.Array
    flags: jax.Array


def summarize(
    x: jax.Array, ids: jax.Array, counted: jax.Array, step: jax.Array, draw: Any, score: Score | None
) -> Summary:
    """Reduce rows [b, m] to their summary.

    Scores of NaN count as -inf; among equals the lowest id wins; columns that are not `counted` count for nothing.
    """
    ids = jnp.broadcast_to(ids, x.shape)
    x = jnp.where(counted, x, -jnp.inf)
    maximum = jnp.zeros(x.shape[:1], jnp.float32)
    if score is not None:
        maximum = jnp.max(jnp.where(x == x, x, -jnp.inf), axis=1)
    scores = x if score is None else score.of(x, ids, step, draw, maximum[:, None])
    scores = jnp.where(counted & (scores == scores), scores, -jnp.inf)
    top = jnp.max(scores, axis=1)
    lowest = jnp.min(jnp.where(counted & (scores == top[:, None]), ids, NO_ID), axis=1)
    finite = jnp.max((counted & (jnp.abs(x) < jnp.inf)).astype(jnp.int32), axis=1)
    broken = jnp.max((counted & (x != x)).astype(jnp.int32), axis=1)
    return Summary(maximum, top, lowest, 2 * broken + finite)


def nothing() -> Summary:
    """Return the summary of no columns."""
    return Summary(jnp.float32(-jnp.inf), jnp.float32(-jnp.inf), jnp.int32(NO_ID), jnp.int32(0))


def relative_to(maximum: jax.Array, score: jax.Array, common: jax.Array, rate: jax.Array) -> jax.Array:
    """Bring scores that are relative to `maximum` to a common, larger one."""
    # Equal infinities differ by nothing, and nothing times infinity is nothing here.
    return score + jnp.where((maximum == common) | (rate == 0), 0.0, (maximum - common) * rate)


def better(a: tuple, b: tuple) -> tuple:
    """Combine (score, id, flags) of two parts: the higher score, then the lower id; flags of both."""
    (score_a, id_a, flags_a), (score_b, id_b, flags_b) = a, b
    take_b = (score_b > score_a) | ((score_b == score_a) & (id_b < id_a))
    return jnp.maximum(score_a, score_b), jnp.where(take_b, id_b, id_a), flags_a | flags_b


def merge(a: Summary, b: Summary, rate: jax.Array | None) -> Summary:
    """Combine the summaries of two parts of a row; rate is None where scores are the values themselves."""
    if rate is None:
        return Summary(a.maximum, *better(a[1:], b[1:]))
    common = jnp.maximum(a.maximum, b.maximum)
    parts = [(relative_to(part.maximum, part.score, common, rate), part.id, part.flags) for part in (a, b)]
    return Summary(common, *better(*parts))


def best_of_blocks(blocks: Summary, rate: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Reduce the summaries [blocks, B] of a row's blocks to (token [B], valid [B]), in one reduction."""
    # Id and flags are what the kernel wrote: anything computed from them first would be written out again.
    low, flag = jnp.float32(-jnp.inf), jnp.zeros((), blocks.flags.dtype)
    if rate is None:
        _, token, flags = lax.reduce((*blocks[1:],), (low, jnp.int32(NO_ID), flag), better, (0,))
        return token, flags == 1

    def combine(a: tuple, b: tuple) -> tuple:
        rate = jnp.maximum(a[-1], b[-1])  # one of them, where the other is the reduction's start
        return (*merge(Summary(*a[:-1]), Summary(*b[:-1]), rate), rate)

    operands = (*blocks, jnp.broadcast_to(rate, blocks.score.shape))
    _, _, token, flags, _ = lax.reduce(operands, (low, low, jnp.int32(NO_ID), flag, jnp.float32(0)), combine, (0,))
    return token, flags == 1
