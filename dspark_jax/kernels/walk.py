"""The walk over candidates: all steps in one kernel, one program per request, the previous token in a register.

    e          = latents[prev]                                     zeros where prev is outside the table
    row[i]     = round(base[s, b, i] + e . w2[ids[s, b, i]])         f32 sum, rounded once
    prev       = the target id with the largest score

Each candidate's row of w2 is read once and nothing V wide is touched. The kernel knows of no head: `latents` is any
table with a row per previous token (markov_w1 for a vanilla head). Heads whose latent depends on more call it a step at
a time with the [B, r] latents of that step and prev = arange(B). The plain form and reference is steps.in_xla.

S steps, B requests, k candidates, r rank.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int32

from ..types import CandidateIds, CandidateLogits, Index, RequestInts
from .summary import Score, Summary, merge, nothing, summarize
from .triton import load, pallas_call, power_of_two, rounded, store

TILE = 16384  # elements of w2 in flight


def walk(
    *,
    base: CandidateLogits,
    out: CandidateLogits | None,
    ids: CandidateIds,
    prev: RequestInts,
    latents: Float[Array, "m r"],
    w2: Float[Array, "n r"],
    keep: bool,
    dtype: Any,
    step: Index | None = None,
    target_ids: CandidateIds | None = None,
    sampling: Any = None,
    score: Score | None = None,
    interpret: bool = False,
) -> tuple[CandidateLogits | None, Int32[Array, "steps B"], Bool[Array, "steps B"]]:
    """Walk all steps, or take the one step `step`.

    Args:
        base: [S, B, k] base logits of the candidates; ids: int32 [S, B, k], their rows of w2.
        out: [S, B, k] of `dtype` to write to; None for a new array (all steps only).
        prev: int32 [B], row of `latents` for the first step; later ones take the chosen target id.
        latents: [m, r] and w2: [n, r], of one dtype.
        keep: whether the corrected rows are written.
        dtype: what corrected values are rounded to.
        step: int32 [] for one step, None for all S.
        target_ids: int32 [S, B, k], what is emitted, fed back and drawn by; None where they are `ids`.
        sampling, score: see dense_step.py.

    Returns:
        The corrected rows (None unless keep), tokens int32 [S, B] and valid bool [S, B] (one row of each for one step).
    """
    S, B, k = ids.shape
    r = w2.shape[1]
    count = S if step is None else 1
    lanes = power_of_two(r)
    chunk = min(power_of_two(k), max(1, TILE // lanes))
    operands = {
        "first": jnp.zeros((1,), jnp.int32) if step is None else jnp.asarray(step, jnp.int32)[None],
        "prev": prev, "latents": latents, "w2": w2, "base": base, "ids": ids, "sampling": sampling,
        "target_ids": target_ids, "out": out if keep else None,
    }  # fmt: skip

    def kernel(refs: Any, results: Any) -> None:
        b = pl.program_id(0)
        start = refs["first"][0]
        q = lax.broadcasted_iota(jnp.int32, (lanes,), 0)
        one_draw = jax.tree.map(lambda ref: load(ref, (b,)), refs.get("sampling"))
        drawn = jax.tree.map(lambda leaf: leaf[None], one_draw)
        slope = None if score is None else score.inverse_temperature(one_draw)

        def one_step(i, prev):
            s = start + i
            known = (prev >= 0) & (prev < latents.shape[0])
            e = load(refs["latents"], (prev, q), known & (q < r), 0).astype(jnp.float32)

            def one_chunk(c, best):
                at = c * chunk + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
                inside = at < k
                row = load(refs["ids"], (s, b, at), inside, 0)
                named = row if target_ids is None else load(refs["target_ids"], (s, b, at), inside, 0)
                w = load(refs["w2"], (row[:, None], q[None, :]), inside[:, None] & (q < r)[None, :], 0)
                x = load(refs["base"], (s, b, at), inside, 0).astype(jnp.float32)
                x = rounded(x + jnp.sum(w.astype(jnp.float32) * e[None, :], axis=1), dtype, interpret)
                if keep:
                    store(results["rows"], (s, b, at), x.astype(dtype), inside)
                found = summarize(x[None, :], named[None, :], inside[None, :], s, drawn, score)
                one = Summary(*(jnp.max(part) for part in found))  # of one row each
                return merge(best, one, slope)

            _, _, token, flags = lax.fori_loop(0, pl.cdiv(k, chunk), one_chunk, nothing())
            store(results["code"], (i, b), 4 * token + flags)
            return token

        lax.fori_loop(0, count, one_step, load(refs["prev"], (b,)))

    shapes = {"code": jax.ShapeDtypeStruct((count, B), jnp.int32)}
    if keep:
        shapes = {"rows": jax.ShapeDtypeStruct((S, B, k), dtype), **shapes}
    results = pallas_call(
        kernel, operands, shapes, name="dspark_walk", interpret=interpret, grid=(B,), num_warps=8,
        aliases={"out": "rows"} if keep and out is not None else {},
    )  # fmt: skip
    code = results["code"]
    return results.get("rows"), code >> 2, (code & 3) == 1
