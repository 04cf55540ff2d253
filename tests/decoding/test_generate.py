"""The decoding loop: greedy output is the target's own, requests do not depend on each other, bad input is refused."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS, GOLDENS
from tiny import build_drafter, drafter_weights, make_drafter, make_pair, make_target, raw_config

from dspark_jax import (
    CostTable,
    DraftSampling,
    PrefixScheduler,
    Target,
    TargetFilter,
    ThresholdPolicy,
    generate,
    load_drafter,
    load_target,
    stream,
)
from dspark_jax.decoding import loop
from dspark_jax.drafting import steps

TOPK = (1, 32, 2048)  # `dspark-jax sweep` makes the same check for every k it is given

SMALL = {"num_hidden_layers": 1, "target_layer_ids": [-1, 0], "num_target_layers": 2}


@pytest.fixture(scope="module")
def trained():
    """The bundled target and its vanilla drafter in float32, as the recorded runs had them."""
    return (
        load_target(CHECKPOINTS / "target", dtype="float32"),
        load_drafter(CHECKPOINTS / "dspark-vanilla", dtype="float32"),
    )


@pytest.fixture(scope="module")
def tiny():
    """A random target of two layers and a drafter of one, which drafts well."""
    return make_pair()


def recorded(kind):
    """Return the reference's greedy runs."""
    return json.loads((GOLDENS / "rounds" / kind / "greedy.json").read_text())


