"""`dspark-jax convert`: any supported checkpoint as a normalised safetensors directory or an Orbax tree."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "convert",
        help="convert a checkpoint for JAX",
        description="Convert a DSpark checkpoint of any supported family; every tensor is accounted for in a manifest.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser of their own (scripts/convert_checkpoint.py) or of the command."""
    parser.add_argument("source", metavar="SRC", help="directory, safetensors file or Hugging Face repository id")
    parser.add_argument("destination", metavar="DST", help="directory to make")
    parser.add_argument("--format", default="safetensors", help="safetensors or orbax (default: safetensors)")
    parser.add_argument("--dtype", default="keep", help="keep, bf16 or f32 (default: keep the stored dtypes)")
    parser.add_argument("--target", metavar="DIR", help="the target's directory, for a missing embedding or LM head")
    parser.add_argument("--head-only", action="store_true", help="write the head's tensors alone")
    parser.add_argument(
        "--continuations", type=int, default=None, metavar="M",
        help="also store each token's M strongest continuations, for --draft-markov-topk",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace the result of an earlier conversion")
    parser.add_argument(
        "--allow-gap", action="store_true",
        help="with --force, where the file system cannot exchange names: move the old result away first",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert, and say what became of it."""
    from dspark_jax.checkpoint import convert

    manifest = convert(
        args.source, args.destination, format=args.format, dtype=args.dtype, target=args.target,
        head_only=args.head_only, force=args.force, allow_gap=args.allow_gap, progress=True,
    )  # fmt: skip
    left_out = sum("left_out" in place for place in manifest["sources"].values())
    print(
        f"{args.destination}: {manifest['family']} checkpoint as {manifest['format']}, "
        f"{len(manifest['tensors'])} tensors, {manifest['parameters']:,} parameters"
        + (f"; {left_out} source tensors left out (named in dspark_manifest.json)" if left_out else "")
        + ("; head only" if manifest["head_only"] else "")
    )
    if manifest["backbone"] not in ("supported", "left out"):
        print(f"note: the backbone is written as tensors only: {manifest['backbone']}", file=sys.stderr)
    for name, how in manifest["missing"].items():
        print(f"note: {name}: {how}", file=sys.stderr)
    for note in manifest["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if args.continuations is not None:
        _store_continuations(args)
    return 0


def _store_continuations(args: argparse.Namespace) -> None:
    from dspark_jax import load_head
    from dspark_jax.checkpoint.continuations import save_continuations
    from dspark_jax.drafting.continuations import table_bytes

    head = load_head(args.destination, target=args.target)
    size = table_bytes(head.config.vocab_size, args.continuations) / 2**20
    print(f"building a table of {args.continuations} continuations per token, {size:.1f} MiB", file=sys.stderr)
    print(save_continuations(head.with_continuations(args.continuations), args.destination))
