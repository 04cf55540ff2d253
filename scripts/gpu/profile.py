"""Sum the kernel times of a profiler trace by category, in the shape of a decode profile."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Iterable
from typing import Any

# The first category whose word occurs in a kernel's name takes it.
CATEGORIES = {
    "projection": ("dspark_dense_step", "dspark_walk", "gemm", "dot", "cublas", "cutlass", "nvjet", "xmma"),
    "selection": ("dspark_pick", "topk", "top_k", "sort", "scatter", "reduce_window", "argmax"),
    "copy": ("memcpy", "memset", "copy"),
}


def category(name: str) -> str:
    """Return the category of a kernel: projection, selection, copy, or elementwise for all else."""
    lower = name.lower()
    return next((c for c, words in CATEGORIES.items() if any(w in lower for w in words)), "elementwise")


def read_trace(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return the events of the newest trace that jax.profiler.trace left under `folder`."""
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder}: no *.trace.json.gz below it")
    with gzip.open(files[-1], "rt") as file:
        return json.load(file)["traceEvents"]


def kernels(events: Iterable[dict[str, Any]]) -> list[tuple[str, float]]:
    """Return (name, microseconds) of every kernel on a GPU: complete events of stream threads of GPU processes."""
    events = list(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}

    def on_stream(event: dict[str, Any]) -> bool:
        where = (event.get("pid"), event.get("tid"))
        return "GPU" in names.get(where[0], "") and threads.get(where, "").startswith("Stream")

    return [(e["name"], float(e["dur"])) for e in events if e.get("ph") == "X" and on_stream(e)]


def table(found: Iterable[tuple[str, float]], drafts: int) -> dict[str, dict[str, float]]:
    """Sum by category: microseconds and launches per draft, and the share of the time."""
    rows: dict[str, dict[str, float]] = {}
    for name, micros in found:
        row = rows.setdefault(category(name), {"microseconds": 0.0, "launches": 0.0})
        row["microseconds"] += micros / drafts
        row["launches"] += 1 / drafts
    total = sum(row["microseconds"] for row in rows.values())
    for row in rows.values():
        row["share"] = row["microseconds"] / total if total else 0.0
    return rows
