"""Calibration of the confidence head by sequential temperature scaling, and what measures it.

With conditional confidences c_i = sigmoid(logit_i / t_i), the survival of step j is a_j = c_1 * ... * c_j: the
predicted probability that the target accepts all of steps 1 to j. From left to right, each t_j is the value of a grid
that makes the expected calibration error of a_j smallest, with t_1 .. t_(j-1) held fixed (DSpark, arXiv 2607.05147,
section 3.2.1). Errors within one standard error of the smallest count as equal, and the Brier score decides among
them: it sees every prediction and not only means of bins, so that steps that rarely survive are fitted as well.

Everything here is NumPy in float64 on recorded pairs; schedule.py applies a calibration inside jit.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import ArrayLike

from ..atomic_files import write_json
from ..checks import check_int, invalid
from ..json_files import read_json
from .records import Records

FILE_NAME = "calibration.json"
BINS, MAX_BINS = 15, 2**20
Curve = Float64[np.ndarray, " used"]  # one value for each bin that holds records
GRID = np.exp(np.linspace(-math.log(8), math.log(8), 361))  # steps of 1.2%; 1 is among them


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One temperature for each draft step: c_j = sigmoid(logit_j / temperatures[j])."""

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that there is at least one temperature and that all are finite and positive."""
        values = self.temperatures
        if not isinstance(values, list | tuple | np.ndarray) or len(values) == 0:
            raise invalid("temperatures", values, "one number > 0 for each draft step")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
                raise invalid("temperatures", value, "a number > 0")
            if not math.isfinite(value) or value <= 0:
                raise invalid("temperatures", float(value), "a finite number > 0")
        object.__setattr__(self, "temperatures", tuple(float(value) for value in values))

    def confidence(self, confidence_logits: ArrayLike) -> Float64[np.ndarray, "N S"]:
        """Return calibrated conditional confidences of logits [N, S], float64."""
        logits = np.asarray(confidence_logits, np.float64)
        if logits.shape[-1] > len(self.temperatures):
            raise invalid("confidence_logits.shape", logits.shape, f"at most {len(self.temperatures)} draft steps")
        return _sigmoid(logits / np.asarray(self.temperatures)[: logits.shape[-1]])

    def save(self, path: str | os.PathLike[str], **facts: Any) -> None:
        """Write JSON; `facts` (JSON values, for example how it was fitted) are kept beside the temperatures."""
        write_json(path, {"temperatures": list(self.temperatures)} | facts)


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration: a JSON file, or `calibration.json` of a checkpoint directory.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a JSON object with a list `temperatures` of numbers > 0.
    """
    if os.path.isdir(path):
        path = os.path.join(path, FILE_NAME)
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(path)}: no such file; `dspark-jax calibrate` writes one") from None
    if "temperatures" not in raw:
        raise ValueError(f"{os.fspath(path)}: expected an object with `temperatures`")
    try:
        return Calibration(raw["temperatures"])
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def find_calibration(checkpoint: str | os.PathLike[str]) -> Calibration | None:
    """Return the calibration beside a checkpoint (its directory or file), or None where there is none."""
    directory = checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint)
    path = os.path.join(directory, FILE_NAME)
    return load_calibration(path) if os.path.lexists(path) else None


def fit_calibration(
    confidence_logits: ArrayLike, accepted: ArrayLike, num_draft: ArrayLike | None = None, *, bins: int = BINS
) -> Calibration:
    """Fit sequential temperature scaling on recorded pairs (see the module's equations).

    Args:
        confidence_logits, accepted, num_draft: as in Records.of.
        bins: equal-width bins of the calibration error.

    Returns:
        Calibration; a step that no block observed keeps temperature 1.
    """
    records = Records.of(confidence_logits, accepted, num_draft)
    bins = check_int("bins", bins, 1, MAX_BINS)
    before = np.ones(len(records.num_accepted))
    temperatures = []
    for step in range(records.confidence_logits.shape[1]):
        seen, logit = records.observed(step), records.confidence_logits[:, step]
        best = 1.0
        if seen.any():
            outcome = records.survived(step)[seen]
            chances = [before[seen] * _sigmoid(logit[seen] / t) for t in GRID]
            errors = np.array([expected_calibration_error(chance, outcome, bins=bins) for chance in chances])
            noise = math.sqrt(outcome.mean() * (1 - outcome.mean()) / len(outcome))
            equal = np.flatnonzero(errors <= errors.min() + noise + 1e-12)
            best = float(GRID[equal[np.argmin([brier_score(chances[i], outcome) for i in equal])]])
        temperatures.append(best)
        before = before * _sigmoid(logit / best)
    return Calibration(tuple(temperatures))


