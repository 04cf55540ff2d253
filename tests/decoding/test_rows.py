"""A request's tokens depend neither on its row nor on what the other rows hold; replaced rows are checked."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny import (
    build_drafter,
    build_target,
    drafter_weights,
    make_drafter,
    make_target,
    raw_config,
    target_config,
    target_weights,
)

from dspark_jax import DraftSampling, TargetFilter, generate
from dspark_jax.decoding import loop
from dspark_jax.decoding.inputs import PREFILL_CHUNK, prepare_options, start

SMALL = {"num_hidden_layers": 1, "target_layer_ids": [-1, 0], "num_target_layers": 2}
CAPACITY = 160


def pair(dtype):
    """A random target and drafter in one dtype."""
    raw, drafter_raw = target_config(num_hidden_layers=2), raw_config(**SMALL)
    target = build_target(raw, target_weights(raw), dtype=dtype)
    return target, build_drafter(drafter_raw, drafter_weights(drafter_raw), dtype)


def prompts_of(count, longest, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 37, int(n)).tolist() for n in rng.integers(1, longest, count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculative", [True, False])
def test_row_and_neighbours_change_no_bit(dtype, speculative):
    """Batches of one size: whatever row a request has and however long its neighbours' prompts are, the same tokens."""
    target, drafter = pair(dtype)
    mine, others = prompts_of(3, 20, 1), prompts_of(9, 2 * PREFILL_CHUNK, 2)
    options = {"max_new_tokens": 12}  # the capacity follows the longest prompt
    seen = {}
    for batch in range(3):
        rows = [mine[0], *others[3 * batch : 3 * batch + 3]]
        rows = rows[-batch:] + rows[:-batch]
        at = rows.index(mine[0])
        draw = DraftSampling([0.8] * 4, np.where(np.arange(4) == at, 7, 100 + np.arange(4) + batch), [0] * 4)
        out = generate(target, drafter if speculative else None, rows, sampling=draw, **options)
        confidence = None if out.confidence_logits is None else out.confidence_logits[out.active[:, at], at]
        seen[batch] = (out.tokens[at].tolist(), None if confidence is None else confidence.tolist())
    assert seen[0] == seen[1] == seen[2]


def idle(target, drafter, options, batch, capacity):
    """A batch in which nothing runs."""
    draw = DraftSampling([0.0] * batch, [0] * batch, [0] * batch)
    state, _ = start(target, drafter, [[1]] * batch, options, sampling=draw, max_new_tokens=1, capacity=capacity)
    return state


