"""Commands of `dspark-jax`: each module has add_parser(subparsers) and run(args) -> exit code; no mathematics here."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

MOST = 4000  # characters of a message: one screen

# Imported on demand: `dspark-jax --help` must not wait for JAX.
COMMANDS = {
    "draft": "draft blocks from recorded hidden states",
    "generate": "write text by speculative decoding",
    "sweep": "acceptance length over k and temperature",
    "calibrate": "calibrate a drafter's confidence on recorded blocks",
    "profile-sps": "measure what a target step costs by its number of tokens",
    "convert": "convert a checkpoint for JAX",
    "export": "export a drafting function for other processes",
    "inspect": "show what a checkpoint is",
    "verify": "compare a converted checkpoint with its source",
}


class Ended(BaseException):
    """SIGTERM or SIGHUP: unwinds like Ctrl-C, so that what was begun is cleaned up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Whatever goes wrong ends with one line on stderr and exit code 2; --debug shows where."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):  # an ASCII terminal gets escapes instead of an error
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    parser = argparse.ArgumentParser(prog="dspark-jax", description="DSpark speculative-decoding drafts in JAX.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
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
    with _ending_signals():
        return _run(args, debug)


def _run(args: argparse.Namespace, debug: bool) -> int:
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except Ended as ended:
        return 128 + int(ended.args[0])
    except Exception as error:  # the last line of defence: a user gets one line, a developer --debug
        if debug:
            traceback.print_exc()
        expected = isinstance(error, ValueError | OSError | ImportError)
        kind = "" if expected else f"{type(error).__name__}: "
        hint = "" if expected or debug else " (--debug shows where; please report it)"
        _complain(f"dspark-jax {args.command}: error: {kind}{one_line(error)}{hint}")
        return 2


@contextlib.contextmanager
def _ending_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `Ended` while a command runs (only the main thread may)."""

    def end(number: int, frame: Any) -> None:
        raise Ended(number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, end) for number in numbers} if main_thread else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed as well
        print(text, file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of bounded length."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{os.fspath(error.filename)}: {error.strerror}"
    else:
        text = str(error)
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split()) or type(error).__name__
    return text if len(text) <= MOST else f"{text[:MOST]} ... ({len(text) - MOST} more characters)"
