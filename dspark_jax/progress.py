"""Progress on stderr for work that takes over a second: of bytes, or of pieces of work."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

DELAY = 1.0


class Progress:
    """Counts; after a second a bar appears on stderr (rich where installed, a plain percentage otherwise).

    Args:
        total: of what `add` counts.
        show: False counts silently; nothing is shown where stderr is no terminal.
        unit: "bytes", or what else is counted.
        title: stands before the label.
    """

    def __init__(self, total: int, show: bool = True, *, unit: str = "bytes", title: str = "") -> None:
        self.total, self.done, self.unit, self.title = total, 0, unit, title
        self.show = show and sys.stderr.isatty()
        self._start, self._bar, self._task, self._plain = time.monotonic(), None, None, False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._plain:
            print(file=sys.stderr)

    def add(self, label: str, count: int) -> None:
        """Count `count` more, of what `label` names."""
        self.done += count
        if not self.show or time.monotonic() - self._start < DELAY:
            return
        if self._bar is None and not self._plain:
            self._bar = self._open()
        if self._bar is None:
            self._plain = True
            print(f"\r{100 * self.done // max(1, self.total):3d}%", end="", file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, completed=self.done, description=f"{self.title} {label[-40:]}".strip())

    def _open(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Rich
        except ImportError:
            return None
        count = DownloadColumn() if self.unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
        bar = Rich(*columns, console=Console(stderr=True), transient=True)
        self._task = bar.add_task("", total=self.total)
        bar.start()
        return bar


@contextlib.contextmanager
def progress(total: int, title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of `total` pieces of work, with what comes next."""
    with Progress(total, unit="pieces", title=title) as bar:
        yield lambda what: bar.add(what, 1)
