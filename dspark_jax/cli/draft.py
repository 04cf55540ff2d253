"""`dspark-jax draft`: draft every recorded block of a file in one jitted call and show what was drafted."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from typing import Any

from .options import add_implementation, add_markov_topk, with_continuations
from .text import read_tokenizer

CALLS = 20  # timed calls after warm-up; their median is shown


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "draft",
        help="draft blocks from recorded hidden states",
        description="Draft every block of a file of recorded backbone hidden states in one jitted call.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of the drafter (or of its head alone)")
    parser.add_argument(
        "--hidden", required=True, metavar="FILE",
        help="safetensors file with hidden [B,S,H], anchor_ids [B] and position [B]",
    )  # fmt: skip
    parser.add_argument(
        "--draft-topk", type=int, metavar="K", help="candidates per step (default: the whole vocabulary)"
    )
    add_markov_topk(parser)
    add_implementation(parser)
    parser.add_argument("--temperature", type=float, metavar="T", help="sample at this temperature (default: greedy)")
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="seed of block 0; block i takes N + i (default: 0)"
    )
    parser.add_argument("--outputs", default="tokens", help="tokens, logits or candidates (default: tokens)")
    parser.add_argument("--logits-dtype", metavar="DTYPE", help="dtype of the corrected logits (default: the head's)")
    parser.add_argument("--min-confidence", type=float, metavar="C", help="prune each block below this confidence")
    parser.add_argument("--num-speculative-tokens", type=int, metavar="S", help="draft only the first S recorded steps")
    parser.add_argument("--dtype", help="dtype of the weights (default: as stored)")
    parser.add_argument(
        "--target", metavar="DIR", help="directory of the target, for a missing LM head and the tokenizer"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json (default: the checkpoint's or the target's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, draft, print."""
    import numpy as np

    import dspark_jax

    head = dspark_jax.load_head(args.checkpoint, dtype=args.dtype, target=args.target)
    head = with_continuations(head, args.checkpoint, args.draft_markov_topk)
    hidden, anchors, positions = _read_recorded(args.hidden)
    steps = hidden.shape[1] if args.num_speculative_tokens is None else args.num_speculative_tokens
    if not 1 <= steps <= hidden.shape[1]:
        raise ValueError(f"--num-speculative-tokens: found {steps}, expected 1 to {hidden.shape[1]} recorded steps")
    hidden = np.ascontiguousarray(hidden[:, :steps])
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature: found {args.temperature}, expected a number >= 0")
    if args.temperature is None and args.seed is not None:
        raise ValueError("--seed: found without --temperature, expected both (a greedy draft draws nothing)")
    sampling = None
    if args.temperature is not None:
        seeds = (args.seed or 0) + np.arange(len(anchors), dtype=object)
        sampling = dspark_jax.DraftSampling([args.temperature] * len(anchors), seeds.tolist(), positions)
    config = dspark_jax.DraftConfig(
        num_speculative_tokens=steps,
        draft_topk=args.draft_topk,
        draft_markov_topk=args.draft_markov_topk,
        draft_sample_method="greedy" if sampling is None else "probabilistic",
        outputs=args.outputs,
        logits_dtype=args.logits_dtype,
        min_confidence=args.min_confidence,
    )
    block, measured = _draft_and_time(head, config, hidden, anchors, sampling, args.implementation)
    dense = None
    if config.draft_topk is not None:
        options = {"sampling": sampling, "logits_dtype": config.logits_dtype}
        dense = np.asarray(dspark_jax.draft_block(head, hidden, anchors, **options).tokens)
    tokenizer = _find_tokenizer(args)
    report = {
        "checkpoint": args.checkpoint,
        "head": head.config.markov_head_type or "none",
        "head_bytes": head.nbytes,
        "dtype": str(np.dtype(head.dtype)),
        "vocab_size": head.config.vocab_size,
        "num_speculative_tokens": steps,
        "draft_topk": config.draft_topk,
        "draft_markov_topk": config.draft_markov_topk,
        "draft_sample_method": config.draft_sample_method,
        "temperature": args.temperature,
        "outputs": config.outputs,
        **measured,
        "blocks": _blocks(block, anchors, positions, dense, tokenizer, head.config.vocab_size),
    }
    if args.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        _print_table(report, has_text=tokenizer is not None)
    return 0


def _read_recorded(path: str) -> tuple[Any, Any, Any]:
    """Read hidden [B,S,H], anchor_ids [B] and position [B] of a safetensors file, checking that they fit together."""
    from ..checkpoint.storage.tensor_files import TensorFiles

    if os.path.isdir(path):
        raise ValueError(f"{path}: found a directory, expected a safetensors file of recorded hidden states")
    files = TensorFiles(path)
    ranks = {"hidden": 3, "anchor_ids": 1, "position": 1}
    for name, rank in ranks.items():
        if name not in files:
            raise ValueError(f"{path}: tensor {name!r} is missing, expected {', '.join(ranks)}; found {sorted(files)}")
        if len(files[name].shape) != rank:
            raise ValueError(
                f"{path}: tensor {name!r}: found shape {list(files[name].shape)}, expected {rank} dimensions"
            )
    hidden, anchors, positions = (files.read(name) for name in ranks)
    for name, array in (("anchor_ids", anchors), ("position", positions)):
        if array.shape[0] != hidden.shape[0]:
            raise ValueError(
                f"{path}: tensor {name!r}: found {array.shape[0]} rows, expected {hidden.shape[0]} as in hidden"
            )
        if array.dtype.kind not in "iu":
            raise ValueError(f"{path}: tensor {name!r}: found dtype {array.dtype}, expected integers")
    if positions.size and int(positions.min()) < 0:
        raise ValueError(f"{path}: tensor 'position': found {int(positions.min())}, expected indices of a sequence")
    return hidden, anchors, positions


