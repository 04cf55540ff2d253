"""Jitted programs that count their traces: what tests and operators read to see that nothing is compiled twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax


class Program:
    """A jitted function that counts its traces.

    Args:
        function: what is jitted.
        static: names of its static arguments.
        donate: names of the arguments whose memory the results may take.
    """

    def __init__(self, function: Callable[..., Any], *, static: Sequence[str] = (), donate: Sequence[str] = ()) -> None:
        self.traces = 0

        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            self.traces += 1
            return function(*args, **named)

        self.jitted = jax.jit(counted, static_argnames=tuple(static), donate_argnames=tuple(donate))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the program."""
        return self.jitted(*args, **named)

    def lower(self, *args: Any, **named: Any) -> jax.stages.Lowered:
        """Lower the program for these arguments."""
        return self.jitted.lower(*args, **named)
