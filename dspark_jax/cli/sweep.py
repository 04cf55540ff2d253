"""`dspark-jax sweep`: acceptance length over k and temperature, as a table, JSON and a plot."""

from __future__ import annotations

import argparse
from typing import Any

from ..atomic_files import write_json
from ..progress import progress
from .options import add_implementation
from .text import read_prompts, read_stop_ids

TOPK = "4,8,16,32,64,128,256,512,1024,2048,off"


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "sweep",
        help="acceptance length over k and temperature",
        description="Measure the acceptance length of top-k drafts by speculative decoding of a set of prompts.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of the drafter")
    parser.add_argument("--target", required=True, metavar="DIR", help="directory of the target (Qwen3ForCausalLM)")
    parser.add_argument(
        "--prompts", required=True, metavar="FILE",
        help='JSON lines: {"turns": [texts]} (tokenised as they are) or {"prompt_ids": [token ids]}',
    )  # fmt: skip
    parser.add_argument("--draft-topk", default=TOPK, metavar="LIST", help=f"k, and off for dense (default: {TOPK})")
    add_implementation(parser)
    parser.add_argument("--temperatures", default="0,1", metavar="LIST", help="default: 0,1")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per prompt above temperature 0")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="per turn (default: 64)")
    parser.add_argument("--limit", type=int, metavar="N", help="read N prompts only")
    parser.add_argument("--batch-size", type=int, default=32, metavar="B", help="requests at once (default: 32)")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="S", help="default: the checkpoint's")
    parser.add_argument("--dtype", help="dtype of all weights (default: as stored)")
    parser.add_argument("--ignore-eos", action="store_true", help="write on behind the end-of-text token")
    parser.add_argument("--json", metavar="FILE", help="write the report")
    parser.add_argument("--plot", metavar="FILE.png", help="write the plot (needs matplotlib)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, measure, print and write."""
    topk = _read_list(
        "--draft-topk", args.draft_topk, lambda item: None if item == "off" else int(item), "numbers and off"
    )
    temperatures = _read_list("--temperatures", args.temperatures, float, "numbers")
    conversations = read_prompts(args.prompts, args.target, args.limit)
    if args.plot is not None:
        _check_matplotlib()

    import dspark_jax
    from dspark_jax.decoding import sweep

    target = dspark_jax.load_target(args.target, dtype=args.dtype)
    drafter = dspark_jax.load_drafter(args.checkpoint, dtype=args.dtype, target=args.target)
    measurements = len(temperatures) * len({*topk, None}) + temperatures.count(0)
    with progress(measurements, "sweep") as advance:
        report = sweep.sweep(
            target,
            drafter,
            conversations,
            topk=topk,
            temperatures=temperatures,
            seeds=args.seeds,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            num_speculative_tokens=args.num_speculative_tokens,
            implementation=args.implementation,
            stop_ids=None if args.ignore_eos else read_stop_ids(args.target),
            advance=advance,
        )
    report = {"checkpoint": args.checkpoint, "prompts_file": args.prompts, "dtype": args.dtype or "stored", **report}
    print(sweep.table(report), end="")
    if args.json is not None:
        write_json(args.json, report)
    if args.plot is not None:
        from dspark_jax.decoding.sweep_plot import plot

        plot(report, args.plot)
    # A run whose greedy output is not the target's has found a fault (or a dtype that rounds too much).
    return 1 if any(part["greedy_output_equals_target"] is False for part in report["temperatures"]) else 0


def _read_list(option: str, text: str, convert: Any, expected: str) -> list[Any]:
    try:
        items = [convert(item.strip()) for item in text.split(",") if item.strip()]
    except ValueError:
        items = []
    if not items:
        raise ValueError(f"{option}: found {text!r}, expected {expected}, separated by commas")
    return items


def _check_matplotlib() -> None:
    """Fail before the work rather than behind it."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install 'dspark-jax[plot]' (in a clone: '.[plot]')")