def _draft_and_time(
    head: Any, config: Any, hidden: Any, anchors: Any, sampling: Any, implementation: str | None
) -> tuple[Any, dict[str, Any]]:
    """Return the drafted block, and median milliseconds per call and bytes of temporaries of the compiled program."""
    import jax

    import dspark_jax

    draft = dspark_jax.make_draft_fn(config, implementation=implementation)
    buffer = dspark_jax.make_buffer(head, config, hidden.shape[0])
    memory = draft.lower(head, hidden, anchors, sampling, buffer).compile().memory_analysis()
    hidden = jax.device_put(hidden)
    block, buffer = jax.block_until_ready(draft(head, hidden, anchors, sampling, buffer))
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        block, buffer = jax.block_until_ready(draft(head, hidden, anchors, sampling, buffer))
        times.append(1e3 * (time.perf_counter() - start))
    return block, {
        "device": jax.devices()[0].device_kind,
        "milliseconds_per_call": statistics.median(times),
        "temporary_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


def _blocks(
    block: Any, anchors: Any, positions: Any, dense: Any, tokenizer: Any, vocab_size: int
) -> list[dict[str, Any]]:
    import numpy as np

    tokens, num_draft, valid = (np.asarray(x) for x in (block.tokens, block.num_draft, block.valid))
    confidence = None if block.confidence is None else np.asarray(block.confidence, np.float64)
    decode = (
        (lambda ids: None)
        if tokenizer is None
        else (lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    )
    found = []
    for b, row in enumerate(tokens.tolist()):
        found.append(
            {
                "anchor_id": int(anchors[b]),
                "position": int(positions[b]),
                "tokens": row,
                "anchor_text": decode([int(anchors[b])]) if 0 <= int(anchors[b]) < vocab_size else None,
                "text": decode(row),
                "num_draft": int(num_draft[b]),
                "valid": bool(valid[b]),
                "confidence": None
                if confidence is None
                else [round(float(c), 6) if math.isfinite(c) else None for c in confidence[b]],
                "equals_dense": None if dense is None else bool((dense[b] == tokens[b]).all()),
            }
        )
    return found


def _find_tokenizer(args: argparse.Namespace) -> Any:
    """Return the tokenizer given, else the checkpoint's, the target's, or that of a directory `target` beside it."""
    beside = os.path.join(os.path.dirname(os.path.abspath(args.checkpoint)), "target")
    folders = [args.checkpoint, args.target, beside]
    path = args.tokenizer
    if path is None:
        paths = (os.path.join(folder, "tokenizer.json") for folder in folders if folder)
        path = next((p for p in paths if os.path.isfile(p)), None)
    elif not os.path.isfile(path):
        raise FileNotFoundError(f"--tokenizer: {path}: no such file")
    if path is None:
        return None
    try:
        return read_tokenizer(path)
    except ImportError:
        if args.tokenizer is not None:
            raise
        return None  # the table shows ids


def _print_table(report: dict[str, Any], *, has_text: bool) -> None:
    """Print the report as a table, with rich where it is installed."""
    blocks = report["blocks"]
    k = report["draft_topk"]
    header = ["block", "position", "after", "drafted text" if has_text else "drafted ids", "draft", "confidence"]
    if k is not None:
        header.append("= dense")
    lines = []
    for number, b in enumerate(blocks):
        text = _quoted(b["text"]) if has_text else " ".join(map(str, b["tokens"]))
        after = _quoted(b["anchor_text"]) if has_text and b["anchor_text"] is not None else str(b["anchor_id"])
        shown = (
            "-" if b["confidence"] is None else " ".join("nan" if c is None else f"{c:.2f}" for c in b["confidence"])
        )
        count = str(b["num_draft"]) if b["valid"] else f"{b['num_draft']} (invalid)"
        line = [str(number), str(b["position"]), after, text, count, shown]
        if k is not None:
            line.append("yes" if b["equals_dense"] else "no")
        lines.append(line)
    _print_lines(header, lines)
    temporaries = report["temporary_bytes"]  # None where the backend does not tell
    form = "dense" if k is None else f"top-{k}"
    how = "greedy" if report["temperature"] is None else f"sampled at temperature {report['temperature']:g}"
    print(
        f"{len(blocks)} blocks x {report['num_speculative_tokens']} steps, {report['head']} head ({report['dtype']}, "
        f"{report['head_bytes'] / 1e6:.1f} MB), vocabulary {report['vocab_size']}, {form}, {how}, on {report['device']}"
    )
    print(
        f"{report['milliseconds_per_call']:.2f} ms per call (median of {CALLS} after warm-up), "
        + (f"{temporaries:,} bytes of temporaries" if temporaries is not None else "bytes of temporaries unknown here")
    )
    if k is not None:
        same = sum(b["equals_dense"] for b in blocks)
        print(f"top-{k} equals dense in {same} of {len(blocks)} blocks")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _print_lines(header: list[str], lines: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        for line in [header, *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    console = Console()
    if not console.is_terminal:  # piped output keeps each block on one line
        console.width = 200
    console.print(table)
