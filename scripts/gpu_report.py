"""Compile the public drafting functions for an H200 without having one, and print what they move and launch.

    python scripts/gpu_report.py                              # a dozen telling cases
    python scripts/gpu_report.py --all --json report.json     # the whole matrix
    python scripts/gpu_report.py --batch 64 --topk 512 --implementation pallas --dump-hlo hlo/

MB are 1e6 bytes of device memory per draft; the floor is what any program must move (docs/gpu_report.md has the rules).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from gpu import compile, cases  # isort: skip  (compile before jax)
import jax

HEADER = (
    f"{'case':58} {'MB':>8} {'floor':>7} {'ratio':>6} {'kernels':>7} {'temp':>6} {'alias':>6} {'sorts':>5} {'us >=':>6}"
)


def line(row: dict[str, Any], name: str) -> str:
    """Format one row."""
    MB, floor = row["megabytes"], row["floor_megabytes"]
    return (
        f"{name:58} {MB:8.1f} {floor:7.1f} {MB / floor:6.3f} {row['kernels']:7d} {row['temp_megabytes']:6.1f} "
        f"{row['aliased_megabytes']:6.1f} {row['vocabulary_sorts']:5d} {row['seconds_bound'] * 1e6:6.0f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the whole matrix instead of the telling cases")
    parser.add_argument("--target", type=pathlib.Path, default=compile.H200, help="GpuTargetConfigProto text file")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    parser.add_argument("--dump-hlo", type=pathlib.Path, help="folder for the optimized HLO")
    parser.add_argument("--batch", type=int, help="only this batch size")
    parser.add_argument("--topk", type=int, help="only this k")
    parser.add_argument("--head", choices=cases.HEADS, help="only this head")
    parser.add_argument("--implementation", choices=cases.FORMS, help="only this form")
    args = parser.parse_args(argv)
    if (reason := compile.missing()) is not None:
        print(f"gpu_report: {reason}", file=sys.stderr)
        return 2
    target, rows = compile.Target(args.target), []
    wanted = {name: getattr(args, name) for name in ("batch", "topk", "head", "implementation")}
    print(HEADER)
    for case in cases.every_case() if args.all else cases.DEFAULT:
        if all(value is None or getattr(case, name) == value for name, value in wanted.items()):
            rows.append(cases.measure(case, target, args.dump_hlo))
            print(line(rows[-1], case.name), flush=True)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"target": target.kind, "jax": jax.__version__, "cases": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
