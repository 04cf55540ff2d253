"""Directories that appear whole under their name, and replace nothing but an earlier result.

A new result is built in a hidden directory beside the destination, next to a lock file that its process holds. It takes
its name by one rename that replaces nothing, or, where an earlier result stands there, by exchanging the two names, so
that a whole result is there at every moment. Of the earlier result only the files that its manifest lists are removed.
A killed run leaves its hidden directory; the next run in the same place finds the lock free and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...json_files import MAX_LISTING, read_json

MANIFEST = "dspark_manifest.json"
HIDDEN = re.compile(r"\.dspark-convert-[0-9a-f]{16}\.(?:lock|partial)")
_NOREPLACE, _EXCHANGE = 1, 2  # flags of Linux's renameat2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
# What results of versions before 0.2 hold, whose manifests list no files.
_FIRST_FILES = frozenset({"config.json", "model.safetensors", "calibration.json", MANIFEST})


def check_destination(path: str, force: bool) -> None:
    """Refuse a destination that exists, unless `force` and it is an earlier result or an empty directory.

    Raises:
        FileExistsError: it exists; it is something else; or it holds files that no conversion wrote (they are named).
    """
    if not os.path.lexists(path):
        return
    if not force:
        raise FileExistsError(f"{path}: exists already; --force replaces it")
    if not os.path.isdir(path) or os.path.islink(path) or (os.listdir(path) and MANIFEST not in os.listdir(path)):
        raise FileExistsError(f"{path}: is not the result of an earlier conversion, so --force does not replace it")
    if foreign := sorted(set(list_files(path)) - listed_files(path)):
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise FileExistsError(
            f"{path}: holds {', '.join(foreign[:5])}{more}, which no conversion wrote; move them away, --force deletes "
            "nothing but what its manifest lists"
        )


def list_files(directory: str) -> list[str]:
    """Return the relative paths of everything in a directory that is no directory, links not followed."""
    found = []
    for folder, folders, files in os.walk(directory):
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), directory) for name in [*files, *linked]]
        if not files and not folders and folder != directory:
            found.append(os.path.relpath(folder, directory) + os.sep)  # an empty folder is somebody's as well
    return found


def listed_files(directory: str) -> set[str]:
    """Return the files that a result's manifest lists, itself among them; nothing for an empty directory."""
    if not os.path.lexists(os.path.join(directory, MANIFEST)):
        return set()
    listed = read_json(os.path.join(directory, MANIFEST), MAX_LISTING).get("files_written")
    if listed is None:
        return set(_FIRST_FILES)
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"{directory}: {MANIFEST}: files_written: expected a list of file names")
    return {*listed, MANIFEST}


