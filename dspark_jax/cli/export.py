"""`dspark-jax export`: write a drafting function that runs with JAX, flatbuffers, NumPy and safetensors alone."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "export",
        help="export a drafting function",
        description="Write program, weights and signature of a drafting function; load_exported(DIR) reads them.",
    )
    parser.add_argument("source", metavar="SRC", help="checkpoint directory of the drafter")
    parser.add_argument("output", metavar="DIR", help="directory to write; made if missing")
    parser.add_argument("--target", metavar="DIR", help="the target's directory, for a missing LM head")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as stored)")
    parser.add_argument("--num-speculative-tokens", type=int, help="drafted tokens (default: the checkpoint's)")
    parser.add_argument("--draft-topk", type=int, help="candidates per step (default: the whole vocabulary)")
    parser.add_argument("--draft-sample-method", default="greedy", help="greedy (default) or probabilistic")
    parser.add_argument("--outputs", default="tokens", help="tokens (default), logits or candidates")
    parser.add_argument("--batch", type=int, nargs=2, default=(1, 1024), metavar=("LEAST", "MOST"))
    parser.add_argument("--platforms", nargs="+", default=("cpu", "cuda", "tpu"), help="default: cpu cuda tpu")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export and say what was written."""
    import dspark_jax

    head = dspark_jax.load_head(args.source, dtype=args.dtype, target=args.target)
    steps = args.num_speculative_tokens
    config = dspark_jax.DraftConfig(
        head.config.max_steps if steps is None else steps,
        draft_topk=args.draft_topk,
        draft_sample_method=args.draft_sample_method,
        outputs=args.outputs,
    )
    written = dspark_jax.export_draft_fn(
        head, config, args.output, batch=tuple(args.batch), platforms=tuple(args.platforms)
    )
    low, high = written["batch"]
    print(f"{args.output}: batches {low} to {high}, platforms {', '.join(written['platforms'])}")
    return 0
