"""Commands of `dspark-jax`: each module has add_parser(subparsers) and run(args) -> exit code; no mathematics here."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Imported on demand: `dspark-jax --help` must not wait for JAX.
COMMANDS = {
    "draft": "draft blocks from recorded hidden states",
    "generate": "write text by speculative decoding",
    "sweep": "acceptance length over k and temperature",
    "calibrate": "calibrate a drafter's confidence on recorded blocks",
    "profile-sps": "measure what a target step costs by its number of tokens",
    "convert": "convert a checkpoint for JAX",
    "inspect": "show what a checkpoint is",
    "verify": "compare a converted checkpoint with its source",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends with a one-line error on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="dspark-jax", description="DSpark speculative-decoding drafts in JAX.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if argv[:1] == [name]:
            module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary, add_help=False)
    args = parser.parse_args(argv)
    # Without a GPU driver, JAX's CUDA plugin logs at import what nobody asked for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, ImportError) as error:
        print(f"dspark-jax {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def one_line(error: BaseException) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
