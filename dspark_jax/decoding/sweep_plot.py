"""The plot of a sweep: acceptance length over k with its intervals, and conditional acceptance by position."""

from __future__ import annotations

import os
from typing import Any

FEWEST = 20  # a position reached in fewer rounds than this says nothing and is left out
COLORS = ("#2a6fbb", "#c8553d", "#3a7d44", "#7d5ba6", "#8a6d1f")


def plot(report: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a PNG of a report of sweep.sweep.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'dspark-jax[plot]' (in a clone: '.[plot]')") from None
    runs = report["temperatures"]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for number, (run, color) in enumerate(zip(runs, COLORS * len(runs), strict=False)):
        rows = [row for row in run["rows"] if row["k"] is not None]
        dense = next(row for row in run["rows"] if row["k"] is None)
        ks, lengths = [row["k"] for row in rows], [row["acceptance_length"] for row in rows]
        errors = [[n - row["low"] for n, row in zip(lengths, rows, strict=True)],
                  [row["high"] - n for n, row in zip(lengths, rows, strict=True)]]  # fmt: skip
        label = f"t = {run['temperature']:g}"
        left.errorbar(
            [k * 1.04**number for k in ks],
            lengths,
            yerr=errors,
            color=color,
            marker="o",
            markersize=4,
            capsize=3,
            label=label,
        )
        left.axhline(dense["acceptance_length"], color=color, linestyle="--", linewidth=1)
        shown = [row for row in rows if row["k"] in {rows[0]["k"], rows[len(rows) // 2]["k"]}]
        for row, line in zip([*shown, dense], (":", "--", "-")[-1 - len(shown) :], strict=True):
            name = "off" if row["k"] is None else row["k"]
            counted = zip(row["conditional"], row["reached"], strict=True)
            steps = [(j + 1, p) for j, (p, n) in enumerate(counted) if n >= FEWEST]
            right.plot(
                [j for j, _ in steps],
                [p for _, p in steps],
                color=color,
                linestyle=line,
                marker=".",
                label=f"{label}, k = {name}",
            )
    ticks = sorted({row["k"] for run in runs for row in run["rows"] if row["k"] is not None})
    left.set_xscale("log", base=2)
    left.set_xticks(ticks, [str(k) for k in ticks])
    left.set_xlabel(f"k (V = {report['vocab_size']})")
    left.set_ylabel("acceptance length (tokens per round)")
    left.set_title("Acceptance length; dashed: dense drafts", fontsize=10)
    right.set_xlabel("draft position")
    right.set_ylabel("conditional acceptance")
    right.set_title("Accepted, given all before were", fontsize=10)
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, format="png", metadata={"Software": None})
