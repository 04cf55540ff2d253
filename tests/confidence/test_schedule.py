"""The prefix scheduler against brute force and its plain Python form; causality; cost tables and their profiler."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bigram_weights, build_head
from scipy.stats import chisquare

from dspark_jax import (
    Calibration,
    CostTable,
    DraftBlock,
    DraftSampling,
    PrefixScheduler,
    ThresholdPolicy,
    draft_block,
    profile_sps,
    verify_block,
)
from dspark_jax.confidence.schedule import admit as pure_admit
from dspark_jax.confidence.schedule import admit_reference, survival

admit = jax.jit(pure_admit)


def block_of(logits, num_draft=None) -> DraftBlock:
    """A block of which only the confidence matters; logits [B, S]."""
    B, S = np.shape(logits)
    return DraftBlock(
        tokens=jnp.zeros((B, S), jnp.int32),
        num_draft=jnp.full(B, S, jnp.int32) if num_draft is None else jnp.asarray(num_draft, jnp.int32),
        valid=jnp.ones(B, bool),
        confidence_logits=jnp.asarray(logits, jnp.float32),
        logits=None,
        candidate_ids=None,
        candidate_logits=None,
        method="greedy",
    )


def convex_costs(rng, tokens: int) -> CostTable:
    """Seconds that grow ever faster with tokens, which makes throughput unimodal; now flat at first, now steep."""
    slopes = np.sort(rng.exponential(size=tokens)) * rng.choice([0.0, 0.05, 0.3, 1.0])
    return CostTable.make(np.arange(1, tokens + 2), 1 / (1 + np.concatenate([[0], np.cumsum(slopes)])))


def throughput(chances, lengths, active, costs) -> float:
    expected = tokens = sum(active)
    for r, n in enumerate(lengths):
        expected, tokens = expected + chances[r][:n].sum(), tokens + n
    return float(expected / float(costs.seconds_at(tokens)))


def test_survival_of_conditional_confidence():
    """Case 28: c = [.9, .5, .9] survives with .9, .45, .405."""
    np.testing.assert_allclose(survival(jnp.array([0.9, 0.5, 0.9])), [0.9, 0.45, 0.405], rtol=1e-6)
    np.testing.assert_array_equal(survival(jnp.array([0.5, jnp.nan, 1.0])), [0.5, 0, 0])


def test_equals_brute_force():
    """1000 random instances with unimodal throughput: no choice of prefix lengths is better."""
    rng = np.random.default_rng(0)
    different = 0
    for i in range(1000):
        B, S = [(1, 4), (2, 3), (3, 2), (4, 1)][i % 4]
        chances = np.cumprod(rng.beta(3, 1, (B, S)), axis=1).astype(np.float32)
        limit = rng.integers(0, S + 1, B) if i % 3 == 0 else np.full(B, S)
        active = rng.random(B) < 0.8 if i % 5 == 0 else np.ones(B, bool)
        active[0] = True
        costs = convex_costs(rng, B * (S + 1))
        table = np.asarray(costs.seconds, np.float64)
        found = np.asarray(admit(chances, limit, active, costs))
        assert found.tolist() == admit_reference(chances, limit, active, costs)
        tops = [range(int(min(limit[r], S)) + 1 if active[r] else 1) for r in range(B)]
        sums = np.concatenate([np.zeros((B, 1)), np.cumsum(chances, axis=1, dtype=np.float64)], axis=1)
        n = active.sum()

        def value(lengths):
            return (
                (n + sum(sums[r, m] for r, m in enumerate(lengths))) / table[n + sum(lengths) - 1]  # noqa: B023
            )

        best = max(value(lengths) for lengths in itertools.product(*tops))
        assert value(found) >= best * (1 - 1e-6), (i, found)
        different += 0 < found.sum() < sum(t.stop - 1 for t in tops)
    assert different > 300


def test_one_jitted_call_at_serving_size():
    """B = 256, S = 16 in one program with one sort; work grows like BS log BS, far below pairwise comparison."""
    B, S = 256, 16
    rng = np.random.default_rng(1)
    costs = CostTable.make([1, 256, 1024, 4096], [200.0, 180.0, 90.0, 20.0])
    scheduler = PrefixScheduler.make(costs)
    block = block_of(rng.normal(1.5, 1.5, (B, S)))
    lengths = np.asarray(scheduler(block))
    chances = np.asarray(survival(block.confidence))
    assert lengths.tolist() == admit_reference(chances, [S] * B, [True] * B, costs)
    assert 0 < lengths.mean() < S
    args = (chances, np.full(B, S), np.ones(B, bool), costs)
    compiled = admit.lower(*args).compile()
    assert compiled.as_text().count(" sort(") == 1
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    assert cost.get("flops", 0) < 200 * B * S
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 100 * B * S


def test_stops_at_the_first_drop_and_goes_no_further():
    """A staircase of costs whose best m lies behind a drop: algorithm 1 stays before it, a global choice would not."""
    costs = CostTable.make([1, 2, 3], [1.0, 1 / 1.9, 1 / 1.9])
    chances = jnp.array([[0.7, 0.7]])
    assert admit(chances, jnp.array([2]), jnp.array([True]), costs).tolist() == [0]
    assert throughput(chances, [2], [True], costs) > throughput(chances, [0], [True], costs)


def test_equal_survival_is_admitted_in_order():
    """Confidences of 1 tie along a block; what is admitted is still a prefix, shared out evenly."""
    costs = CostTable.make(np.arange(1, 20), np.where(np.arange(1, 20) <= 6, 1.0, 0.01))
    assert admit(jnp.ones((3, 4)), jnp.full(3, 4), jnp.ones(3, bool), costs).tolist() == [1, 1, 1]
    assert admit(jnp.ones((3, 4)), jnp.array([4, 0, 4]), jnp.ones(3, bool), costs).tolist() == [2, 0, 1]


def test_inactive_requests_cost_nothing():
    """Case 24: padded rows do not change what live rows are given, whatever they hold."""
    rng = np.random.default_rng(2)
    costs = CostTable.make([1, 4, 8, 16], [10.0, 9.0, 5.0, 1.0])
    logits = rng.normal(1, 1, (3, 4))
    alone = PrefixScheduler.make(costs)(block_of(logits)).tolist()
    padded = np.concatenate([logits[:1], np.full((1, 4), np.nan), logits[1:], np.full((1, 4), 50.0)])
    found = PrefixScheduler.make(costs)(block_of(padded), jnp.array([True, False, True, True, False])).tolist()
    assert found == [alone[0], 0, *alone[1:], 0]


def test_a_decision_does_not_see_later_steps():
    """Changing a request's confidences after step j changes no decision up to step j + 1 of that request."""
    rng = np.random.default_rng(3)
    costs = CostTable.make([1, 4, 8, 12, 16], [10.0, 9.5, 7.0, 4.0, 2.0])
    scheduler, changed = PrefixScheduler.make(costs), 0
    for _ in range(100):
        logits = rng.normal(1, 1.5, (3, 4))
        r, j = rng.integers(3), rng.integers(3)
        other = logits.copy()
        other[r, j + 1 :] = rng.normal(1, 3, 3 - j)
        before, after = scheduler(block_of(logits)), scheduler(block_of(other))
        assert min(int(before[r]), j + 1) == min(int(after[r]), j + 1)
        changed += before.tolist() != after.tolist()
    assert changed > 10


