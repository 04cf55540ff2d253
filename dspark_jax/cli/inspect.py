"""`dspark-jax inspect`: what a checkpoint is, on one screen."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint is",
        description="Show family, geometry, head, vocabularies, anchor rule and what is missing; reads headers alone.",
    )
    parser.add_argument("source", metavar="SRC", help="directory, safetensors file or Hugging Face repository id")
    parser.add_argument("--target", metavar="DIR", help="the target's directory, for a missing embedding or LM head")
    parser.add_argument("--json", action="store_true", help="print JSON, with the normalised config")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from dspark_jax.checkpoint import inspect
    from dspark_jax.checkpoint.inspect import to_text

    report = inspect(args.source, target=args.target)
    print(json.dumps(report, indent=2) if args.json else to_text(report))
    return 0
