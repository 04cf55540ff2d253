"""Progress bars on stderr for long runs: rich's where it is installed and stderr is a terminal, else nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each of `total` pieces of work, with what comes next."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda what: None
        return
    console = Console(file=sys.stderr)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda what: bar.update(task, advance=1, description=f"{description} {what}")