def test_calibration_and_limits_apply():
    costs = CostTable.make([1, 100], [10.0, 9.0])
    logits = np.array([[2.0, 2.0, 2.0]])
    cold, warm = Calibration((0.5, 0.5, 0.5)), Calibration((1.0, 50.0, 1.0))
    assert PrefixScheduler.make(costs, cold)(block_of(logits, [2])).tolist() == [2]
    policy = ThresholdPolicy.make(0.6, warm)
    assert policy(block_of(logits)).tolist() == [1]
    assert ThresholdPolicy.make(0.6)(block_of(logits)).tolist() == [3]
    assert ThresholdPolicy.make(0.6)(block_of(np.tile(logits, (2, 1))), jnp.array([False, True])).tolist() == [0, 3]
    with pytest.raises(ValueError, match=r"calibration.temperatures: found 2, expected one for each of the 3"):
        PrefixScheduler.make(costs, Calibration((1.0, 1.0)))(block_of(logits))
    with pytest.raises(ValueError, match=r"block.confidence_logits"):
        PrefixScheduler.make(costs)(DraftBlock(**(vars(block_of(logits)) | {"confidence_logits": None})))
    with pytest.raises(ValueError, match=r"threshold: found 1\.5"):
        ThresholdPolicy.make(1.5)


