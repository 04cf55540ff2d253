"""The draft: one lax.scan over the steps of a block, dense or over candidates, greedy or sampled.

Each step maps the previous token to a latent (heads.py), adds latent times rows of markov_w2 to the base logits in
float32, rounds the sum once to the logits dtype and picks a token from the rounded row, so that what a verifier reads
is what was drawn from, whatever the `outputs`. `draft` is pure; the entry points around it (api.py) coerce and jit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import candidates, sampling
from .heads import DSparkHead, bias, bias_at
from .types import DraftBlock, DraftBuffer, DraftSampling

# A projection corrects one step's row: (rows, step, latent or None) -> (rows, logits float32 [B, n]); `rows` is what
# the scan carries of the corrected logits, () where nobody asks for them.
Projection = Callable[[Any, jax.Array, jax.Array | None], tuple[Any, jax.Array]]


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """Round float32 to the values of `dtype`, staying float32.

    XLA may drop a cast to a narrower type and back; it must keep an explicit reduction of precision.
    """
    info = jnp.finfo(dtype)
    return x if info.bits == 32 else lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def draft(
    head: DSparkHead,
    base: jax.Array,
    anchor: jax.Array,
    hidden: jax.Array | None,
    draw: DraftSampling | None,
    buffer: DraftBuffer | None = None,
    min_confidence: jax.Array | None = None,
    *,
    topk: int | None,
    outputs: str,
    logits_dtype: Any,
) -> tuple[DraftBlock, DraftBuffer | None]:
    """Draft a block from step-major base logits; the pure core under every entry point.

    Args:
        base: [S, B, Vd] base logits; anchor: int32 [B]; hidden: [S, B, H], or None where the head needs none.
        draw: None for greedy, else the per-request sampling parameters.
        buffer: rows to write into for topk with outputs="logits", or None to make new ones.
        min_confidence: float32 [] threshold, or None.
        topk, outputs, logits_dtype: static; see `api.draft_block`.

    Returns:
        The block, and the refilled buffer (None without one). With a buffer the block's `logits` is None: the caller
        reads the buffer's, since returning one array twice would copy it.
    """
    S, B, _ = base.shape
    markov, keep, fields = head.markov, outputs != "tokens", {}
    if topk is None:
        ids = head.target_ids
        rows, project = _dense(head, base, keep, logits_dtype)
    else:
        values, draft_ids = candidates.select(_mask_padding(head, base), topk)
        ids = draft_ids if head.target_ids is None else jnp.take(head.target_ids, draft_ids)
        rows, project = _over_candidates(head, values, draft_ids, keep, logits_dtype)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        state, prev, rows = carry
        step, hoisted = xs
        latent = None
        if markov is not None:
            state, latent = markov.step(state, markov.embed(prev), hoisted)
        rows, logits = project(rows, step, latent)
        token = _choose(logits, ids if topk is None else ids[step], step, draw)
        return (state, token, rows), (token, sampling.row_is_valid(logits))

    state = () if markov is None else markov.start(B)
    hoisted = () if markov is None else markov.hoist(hidden)
    with jax.named_scope("draft_steps"):
        xs = (jnp.arange(S, dtype=jnp.int32), hoisted)
        (_, _, rows), (tokens, valid) = lax.scan(body, (state, anchor, rows), xs)

    if outputs == "candidates":
        fields = {"candidate_ids": ids, "candidate_logits": rows}
    elif outputs == "logits" and topk is None:
        fields = {"logits": _to_target_columns(head, rows)}
    elif outputs == "logits" and buffer is not None:
        buffer = candidates.refill(buffer, ids, rows)
    elif outputs == "logits":
        empty = jnp.full((S, B, head.config.vocab_size), -jnp.inf, logits_dtype)
        fields = {"logits": candidates.scatter(empty, ids, rows)}

    valid &= ((anchor >= 0) & (anchor < head.config.vocab_size))[None]
    confidence = _confidence(head, hidden, jnp.concatenate([anchor[None], tokens[:-1]]))
    block = DraftBlock(
        tokens=tokens.T,
        num_draft=_num_draft(valid, confidence, min_confidence),
        valid=valid.all(axis=0),
        confidence_logits=None if confidence is None else confidence.T,
        method="greedy" if draw is None else "probabilistic",
        **fields,
    )
    return block, buffer


def teacher_forced(head: DSparkHead, hidden: jax.Array, prev: jax.Array) -> jax.Array:
    """Return corrected logits [S, B, Vd] where the previous tokens prev [S, B] are given; hidden [S, B, H]."""
    base, markov = head.base_logits(hidden), head.markov
    if markov is None:
        return base

    def body(state: Any, xs: Any) -> tuple[Any, jax.Array]:
        return markov.step(state, *xs)

    _, latents = lax.scan(body, markov.start(prev.shape[1]), (markov.embed(prev), markov.hoist(hidden)))
    return (base.astype(jnp.float32) + bias(latents, markov.markov_w2[...])).astype(base.dtype)


def _dense(head: DSparkHead, base: jax.Array, keep: bool, dtype: Any) -> tuple[Any, Projection]:
    """Project onto all draft ids."""
    rows, correct = _corrected_rows(base, keep, dtype)
    padded = head.target_ids is None and head.config.Vd > head.config.vocab_size

    def project(rows: Any, step: jax.Array, latent: jax.Array | None) -> tuple[Any, jax.Array]:
        added = None if latent is None else bias(latent, head.markov.markov_w2[...])
        rows, logits = correct(rows, step, added)
        return rows, _mask_padding(head, logits) if padded else logits

    return rows, project


def _over_candidates(
    head: DSparkHead, values: jax.Array, draft_ids: jax.Array, keep: bool, dtype: Any
) -> tuple[Any, Projection]:
    """Project onto the chosen draft ids [S, B, k] alone; values are their base logits."""
    rows, correct = _corrected_rows(values, keep, dtype)

    def project(rows: Any, step: jax.Array, latent: jax.Array | None) -> tuple[Any, jax.Array]:
        added = None if latent is None else bias_at(latent, head.markov.markov_w2[...], draft_ids[step])
        return correct(rows, step, added)

    return rows, project


def _corrected_rows(base: jax.Array, keep: bool, dtype: Any) -> tuple[Any, Callable[..., tuple[Any, jax.Array]]]:
    """Return the carry for rows [S, B, n] and the function that adds one step's bias to it.

    Where the rows are kept in the dtype of the base, they are the base, corrected in place; the row is read back from
    them, which spares XLA a second copy of it.
    """
    in_place = keep and base.dtype == dtype
    rows = base if in_place else jnp.zeros(base.shape, dtype) if keep else ()

    def correct(rows: Any, step: jax.Array, added: jax.Array | None) -> tuple[Any, jax.Array]:
        # Slabs [1, B, n] read and written at one non-negative start fuse in place; a row [B, n] would be copied first.
        start, size = (step, jnp.int32(0), jnp.int32(0)), (1, *base.shape[1:])
        slab = lax.dynamic_slice(rows if in_place else base, start, size, allow_negative_indices=False)
        logits = slab.astype(jnp.float32) if added is None else slab.astype(jnp.float32) + added[None]
        logits = round_to(logits, dtype)
        if keep:
            rows = lax.dynamic_update_slice(rows, logits.astype(dtype), start, allow_negative_indices=False)
            logits = lax.dynamic_slice(rows, start, size, allow_negative_indices=False)
        return rows, logits[0].astype(jnp.float32)

    return rows, correct


def _choose(logits: jax.Array, ids: jax.Array | None, step: jax.Array, draw: DraftSampling | None) -> jax.Array:
    """Return the drafted target ids int32 [B]; ids are [B, n], ascending [n], or None where slots are ids."""
    score = logits
    if draw is not None:
        # Without the barrier XLA hoists a [B, n] part of the generator out of the scan and keeps it.
        draw, step = lax.optimization_barrier((draw, step))
        named = jnp.arange(logits.shape[1], dtype=jnp.int32) if ids is None else ids
        bits = sampling.noise_bits(draw.seed[:, None], draw.position[:, None], step, sampling.DRAFT, named)
        score = sampling.scores(logits, draw.temperature, bits)
    slot = sampling.choose(score, ids if ids is not None and ids.ndim == 2 else None)
    if ids is None:
        return slot
    return ids[slot] if ids.ndim == 1 else jnp.take_along_axis(ids, slot[:, None], axis=1)[:, 0]


def _mask_padding(head: DSparkHead, logits: jax.Array) -> jax.Array:
    """Set the columns [..., Vd] beyond the target vocabulary to -inf, where the draft vocabulary is padded."""
    V = head.config.vocab_size
    if head.target_ids is not None or logits.shape[-1] <= V:
        return logits
    column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(column < V, logits, jnp.array(-jnp.inf, logits.dtype))


def _to_target_columns(head: DSparkHead, rows: jax.Array) -> jax.Array:
    """Bring rows [S, B, Vd] to the target vocabulary [S, B, V]; -inf where no draft id stands for a target id."""
    V = head.config.vocab_size
    if head.target_ids is None:
        return rows[..., :V]
    empty = jnp.full((*rows.shape[:2], V), -jnp.inf, rows.dtype)
    return empty.at[..., head.target_ids].set(rows, unique_indices=True, indices_are_sorted=True)


def _confidence(head: DSparkHead, hidden: jax.Array | None, prev: jax.Array) -> jax.Array | None:
    """Return confidence logits float32 [S, B] for previous tokens [S, B]; None without a head or hidden states."""
    if head.confidence is None or hidden is None:
        return None
    with_markov = head.config.confidence_head_with_markov
    return head.confidence(hidden, head.markov.embed(prev) if with_markov else None)


def _num_draft(valid: jax.Array, confidence: jax.Array | None, min_confidence: jax.Array | None) -> jax.Array:
    """Return int32 [B]: steps before the first that is invalid or whose confidence is below the threshold."""
    go_on = valid
    if min_confidence is not None:
        go_on &= jax.nn.sigmoid(confidence) >= min_confidence
    return jnp.cumprod(go_on.astype(jnp.int32), axis=0).sum(axis=0)