@contextlib.contextmanager
def appearing_directory(
    path: str, *, force: bool = False, allow_gap: bool = False, say: Callable[[str], None] = lambda note: None
) -> Iterator[str]:
    """Give a hidden directory beside `path`, which takes that name at the end and is removed when anything goes wrong.

    Args:
        path: absolute; `check_destination` has accepted it.
        force: an earlier result may be replaced.
        allow_gap: where the file system cannot exchange two names, move the old result away first.
        say: called with what the user should know of at the end.

    Raises:
        FileExistsError: something appeared under the name meanwhile.
    """
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    remove_leftovers(parent)
    before = _identity(path)
    with contextlib.ExitStack() as held:
        if before is not None:  # an open directory keeps its number, by which it is known again, from being reused
            held.callback(os.close, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        partial = held.enter_context(_hidden(path, say))
        yield partial
        if before is None:
            _rename_new(partial, path)
        elif not force:
            raise FileExistsError(f"{path}: exists already; --force replaces it")
        else:
            _replace(partial, path, before, allow_gap, say)


def remove_leftovers(parent: str) -> list[str]:
    """Remove what killed conversions left in a directory; those of running ones are locked and stay."""
    removed = []
    for name in sorted(os.listdir(parent) if os.path.isdir(parent) else []):
        if not HIDDEN.fullmatch(name) or not name.endswith(".lock"):
            continue
        lock = os.path.join(parent, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                words = os.read(descriptor, 4096).decode("utf-8", "surrogateescape").split(" ", 2)
                mine = (int(words[0]), int(words[1])) if len(words) == 3 else None
                path = os.path.join(parent, words[2] if len(words) == 3 else "result")
                if _clear(lock.removesuffix(".lock") + ".partial", mine, path, lambda note: None):
                    os.unlink(lock)
                    removed.append(name)
            finally:
                os.close(descriptor)
    return removed


@contextlib.contextmanager
def _hidden(path: str, say: Callable[[str], None]) -> Iterator[str]:
    """Make a lock file, hold it, and make the hidden directory that belongs to it; clear both away at the end."""
    while True:
        stem = os.path.join(os.path.dirname(path), f".dspark-convert-{secrets.token_hex(8)}")
        descriptor = os.open(stem + ".lock", os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A run that cleans up may have taken the file for a leftover before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(stem + ".lock"), os.fstat(descriptor)):
                break
        os.close(descriptor)
    mine = None
    try:
        os.mkdir(stem + ".partial")
        mine = _identity(stem + ".partial")
        assert mine is not None
        # Behind an exchange the hidden name is that of the earlier result: the lock says which directory is ours.
        os.write(descriptor, f"{mine[0]} {mine[1]} {os.path.basename(path)}".encode("utf-8", "surrogateescape"))
        yield stem + ".partial"
    finally:
        # Without the lock file the next run would not know a directory that could not be removed.
        if _clear(stem + ".partial", mine, path, say):
            with contextlib.suppress(OSError):
                os.unlink(stem + ".lock")
        os.close(descriptor)


def _clear(partial: str, mine: tuple[int, int] | None, path: str, say: Callable[[str], None]) -> bool:
    """Take the hidden name away: our own directory is removed; any other one is an exchanged earlier result."""
    found = _identity(partial)
    if found is None:
        return True
    if found == mine:
        return _remove_tree(partial)
    _remove_listed(partial, path, say)
    return not os.path.lexists(partial)


def _remove_tree(path: str) -> bool:
    """Remove a directory of ours until it stays away."""
    # Orbax's threads may still write into it for a moment after they have failed.
    quiet, absent = 5 if "orbax.checkpoint" in sys.modules else 1, 0
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        absent = 0 if os.path.lexists(path) else absent + 1
        if absent == quiet:
            return True
        time.sleep(0.1)
    return False


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _rename_new(partial: str, path: str) -> None:
    """Give `partial` its name, replacing nothing."""
    try:
        _renameat2(partial, path, _NOREPLACE)
        return
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not os.path.lexists(path):  # the file system knows no such rename: look once more, at the last moment
            os.rename(partial, path)
            return
    raise FileExistsError(f"{path}: appeared while converting, so it was not replaced")


def _replace(partial: str, path: str, before: tuple[int, int], allow_gap: bool, say: Callable[[str], None]) -> None:
    """Exchange `partial` and the earlier result; then remove the earlier result's own files."""
    if _identity(path) is None:  # it has been removed meanwhile
        return _rename_new(partial, path)
    check_destination(path, True)  # once more: files may have appeared in it
    replaced = f"{path}: was replaced while converting, so it was left as it is"
    if _identity(path) != before:
        raise FileExistsError(replaced)
    try:
        _renameat2(partial, path, _EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if not allow_gap:
            raise OSError(
                error.errno,
                "the file system cannot exchange two names; --allow-gap moves the old result away first, so that for a "
                "moment none is there",
                path,
            ) from None
        return _replace_with_gap(partial, path, before, say)
    if _identity(partial) != before:  # something else stood there at the moment of the exchange
        _renameat2(partial, path, _EXCHANGE)
        raise FileExistsError(replaced)
    _remove_listed(partial, path, say)


def _replace_with_gap(partial: str, path: str, before: tuple[int, int], say: Callable[[str], None]) -> None:
    """Move the earlier result to a visible name, give `partial` the free one, then clear the old one away."""
    # A visible name: a run that is killed here leaves the old result where its owner finds it.
    aside = _sibling(path, "old")
    os.rename(path, aside)
    try:
        if _identity(aside) != before:
            raise FileExistsError(f"{path}: was replaced while converting, so it was left as it is")
        _rename_new(partial, path)
    except BaseException:
        if os.path.lexists(path):
            say(f"{aside}: the directory that stood at {path}, whose name was taken meanwhile")
        else:
            os.rename(aside, path)
        raise
    _remove_listed(aside, path, say)


def _sibling(path: str, word: str) -> str:
    return os.path.join(os.path.dirname(path), f"{os.path.basename(path)[:200]}.{word}-{secrets.token_hex(4)}")


def _remove_listed(old: str, path: str, say: Callable[[str], None]) -> None:
    """Remove the files that an old result's manifest lists; keep the rest under a visible name, and name it."""
    listed: set[str] = set()
    with contextlib.suppress(ValueError, OSError):
        listed = listed_files(old)
    for name in [*sorted(listed.intersection(list_files(old)) - {MANIFEST}), *sorted(listed & {MANIFEST})]:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(old, name))
    for folder, _, _ in os.walk(old, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    if os.path.lexists(old):
        kept = _sibling(path, "kept")
        os.rename(old, kept)
        names = ", ".join(list_files(kept)[:5])
        say(f"{kept}: kept, since it is no file of the earlier result or could not be removed: {names}")


def _renameat2(source: str, destination: str, flags: int) -> None:
    """Call Linux's renameat2(2); OSError with ENOSYS where there is none."""
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    here = -100  # AT_FDCWD
    if function(here, os.fsencode(source), here, os.fsencode(destination), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), destination)