# ---- the paper's appendix A: a length decided with a look at later tokens biases the output ----

N = 200_000
# One step costs as much as two, and dearly: only a whole block with a good second step pays.
STAIRS = CostTable.make([1, 2, 3], [1.0, 1 / 1.9, 1 / 1.9])


def drafted_pairs():
    """Blocks of two fair coins; the second step's confidence is high after a 0 and low after a 1."""
    weights = bigram_weights(np.zeros((2, 2)))
    weights["confidence_head.proj.weight"] = np.array([[0, 0, 12.0, -12.0]], np.float32)
    weights["confidence_head.proj.bias"] = np.array([0.0], np.float32)
    head = build_head(weights, block_size=2)
    draw = DraftSampling(np.ones(N), np.arange(N), np.full(N, 3))
    block = draft_block(head, np.zeros((N, 2, 2), np.float32), np.zeros(N, int), sampling=draw, outputs="logits")
    # The first step's confidence is the same for all; only the second one depends on what was drafted.
    first = jnp.full((N, 1), np.log(0.7 / 0.3), jnp.float32)
    logits = jnp.concatenate([first, block.confidence_logits[:, 1:]], axis=1)
    return DraftBlock(**(vars(block) | {"confidence_logits": logits})), draw


def best_of_all(chances):
    """The non-causal rule: the prefix length of the largest throughput, wherever it lies."""
    expected = jnp.stack([jnp.ones(N), 1 + chances[:, 0], 1 + chances.sum(axis=1)], axis=1)
    return jnp.argmax(expected / STAIRS.seconds_at(jnp.arange(1, 4))[None], axis=1)


def first_tokens(block, draw, lengths):
    target = np.broadcast_to(np.log([[0.5, 0.5], [0.2, 0.8], [0.5, 0.5]]).astype(np.float32), (N, 3, 2))
    out = verify_block(block, target, draw, num_draft=lengths)
    return np.bincount(np.asarray(out.tokens)[:, 0], minlength=2) / N


def test_looking_ahead_biases_and_algorithm_1_does_not():
    block, draw = drafted_pairs()
    chances = survival(block.confidence)
    ahead = best_of_all(chances)
    assert sorted(np.unique(ahead).tolist()) == [0, 2]
    # Verified exactly when the draft is 0 (then kept, since p = q); otherwise the target draws afresh: 1/2 + 1/4.
    np.testing.assert_allclose(first_tokens(block, draw, ahead), [0.75, 0.25], atol=0.005)
    each = jax.vmap(admit, in_axes=(0, 0, None, None))
    for costs in (STAIRS, CostTable.make([1, 2, 3], [1.0, 0.75, 0.6])):
        lengths = each(chances[:, None], jnp.full((N, 1), 2), jnp.ones(1, bool), costs)[:, 0]
        found = first_tokens(block, draw, lengths)
        assert chisquare(found * N, [N / 2, N / 2]).pvalue > 1e-4, found
    assert sorted(np.unique(lengths).tolist()) == [1, 2]
    policy = ThresholdPolicy.make(0.5)(block)
    assert sorted(np.unique(policy).tolist()) == [1, 2]
    assert chisquare(first_tokens(block, draw, policy) * N, [N / 2, N / 2]).pvalue > 1e-4


# ---- cost tables ----