def ragged_prompts(count, vocab=37, seed=0):
    """Draw prompts of lengths 1, 2, 3, ..., some beyond one bucket."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, 1 + 3 * n).tolist() for n in range(count)]


@pytest.mark.parametrize("kind", ["vanilla", pytest.param("gated", marks=pytest.mark.slow),
                                  pytest.param("rnn", marks=pytest.mark.slow)])  # fmt: skip
def test_dense_greedy_decoding_equals_the_reference_round_by_round(kind, trained):
    runs = recorded(kind)
    drafter = trained[1] if kind == "vanilla" else load_drafter(CHECKPOINTS / f"dspark-{kind}", dtype="float32")
    out = generate(trained[0], drafter, [run["prompt_ids"] for run in runs], max_new_tokens=72)
    rounds = 0
    for run, tokens, lengths in zip(runs, out.tokens, out.acceptance_lengths, strict=True):
        assert run["matches_target_greedy"]
        new = run["output_ids"][len(run["prompt_ids"]) :]
        assert tokens[: len(new)].tolist() == new
        assert len(tokens) == 72
        # The reference stops at the round that reaches 64 tokens, this run goes on a little.
        assert lengths[: len(run["acceptance_lengths"])].tolist() == run["acceptance_lengths"]
        rounds += len(run["acceptance_lengths"])
    assert rounds > 400


@pytest.mark.slow
def test_greedy_output_is_the_targets_own_for_every_k(trained):
    """All 24 bundled prompts: only the acceptance length may change."""
    target, drafter = trained
    runs = recorded("vanilla")
    prompts = [run["prompt_ids"] for run in runs]
    own = generate(target, None, prompts, max_new_tokens=32)
    for run, tokens in zip(runs, own.tokens, strict=True):
        assert tokens.tolist() == run["output_ids"][96:128]
    assert own.acceptance_length == 1
    lengths = {}
    for k in TOPK:
        out = generate(target, drafter, prompts, max_new_tokens=32, draft_topk=k)
        for found, expected in zip(out.tokens, own.tokens, strict=True):
            np.testing.assert_array_equal(found, expected)
        lengths[k] = out.acceptance_length
    assert 1 < lengths[1] < lengths[32] < lengths[2048]


def test_plain_and_speculative_decoding_agree_on_random_models(tiny):
    target, drafter = tiny
    prompts = ragged_prompts(4)
    own = generate(target, None, prompts, max_new_tokens=24, capacity=64)
    for options in ({}, {"draft_topk": 3, "num_speculative_tokens": 2}, {"min_confidence": 0.5}):
        out = generate(target, drafter, prompts, max_new_tokens=24, capacity=64, **options)
        for found, expected in zip(out.tokens, own.tokens, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert out.finish_reason == ["length"] * 4
        steps = options.get("num_speculative_tokens", 5)
        if "min_confidence" not in options:
            assert (out.num_draft[out.active] == steps).all()
            assert {0, 1} <= set(out.num_accepted[out.active].tolist())
        else:
            assert set(out.num_draft[out.active].tolist()) > {0, 5}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_16_requests_of_different_lengths_equal_each_alone(tiny, temperature):
    target, drafter = tiny
    prompts = ragged_prompts(16)
    limits = [5 + n for n in range(16)]
    seeds = np.arange(16, dtype=np.uint32) + 2**31

    def decode(rows):
        draw = DraftSampling(np.full(len(rows), temperature, np.float32), seeds[rows], np.zeros(len(rows), np.int32))
        chosen = [prompts[row] for row in rows]
        return generate(
            target, drafter, chosen, sampling=draw, max_new_tokens=[limits[row] for row in rows], capacity=96
        )

    together = decode(list(range(16)))
    for row in range(16):
        alone = decode([row])
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.acceptance_lengths[0], together.acceptance_lengths[row])
        assert len(together.tokens[row]) == limits[row]


def test_stop_tokens_end_a_request_and_only_that(tiny):
    target, drafter = tiny
    prompts = ragged_prompts(4)
    free = generate(target, None, prompts, max_new_tokens=24, capacity=64)
    stop = int(free.tokens[1][10])
    for with_drafter in (None, drafter):
        out = generate(target, with_drafter, prompts, max_new_tokens=24, capacity=64, stop_ids=[stop])
        for found, whole, why in zip(out.tokens, free.tokens, out.finish_reason, strict=True):
            end = np.flatnonzero(whole == stop)
            np.testing.assert_array_equal(found, whole[: end[0] + 1] if len(end) else whole)
            assert why == ("stop" if len(end) else "length")
    assert len(out.tokens[1]) <= 11
    other = [[int(free.tokens[0][2])], [-1], [-1], [-1]]
    out = generate(target, drafter, prompts, max_new_tokens=24, capacity=64, stop_ids=other)
    assert [why == "stop" for why in out.finish_reason] == [True, False, False, False]


def test_filters_hold_in_every_round(tiny):
    target, drafter = tiny
    allowed = np.zeros((3, 37), bool)
    allowed[:, [2, 3, 5, 7, 11]] = True
    draw = DraftSampling([1.0, 1.0, 0.0], [1, 2, 3], [0, 0, 0])
    filters = TargetFilter(allowed=allowed)
    out = generate(target, drafter, ragged_prompts(3), sampling=draw, target_filter=filters, max_new_tokens=30)
    assert set(np.concatenate(out.tokens).tolist()) <= {2, 3, 5, 7, 11}
    assert len(set(out.tokens[0].tolist())) > 1


def test_scheduler_shortens_drafts_without_changing_greedy_output(tiny):
    target, drafter = tiny
    prompts = ragged_prompts(4)
    own = generate(target, None, prompts, max_new_tokens=24, capacity=64)
    free = generate(target, drafter, prompts, max_new_tokens=24, capacity=64)
    costs = CostTable.make([1, 8, 16, 64], [100.0, 60.0, 30.0, 5.0])
    for policy in (ThresholdPolicy.make(0.4), PrefixScheduler.make(costs)):
        out = generate(target, drafter, prompts, max_new_tokens=24, capacity=64, scheduler=policy)
        for found, expected in zip(out.tokens, own.tokens, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert out.num_draft[out.active].mean() < free.num_draft[free.active].mean()
        assert (out.num_accepted[out.active] <= out.num_draft[out.active]).all()


def test_records_for_calibration(tiny):
    target, drafter = tiny
    limits = (4, 12, 12, 1)
    out = generate(target, drafter, ragged_prompts(4), max_new_tokens=limits, capacity=64)
    rounds = len(out.active)
    assert out.confidence_logits.shape == (rounds, 4, 5)
    assert np.isfinite(out.confidence_logits).all()
    assert (out.committed == np.where(out.active, out.num_accepted + 1, 0)).all()
    # A finished request takes part no more, and the prefill gave the first token.
    assert [1 + out.committed[:, b].sum() >= n for b, n in enumerate(limits)] == [True] * 4
    assert not out.active[:, 3].any()
    assert [len(tokens) for tokens in out.tokens] == list(limits)


def test_stream_yields_what_generate_collects(tiny):
    target, drafter = tiny
    prompts = ragged_prompts(4)
    events = list(stream(target, drafter, prompts, max_new_tokens=9, capacity=64))
    assert events[0].tokens.shape == (4, 1)
    out = generate(target, drafter, prompts, max_new_tokens=9, capacity=64)
    for b in range(4):
        streamed = [token for event in events for token in event.tokens[b].tolist() if token >= 0]
        assert streamed == out.tokens[b].tolist()


def test_prompts_in_chunks_equal_prompts_at_once(tiny, monkeypatch):
    target, drafter = tiny
    prompts = ragged_prompts(8)[4:]
    whole = generate(target, drafter, prompts, max_new_tokens=6, capacity=64)
    monkeypatch.setattr("dspark_jax.decoding.inputs.PREFILL_CHUNK", 8)
    chunked = generate(target, drafter, prompts, max_new_tokens=6, capacity=64)
    for a, b in zip(whole.tokens, chunked.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.num_accepted, chunked.num_accepted)


def test_a_new_request_in_a_used_row_is_as_good_as_alone(tiny):
    """Continuous batching: replace_rows leaves nothing of the old request behind."""
    from dspark_jax.decoding.inputs import prepare_options, start

    target, drafter = tiny
    options, _ = prepare_options(target, drafter, sampled=False)
    prompts = ragged_prompts(5)
    state, _ = start(target, drafter, prompts[1:5], options, max_new_tokens=30, capacity=64)
    for _ in range(3):
        state, _ = loop.speculative_round(target, drafter, state, None, None, options=options)
    fresh, first = start(target, drafter, prompts[:1], options, max_new_tokens=12, capacity=64)
    state = loop.replace_rows(state, np.array([1], np.int32), fresh)
    tokens, confidence = np.asarray(first.tokens)[0].tolist(), []
    while bool(state.active[1]):
        state, done = loop.speculative_round(target, drafter, state, None, None, options=options)
        tokens += [token for token in np.asarray(done.tokens)[1].tolist() if token >= 0]
        confidence.append(np.asarray(done.confidence_logits)[1])
    alone = generate(target, drafter, prompts[:1], max_new_tokens=12, capacity=64)
    assert tokens == alone.tokens[0].tolist()
    np.testing.assert_allclose(confidence, alone.confidence_logits[:, 0], atol=1e-4)


@pytest.mark.slow
def test_1000_rounds_without_a_new_trace_or_growth(tiny):
    target, drafter = tiny
    draw = DraftSampling([0.7, 0.0], [1, 2], [0, 0])
    counts, rounds = [], 0
    for event in stream(target, drafter, ragged_prompts(2), sampling=draw, max_new_tokens=6000, draft_topk=4):
        rounds += 1
        if rounds in (10, 1000):
            counts.append((loop.speculative_round._cache_size(), len(jax.live_arrays())))
        if rounds == 1000:
            assert event.active.all()
            break
    assert rounds == 1000
    assert counts[0] == counts[1]


@pytest.mark.parametrize("speculative", [False, True])
def test_target_without_finite_logits_ends_its_request_and_no_other(tiny, speculative):
    """The target gives NaN for every token behind token 36, which only the first prompt holds."""
    target, drafter = tiny[0], None
    if speculative:  # its draft vocabulary ends before token 36, which would spoil the rows behind it
        raw = raw_config(**SMALL)
        weights = drafter_weights(raw)
        cut = {name: weights[name][:36] for name in ("lm_head.weight", "markov_head.markov_w2.weight")}
        drafter = build_drafter(raw, weights | cut | {"d2t": np.zeros(36, np.int64)})
    broken, _ = make_pair()
    table = np.array(broken.embed_tokens[...])
    table[36] = np.nan
    broken.embed_tokens[...] = table
    prompts = [[36], [3, 4], [5], [6, 7]]
    allowed = np.ones((4, 37), bool)
    allowed[:, 36] = False
    restrict = TargetFilter(allowed=allowed)
    own = generate(target, None, prompts, max_new_tokens=8, capacity=64, target_filter=restrict)
    out = generate(broken, drafter, prompts, max_new_tokens=8, capacity=64, target_filter=restrict)
    assert out.finish_reason == ["invalid", "length", "length", "length"]
    assert len(out.tokens[0]) == 0
    for found, expected in zip(out.tokens[1:], own.tokens[1:], strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, r"prompts: found \[\], expected a non-empty list"),
        ({"prompts": [[]]}, r"prompts\[0\]: found \[\], expected a non-empty list of token ids"),
        ({"prompts": [[1], [2, 37]]}, r"prompts\[1\]: found 37, expected token ids below the target's vocab_size 37"),
        ({"prompts": [[-1]]}, r"prompts\[0\]: found -1"),
        ({"prompts": [[0.5]]}, r"prompts\[0\]"),
        ({"capacity": 20}, r"capacity: found 20, expected at least 22 slots, for prompt 0 of 8 tokens"),
        ({"max_new_tokens": 0}, r"max_new_tokens: found 0, expected an integer from 1"),
        ({"draft_topk": 38}, r"topk: found 38"),
        ({"num_speculative_tokens": 6}, r"num_steps: found 6"),
        ({"draft_sample_method": "probabilistic"}, r"draft_sample_method: found 'probabilistic', expected 'greedy'"),
        ({"rule": "none"}, r"rule: found 'none'"),
        ({"stop_ids": [[1], [2]]}, r"stop_ids"),
        ({"sampling": DraftSampling([1.0, 1.0], [1, 2], [0, 0])}, r"sampling\.temperature\.shape"),
    ],
)
def test_bad_input_is_refused(tiny, options, message):
    arguments = {"prompts": [[1] * 8], "max_new_tokens": 8, **options}
    with pytest.raises(ValueError, match=message):
        generate(*tiny, **arguments)


def test_prompts_beyond_the_targets_limit_are_refused():
    target = make_target(max_position_embeddings=12)
    with pytest.raises(ValueError, match=r"prompt 0 of 8 tokens and max_new_tokens 8.*at most 12 positions"):
        generate(target, None, [[1] * 8], max_new_tokens=8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 41}, "drafter vocab_size: found 37, expected the target's, 41"),
        ({"num_hidden_layers": 4}, "drafter num_target_layers: found 2, expected the target's depth, 4"),
        ({"hidden_size": 14}, "drafter fc input: found 20, expected 2 taps of the target's hidden_size 14 = 28"),
    ],
)
def test_drafter_of_another_target_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        generate(make_target(**{"num_hidden_layers": 2, **fields}), make_drafter(**SMALL), [[1]], max_new_tokens=2)


def test_taps_beyond_the_targets_depth_are_refused():
    drafter = make_drafter(**SMALL | {"target_layer_ids": [0, 5], "num_target_layers": None})
    with pytest.raises(ValueError, match=r"drafter target_layer_ids: found \[0, 5\], expected layers below"):
        generate(make_target(), drafter, [[1]], max_new_tokens=2)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["vocab_size", "hidden_size", "num_layers", "max_length"],
)
@dataclasses.dataclass(frozen=True)
class BigramTarget:
    """The smallest target: next-token logits from a table, taps that say which token stood there, nothing to cache."""

    table: jax.Array
    vocab_size: int = 37
    hidden_size: int = 10
    num_layers: int = 2
    max_length: int | None = None

    def make_cache(self, batch, capacity):
        return jnp.zeros((batch, 1))

    def forward(self, tokens, start, cache, taps):
        rows = self.table[tokens]
        return rows, jnp.tile(rows[..., : self.hidden_size], len(taps)), cache

    def logits(self, hidden):
        return hidden


def test_any_target_behind_the_protocol_will_do(tiny):
    target = BigramTarget(jax.random.normal(jax.random.key(0), (37, 37)))
    assert isinstance(target, Target)
    prompts = ragged_prompts(4)
    out = generate(target, tiny[1], prompts, max_new_tokens=9, capacity=64)
    best = np.asarray(target.table.argmax(axis=1))
    for prompt, tokens in zip(prompts, out.tokens, strict=True):
        expected, last = [], prompt[-1]
        for _ in range(9):
            last = int(best[last])
            expected.append(last)
        assert tokens.tolist() == expected


@pytest.mark.parametrize("topk", [None, 9])
@pytest.mark.parametrize("temperature", [None, 0.8])
def test_the_kernels_run_inside_the_loop_and_agree_with_plain_xla(topk, temperature, monkeypatch):
    """`implementation` reaches the kernels through stream, round and drafter: under "pallas" they are really called."""
    calls = []
    for name in ("dense_step", "walk"):
        original = getattr(steps, name)
        monkeypatch.setattr(steps, name, lambda original=original, **named: (calls.append(1), original(**named))[1])
    target, drafter = make_pair()
    sampling = None if temperature is None else DraftSampling([temperature] * 2, [3, 4], [0, 0])
    common = {"sampling": sampling, "draft_topk": topk, "max_new_tokens": 9}
    tokens = {}
    for implementation in ("xla", "pallas"):
        out = generate(target, drafter, [[1, 2, 3], [4, 5]], implementation=implementation, **common)
        tokens[implementation] = [ids.tolist() for ids in out.tokens]
        assert bool(calls) == (implementation == "pallas")
    assert tokens["xla"] == tokens["pallas"]
    with pytest.raises(ValueError, match="implementation: found 'cuda', expected one of xla, pallas"):
        generate(target, drafter, [[1]], implementation="cuda")
    with pytest.raises(ValueError, match="implementation: found 'xla', expected None, since there is no drafter"):
        generate(target, None, [[1]], implementation="xla")


def test_events_carry_the_finish_reason():
    """The event in which a request ends says why; the others say None."""
    target, drafter = make_pair()
    for model in (None, drafter):
        events = list(stream(target, model, [[1, 2, 3], [4, 5]], max_new_tokens=[1, 6]))
        reasons = [event.finish_reason for event in events]
        assert [r[0] for r in reasons] == ["length"] + [None] * (len(events) - 1)
        assert [r[1] for r in reasons] == [None] * (len(events) - 1) + ["length"]
        stop = int(np.concatenate([e.tokens[1][e.tokens[1] >= 0] for e in events])[2])
        ended = list(stream(target, model, [[4, 5]], max_new_tokens=6, stop_ids=[stop]))
        assert ended[-1].finish_reason == ("stop",)
