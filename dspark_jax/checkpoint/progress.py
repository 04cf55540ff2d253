"""A progress bar for work that takes over a second."""

from __future__ import annotations

import sys
import time
from typing import Any

DELAY = 1.0


class Progress:
    """Counts bytes; after a second a bar appears on stderr (rich where installed, a plain percentage otherwise).

    Args:
        total: bytes in all.
        show: False counts silently.
    """

    def __init__(self, total: int, show: bool) -> None:
        self.total, self.done, self.label = total, 0, ""
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
        """Count `count` more bytes, of the tensor `label`."""
        self.done += count
        if not self.show or time.monotonic() - self._start < DELAY:
            return
        if self._bar is None and not self._plain:
            self._bar = self._open()
        if self._bar is None:
            self._plain = True
            print(f"\r{100 * self.done // max(1, self.total):3d}%", end="", file=sys.stderr, flush=True)
        else:
            self._bar.update(self._task, completed=self.done, description=label[-40:])

    def _open(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Rich
        except ImportError:
            return None
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        bar = Rich(*columns, console=Console(stderr=True), transient=True)
        self._task = bar.add_task("", total=self.total)
        bar.start()
        return bar
