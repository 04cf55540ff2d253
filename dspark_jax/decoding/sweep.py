"""Acceptance swept over k and temperature: what top-k drafting costs in accepted tokens, with confidence intervals.

    acceptance length = committed tokens / rounds                    over all rounds of all prompts
    conditional[j]    = P(draft j accepted | drafts before it were)  j = 1 .. S

Intervals are percentiles of a bootstrap over prompts: rounds of one prompt are not independent, prompts are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import check_int, check_topk, invalid
from ..drafting.drafter import Drafter
from ..transformer.target import Target
from ..types import DraftSampling
from .generate import Generated, generate

RESAMPLES = 4000
LEVEL = 0.95

Conversation = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Counts:
    """What was counted for one k and temperature. P prompts; sums over seeds and turns.

    Attributes:
        committed, rounds: int64 [P].
        accepted, reached: int64 [S], rounds in which draft j was accepted, and in which it was verified and all before
            it were accepted.
        tokens: the new tokens of every request, in order.
    """

    committed: np.ndarray
    rounds: np.ndarray
    accepted: np.ndarray
    reached: np.ndarray
    tokens: list[np.ndarray]

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per round."""
        return float(self.committed.sum() / self.rounds.sum())

    @property
    def conditional(self) -> list[float | None]:
        """Conditional acceptance of each position; None where it was never reached."""
        return [float(a / n) if n else None for a, n in zip(self.accepted, self.reached, strict=True)]


def count(results: Sequence[tuple[Generated, np.ndarray]], prompts: int, steps: int) -> Counts:
    """Count results, each with the prompt number of its requests, int [B]."""
    committed, rounds = np.zeros(prompts, np.int64), np.zeros(prompts, np.int64)
    accepted, reached = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    tokens: list[np.ndarray] = []
    for out, owner in results:
        counted = out.active.copy()
        for b, why in enumerate(out.finish_reason):
            # A stop token cuts its round short, which says nothing about the drafts behind it.
            if why == "stop" and (taken := np.flatnonzero(counted[:, b])).size:
                counted[taken[-1], b] = False
        np.add.at(committed, owner, np.where(counted, out.committed, 0).sum(axis=0))
        np.add.at(rounds, owner, counted.sum(axis=0))
        for step in range(steps):
            reached[step] += (counted & (out.num_draft > step) & (out.num_accepted >= step)).sum()
            accepted[step] += (counted & (out.num_accepted > step)).sum()
        tokens += out.tokens
    return Counts(committed, rounds, accepted, reached, tokens)


def bootstrap(
    counts: Counts, against: Counts | None = None, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float]:
    """Return the interval of the acceptance length, or of its difference to `against` on the same prompts (paired)."""
    picks = np.random.default_rng(seed).integers(0, len(counts.rounds), (resamples, len(counts.rounds)))

    def lengths(of: Counts) -> np.ndarray:
        return of.committed[picks].sum(axis=1) / np.maximum(of.rounds[picks].sum(axis=1), 1)

    values = lengths(counts) if against is None else lengths(counts) - lengths(against)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measure(
    target: Target,
    drafter: Drafter | None,
    conversations: Sequence[Conversation],
    *,
    topk: int | None,
    temperature: float,
    seeds: int,
    max_new_tokens: int,
    batch_size: int,
    **options: Any,
) -> Counts:
    """Decode all conversations at one k and temperature and count.

    Every turn is decoded behind the turns and answers before it. Requests have the seeds 0, 1, ... in order, so that
    all k see the same noise.
    """
    jobs = [(p, list[int](), list(turns)) for p, turns in enumerate(conversations) for _ in range(seeds)]
    results, asked = [], 0
    for turn in range(max(len(turns) for _, _, turns in jobs)):
        open_jobs = [job for job in jobs if len(job[2]) > turn]
        for at in range(0, len(open_jobs), batch_size):
            batch = open_jobs[at : at + batch_size]
            for _, history, turns in batch:
                history += turns[turn]
            draw = None
            if temperature > 0:
                numbers = np.arange(asked, asked + len(batch), dtype=np.uint32)
                flat = np.full(len(batch), temperature, np.float32)
                draw = DraftSampling(flat, numbers, np.zeros(len(batch), np.int32))
            asked += len(batch)
            prompts = [history for _, history, _ in batch]
            out = generate(
                target, drafter, prompts, sampling=draw, draft_topk=topk, max_new_tokens=max_new_tokens, **options
            )
            results.append((out, np.array([p for p, _, _ in batch])))
            for (_, history, _), new in zip(batch, out.tokens, strict=True):
                history += new.tolist()
    steps = 0 if drafter is None else options.get("num_speculative_tokens") or drafter.config.max_steps
    return count(results, len(conversations), steps)


