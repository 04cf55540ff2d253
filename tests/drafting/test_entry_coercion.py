"""What callers hand in is coerced without a new trace and without a changed value; confidence thresholds."""

import jax.numpy as jnp
import numpy as np
import pytest
from entry_cases import ANCHORS, HEAD, HIDDEN, PARAMS, ROWS, B, H, R, S, V
from helpers import build_head, make_head, make_weights

import dspark_jax
from dspark_jax import DraftConfig, DraftSampling
from dspark_jax.drafting import api


def spellings(number):
    """Return (hidden, anchors, sampling) number `number`: other values, and another container or dtype each time."""
    rng = np.random.default_rng(number)
    temperature, seed = rng.uniform(0, 2, B), rng.integers(0, 2**32, B)
    position, anchors = rng.integers(0, 2**31, B), rng.integers(0, V, B)
    hidden = rng.standard_normal((B, S, H))
    weak = jnp.full((B,), float(temperature[0]))  # weakly typed, as jnp.full of a Python number is
    floats = [
        temperature.tolist(),
        temperature,
        temperature.astype(np.float32),
        temperature.astype(np.float16),
        weak,
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(temperature, jnp.bfloat16),
        float(temperature[0]),
        jnp.float32(0.5),
        rng.integers(0, 3, B),
    ][number % 10]
    small = number % 100
    seeds = [
        seed.tolist(),
        seed.astype(np.int64),
        seed.astype(np.uint64),
        seed.astype(np.uint32),
        jnp.full((B,), small),
        jnp.asarray(seed.astype(np.uint32)),
        tuple(seed.tolist()),
    ][number % 7]
    positions = [
        position.tolist(),
        position.astype(np.int64),
        position.astype(np.int32),
        position.astype(np.uint32),
        jnp.full((B,), small),
        jnp.asarray(position.astype(np.int32)),
    ][number % 6]
    ids = [anchors.tolist(), anchors, anchors.astype(np.uint8), jnp.asarray(anchors, jnp.int32), jnp.full((B,), 3)][
        number % 5
    ]
    states = [hidden.tolist(), hidden, hidden.astype(np.float32), jnp.asarray(hidden, jnp.float32)][number % 4]
    return states, ids, DraftSampling(floats, seeds, positions)


@pytest.fixture(scope="module")
def weakly_typed():
    """Check that the spellings do hold weakly typed arrays, without which the next tests would prove less."""
    assert jnp.full((B,), 1.0).weak_type
    assert jnp.full((B,), 3).weak_type


@pytest.mark.parametrize(("topk", "outputs"), [(None, "tokens"), (5, "logits")])
def test_case_35_one_trace_over_100_calls(weakly_typed, topk, outputs):
    """Changing temperatures, seeds, positions as lists, NumPy, int64, weakly typed and JAX arrays: one trace."""
    config = DraftConfig(S, topk, "probabilistic", outputs)
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(HEAD, config, B)
    assert fn.trace_count() == 0
    for number in range(100):
        hidden, anchors, params = spellings(number)
        _, buffer = fn(HEAD, hidden, anchors, params, buffer)
    assert fn.trace_count() == 1


def test_case_35_one_trace_of_the_logits_function(weakly_typed):
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(S, None, "probabilistic", "logits"))
    for number in range(100):
        hidden, anchors, params = spellings(number)
        rows = [np.zeros((S, B, V)), ROWS, ROWS.tolist(), jnp.asarray(ROWS)][number % 4]
        fn(HEAD, rows, anchors, params, hidden)
    assert fn.trace_count() == 1


