"""Writing files so that a reader, a crash or a full disk never meets half of one: beside the file, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the name of a new file beside `path`; on success it takes the place of `path`, else it is removed.

    Raises:
        OSError: of the file system, with the name that the caller gave.
    """
    path = os.path.realpath(path)  # a link keeps pointing where it points
    directory, base = os.path.split(path)
    try:
        # A short prefix: the longest legal name of `path` leaves no room for an addition.
        descriptor, beside = tempfile.mkstemp(prefix=".new-", suffix=os.path.splitext(base)[1][-8:], dir=directory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    os.close(descriptor)
    try:
        yield beside
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        mode = os.stat(path).st_mode if os.path.exists(path) else 0o666 & ~_umask()
        os.chmod(beside, mode & 0o7777)
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.filename in (beside, None):
            raise OSError(error.errno, error.strerror, path) from None
        raise


@contextlib.contextmanager
def open_replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[Any]:
    """Open a file for writing (UTF-8 text for "w", bytes for "wb") that takes the place of `path` when closed."""
    with replacing(path) as beside, open(beside, mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        file.flush()


def write_json(path: str | os.PathLike[str], value: Any, *, sort_keys: bool = False) -> None:
    """Write JSON that a person can read, in place of `path`."""
    with open_replacing(path) as file:
        json.dump(value, file, indent=2, sort_keys=sort_keys)
        file.write("\n")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