def run_with_replacement(dtype, rounds, seed):
    """Serve requests in rows that are replaced at random; return their tokens in company, and alone among idle rows."""
    target, drafter = pair(dtype)
    options, _ = prepare_options(target, drafter, sampled=True)
    rng, batch = np.random.default_rng(seed), 4

    def fresh(number):
        prompt = np.random.default_rng(number).integers(0, 37, number % 50 + 1).tolist()
        draw = DraftSampling([[0.0, 0.7, 1.3][number % 3]], [number], [0])
        return start(
            target, drafter, [prompt], options, sampling=draw, max_new_tokens=number % 17 + 2, capacity=CAPACITY
        )

    state = idle(target, drafter, options, batch, CAPACITY)
    owner, tokens, asked, counts = [None] * batch, {}, 0, []
    for at in range(rounds):
        active = np.asarray(state.active)
        for row in rng.permutation(batch):
            if not active[row] and rng.random() < 0.7:
                one, first = fresh(asked)
                state = loop.replace_rows(state, [int(row)], one)
                owner[row], tokens[asked] = asked, np.asarray(first.tokens)[0].tolist()
                asked += 1
        took = np.asarray(state.active)
        state, done = loop.speculative_round(target, drafter, state, None, None, options=options)
        for row in np.flatnonzero(took):
            tokens[owner[row]] += [token for token in np.asarray(done.tokens)[row].tolist() if token >= 0]
        if at in (20, rounds - 1):
            counts.append(
                (loop.speculative_round._cache_size(), loop._replace_rows._cache_size(), len(jax.live_arrays()))
            )
    finished = [
        number for number in tokens if number not in {owner[r] for r in np.flatnonzero(np.asarray(state.active))}
    ]
    alone = {}
    for number in finished[:: max(1, len(finished) // 40)]:
        state = idle(target, drafter, options, batch, CAPACITY)
        one, first = fresh(number)
        state, alone[number] = loop.replace_rows(state, [number % batch], one), np.asarray(first.tokens)[0].tolist()
        while bool(state.active[number % batch]):
            state, done = loop.speculative_round(target, drafter, state, None, None, options=options)
            alone[number] += [token for token in np.asarray(done.tokens)[number % batch].tolist() if token >= 0]
    return tokens, alone, counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_replaced_rows_equal_themselves_among_idle_rows(dtype, rounds):
    tokens, alone, counts = run_with_replacement(dtype, rounds, seed=5)
    assert len(alone) >= min(10, rounds // 10)
    for number, ids in alone.items():
        assert tokens[number] == ids, number
    (first, last) = counts
    assert first[:2] == last[:2]  # no new trace
    assert last[2] <= first[2] + 2  # no growth


def test_rows_are_checked_before_anything_is_replaced():
    target, drafter = make_target(num_hidden_layers=2), make_drafter(**SMALL)
    options, _ = prepare_options(target, drafter, sampled=False)
    common = {"max_new_tokens": 4, "capacity": 64}
    state, _ = start(target, drafter, [[1], [2], [3]], options, **common)
    two, _ = start(target, drafter, [[4], [5]], options, **common)
    for rows, words in (
        ([0, 3], r"rows: found \[0, 3\], expected distinct rows from 0 to 2"),
        ([-1, 0], "expected distinct rows from 0 to 2"),
        ([1, 1], "expected distinct rows from 0 to 2"),
        ([1], r"rows: found 'int64 \[1\]', expected integers \[2\], one for each new request"),
        ([0.0, 1.0], r"rows: found 'float64 \[2\]'"),
        ([[0, 1]], r"rows: found 'int64 \[1, 2\]'"),
    ):
        with pytest.raises(ValueError, match=words):
            loop.replace_rows(state, rows, two)
    larger, _ = start(target, drafter, [[4], [5]], options, max_new_tokens=4, capacity=96)
    with pytest.raises(ValueError, match=r"fresh\.target_cache\.keys.*: found 'float32 \[96, .*expected float32 \[64"):
        loop.replace_rows(state, [0, 1], larger)
    stops, _ = start(target, drafter, [[4], [5]], options, stop_ids=[3], **common)
    with pytest.raises(ValueError, match=r"fresh\.stop_ids: found 'int32 \[1\]', expected None"):
        loop.replace_rows(state, [0, 1], stops)
    filtered, _ = start(target, drafter, [[4], [5]], options, target_filter=TargetFilter(top_k=3), **common)
    with pytest.raises(ValueError, match=r"fresh\.target_filter.*expected None"):
        loop.replace_rows(state, [0, 1], filtered)
    plain, _ = start(target, None, [[4], [5]], dataclasses.replace(options, draft=None, taps=()), **common)
    with pytest.raises(ValueError, match=r"fresh\.context"):
        loop.replace_rows(state, [0, 1], plain)
    assert not state.anchor.is_deleted()
    loop.replace_rows(state, np.array([2, 0], np.int64), two)
    assert state.anchor.is_deleted()  # donated


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 99999999999999}, "max_new_tokens: found 99999999999999, expected an integer from 1 to"),
        ({"max_new_tokens": 10**400}, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: found"),
        ({"stop_ids": [2**31]}, "stop_ids: found 2147483648, expected token ids below"),
        ({"capacity": 2**40}, "capacity: found"),
    ],
)
def test_absurd_numbers_are_refused(options, words):
    target, drafter = make_target(num_hidden_layers=2), make_drafter(**SMALL)
    with pytest.raises(ValueError, match=words):
        generate(target, drafter, [[1, 2]], **options)
