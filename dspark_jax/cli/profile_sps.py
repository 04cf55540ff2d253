"""`dspark-jax profile-sps`: measure target steps per second over batch sizes, the prefix scheduler's cost table."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command's options."""
    parser = subparsers.add_parser(
        "profile-sps",
        help="measure what a target step costs by its number of tokens",
        description=(
            "Measure target steps per second over batch sizes. WHAT is a target's directory, or MODULE:FUNCTION, where "
            "FUNCTION(n) prepares a step of n tokens and returns a function that runs it."
        ),
    )
    parser.add_argument("what", metavar="WHAT", help="directory of a target, or MODULE:FUNCTION")
    parser.add_argument("out", metavar="OUT", help="JSON file to write")
    parser.add_argument(
        "--tokens", default="1,2,4,8,16,32,64,128", help="increasing batch sizes (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="timed runs, of which the median counts")
    parser.add_argument("--warmup", type=int, default=2, help="runs before timing")
    parser.add_argument("--context", type=int, default=256, help="cached positions of each request (directory only)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and write the table."""
    from dspark_jax.confidence.costs import profile_sps

    try:
        sizes = [int(size) for size in args.tokens.split(",")]
    except ValueError:
        raise ValueError(f"--tokens: found {args.tokens!r}, expected integers with commas between them") from None
    table = profile_sps(load(args.what, args.context), sizes, warmup=args.warmup, repeats=args.repeats)
    table.save(args.out, repeats=args.repeats, measured=args.what)
    print("tokens  steps/s  ms/step")
    for size, rate in zip(sizes, table.sps(sizes).tolist(), strict=True):
        print(f"{size:6d}  {rate:7.1f}  {1000 / rate:7.2f}")
    print(f"wrote {args.out}")
    return 0


def load(what: str, context: int) -> Callable[[int], Any]:
    """Return the function that prepares a step of n tokens."""
    if os.path.isdir(what):
        return target_step(what, context)
    module, colon, name = what.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"WHAT: found {what!r}, expected a directory or MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"WHAT: found {what!r}, but importing it failed ({error})") from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise ValueError(f"WHAT: found {what!r}, expected a function {name} in {module}")
    return function


def target_step(directory: str, context: int) -> Callable[[int], Callable[[], Any]]:
    """Return a maker of steps of a target: n requests of one token each behind `context` cached positions."""
    import jax
    import jax.numpy as jnp

    from dspark_jax.checkpoint.load import load_target
    from dspark_jax.checks import check_int

    check_int("--context", context, 1)
    target = load_target(directory)
    if target.max_length is not None:
        check_int("--context", context, 1, target.max_length - 1)

    @jax.jit
    def step(target: Any, tokens: Any, start: Any, cache: Any) -> Any:
        hidden, _, _ = target.forward(tokens, start, cache, ())
        return target.logits(hidden)

    def make(n: int) -> Callable[[], Any]:
        tokens, start = jnp.zeros((n, 1), jnp.int32), jnp.full((n,), context, jnp.int32)
        cache = target.make_cache(n, context + 1)
        return lambda: step(target, tokens, start, cache)

    return make
