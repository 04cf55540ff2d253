"""Sequential temperature scaling recovers known distortions; its measures against plain loops; the command."""

import json
import sys

import jax
import numpy as np
import pytest
from helpers import CHECKPOINTS, KINDS, TESTS, make_inputs, make_weights, save_checkpoint

from dspark_jax import (
    Calibration,
    CostTable,
    PrefixScheduler,
    draft_block,
    fit_calibration,
    load_calibration,
    load_head,
)
from dspark_jax.cli import main
from dspark_jax.confidence.calibration import auc, brier_score, expected_calibration_error, measure, reliability
from dspark_jax.confidence.records import Records, load_records


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def synthetic(n=20_000, temperatures=(2.0, 0.5, 1.0, 3.0), seed=0, limit=None):
    """Blocks whose true conditional confidence is sigmoid(logit / temperature); returns logits, accepted, num_draft."""
    rng = np.random.default_rng(seed)
    S = len(temperatures)
    true = rng.normal(1.0, 1.5, (n, S))
    flags = rng.random((n, S)) < sigmoid(true)
    accepted = np.cumprod(flags, axis=1).sum(axis=1)
    num_draft = np.full(n, S) if limit is None else np.asarray(limit)
    return true * np.asarray(temperatures), np.minimum(accepted, num_draft), num_draft


def test_recovers_the_temperatures():
    logits, accepted, _ = synthetic()
    fitted = fit_calibration(logits, accepted)
    np.testing.assert_allclose(fitted.temperatures, [2.0, 0.5, 1.0, 3.0], rtol=0.25)
    held_out = Records.of(*synthetic(seed=1))
    before, after = measure(held_out), measure(held_out, fitted)
    assert before.ece.mean() > 0.04
    assert after.ece.mean() < 0.02
    assert (after.brier[[0, 3]] < before.brier[[0, 3]]).all()
    np.testing.assert_array_equal(after.count, 20_000)
    # A temperature keeps the order of the first step's predictions.
    np.testing.assert_allclose(after.auc[0], before.auc[0], atol=1e-12)


def test_fit_is_sequential():
    """A temperature does not depend on later steps; of those with the least error (within noise) Brier picks one."""
    logits, accepted, _ = synthetic(n=3000)
    whole = fit_calibration(logits, accepted)
    part = fit_calibration(logits[:, :2], np.minimum(accepted, 2))
    assert whole.temperatures[:2] == part.temperatures
    survived = accepted > 1
    first = sigmoid(logits[:, 0] / whole.temperatures[0])

    def error(t):
        return expected_calibration_error(first * sigmoid(logits[:, 1] / t), survived)

    noise = survived.std() / len(survived) ** 0.5
    grid = np.geomspace(1 / 8, 8, 361)
    errors = np.array([error(t) for t in grid])
    assert error(whole.temperatures[1]) <= errors.min() + noise + 1e-9
    brier = np.array([np.mean((first * sigmoid(logits[:, 1] / t) - survived) ** 2) for t in grid])
    np.testing.assert_allclose(
        grid[np.argmin(np.where(errors <= errors.min() + noise, brier, 1))], whole.temperatures[1]
    )


def test_calibrated_records_keep_temperatures_near_one():
    logits, accepted, _ = synthetic(temperatures=(1.0, 1.0, 1.0))
    fitted = fit_calibration(logits, accepted)
    np.testing.assert_allclose(fitted.temperatures, 1, rtol=0.2)


def test_truncated_blocks_do_not_bias_the_fit():
    """Steps that were never verified are left out, not counted as rejected."""
    rng = np.random.default_rng(4)
    logits, accepted, limit = synthetic(n=40_000, limit=rng.integers(0, 5, 40_000))
    fitted = fit_calibration(logits, accepted, limit)
    np.testing.assert_allclose(fitted.temperatures, [2.0, 0.5, 1.0, 3.0], rtol=0.3)
    quality = measure(Records.of(logits, accepted, limit), fitted)
    np.testing.assert_allclose(quality.count, 40_000 * np.array([0.8, 0.6, 0.4, 0.2]), rtol=0.05)
    assert quality.ece.max() < 0.02
    none = fit_calibration(logits[:50], np.minimum(accepted[:50], 2), np.minimum(limit[:50], 2))
    assert none.temperatures[2:] == (1.0, 1.0)


def test_measures_against_plain_loops():
    rng = np.random.default_rng(5)
    p, y = np.round(rng.random(300), 2), rng.random(300) < 0.4
    p = p * 0.998 + 0.001  # no value on an edge of a bin
    gaps = 0.0
    for b in range(10):
        inside = (p >= b / 10) & (p < (b + 1) / 10)
        if inside.any():
            gaps += inside.mean() * abs(y[inside].mean() - p[inside].mean())
    np.testing.assert_allclose(expected_calibration_error(p, y, bins=10), gaps, rtol=1e-12)
    np.testing.assert_allclose(brier_score(p, y), sum((a - b) ** 2 for a, b in zip(p, y, strict=True)) / 300)
    wins = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    np.testing.assert_allclose(auc(p, y), np.mean(wins))
    assert np.isnan(auc(p, np.ones(300, bool)))
    assert expected_calibration_error([1.0, 0.0], [True, False]) == 0
    assert expected_calibration_error([0.9, 0.9], [True, False]) == pytest.approx(0.4)


def test_accepted_as_flags_or_counts():
    logits, accepted, _ = synthetic(n=500)
    flags = np.arange(4) < accepted[:, None]
    flags[:, 3] |= np.random.default_rng(0).random(500) < 0.5  # what follows the first False does not count
    flags[accepted == 3, 3] = False
    assert fit_calibration(logits, flags) == fit_calibration(logits, accepted)