def expected_calibration_error(probability: ArrayLike, outcome: ArrayLike, *, bins: int = BINS) -> float:
    """Return sum over bins of (share of records) * |mean outcome - mean probability|, equal-width bins of [0, 1]."""
    bins = check_int("bins", bins, 1, MAX_BINS)
    p, y = np.asarray(probability, np.float64), np.asarray(outcome, np.float64)
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=y - p, minlength=bins)
    return float(np.abs(gap).sum() / len(p))


def brier_score(probability: ArrayLike, outcome: ArrayLike) -> float:
    """Return the mean of (probability - outcome)**2."""
    return float(np.mean((np.asarray(probability, np.float64) - np.asarray(outcome, np.float64)) ** 2))


def auc(probability: ArrayLike, outcome: ArrayLike) -> float:
    """Return the chance that a success has a larger probability than a failure, ties as half; NaN without both."""
    p, y = np.asarray(probability, np.float64), np.asarray(outcome, bool)
    wins, losses = int(y.sum()), int((~y).sum())
    if wins == 0 or losses == 0:
        return float("nan")
    _, index, counts = np.unique(p, return_inverse=True, return_counts=True)
    rank = np.cumsum(counts) - (counts - 1) / 2
    return float((rank[index.reshape(-1)][y].sum() - wins * (wins + 1) / 2) / (wins * losses))


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality of predicted survival, one value for each step: records seen, mean outcome, ECE, Brier score, AUC."""

    count: Int64[np.ndarray, " S"]
    survival: Float64[np.ndarray, " S"]
    ece: Float64[np.ndarray, " S"]
    brier: Float64[np.ndarray, " S"]
    auc: Float64[np.ndarray, " S"]


def measure(records: Records, calibration: Calibration | None = None, *, bins: int = BINS) -> Quality:
    """Measure predicted against observed survival at each step, raw or with a calibration; NaN where none was seen."""
    bins = check_int("bins", bins, 1, MAX_BINS)
    S = records.confidence_logits.shape[1]
    calibration = Calibration((1.0,) * S) if calibration is None else calibration
    predicted = np.cumprod(calibration.confidence(records.confidence_logits), axis=1)
    table = np.full((5, S), np.nan)
    for step in range(S):
        seen = records.observed(step)
        table[0, step] = seen.sum()
        if seen.any():
            p, y = predicted[seen, step], records.survived(step)[seen]
            error = expected_calibration_error(p, y, bins=bins)
            table[1:, step] = y.mean(), error, brier_score(p, y), auc(p, y)
    return Quality(table[0].astype(np.int64), *table[1:])


def reliability(
    records: Records, step: int, calibration: Calibration | None = None, *, bins: int = BINS
) -> tuple[Curve, Curve, Curve]:
    """Return the reliability curve of a step: mean prediction, mean outcome and share of records of each used bin."""
    bins = check_int("bins", bins, 1, MAX_BINS)
    calibration = Calibration((1.0,) * records.confidence_logits.shape[1]) if calibration is None else calibration
    seen = records.observed(step)
    p = np.prod(calibration.confidence(records.confidence_logits)[seen, : step + 1], axis=1)
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    used = count > 0

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(index, weights=values, minlength=bins)[used] / count[used]

    return mean(p), mean(records.survived(step)[seen].astype(np.float64)), count[used] / max(count.sum(), 1)


def _sigmoid(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
    # Both branches avoid overflow; np.exp of a large positive number would warn.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))
