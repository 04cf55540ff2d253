"""Time drafting on whatever device is there: this package, a plain JAX port and PyTorch, same arrays, one run.

    python scripts/bench_draft.py                # B = 8, V = 151936, k = 512; float32 on CPUs, bfloat16 on GPUs
    python scripts/bench_draft.py --profile --json out.json

Every function is warmed up, then all are timed in turn, round by round, so that a slow moment of the machine hits all
alike; medians and quartiles are printed. Greedy, vanilla head, base logits given. On a GPU inputs larger than the L2
cache rotate, each case is also printed as a fraction of its byte floor at the device's measured copy bandwidth, and
--profile sums kernel times by category.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory on the same device
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import bench_ports
import jax
import jax.numpy as jnp
import numpy as np
from gpu import profile as trace

from dspark_jax import DraftConfig, DSparkConfig, make_draft_from_logits_fn
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.drafting.heads import VanillaMarkovHead
from dspark_jax.kernels.select import select_topk


@dataclasses.dataclass
class Timed:
    """One function under the clock: `run` does the work and waits for it; `floor` is the bytes it must move."""

    name: str
    run: Callable[[], Any]
    floor: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return milliseconds: median and quartiles."""
        low, middle, high = (1e3 * q for q in statistics.quantiles(self.seconds, n=4, method="inclusive"))
        return {"name": self.name, "ms": middle, "ms_quartiles": [low, high], "rounds": len(self.seconds)}


class Problem:
    """Weights and base logits of one size, as JAX arrays and, where PyTorch is there, as equal tensors."""

    def __init__(self, S: int, B: int, V: int, r: int, k: int, dtype: str) -> None:
        self.S, self.B, self.V, self.r, self.k, self.dtype = S, B, V, r, k, jnp.dtype(dtype)
        rng = np.random.default_rng(0)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        gpu = jax.default_backend() == "gpu"
        self.copies = 3 if gpu else 1  # so that no input is still in the cache
        host = draw(S, B, V) * 3
        self.host = (host, draw(V, r), draw(V, r) * (0.5 / r**0.5), rng.integers(0, V, B).astype(np.int32))
        self.w1, self.w2 = (jnp.asarray(w, self.dtype) for w in self.host[1:3])
        self.anchor = jnp.asarray(self.host[3])
        self.bases = [jnp.asarray(host, self.dtype) for _ in range(self.copies)]
        config = DSparkConfig(
            vocab_size=V, hidden_size=8, block_size=S + 1, mask_token_id=0, markov_rank=r, markov_head_type="vanilla"
        )
        self.head = DSparkHead(config, None, VanillaMarkovHead(self.w1, self.w2))
        self.turn = 0

    def base(self) -> jax.Array:
        """Return the next copy of the base logits."""
        self.turn += 1
        return self.bases[self.turn % self.copies]

    def floor(self, k: int | None, outputs: str) -> int:
        """Return the bytes that a draft must move."""
        slab, item = self.S * self.B * self.V * self.dtype.itemsize, self.dtype.itemsize
        if k is not None:
            return slab + self.S * self.B * k * self.r * item
        return self.S * self.V * self.r * item + slab * (2 if outputs == "logits" else 1)


def ours(problem: Problem, form: str, k: int | None, outputs: str) -> Timed:
    """Time this package's jitted function; the dense one corrects its own last output in place."""
    fn = make_draft_from_logits_fn(DraftConfig(problem.S, k, outputs=outputs), implementation=form)
    state = {"base": jnp.array(problem.base())} if outputs == "logits" else {}

    def run() -> None:
        block = fn(problem.head, state.get("base", problem.base()), problem.anchor, None, None)
        if outputs == "logits":
            state["base"] = block.logits
        jax.block_until_ready(block)

    kind = "dense" if k is None else f"top-{k}"
    return Timed(f"dspark_jax {form}: {kind}, {outputs}", run, problem.floor(k, outputs))


def jax_cases(problem: Problem, forms: list[str]) -> list[Timed]:
    """Return the JAX functions: this package's, the plain port's, and selection alone."""
    k, args = problem.k, (problem.w1, problem.w2, problem.anchor)
    cases = []
    for form in forms:
        cases += [ours(problem, form, None, "logits"), ours(problem, form, None, "tokens")]
        cases += [ours(problem, form, k, "candidates")]
    wait = jax.block_until_ready
    rows = problem.S * problem.B
    cases += [
        Timed(
            "plain JAX: dense",
            lambda: wait(bench_ports.jax_dense(problem.base(), *args)),
            problem.floor(None, "logits"),
        ),
        Timed(
            f"plain JAX: top-{k}", lambda: wait(bench_ports.jax_topk(problem.base(), *args, k)), problem.floor(k, "")
        ),
    ]
    alone = {"lax.top_k": partial(jax.lax.top_k, k=k)}
    alone |= {f"select_topk {form}": partial(select_topk, k=k, implementation=form) for form in forms}
    for name, select in alone.items():
        jitted = jax.jit(select)

        def run(f: Any = jitted) -> Any:
            return wait(f(problem.base().reshape(rows, problem.V)))

        cases.append(Timed(f"{name} alone", run, rows * problem.V * problem.dtype.itemsize))
    return cases


