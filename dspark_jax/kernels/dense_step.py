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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from ..types import Index, RequestFlags, RequestInts, StepRows
from .summary import NO_ID, Score, Summary, best_of_blocks, summarize
from .triton import load, pallas_call, power_of_two, rounded, store

RANK_CHUNK = 256  # of the product's inner axis at a time
BATCH_TILE = 64


def dense_step(
    *,
    base: StepRows,
    out: StepRows | None,
    step: Index,
    prev: RequestInts,
    latents: Float[Array, "m r"],
    w2: Float[Array, "n r"],
    keep: bool,
    dtype: Any,
    live: int | None = None,
    target_ids: Int32[Array, " n"] | None = None,
    sampling: Any = None,
    score: Score | None = None,
    interpret: bool = False,
) -> tuple[StepRows | None, RequestInts, RequestFlags]:
    """Correct the slab base[step] and choose a token per request.

    Args:
        base: [S, B, n] base logits.
        out: [S, B, n] of `dtype` to write to, or None to write into base itself (which must have `dtype`).
        step: int32 [], the slab; prev: int32 [B], row of `latents` for each request.
        latents: [m, r] and w2: [n, r], of one dtype.
        keep: whether the corrected rows are written at all.
        dtype: what corrected values are rounded to.
        live: columns from here on never win and count for nothing (they are written as -inf); None for all.
        target_ids: int32 [n], ascending ids that columns stand for; None where they are the columns.
        sampling, score: a pytree of per-request leaves [B] and the functions that score with them.

    Returns:
        The written buffer (None unless keep), tokens int32 [B] (target ids), valid bool [B].
    """
    S, B, n = base.shape
    r = w2.shape[1]
    live = n if live is None else live
    block = 128 if w2.dtype.itemsize == 2 else 64
    blocks = pl.cdiv(n, block)
    tile = min(BATCH_TILE, power_of_two(B, 16))
    in_place = keep and out is None
    operands = {
        "step": jnp.asarray(step, jnp.int32)[None], "prev": prev, "latents": latents, "w2": w2, "base": base,
        "sampling": sampling, "target_ids": target_ids, "out": out if keep else None,
    }  # fmt: skip

    def kernel(refs: Any, results: Any) -> None:
        j, s = pl.program_id(0), refs["step"][0]
        column = j * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
        inside = column < n
        ids = column if target_ids is None else load(refs["target_ids"], (column,), inside, NO_ID)
        chunk = min(RANK_CHUNK, power_of_two(r, 16))
        parts = [q * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0) for q in range(pl.cdiv(r, chunk))]
        weights = [load(refs["w2"], (column[:, None], p[None]), inside[:, None] & (p < r)[None], 0) for p in parts]

        def one_tile(i: Index | int, _: None) -> None:
            b = i * tile + lax.broadcasted_iota(jnp.int32, (tile,), 0)
            row = load(refs["prev"], (b,), b < B, -1)
            known = (row >= 0) & (row < latents.shape[0])
            mask = (b < B)[:, None] & inside[None, :]
            place = (s, b[:, None], column[None, :])
            x = load(refs["base"], place, mask, 0).astype(jnp.float32)
            for p, weight in zip(parts, weights, strict=True):
                e = load(refs["latents"], (row[:, None], p[None, :]), known[:, None] & (p < r)[None, :], 0)
                precision = lax.Precision.HIGHEST if w2.dtype == jnp.float32 else None
                x += jnp.dot(e, weight.T, preferred_element_type=jnp.float32, precision=precision)
            x = jnp.where((column < live)[None, :], rounded(x, dtype, interpret), -jnp.inf)
            if keep:
                store(results["rows"], place, x.astype(dtype), mask)
            drawn = jax.tree.map(lambda ref: load(ref, (b,), b < B, 0), refs.get("sampling"))
            found = summarize(x, ids[None, :], (column < live)[None, :], s, drawn, score)
            for name, value in zip(Summary._fields, found, strict=True):
                if name in results:
                    store(results[name], (j, b), value.astype(kinds[name]), b < B)

        lax.fori_loop(0, pl.cdiv(B, tile), one_tile, None)

    kinds = {"maximum": jnp.float32, "score": jnp.float32, "id": jnp.int32, "flags": jnp.int8}
    if score is None:
        del kinds["maximum"]  # scores are the values themselves
    shapes = {name: jax.ShapeDtypeStruct((blocks, B), kind) for name, kind in kinds.items()}
    if keep:
        shapes = {"rows": jax.ShapeDtypeStruct((S, B, n), dtype), **shapes}
    results = pallas_call(
        kernel, operands, shapes, name="dspark_dense_step", interpret=interpret, grid=(blocks,),
        num_warps=4 if tile < 64 else 8, aliases={"base" if in_place else "out": "rows"} if keep else {},
    )  # fmt: skip
    summary = Summary(results.get("maximum", jnp.zeros((), jnp.float32)), *(results[n] for n in Summary._fields[1:]))
    tokens, valid = best_of_blocks(summary, None if score is None else score.inverse_temperature(sampling))
    return results.get("rows"), tokens, valid
