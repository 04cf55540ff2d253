"""What must not matter does not: k = V against dense, outputs, batch, rows, number of steps; for every head kind.

Equality is meant as everywhere in the library: noise bits equal; logits within 2e-6 of the largest (float32) or 2 units
in its last place (halves); tokens equal wherever the gap of what was maximised exceeds twice that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, assert_logits, assert_tokens, base_logits, bound, f32, make_head, make_inputs, margin

import dspark_jax
from dspark_jax import DraftSampling, noise

B, S, V, Vd, H = 6, 5, 37, 23, 12
HEADS = [(None, Vd), ("vanilla", V), ("gated", Vd), ("rnn", V)]
# One row of the batch has temperature 0, so sampled walks cover greedy choice too; every compiled shape costs time.
WALKS = [(*head, "probabilistic") for head in HEADS] + [("vanilla", V, "greedy")]
TEMPERATURE = np.asarray([1.0, 0.6, 0.0, 1.4, 1.0, 0.9], np.float32)
SEED = np.asarray([3, 4, 5, 2**32 - 1, 7, 3], np.uint32)
POSITION = np.asarray([10, 11, 12, 13, 2**31 - 1, 10], np.int32)


@functools.cache
def setting(kind, size, dtype="float32"):
    """Return (head, hidden, anchors)."""
    return make_head(kind, V, size, H, 6, dtype, seed=11), *make_inputs(B, S, H, V, seed=12)


def params(method, rows=slice(None)):
    return None if method == "greedy" else DraftSampling(TEMPERATURE[rows], SEED[rows], POSITION[rows])


@functools.cache
def block_of(kind, size, method, topk, outputs, dtype="float32"):
    head, hidden, anchors = setting(kind, size, dtype)
    return dspark_jax.draft_block(head, hidden, anchors, sampling=params(method), topk=topk, outputs=outputs)


@jax.jit
def scores(row, step, temperature, seed, position):
    """What a draw maximises, for dense rows [B, V] of one step."""
    bits = noise.noise_bits(seed[:, None], position[:, None], step, noise.DRAFT, jnp.arange(V)[None])
    return noise.scores(row, temperature, bits)


def gaps(block, method):
    """Margins [B, S] of what each step maximised, in units of logits; block.logits is [S, B, V]."""
    logits = f32(block.logits)
    if method == "greedy":
        return margin(logits).T
    scale = np.where(TEMPERATURE < 1e-5, 1, TEMPERATURE)
    steps = [margin(scores(row, step, TEMPERATURE, SEED, POSITION)) * scale for step, row in enumerate(logits)]
    return np.stack(steps, axis=1)


@pytest.mark.parametrize(("kind", "size", "method"), WALKS)
def test_all_candidates_equal_dense(kind, size, method):
    dense = block_of(kind, size, method, None, "logits")
    full = block_of(kind, size, method, size, "logits")
    assert_tokens(full.tokens, dense.tokens, gaps(dense, method), 2 * bound(dense.logits))
    same = (np.asarray(full.tokens) == np.asarray(dense.tokens)).all(1)
    assert same.sum() >= B - 1
    assert_logits(f32(full.logits)[:, same], f32(dense.logits)[:, same])
    assert (np.isfinite(f32(full.logits)).sum(-1) == size).all()
    if dense.confidence_logits is not None:
        assert_logits(f32(full.confidence_logits)[same], f32(dense.confidence_logits)[same])


@pytest.mark.parametrize(
    ("kind", "size", "method", "topk"),
    [(*walk, 7) for walk in WALKS] + [("vanilla", V, "greedy", 1)],
)
def test_candidates_are_the_dense_values_of_the_largest_base_logits(kind, size, method, topk):
    """Candidates' logits equal the dense row where the past is equal; their ids have the largest base values."""
    head, hidden, anchors = setting(kind, size)
    top = block_of(kind, size, method, topk, "candidates")
    rows = block_of(kind, size, method, topk, "logits")
    order = np.argsort(-np.asarray(base_logits(head, hidden)), axis=-1, kind="stable")[..., :topk]
    drafted = np.arange(size) if head.target_ids is None else np.asarray(head.target_ids)
    np.testing.assert_array_equal(top.candidate_ids, drafted[order])
    # The scattered row holds the candidates bit for bit, and -inf elsewhere.
    scattered = np.full((S, B, V), -np.inf, np.float32)
    np.put_along_axis(scattered, np.asarray(top.candidate_ids), f32(top.candidate_logits), -1)
    np.testing.assert_array_equal(rows.logits, scattered)
    # Teacher forcing with the drafted tokens gives the dense rows of the same past.
    prev = np.concatenate([anchors[:, None], np.asarray(top.tokens)[:, :-1]], axis=1)
    dense = f32(dspark_jax.teacher_forced_logits(head, hidden, prev))
    assert_logits(top.candidate_logits, np.take_along_axis(dense, order, -1))