def torch_cases(problem: Problem, compiled: bool) -> tuple[list[Timed], list[str]]:
    """Return PyTorch's functions on the same arrays, and what could not be timed and why."""
    try:
        import torch
    except ImportError:
        return [], ["PyTorch: not installed"]
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    dtype = getattr(torch, problem.dtype.name)
    base, w1, w2 = (torch.tensor(x, dtype=dtype, device=device) for x in problem.host[:3])
    anchor = torch.tensor(problem.host[3], dtype=torch.int64, device=device)
    bases, turn = [base.clone() for _ in range(problem.copies)], [0]

    def timed(name: str, function: Callable[..., Any], *more: Any, floor: int) -> Timed:
        def run() -> None:
            turn[0] += 1
            with torch.inference_mode():
                function(bases[turn[0] % problem.copies], *more)
            if device == "cuda":
                torch.cuda.synchronize()

        return Timed(name, run, floor)

    k, notes = problem.k, []
    dense, candidates = problem.floor(None, "logits"), problem.floor(problem.k, "")
    cases = [
        timed("PyTorch eager: dense", bench_ports.torch_dense, w1, w2, anchor, floor=dense),
        timed(f"PyTorch eager: top-{k}", bench_ports.torch_topk, w1, w2, anchor, k, floor=candidates),
        timed("torch.topk alone", lambda x: torch.topk(x, k, dim=-1), floor=base.numel() * base.element_size()),
    ]
    if compiled:
        for name, function, more, floor in (
            ("PyTorch compiled: dense", bench_ports.torch_dense, (w1, w2, anchor), dense),
            (f"PyTorch compiled: top-{k}", bench_ports.torch_topk, (w1, w2, anchor, k), candidates),
        ):
            case = timed(name, torch.compile(function), *more, floor=floor)
            try:
                case.run()
                cases.append(case)
            except Exception as error:  # no compiler on this machine, or a graph it cannot take
                notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    return cases, notes


def measure(cases: list[Timed], rounds: int, seconds: float) -> None:
    """Warm up, then time all cases in turn until the rounds or the seconds are used up."""
    for case in cases:
        case.run()
        case.run()
    stop = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > stop:
            break
        for case in cases:
            start = time.perf_counter()
            case.run()
            case.seconds.append(time.perf_counter() - start)


def copy_bandwidth() -> float:
    """Measure bytes per second, read and written, of a device-to-device copy far larger than the cache."""
    x = jnp.ones((256, 1 << 20), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    case = Timed("copy", lambda: jax.block_until_ready(copy(x)))
    measure([case], 15, 5)
    return 2 * x.nbytes / statistics.median(case.seconds)


def profile(problem: Problem, forms: list[str]) -> dict[str, Any]:
    """Trace ten drafts of each of this package's cases and sum their kernels by category."""
    tables = {}
    for form in forms:
        for k, outputs in ((None, "logits"), (problem.k, "candidates")):
            case = ours(problem, form, k, outputs)
            case.run()
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(10):
                        case.run()
                found = trace.kernels(trace.read_trace(pathlib.Path(folder)))
            tables[case.name] = trace.table(found, 10)
    return tables


def print_rows(rows: list[dict[str, Any]], reference: str) -> None:
    """Print medians, quartiles, ratios to the reference and fractions of the floor."""
    base = next((row["ms"] for row in rows if row["name"] == reference), None)
    print(f"{'function':44} {'ms':>9} {'quartiles':>19} {'ratio':>7} {'of floor':>8}")
    for row in rows:
        low, high = row["ms_quartiles"]
        ratio = "" if base is None else f"{row['ms'] / base:7.2f}"
        share = f"{row['floor_fraction']:8.2f}" if "floor_fraction" in row else ""
        print(f"{row['name']:44} {row['ms']:9.2f} {low:9.2f}-{high:9.2f} {ratio} {share}")
    if base is not None:
        print(f"ratio: to {reference}")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on GPUs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after the round that passes this")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--profile", action="store_true", help="kernel times by category (GPU)")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)

    gpu = jax.default_backend() == "gpu"
    dtype = args.dtype or ("bfloat16" if gpu else "float32")
    problem = Problem(args.steps, args.batch, args.vocab, args.rank, args.topk, dtype)
    forms = ["xla", "pallas"] if gpu else ["xla"]  # the interpreter is no form to time
    cases, notes = jax_cases(problem, forms), []
    if not args.no_torch:
        more, notes = torch_cases(problem, not args.no_compile)
        cases += more
    measure(cases, args.rounds, args.seconds)
    rows = [case.summary() for case in cases]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind if gpu else platform.processor() or platform.machine(),
        "threads": os.cpu_count(), "jax": jax.__version__, "dtype": dtype, "notes": notes,
        **{name: getattr(args, name) for name in ("batch", "vocab", "rank", "steps", "topk")}, "cases": rows,
    }  # fmt: skip
    if gpu:
        report["copy_bytes_per_second"] = copy_bandwidth()
        for row, case in zip(rows, cases, strict=True):
            if case.floor is not None:
                row["floor_fraction"] = case.floor / report["copy_bytes_per_second"] / (row["ms"] / 1e3)
        if args.profile:
            report["profile"] = profile(problem, forms)
    names = [row["name"] for row in rows]
    reference = "PyTorch eager: dense" if "PyTorch eager: dense" in names else "plain JAX: dense"
    sizes = f"S={args.steps} B={args.batch} V={args.vocab} r={args.rank}"
    print(f"{report['device']}, JAX {jax.__version__}, {dtype}, {sizes}")
    print_rows(rows, reference)
    for name, table in report.get("profile", {}).items():
        print(f"\n{name}: microseconds per draft by kernel category")
        for kind, row in sorted(table.items(), key=lambda item: -item[1]["microseconds"]):
            print(f"  {kind:12} {row['microseconds']:9.1f} {row['share']:6.1%} {row['launches']:6.1f} launches")
    for note in notes:
        print(f"not timed: {note}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
