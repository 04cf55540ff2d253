"""The one reader of JSON: whatever file a user names, it answers quickly, within bounded memory, in one line.

A file must be a regular one (a pipe would hang, a device never ends), of bounded size, UTF-8, with unique keys (readers
disagree on which of two values counts), bounded depth, finite numbers and integers of at most 64 bits.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import Any

MAX_CONFIG = 1 << 22  # bytes of a config, a calibration, a manifest of a small checkpoint
MAX_LISTING = 1 << 25  # bytes of an index or manifest that names every tensor
MAX_LINES = 1 << 30  # bytes of a file with one JSON value a line
MAX_LINE = 1 << 24
MAX_DEPTH = 64
_LARGEST = 2**64


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """Read a whole regular file of at most `limit` bytes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a regular file, or a larger one.
    """
    path = os.fspath(path)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(text) > limit:
        raise ValueError(f"{path}: {max(size, len(text))} bytes, expected at most {limit}")
    return text


def open_regular(path: str) -> Any:
    """Open a regular file for reading bytes; a pipe or device is refused without waiting for it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except OSError as error:  # a directory on some systems, a socket, no permission
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(where: str, text: bytes, *, large_integers: bool = False) -> Any:
    """Parse one JSON value; `where` names it in errors.

    Args:
        large_integers: give integers of 21 to 40 characters as floats (tokenizers write 10^30 for "no limit").

    Raises:
        ValueError: not JSON, a repeated key, too deep, a number that is not finite or an integer beyond 64 bits.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_large if large_integers else _whole,
        )
        _check_depth(value)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{where}: not valid JSON ({reason})") from None
    return value


def parse_json_object(where: str, text: bytes, *, large_integers: bool = False) -> dict[str, Any]:
    """Parse a JSON object; arguments and errors as `parse_json`."""
    value = parse_json(where, text, large_integers=large_integers)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: found {type(value).__name__}, expected a JSON object")
    return value


def read_json(path: str | os.PathLike[str], limit: int = MAX_CONFIG, *, large_integers: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object of at most `limit` bytes; large_integers as in `parse_json`.

    Raises:
        FileNotFoundError, ValueError: as `read_bytes` and `parse_json_object`.
    """
    return parse_json_object(os.fspath(path), read_bytes(path, limit), large_integers=large_integers)


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of a file with one JSON value a line; empty lines are skipped."""
    path = os.fspath(path)
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_LINES:
            raise ValueError(f"{path}: {size} bytes, expected at most {MAX_LINES}")
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise ValueError(f"{path}, line {number}: expected at most {MAX_LINE} bytes")
            if line.strip():
                yield number, parse_json(f"{path}, line {number}", line)


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read config.json of a checkpoint directory as raw JSON (never through a model class, which rewrites fields)."""
    path = os.path.join(directory, "config.json")
    try:
        return read_json(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; a checkpoint directory holds config.json") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {repeated[:100]!r} is given twice")
    return result


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no finite number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond the numbers that a float holds")
    return value


def _whole(text: str) -> int:
    # Counting digits first: converting a million of them takes seconds.
    if len(text) > 20 or abs(int(text)) >= _LARGEST:
        raise ValueError(f"the integer {text[:40]} is beyond 64 bits")
    return int(text)


def _large(text: str) -> int | float:
    return _finite(text) if 20 < len(text) <= 40 else _whole(text)


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in inside if isinstance(inner, dict | list)]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
