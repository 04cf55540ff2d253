"""`dspark-jax verify`: compare a conversion with its source; exit code 1 if it is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "verify",
        help="compare a converted checkpoint with its source",
        description="Read the source again with PyTorch, compare every tensor, draft random hidden states with both.",
    )
    parser.add_argument("source", metavar="SRC", help="the checkpoint that was converted")
    parser.add_argument("destination", metavar="DST", help="the result of `dspark-jax convert`")
    parser.add_argument(
        "--target", metavar="DIR", help="the target's directory, where the conversion took it from there"
    )
    parser.add_argument("--blocks", type=int, default=8, metavar="B", help="random blocks to draft (default: 8)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random hidden states (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare, print, and return 0 for a right conversion, 1 for a wrong one."""
    from dspark_jax.checkpoint import verify

    if args.blocks < 1:
        raise ValueError(f"--blocks: found {args.blocks}, expected at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed: found {args.seed}, expected at least 0")
    report = verify(args.source, args.destination, target=args.target, blocks=args.blocks, seed=args.seed)
    if args.json:
        print(json.dumps(dataclasses.asdict(report) | {"passed": report.passed}, indent=2))
        return 0 if report.passed else 1
    base = "" if report.with_lm_head else ", from random base logits (no LM head on either side)"
    print(f"tensors     {report.tensors} compared, {len(report.problems)} problems")
    for problem in report.problems:
        print(f"            {problem}")
    print(f"draft       {report.blocks} random blocks of {report.steps} steps{base}")
    print(f"logits      largest error {report.logit_error:.3g}, allowed {report.tolerance:.3g}")
    if report.confidence_error is not None:
        print(f"confidence  largest error {report.confidence_error:.3g}, allowed {report.tolerance:.3g}")
    print(f"tokens      {report.token_agreement:.1%} equal, {report.unexplained} differ without a close call")
    print("PASS" if report.passed else "FAIL")
    return 0 if report.passed else 1