def test_cost_table_between_and_beyond_measurements(tmp_path):
    table = CostTable.make([2, 4, 8], [1.0, 0.5, 0.25])
    np.testing.assert_allclose(table.seconds_at([1, 2, 3, 4, 6, 8, 10]), [1, 1, 1.5, 2, 3, 4, 5], rtol=1e-6)
    falling = CostTable.make([2, 4], [0.5, 1.0])
    np.testing.assert_allclose(falling.seconds_at([8]), [1.0])
    assert float(CostTable.make([4], [2.0]).sps(100)) == 2.0
    table.save(tmp_path / "costs.json", measured="by hand")
    raw = json.loads((tmp_path / "costs.json").read_text())
    assert raw == {"tokens": [2, 4, 8], "sps": [1.0, 0.5, 0.25], "measured": "by hand"}
    again = CostTable.load(tmp_path / "costs.json")
    np.testing.assert_array_equal(again.seconds, table.seconds)


@pytest.mark.parametrize(
    ("tokens", "sps", "message"),
    [
        ([], [], "tokens"),
        ([1, 1], [1, 1], "tokens: found"),
        ([0, 1], [1, 1], "tokens: found"),
        ([1.5, 2], [1, 1], "tokens: found"),
        ([1, 2], [1], "sps: found"),
        ([1, 2], [1, 0], "sps: found"),
        ([1, 2], [1, float("nan")], "sps: found"),
    ],
)
def test_bad_cost_tables_are_refused(tokens, sps, message):
    with pytest.raises(ValueError, match=message):
        CostTable.make(tokens, sps)


def test_bad_cost_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="profile-sps"):
        CostTable.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        CostTable.load(tmp_path / "broken.json")
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match="found list, expected a JSON object"):
        CostTable.load(tmp_path / "other.json")
    (tmp_path / "other.json").write_text('{"tokens": [1]}')
    with pytest.raises(ValueError, match="`tokens` and `sps`"):
        CostTable.load(tmp_path / "other.json")


def test_profiler_takes_the_median_and_leaves_out_the_warmup():
    """With a clock of our own: 2 s per token, and every fifth run ten times as long; the first runs cost 100 s."""
    now, calls = [0.0], []

    def make_step(n):
        count = [0]

        def step():
            count[0] += 1
            calls.append(n)
            now[0] += 100 if count[0] <= 2 else 2 * n * (10 if count[0] % 5 == 0 else 1)
            return jnp.zeros(n)

        return step

    table = profile_sps(make_step, [1, 2, 8], warmup=2, repeats=7, clock=lambda: now[0])
    np.testing.assert_allclose(table.seconds, [2, 4, 16])
    assert calls.count(8) == 9
    with pytest.raises(ValueError, match="tokens: found"):
        profile_sps(make_step, [2, 1])
    with pytest.raises(ValueError, match="repeats: found 0"):
        profile_sps(make_step, [1], repeats=0)


def test_profile_sps_command(tmp_path, capsys, monkeypatch):
    from dspark_jax.cli import main

    (tmp_path / "my_steps.py").write_text(
        "import jax.numpy as jnp\ndef step(n):\n    return lambda: jnp.ones(n).sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["profile-sps", "my_steps:step", "out.json", "--tokens", "1,4", "--repeats", "3"]) == 0
    table = CostTable.load("out.json")
    assert table.tokens.tolist() == [1, 4]
    assert (np.asarray(table.seconds) > 0).all()
    assert "steps/s" in capsys.readouterr().out
    for bad in (
        ["my_steps", "o"],
        ["my_steps:none", "o"],
        ["no_such:f", "o"],
        ["my_steps:step", "o", "--tokens", "1,x"],
    ):
        assert main(["profile-sps", *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_profile_sps_of_the_bundled_target(tmp_path, capsys, checkpoints):
    from dspark_jax.cli import main

    out = str(tmp_path / "out.json")
    options = ["--tokens", "1,3", "--repeats", "1", "--warmup", "1", "--context", "16"]
    assert main(["profile-sps", str(checkpoints / "target"), out, *options]) == 0
    assert CostTable.load(out).tokens.tolist() == [1, 3]
    assert main(["profile-sps", str(checkpoints / "target"), out, "--context", "0"]) == 2
    assert "--context: found 0" in capsys.readouterr().err