def test_json_round_trip(tmp_path):
    calibration = Calibration((1.25, 0.5))
    calibration.save(tmp_path / "calibration.json", drafter="x")
    assert load_calibration(tmp_path) == calibration == load_calibration(tmp_path / "calibration.json")
    assert json.loads((tmp_path / "calibration.json").read_text()) == {"temperatures": [1.25, 0.5], "drafter": "x"}
    np.testing.assert_allclose(calibration.confidence([[1.0, 1.0]]), [[sigmoid(0.8), sigmoid(2.0)]])


def test_loaded_with_the_head(tmp_path):
    """calibration.json beside a checkpoint comes with the head and stays static under jit."""
    directory = save_checkpoint(tmp_path / "drafter", make_weights("vanilla"))
    assert load_head(directory).calibration is None
    Calibration((1.25, 0.5)).save(directory / "calibration.json")
    head = load_head(directory)
    assert head.calibration == Calibration((1.25, 0.5))
    assert jax.jit(lambda head: head)(head).calibration == head.calibration
    hidden, anchor = make_inputs(2, 2, 12, 37)
    block = draft_block(head, hidden, anchor)
    scheduler = PrefixScheduler.make(CostTable.make([1, 100], [10.0, 9.9]), head.calibration)
    assert scheduler(block).tolist() == [2, 2]
    (directory / "calibration.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_head(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_drafters_are_calibrated(kind):
    """Held-out blocks of the trained drafters (scripts/record_acceptance.py): mean ECE of survival below 2%."""
    records = load_records(TESTS / "records" / f"{kind}-heldout.npz")
    calibration = load_calibration(CHECKPOINTS / f"dspark-{kind}")
    assert load_head(CHECKPOINTS / f"dspark-{kind}").calibration == calibration
    before, after = measure(records), measure(records, calibration)
    assert after.ece.mean() < 0.02
    assert after.ece[0] < before.ece[0]
    assert after.survival[0] > 0.5
    assert after.auc.min() > 0.6


def test_reliability_curve():
    records = Records.of([[0.0], [0.0], [5.0], [5.0]], [0, 1, 1, 1])
    predicted, observed, share = reliability(records, 0)
    np.testing.assert_allclose(predicted, [0.5, sigmoid(5.0)])
    np.testing.assert_allclose(observed, [0.5, 1.0])
    np.testing.assert_allclose(share, [0.5, 0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1]), r"confidence_logits.shape"),
        (([[np.nan]], [1]), "confidence_logits: found 'NaN"),
        (([[1.0]], [2]), "accepted: found 2"),
        (([[1.0]], [-1]), "accepted: found -1"),
        (([[1.0]], [0.5]), "accepted: found 'float64"),
        (([[1.0, 1.0]], [1], [3]), "num_draft: found"),
        (([[1.0, 1.0]], [2], [1]), "accepted: found 2"),
    ],
)
def test_bad_records_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_calibration(*arguments)


BROKEN = ["[1]", "{}", "{"] + [f'{{"temperatures": {x}}}' for x in ("[]", "[0]", '["1"]', "[true]", "1", "[NaN]")]


@pytest.mark.parametrize("text", BROKEN)
def test_bad_calibration_files_are_refused(tmp_path, text):
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(ValueError, match=r"calibration.json|temperatures"):
        load_calibration(tmp_path)
    with pytest.raises(FileNotFoundError, match="calibrate"):
        load_calibration(tmp_path / "none.json")


def test_command(tmp_path, capsys):
    Records.of(*synthetic(n=4000)).save(tmp_path / "fit.npz")
    Records.of(*synthetic(n=4000, seed=1)).save(tmp_path / "held.npz")
    kept = load_records(tmp_path / "fit.npz")
    np.testing.assert_array_equal(kept.num_accepted, synthetic(n=4000)[1])
    out = tmp_path / "out.json"
    assert main(["calibrate", str(tmp_path / "fit.npz"), str(out), "--held-out", str(tmp_path / "held.npz")]) == 0
    printed = capsys.readouterr().out
    assert "ECE before" in printed
    assert len([line for line in printed.splitlines() if line.strip()[:1].isdigit()]) == 4
    fitted = load_calibration(out)
    assert fitted.temperatures == pytest.approx(
        fit_calibration(kept.confidence_logits, kept.num_accepted, kept.num_draft).temperatures
    )
    after = measure(load_records(tmp_path / "held.npz"), fitted)
    assert f"{after.ece.mean():.4f} after" in printed
    np.testing.assert_allclose(json.loads(out.read_text())["ece"], after.ece, atol=1e-6)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    assert main(["calibrate", str(tmp_path / "fit.npz"), str(folder)]) == 0
    assert load_calibration(folder) == fitted


def test_command_refuses_bad_files(tmp_path, capsys):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("none.npz", "other.npz", "text.npz"):
        assert main(["calibrate", str(tmp_path / name), str(tmp_path / "out.json")]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert name in captured.err
        assert not (tmp_path / "out.json").exists()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    Records.of(*synthetic(n=500)).save(tmp_path / "fit.npz")
    figure = tmp_path / "reliability.png"
    assert main(["calibrate", str(tmp_path / "fit.npz"), str(tmp_path / "out.json"), "--plot", str(figure)]) == 0
    assert figure.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Records.of(*synthetic(n=50)).save(tmp_path / "fit.npz")
    assert main(["calibrate", str(tmp_path / "fit.npz"), str(tmp_path / "out.json"), "--plot", "x.png"]) == 2
    assert "dspark-jax[plot]" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
