"""The sweep's counting, its intervals, its report and its command."""

import json

import numpy as np
import pytest
from helpers import CHECKPOINTS
from tiny import make_drafter, make_target

from dspark_jax import Generated
from dspark_jax.cli import main
from dspark_jax.decoding import sweep


def result(accepted, active, finish="length"):
    """Make what generate returns for accepted drafts [R, B] of three proposed."""
    accepted, active = np.array(accepted), np.array(active, bool)
    return Generated(
        tokens=[np.array([b]) for b in range(active.shape[1])],
        finish_reason=[finish] * active.shape[1],
        active=active,
        num_draft=np.where(active, 3, 0),
        num_accepted=accepted,
        committed=np.where(active, accepted + 1, 0),
        lengths=np.full(len(active), 3, np.int32),
        confidence_logits=None,
        prefill_seconds=0.0,
        decode_seconds=0.0,
    )


def test_counts_by_hand():
    """Prompt 0: rounds with 0, 2 and 3 accepted; prompt 1: one round with 1."""
    out = result([[0, 1], [2, 9], [3, 9]], [[1, 1], [1, 0], [1, 0]])
    counts = sweep.count([(out, np.array([0, 1]))], prompts=2, steps=3)
    assert counts.committed.tolist() == [8, 2]
    assert counts.rounds.tolist() == [3, 1]
    assert counts.acceptance_length == 10 / 4
    assert counts.reached.tolist() == [4, 3, 2]
    assert counts.accepted.tolist() == [3, 2, 1]
    assert counts.conditional == [3 / 4, 2 / 3, 1 / 2]


def test_a_round_cut_by_a_stop_token_is_not_counted():
    counts = sweep.count([(result([[2], [1]], [[1], [1]], "stop"), np.array([0]))], prompts=1, steps=3)
    assert (counts.committed.tolist(), counts.rounds.tolist()) == ([3], [1])


def test_unreached_positions_have_no_acceptance():
    counts = sweep.count([(result([[0]], [[1]]), np.array([0]))], prompts=1, steps=3)
    assert counts.conditional == [0.0, None, None]


def test_bootstrap_covers_the_mean_as_often_as_it_says():
    """200 experiments of 40 prompts with a known mean: about 95% of the intervals cover it."""
    rng, covered = np.random.default_rng(0), 0
    for trial in range(200):
        rounds = np.full(40, 20)
        committed = rng.binomial(60, rng.uniform(0.3, 0.7, 40)) + 20
        empty = np.zeros(0, np.int64)
        low, high = sweep.bootstrap(sweep.Counts(committed, rounds, empty, empty, []), resamples=500, seed=trial)
        covered += low <= 1 + 60 * 0.5 / 20 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_paired_differences_are_narrower_than_intervals():
    rng = np.random.default_rng(1)
    rounds, committed = np.full(40, 20), rng.integers(20, 100, 40)
    empty = np.zeros(0, np.int64)
    dense = sweep.Counts(committed, rounds, empty, empty, [])
    less = sweep.Counts(committed - 2, rounds, empty, empty, [])
    low, high = sweep.bootstrap(less, dense)
    assert low == pytest.approx(-0.1)
    assert high == pytest.approx(-0.1)
    low, high = sweep.bootstrap(less)
    assert high - low > 0.2


@pytest.mark.slow
def test_command_writes_table_json_and_plot(tmp_path, capsys):
    report, plot = tmp_path / "sweep.json", tmp_path / "sweep.png"
    arguments = ["sweep", str(CHECKPOINTS / "dspark-vanilla"), "--target", str(CHECKPOINTS / "target"), "--prompts",
                 str(CHECKPOINTS / "prompts.jsonl"), "--draft-topk", "off,2", "--temperatures", "0", "--limit", "4",
                 "--max-new-tokens", "12", "--dtype", "float32", "--json", str(report)]  # fmt: skip
    with_plot = True
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with_plot = False
    assert main([*arguments, "--plot", str(plot)] if with_plot else arguments) == 0
    out = capsys.readouterr().out
    assert "Temperature 0" in out
    assert "| off |" in out
    assert "equals the target's own greedy decoding" in out
    saved = json.loads(report.read_text())
    rows = saved["temperatures"][0]["rows"]
    assert [row["k"] for row in rows] == [2, None]
    assert 1 <= rows[0]["acceptance_length"] < rows[1]["acceptance_length"] <= 8
    assert rows[1]["minus_dense"] == 0
    assert saved["temperatures"][0]["greedy_output_equals_target"] is True
    if with_plot:
        assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_later_turns_see_the_answers_before_them():
    target, drafter = make_target(num_hidden_layers=2), make_drafter(
        num_hidden_layers=1, target_layer_ids=[-1, 0], num_target_layers=2
    )  # fmt: skip
    options = {"topk": None, "temperature": 0.0, "seeds": 1, "max_new_tokens": 5, "batch_size": 8}
    two = sweep.measure(target, drafter, [[[1, 2], [3]], [[4]]], **options)
    assert [len(tokens) for tokens in two.tokens] == [5, 5, 5]
    answer = two.tokens[0].tolist()
    one = sweep.measure(target, drafter, [[[1, 2, *answer, 3]]], **options)
    np.testing.assert_array_equal(one.tokens[0], two.tokens[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--draft-topk", "4,many"], "--draft-topk: found '4,many', expected numbers and off"),
        (["--draft-topk", "5000"], "topk: found 5000, expected an integer from 1 to 4096"),
        (["--temperatures", "-1"], "temperatures: found -1.0"),
        (["--prompts", "NOWHERE"], "NOWHERE"),
        (["--prompts", "BAD"], "line 2: expected"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, message, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt_ids": [1, 2]}\n{"text": "x"}\n')
    change = [str(bad) if part == "BAD" else part for part in change]
    arguments = ["sweep", str(CHECKPOINTS / "dspark-vanilla"), "--target", str(CHECKPOINTS / "target")]
    prompts = [] if "--prompts" in change else ["--prompts", str(CHECKPOINTS / "prompts.jsonl")]
    assert main([*arguments, *prompts, *change]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
