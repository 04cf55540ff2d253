"""`dspark-jax generate`: write text behind a prompt, with accepted drafts marked, and compare with plain decoding."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from typing import Any

from .chat import render_chat
from .options import add_implementation, add_markov_topk, with_continuations
from .text import TextStream, load_tokenizer, read_stop_ids

MARKS = {"color": ("\x1b[32m", "\x1b[0m"), "brackets": ("⟦", "⟧"), "none": ("", "")}
WARM_UP = 2  # rounds before the clock starts: they compile


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "generate",
        help="write text by speculative decoding",
        description="Write text behind a prompt by speculative decoding; accepted drafts are marked.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of the drafter")
    parser.add_argument("--target", required=True, metavar="DIR", help="directory of the target")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message: apply the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--draft-topk", type=int, metavar="K", help="candidates per draft step (default: all)")
    add_markov_topk(parser)
    add_implementation(parser)
    parser.add_argument("--rule", default="token", help="verification: token, block or target_only (default: token)")
    parser.add_argument(
        "--num-speculative-tokens", type=_length, metavar="S",
        help="a number (default: the checkpoint's), or auto: draft only where that is faster than plain decoding",
    )  # fmt: skip
    parser.add_argument("--min-confidence", type=float, metavar="C", help="verify a draft up to this confidence")
    parser.add_argument("--top-k", type=int, metavar="K", help="restrict the target to its K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="restrict the target to this mass")
    parser.add_argument("--dtype", help="dtype of all weights (default: as stored)")
    parser.add_argument("--ignore-eos", action="store_true", help="write on behind the end-of-text token")
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run of plain decoding")
    parser.add_argument(
        "--mark", choices=("auto", *MARKS), default="auto",
        help="how accepted drafts are marked (default: color on a terminal, else brackets)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load, stream, compare."""
    import dspark_jax

    tokenizer = load_tokenizer(args.target)
    if args.chat:
        prompt = render_chat(args.target, [{"role": "user", "content": args.prompt}])
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode(args.prompt).ids
    if not ids:
        raise ValueError(f"--prompt: found {args.prompt!r}, expected text of at least one token")
    target = dspark_jax.load_target(args.target, dtype=args.dtype)
    drafter = dspark_jax.load_drafter(args.checkpoint, dtype=args.dtype, target=args.target)
    if args.draft_markov_topk:
        head = with_continuations(drafter.head, args.checkpoint, args.draft_markov_topk)
        drafter = dspark_jax.Drafter(drafter.backbone, head)
    shared: dict[str, Any] = {
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": None if args.ignore_eos else read_stop_ids(args.target),
    }
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature: found {args.temperature}, expected a number >= 0")
    if args.temperature != 0:
        shared["sampling"] = dspark_jax.DraftSampling([args.temperature], [args.seed], [0])
    if args.top_k is not None or args.top_p is not None:
        shared["target_filter"] = dspark_jax.TargetFilter(top_k=args.top_k, top_p=args.top_p)
    options = {
        "draft_topk": args.draft_topk,
        "draft_markov_topk": args.draft_markov_topk,
        "rule": args.rule,
        "num_speculative_tokens": args.num_speculative_tokens,
        "min_confidence": args.min_confidence,
        "implementation": args.implementation,
    }
    style = ("color" if sys.stdout.isatty() else "brackets") if args.mark == "auto" else args.mark
    before, after = MARKS[style]
    _warm_up(dspark_jax.stream(target, drafter, [ids], **shared, **options))
    print("" if args.chat else args.prompt, end="", flush=True)
    text, events = TextStream(tokenizer), []
    for event in dspark_jax.stream(target, drafter, [ids], **shared, **options):
        new = _new_tokens(event)
        drafted = min(int(event.num_accepted[0]), len(new))
        accepted = text.push(new[:drafted])
        print((before + accepted + after if accepted else "") + text.push(new[drafted:]), end="", flush=True)
        events.append(event)
    print(text.push([], last=True), flush=True)
    rounds = events[1:]
    lengths = [int(event.committed[0]) for event in rounds]
    if not rounds:
        print("\n1 token, written by the prefill: nothing was drafted")
        return 0
    chosen = args.num_speculative_tokens
    most = 1 + (chosen if isinstance(chosen, int) else drafter.config.max_steps)
    speed = _speed(rounds)
    print(
        f"\n{sum(len(_new_tokens(e)) for e in events)} tokens, {len(rounds)} rounds: acceptance length "
        f"{sum(lengths) / len(lengths):.2f} of at most {most}, {speed:.1f} tokens/s"
    )
    if args.no_baseline:
        return 0
    _warm_up(dspark_jax.stream(target, None, [ids], **shared))
    plain = list(dspark_jax.stream(target, None, [ids], **shared))
    if len(plain) > 1:
        line = f"plain decoding: {_speed(plain[1:]):.1f} tokens/s; speed-up {speed / _speed(plain[1:]):.2f}x"
        if args.temperature == 0:
            same = [t for e in events for t in _new_tokens(e)] == [t for e in plain for t in _new_tokens(e)]
            line += ", same text" if same else ", other text (rounding; --dtype float32 rounds less)"
        print(line)
    return 0


def _length(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _new_tokens(event: Any) -> list[int]:
    return [int(token) for token in event.tokens[0] if token >= 0]


def _warm_up(events: Iterator[Any]) -> None:
    """Compile: run the prefill and the first rounds, with the shapes of the run that is timed."""
    for number, _ in enumerate(events):
        if number == WARM_UP:
            return


def _speed(rounds: list[Any]) -> float:
    """Return new tokens per second of decoding, without the prefill."""
    return sum(len(_new_tokens(event)) for event in rounds) / sum(event.seconds for event in rounds)