def sweep(
    target: Target,
    drafter: Drafter,
    conversations: Sequence[Conversation],
    *,
    topk: Sequence[int | None],
    temperatures: Sequence[float] = (0.0, 1.0),
    seeds: int = 1,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    advance: Callable[[str], None] = lambda what: None,
    **options: Any,
) -> dict[str, Any]:
    """Measure every k at every temperature; dense (None) is always measured, as what the others are compared with.

    At temperature 0 the output of every k is compared with the target's own greedy decoding, token for token.

    Args:
        topk: the k; None is dense.
        seeds: runs per prompt where the temperature is above 0.
        advance: called with what comes next, once per measurement.
        options: further ones of `generate`.

    Returns:
        A JSON-ready report: per temperature rows (see `_row`) and the smallest k whose interval includes dense.
    """
    chosen = _check_topk(topk, drafter.config.Vd)
    runs = []
    for temperature in temperatures:
        if not 0 <= float(temperature) < 1e6:
            raise invalid("temperatures", temperature, "numbers >= 0")
        common = {
            "temperature": float(temperature),
            "seeds": check_int("seeds", seeds, 1) if temperature > 0 else 1,
            "max_new_tokens": max_new_tokens,
            "batch_size": check_int("batch_size", batch_size, 1),
        }
        found = {}
        for k in [None, *(k for k in chosen if k is not None)]:
            advance(f"t={temperature:g} k={'off' if k is None else k}")
            found[k] = measure(target, drafter, conversations, topk=k, **common, **options)
        same = None
        if temperature == 0:
            advance("t=0 plain")
            stops = {name: value for name, value in options.items() if name == "stop_ids"}
            own = measure(target, None, conversations, topk=None, **common, **stops)
            same = all(all(map(np.array_equal, c.tokens, own.tokens)) for c in found.values())
        rows = [_row(k, found[k], found[None]) for k in chosen]
        dense = found[None].acceptance_length
        fitting = [row["k"] for row in rows if row["k"] is not None and row["low"] <= dense <= row["high"]]
        runs.append(
            {
                "temperature": float(temperature),
                "rounds_dense": int(found[None].rounds.sum()),
                "greedy_output_equals_target": same,
                "smallest_k_including_dense": min(fitting, default=None),
                "rows": rows,
            }
        )
    return {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": drafter.config.Vd,
        "head": drafter.config.markov_head_type or "none",
        "num_speculative_tokens": options.get("num_speculative_tokens") or drafter.config.max_steps,
        "prompts": len(conversations),
        "seeds": seeds,
        "max_new_tokens": max_new_tokens,
        "level": LEVEL,
        "temperatures": runs,
    }


def _row(k: int | None, counts: Counts, dense: Counts) -> dict[str, Any]:
    low, high = bootstrap(counts)
    less_low, less_high = bootstrap(counts, dense)
    return {
        "k": k,
        "acceptance_length": counts.acceptance_length,
        "low": low,
        "high": high,
        "minus_dense": counts.acceptance_length - dense.acceptance_length,
        "minus_dense_low": less_low,
        "minus_dense_high": less_high,
        "conditional": counts.conditional,
        "reached": counts.reached.tolist(),
        "rounds": int(counts.rounds.sum()),
    }


def _check_topk(topk: Sequence[int | None], draft_vocab_size: int) -> list[int | None]:
    """Return the k in ascending order with dense (None) last, each once."""
    wanted = {check_topk(k, draft_vocab_size) for k in topk}
    return [*sorted(k for k in wanted if k is not None), None]


def table(report: dict[str, Any]) -> str:
    """Return the report as Markdown tables, one per temperature."""
    lines = []
    for run in report["temperatures"]:
        steps = report["num_speculative_tokens"]
        heads = ["k", "acceptance length", f"{report['level']:.0%} interval", "minus dense (paired)"]
        heads += [f"p{j + 1}" for j in range(steps)]
        lines += [f"Temperature {run['temperature']:g}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row in run["rows"]:
            p = " | ".join("-" if value is None else f"{value:.3f}" for value in row["conditional"])
            minus = f"{row['minus_dense']:+.3f} ({row['minus_dense_low']:+.3f} to {row['minus_dense_high']:+.3f})"
            lines.append(
                f"| {'off' if row['k'] is None else row['k']} | {row['acceptance_length']:.3f} | "
                f"{row['low']:.3f} to {row['high']:.3f} | {'' if row['k'] is None else minus} | {p} |"
            )
        k, V = run["smallest_k_including_dense"], report["vocab_size"]
        said = "none of these k" if k is None else f"k = {k} ({100 * k / V:.1f}% of V = {V})"
        lines += ["", f"Smallest k whose interval includes dense: {said}."]
        if run["greedy_output_equals_target"] is not None:
            same = "equals" if run["greedy_output_equals_target"] else "DIFFERS FROM"
            lines.append(f"The output of every k {same} the target's own greedy decoding.")
        lines.append("")
    return "\n".join(lines)
