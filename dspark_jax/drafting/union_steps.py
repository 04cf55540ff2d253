"""The steps of a block over two lists of candidates: the base top-k, and the previous token's continuations.

    slots 0 .. k-1      the k largest base logits, chosen before the scan
    slots k .. k+m-1    the m strongest continuations of the previous token (continuations.py), base logits gathered

An id stands in one slot. No sort finds the repeats: a continuation that precedes or equals the last base candidate in
the order of selection (value descending, id ascending) is one of them; its own slot is dead: logit -inf, id V + slot.

The certificate says that a greedy token is the argmax of the whole corrected row. With e bounding the difference
between two orders of summation of a bias, and rounding being monotone,

    round(x_w + (b_w - e)) > round(x_i + (b_i + e))   for every other candidate i, and
    round(x_w + (b_w - e)) > round(x_k + (b_m + e))   for all ids that are in neither list

hold also for the dense row, in whatever order its products are summed. Where e is 0 the candidates' values are exact,
and the choice among them needs no margin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .. import noise
from ..config import DraftOptions
from ..linear import gather_rows, round_to
from ..ordered_keys import to_keys
from ..types import (
    CandidateIds,
    CandidateLogits,
    DraftLogits,
    DraftSampling,
    Index,
    Latents,
    RequestFlags,
    RequestFloats,
    RequestInts,
    RequestRows,
    StepFlags,
    StepHidden,
    StepTokens,
)
from .continuations import Continuations
from .head import DSparkHead
from .heads import bias_at
from .rows import CandidateRows, draw_scores


class UnionSteps(NamedTuple):
    """What the steps give.

    Attributes:
        logits, ids: the corrected union and its target ids [S, B, k+m], None unless kept.
        tokens, valid: as in steps.py; certified: which tokens are proven to be the dense ones, or None.
    """

    logits: CandidateLogits | None
    ids: CandidateIds | None
    tokens: StepTokens
    valid: StepFlags
    certified: StepFlags | None


def certifies(head: DSparkHead, sampling: DraftSampling | None) -> bool:
    """Say whether drafts of this head carry a certificate: greedy ones, where a step's bias is the table's (z = e)."""
    markov = head.markov
    return (
        head.continuations is not None and markov is not None and markov.kind.latent_is_embedding and sampling is None
    )


def union_steps(
    head: DSparkHead,
    base: DraftLogits,
    rows: CandidateRows,
    anchor: RequestInts,
    hidden: StepHidden | None,
    sampling: DraftSampling | None,
    *,
    options: DraftOptions,
) -> UnionSteps:
    """Take all S steps after anchor [B]: one lax.scan.

    Args:
        base: [S, B, Vd], where continuations find their base logits; rows: the base top-k of it.
        hidden: [S, B, H], or None where the head needs none; sampling: None for greedy.
        options: markov_topk says m; see steps.in_xla.
    """
    markov, table = head.markov, head.continuations
    assert markov is not None
    assert table is not None
    S, B, k = rows.base.shape
    m, dtype = options.markov_topk, options.logits_dtype
    w2, certify = markov.markov_w2[...], certifies(head, sampling)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev = carry
        step, hoisted, top, draft_ids, ids = xs
        state, latent = markov.step(state, markov.embed(prev), hoisted)
        dead = jnp.zeros((B, 0), bool)
        if m:
            more, dead = continued(head, base, top, draft_ids, prev, step, m=m)
            draft_ids = jnp.concatenate([draft_ids, more[0]], axis=1)
            ids = jnp.concatenate([ids, more[1]], axis=1)
            top = jnp.concatenate([top, more[2]], axis=1)
        added = bias_at(latent, w2, draft_ids)
        value = top.astype(jnp.float32)
        logits = round_to(value + added, dtype)
        live = jnp.concatenate([jnp.ones((B, k), bool), ~dead], axis=1)
        logits = jnp.where(live, logits, -jnp.inf)
        score = logits
        if sampling is not None:
            held, step = lax.optimization_barrier((sampling, step))
            score = draw_scores(logits, ids, step, held)
        slot = noise.choose(score, ids)
        token = jnp.take_along_axis(ids, slot[:, None], axis=1)[:, 0]
        valid = noise.row_is_valid(logits)
        proof = None
        if certify:
            bound = unseen_bias(table, added, prev, m=m)
            kth = value[:, k - 1]
            everything = max(k, m) >= head.config.draftable
            e = error_bound(table, latent.astype(w2.dtype))
            proof = valid & proven(value, added, live, slot, None if everything else (kth, bound), e, dtype)
        kept = (logits.astype(dtype), ids) if options.keeps_rows else None
        return (state, token), (token, valid, proof, kept)

    xs = (jnp.arange(S, dtype=jnp.int32), markov.hoist(hidden), rows.base, rows.draft_ids, rows.target_ids)
    _, (tokens, valid, proof, kept) = lax.scan(body, (markov.start(B), anchor), xs)
    logits, ids = (None, None) if kept is None else kept
    return UnionSteps(logits, ids, tokens, valid, proof)


def continued(
    head: DSparkHead,
    base: DraftLogits,
    top: Float[Array, "B k"],
    draft_ids: Int32[Array, "B k"],
    prev: RequestInts,
    step: Index,
    *,
    m: int,
) -> tuple[tuple[Int32[Array, "B m"], Int32[Array, "B m"], Float[Array, "B m"]], Bool[Array, "B m"]]:
    """Return (draft ids, target ids, base logits) [B, m] of the continuations of prev [B], and which are dead [B, m].

    Args:
        top: [B, k] base logits of the step's base candidates, descending; draft_ids: int32 [B, k].
    """
    assert head.continuations is not None
    B, k = draft_ids.shape
    V = head.config.vocab_size
    ids = gather_rows(head.continuations.ids[:, :m], prev)  # id 0 throughout for a previous token outside [0, V)
    value = base[step, jnp.arange(B, dtype=jnp.int32)[:, None], ids]
    key, last, last_id = to_keys(value), to_keys(top[:, -1:]), draft_ids[:, -1:]
    dead = (key > last) | ((key == last) & (ids <= last_id))
    outside = (prev < 0) | (prev >= V)
    dead |= outside[:, None]
    slot = jnp.arange(m, dtype=jnp.int32)[None] + (V + k)
    named = ids if head.target_ids is None else jnp.take(head.target_ids, ids)
    return (ids, jnp.where(dead, slot, named), value), dead


def unseen_bias(table: Continuations, added: RequestRows, prev: RequestInts, *, m: int) -> RequestFloats:
    """Return the largest bias [B] that an id outside the m continuations of prev [B] can have.

    Args:
        added: [B, k+m] the step's biases, whose last column is the m-th continuation's.
    """
    if 0 < m < table.m:  # of a larger table: the value that this step has computed
        return added[:, -1]
    values = table.largest[...] if m == 0 else table.last[...]
    return values[jnp.clip(prev, 0, values.shape[0] - 1)]


def error_bound(table: Continuations, latent: Latents) -> RequestFloats:
    """Return by how much two orders of summation of latent [B, r] times a row of w2 can differ, float32 [B]."""
    return jnp.sum(jnp.abs(latent.astype(jnp.float32)) * table.slack[...][None], axis=1)


def proven(
    value: RequestRows,
    added: RequestRows,
    live: Bool[Array, "B n"],
    slot: RequestInts,
    unseen: tuple[RequestFloats, RequestFloats] | None,
    e: RequestFloats,
    dtype: Any,
) -> RequestFlags:
    """Say which slots [B] are certainly the argmax of the dense row.

    Args:
        value, added: float32 [B, n], base logits and biases of the candidates; live: those that count.
        unseen: the largest base logit and the largest bias [B] of all others; None where there are none.
        e: bound of the error of a bias, float32 [B]; dtype: what sums are rounded to.
    """

    def low(x: RequestRows) -> RequestFloats:
        return jnp.take_along_axis(x, slot[:, None], axis=1)[:, 0]

    winner = round_to(low(value) + (low(added) - e), dtype)
    rival = live & (jnp.arange(value.shape[1], dtype=jnp.int32)[None] != slot[:, None])
    high = jnp.where(rival, round_to(value + (added + e[:, None]), dtype), -jnp.inf)
    proof = (e == 0) | (winner > jnp.max(high, axis=1))
    if unseen is not None:
        proof &= winner > round_to(unseen[0] + (unseen[1] + e), dtype)
    return proof