@pytest.mark.parametrize(
    ("kind", "method", "dtype"),
    [(kind, method, "float32") for kind, _, method in WALKS if kind]
    + [("vanilla", "probabilistic", "bfloat16"), ("rnn", "greedy", "bfloat16")],
)
@pytest.mark.parametrize("topk", [None, 7])
def test_every_output_draws_the_same_tokens(kind, method, topk, dtype):
    size = dict(HEADS)[kind]
    wanted = ("tokens", "logits") if topk is None else ("tokens", "logits", "candidates")
    first, *others = (block_of(kind, size, method, topk, outputs, dtype) for outputs in wanted)
    assert first.logits is first.candidate_ids is first.candidate_logits is None
    assert first.method == method
    for block in others:
        np.testing.assert_array_equal(block.tokens, first.tokens)
        np.testing.assert_array_equal(block.num_draft, first.num_draft)
    # What was drawn is the best of what is reported, so a verifier reads what was drawn from.
    rows = others[0]
    assert rows.logits.dtype == jnp.dtype(dtype)
    if method == "greedy":
        np.testing.assert_array_equal(np.argmax(f32(rows.logits), axis=-1).T, rows.tokens)
        return
    for step, row in enumerate(f32(rows.logits)):
        score = np.asarray(scores(row, step, TEMPERATURE, SEED, POSITION))
        chosen = np.take_along_axis(score, np.asarray(rows.tokens)[:, step, None], 1)[:, 0]
        np.testing.assert_allclose(chosen, score.max(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "method", "topk"),
    [(kind, "probabilistic", None) for kind in KINDS] + [("gated", "probabilistic", 7), ("vanilla", "greedy", None)],
)
def test_a_request_draws_the_same_tokens_in_any_row_of_any_batch(kind, method, topk):
    size = dict(HEADS)[kind]
    head, hidden, anchors = setting(kind, size)
    full = block_of(kind, size, method, topk, "logits")
    clear = gaps(full, method)
    for rows in ([0], [4], [5, 4, 3, 2, 1, 0], [0, 0, 3, 0, 1, 3, 2, 5]):
        part = dspark_jax.draft_block(
            head, hidden[rows], anchors[rows], sampling=params(method, rows), topk=topk, outputs="logits"
        )
        assert_tokens(part.tokens, np.asarray(full.tokens)[rows], clear[rows], 2 * bound(full.logits))
        same = (np.asarray(part.tokens) == np.asarray(full.tokens)[rows]).all(1)
        assert same.mean() > 0.7
        assert_logits(f32(part.logits)[:, same], f32(full.logits)[:, rows][:, same])
        allowed = bound(full.confidence_logits)
        error = np.abs(f32(part.confidence_logits)[same] - f32(full.confidence_logits)[rows][same])
        assert error.max() <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_steps_give_a_prefix(kind):
    size, method = dict(HEADS)[kind], "probabilistic"
    head, hidden, anchors = setting(kind, size)
    full = block_of(kind, size, method, None, "logits")
    for steps in (1, 3) if kind == "rnn" else (3,):
        part = dspark_jax.draft_block(head, hidden[:, :steps], anchors, sampling=params(method), outputs="logits")
        assert part.tokens.shape == (B, steps)
        clear = gaps(full, method)[:, :steps]
        assert_tokens(part.tokens, np.asarray(full.tokens)[:, :steps], clear, 2 * bound(full.logits))
        same = (np.asarray(part.tokens) == np.asarray(full.tokens)[:, :steps]).all(1)
        assert_logits(f32(part.logits)[:, same], f32(full.logits)[:steps, same])


@pytest.mark.parametrize(("kind", "size", "topk"), [(*head, None) for head in HEADS] + [("gated", Vd, 7)])
def test_logits_in_are_hidden_in(kind, size, topk):
    """draft_block is draft_from_logits of the head's own base logits."""
    head, hidden, anchors = setting(kind, size)
    whole = block_of(kind, size, "probabilistic", topk, "logits")
    base = base_logits(head, hidden)
    draw = params("probabilistic")
    block = dspark_jax.draft_from_logits(head, base, anchors, hidden=hidden, sampling=draw, topk=topk, outputs="logits")
    assert_tokens(block.tokens, whole.tokens, gaps(whole, "probabilistic"), 2 * bound(whole.logits))
    assert_logits(block.logits, whole.logits)
    assert not base.is_deleted()


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing_the_drafted_tokens_gives_the_drafted_rows(kind):
    size = dict(HEADS)[kind]
    head, hidden, anchors = setting(kind, size)
    block = block_of(kind, size, "probabilistic", None, "logits")
    prev = np.concatenate([anchors[:, None], np.asarray(block.tokens)[:, :-1]], axis=1)
    columns = np.arange(size) if head.target_ids is None else np.asarray(head.target_ids)
    assert_logits(dspark_jax.teacher_forced_logits(head, hidden, prev), f32(block.logits)[..., columns])


@pytest.mark.parametrize(("kind", "topk"), [(kind, None) for kind in KINDS] + [("rnn", 7)])
def test_made_functions_equal_the_plain_ones(kind, topk):
    """make_draft_fn and make_draft_from_logits_fn draw what draft_block draws."""
    size, method = dict(HEADS)[kind], "probabilistic"
    head, hidden, anchors = setting(kind, size)
    whole = block_of(kind, size, method, topk, "logits")
    config = dspark_jax.DraftConfig(S, topk, method, "logits")
    buffer = dspark_jax.make_buffer(head, config, B)
    assert (buffer is None) == (topk is None)
    block, _ = dspark_jax.make_draft_fn(config)(head, hidden, anchors, params(method), buffer)
    np.testing.assert_array_equal(block.tokens, whole.tokens)
    np.testing.assert_array_equal(block.num_draft, whole.num_draft)
    assert_logits(block.logits, whole.logits)
    base = base_logits(head, hidden)
    block = dspark_jax.make_draft_from_logits_fn(config)(head, base, anchors, params(method), hidden)
    assert_tokens(block.tokens, whole.tokens, gaps(whole, method), 2 * bound(whole.logits))
    assert_logits(block.logits, whole.logits)
    assert_logits(block.confidence_logits, whole.confidence_logits)
