"""Known faults of single rows, anchors, padding and buffers, each with its right value."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    KINDS,
    base_logits,
    f32,
    make_head,
    make_inputs,
)
from pitfalls_cases import INF, NAN, NEGATIVE_NAN, draft, plain, tokens

import dspark_jax
from dspark_jax import DraftSampling


def bad_batch(value, where=slice(None)):
    """Four requests of three steps over V = 6; request 1 has `value` in its step 1."""
    rows = np.random.default_rng(3).standard_normal((4, 3, 6)).astype(np.float32)
    bad = rows.copy()
    bad[1, 1, where] = value
    return rows, bad


def chain_head(kind="vanilla"):
    return make_head(kind, V=6, H=4, r=3, seed=9)


PARAMS = DraftSampling([1.0, 0.7, 0.0, 2.0], [1, 2, 3, 4], [5, 6, 7, 8])


@pytest.mark.parametrize("sampling", [None, PARAMS], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize(
    ("case", "value", "where"),
    [("21", NAN, slice(None)), ("21", NAN, 4), ("21", NEGATIVE_NAN, 0), ("22", -INF, slice(None))],
    ids=["nan-row", "one-nan", "one-negative-nan", "all-inf"],
)
def test_cases_21_22_and_26_bad_rows_stay_alone(case, value, where, k, sampling):
    """A row of NaN or of -inf: valid token ids, num_draft stops there, and no other request changes at all.

    The calls alternate between good and bad inputs of one compiled program: nothing of a bad call stays (case 26).
    """
    head, (good_rows, bad_rows) = chain_head(), bad_batch(value, where)
    hidden, anchors = make_inputs(4, 3, 4, 6, seed=2)

    def call(rows):
        return draft(head, rows, anchors, hidden=hidden, sampling=sampling, topk=k, outputs="logits")

    good, bad, again = call(good_rows), call(bad_rows), call(good_rows)
    others = [0, 2, 3]
    assert np.asarray(good.valid).all()
    assert np.asarray(bad.valid).tolist() == [True, False, True, True]
    assert np.asarray(bad.num_draft).tolist() == [3, 1, 3, 3]
    assert np.asarray(bad.tokens).min() >= 0
    assert np.asarray(bad.tokens).max() < 6
    np.testing.assert_array_equal(np.asarray(bad.tokens)[others], np.asarray(good.tokens)[others])
    np.testing.assert_array_equal(f32(bad.logits)[:, others], f32(good.logits)[:, others])
    np.testing.assert_array_equal(np.asarray(bad.tokens)[1, 0], np.asarray(good.tokens)[1, 0])
    np.testing.assert_array_equal(f32(bad.logits)[0], f32(good.logits)[0])
    assert np.isfinite(f32(bad.confidence_logits)).all()
    for name in ("tokens", "num_draft", "valid", "confidence_logits", "logits"):
        np.testing.assert_array_equal(getattr(again, name), getattr(good, name))


@pytest.mark.parametrize("kind", KINDS)
def test_case_21_nan_hidden_states_stay_alone(kind):
    """NaN in the hidden states of request 1, step 1, for every head: the other requests draft the same bits."""
    head = chain_head(kind)
    hidden, anchors = make_inputs(4, 3, 4, 6, seed=2)
    bad = hidden.copy()
    bad[1, 1] = NAN
    good, block = (dspark_jax.draft_block(head, h, anchors, sampling=PARAMS, outputs="logits") for h in (hidden, bad))
    assert np.asarray(block.valid).tolist() == [True, False, True, True]
    assert np.asarray(block.num_draft).tolist() == [3, 1, 3, 3]
    others = [0, 2, 3]
    np.testing.assert_array_equal(np.asarray(block.tokens)[others], np.asarray(good.tokens)[others])
    np.testing.assert_array_equal(f32(block.logits)[:, others], f32(good.logits)[:, others])
    assert ((np.asarray(block.tokens) >= 0) & (np.asarray(block.tokens) < 6)).all()


def test_case_21_infinite_values_beside_finite_ones_are_valid():
    rows = np.asarray([[[1, INF, 0, -INF]], [[-INF, -INF, 2, -INF]]], np.float32)
    for k in (None, 2):
        block = draft(plain(4), rows, topk=k)
        assert np.asarray(block.valid).all()
        assert tokens(block) == [[1], [2]]


@pytest.mark.parametrize("k", [None, 2])
@pytest.mark.parametrize("anchor", [-1, 6, 2**31 - 1, -(2**31), 2**40])
@pytest.mark.parametrize("kind", KINDS)
def test_case_23_anchors_outside_the_vocabulary_are_flagged(kind, anchor, k):
    """Every step of that request is invalid (zero embedding, no wrapped row), the other requests do not change."""
    head = chain_head(kind)
    hidden, anchors = make_inputs(4, 3, 4, 6, seed=2)
    anchors = anchors.astype(np.int64)

    def call(anchors):
        return dspark_jax.draft_block(head, hidden, anchors, sampling=PARAMS, topk=k, outputs="logits")

    good = call(anchors)
    anchors[2] = anchor
    bad = call(anchors)
    assert np.asarray(bad.valid).tolist() == [True, True, False, True]
    assert np.asarray(bad.num_draft).tolist() == [3, 3, 0, 3]
    others = [0, 1, 3]
    np.testing.assert_array_equal(np.asarray(bad.tokens)[others], np.asarray(good.tokens)[others])
    np.testing.assert_array_equal(f32(bad.logits)[:, others], f32(good.logits)[:, others])
    assert ((np.asarray(bad.tokens) >= 0) & (np.asarray(bad.tokens) < 6)).all()
    assert np.isfinite(f32(bad.confidence_logits)).all()
    if kind == "vanilla":  # e = 0, so the first row is the base row
        row, base = f32(bad.logits)[0, 2], f32(base_logits(head, hidden))[0, 2]
        np.testing.assert_allclose(row[np.isfinite(row)], base[np.isfinite(row)], atol=1e-6)


@pytest.mark.parametrize("k", [None, 2])
def test_case_24_padded_rows_never_change_live_rows(k):
    """Rows 2 and 3 are padding: whatever they hold, rows 0 and 1 draft the same bits."""
    head = chain_head("rnn")
    hidden, anchors = make_inputs(4, 3, 4, 6, seed=5)
    blocks = []
    for fill, anchor, temperature, seed in ((0.0, 0, 0.0, 0), (NAN, -1, np.inf, 7), (INF, 99, 1.0, 2**32 - 1)):
        h, a = hidden.copy(), anchors.copy()
        h[2:], a[2:] = fill, anchor
        params = DraftSampling(
            jnp.asarray([1.0, 0.0, temperature, temperature]), np.asarray([1, 2, seed, seed]), [5, 6, 0, 0]
        )
        blocks.append(dspark_jax.draft_block(head, h, a, sampling=params, topk=k, outputs="logits"))
    assert np.asarray(blocks[1].valid).tolist() == [True, True, False, False]
    for block in blocks[1:]:
        for name in ("tokens", "num_draft", "valid", "confidence_logits"):
            np.testing.assert_array_equal(getattr(block, name)[:2], getattr(blocks[0], name)[:2])
        np.testing.assert_array_equal(f32(block.logits)[:, :2], f32(blocks[0].logits)[:, :2])


@pytest.mark.parametrize(("sample_from_anchor", "steps"), [(True, 4), (False, 3)])
def test_case_25_more_steps_than_the_checkpoint_has_are_refused(sample_from_anchor, steps):
    """block_size 4: four steps, or three where slot 0 is the anchor's. Fewer steps are a prefix (test_identities)."""
    head = make_head("vanilla", V=6, H=4, r=3, block_size=4, sample_from_anchor=sample_from_anchor)
    hidden, anchors = make_inputs(1, steps + 1, 4, 6)
    rows = np.zeros((steps + 1, 1, 6), np.float32)
    config = dspark_jax.DraftConfig(steps + 1, 2, outputs="logits")
    calls = (
        lambda: dspark_jax.draft_block(head, hidden, anchors),
        lambda: dspark_jax.draft_from_logits(head, rows, anchors),
        lambda: dspark_jax.teacher_forced_logits(head, hidden, np.zeros((1, steps + 1), int)),
        lambda: dspark_jax.make_draft_from_logits_fn(config)(head, rows, anchors),
        lambda: dspark_jax.make_buffer(head, config, 1),
    )
    for call in calls:
        with pytest.raises(ValueError, match=rf"found {steps + 1}, expected at most {steps} draft steps"):
            call()
    assert dspark_jax.draft_block(head, hidden[:, :steps], anchors).tokens.shape == (1, steps)


def test_case_26_a_buffer_forgets_the_last_call():
    """Top-k rows of a reused buffer equal those of a fresh one, over calls whose candidates differ."""
    head = chain_head("gated")
    config = dspark_jax.DraftConfig(3, 2, "greedy", "logits")
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(head, config, 4)
    for seed in range(6):
        hidden, anchors = make_inputs(4, 3, 4, 6, seed=seed)
        if seed == 2:
            hidden[1] = NAN
        block, buffer = fn(head, hidden, anchors, None, buffer)
        fresh = dspark_jax.draft_block(head, hidden, anchors, topk=2, outputs="logits")
        np.testing.assert_array_equal(block.logits, fresh.logits)
        np.testing.assert_array_equal(block.tokens, fresh.tokens)
        finite = np.isfinite(f32(block.logits)).sum(-1)
        assert (finite[:, [0, 2, 3]] == 2).all()
    assert fn.trace_count() == 1