@pytest.mark.parametrize("outputs", ["tokens", "logits", "candidates"])
def test_case_35_draft_block_traces_once_per_shapes_and_options(outputs, weakly_typed, monkeypatch):
    """The plain functions too, counted at the core that is traced; thresholds and new heads of a shape are values."""
    traces = []
    core = api.draft
    monkeypatch.setattr(api, "draft", lambda *args, **options: (traces.append(1), core(*args, **options))[1])
    size = {"tokens": 31, "logits": 32, "candidates": 33}[outputs]  # shapes that no other test has compiled
    heads = [make_head("vanilla", size, None, H, R, seed=seed) for seed in (0, 1)]
    topk = 7 if outputs == "candidates" else None
    for number in range(100):
        hidden, anchors, params = spellings(number)
        dspark_jax.draft_block(
            heads[number % 2], hidden, anchors, sampling=params, topk=topk, outputs=outputs, min_confidence=number / 100
        )
    assert len(traces) == 1
    dspark_jax.draft_block(heads[0], HIDDEN, ANCHORS, topk=topk, outputs=outputs)  # greedy: another method
    dspark_jax.draft_block(heads[0], HIDDEN, ANCHORS, sampling=PARAMS, topk=8, outputs=outputs)
    assert len(traces) == 3


def test_coercion_keeps_the_values():
    """The same numbers in any container draw the same tokens."""
    reference = dspark_jax.draft_block(
        HEAD,
        HIDDEN,
        ANCHORS,
        sampling=DraftSampling(np.float32([0.7, 1.5, 0]), np.uint32([1, 2**32 - 1, 3]), np.int32([4, 5, 6])),
    )
    for params in (
        DraftSampling([0.7, 1.5, 0], [1, 2**32 - 1, 3], [4, 5, 6]),
        DraftSampling(np.asarray([0.7, 1.5, 0]), np.asarray([1, 2**32 - 1, 3]), np.asarray([4, 5, 6], np.uint8)),
        DraftSampling(jnp.asarray([0.7, 1.5, 0]), jnp.asarray([1, 2**32 - 1, 3], jnp.uint32), jnp.asarray([4, 5, 6])),
    ):
        for hidden in (HIDDEN.tolist(), HIDDEN.astype(np.float64), jnp.asarray(HIDDEN)):
            block = dspark_jax.draft_block(HEAD, hidden, ANCHORS.tolist(), sampling=params)
            np.testing.assert_array_equal(block.tokens, reference.tokens)
    one = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=DraftSampling(0.7, [1] * B, [4] * B))
    all_ = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=DraftSampling([0.7] * B, [1] * B, [4] * B))
    np.testing.assert_array_equal(one.tokens, all_.tokens)


def test_min_confidence_prunes_at_the_first_step_below_it():
    full = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS)
    confidence = np.asarray(full.confidence)
    np.testing.assert_allclose(confidence, 1 / (1 + np.exp(-np.asarray(full.confidence_logits))), atol=1e-6)
    assert (np.asarray(full.num_draft) == S).all()
    seen = set()
    for threshold in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        block = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, min_confidence=threshold)
        expected = [next((s for s in range(S) if row[s] < threshold), S) for row in confidence]
        assert np.asarray(block.num_draft).tolist() == expected
        np.testing.assert_array_equal(block.tokens, full.tokens)
        assert np.asarray(block.valid).all()
        seen.update(expected)
    assert len(seen) > 2


def test_a_confidence_equal_to_the_threshold_is_kept():
    """Only steps below the threshold are pruned: logit 0 is confidence 0.5 exactly."""
    weights = make_weights("vanilla", V=V, H=H, r=R)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        weights[name][:] = 0
    head = build_head(weights)
    for threshold, steps in ((0.5, S), (np.nextafter(np.float32(0.5), np.float32(1)).item(), 0)):
        block = dspark_jax.draft_block(head, HIDDEN, ANCHORS, min_confidence=threshold)
        assert np.asarray(block.num_draft).tolist() == [steps] * B


def test_no_threshold_keeps_nan_confidence():
    """A pruned length is never longer than the steps whose confidence is a number."""
    hidden = HIDDEN.copy()
    hidden[1, 2] = np.nan
    block = dspark_jax.draft_block(HEAD, hidden, ANCHORS, min_confidence=0.0)
    assert np.asarray(block.num_draft).tolist() == [S, 2, S]
