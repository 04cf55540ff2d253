"""Counters for operators: added up on the device without a host sync, read when wanted; Prometheus if installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import check_int
from ..optional import require
from ..types import DraftBlock
from ..verification.verify import Verified

Counts = dict[str, jax.Array]


@partial(jax.jit, donate_argnums=0)
def _add(counts: Counts, block: DraftBlock, out: Verified | None, live: jax.Array | None) -> Counts:
    """Add a round's counts, uint32; requests that are not `live` (padding) count for nothing."""
    steps = jnp.arange(block.tokens.shape[1], dtype=jnp.int32)[None]
    live = jnp.ones(block.valid.shape, bool) if live is None else live
    proposed = (steps < block.num_draft[:, None]) & live[:, None]
    new = {
        "rounds": jnp.ones((), bool),
        "requests": live,
        "invalid": live & ~block.valid,
        "drafted": proposed,
    }
    if block.certified is not None:
        new["certified"] = proposed & block.certified
    if out is not None:
        new["accepted"] = (steps < out.num_accepted[:, None]) & live[:, None]
    per_position = ("drafted", "accepted", "certified")

    def total(name: str, flags: jax.Array) -> jax.Array:
        return jnp.sum(flags, axis=0 if name in per_position else None, dtype=jnp.uint32)

    return counts | {name: counts[name] + total(name, flags) for name, flags in new.items()}


class DraftCounters:
    """Totals since the start: rounds, requests, invalid requests; per position drafted, accepted and certified tokens.

    Args:
        num_steps: S.
        programs: name -> a function that says how often a program was traced (DraftFunction.trace_count), whose growth
            after warm-up means recompilation.
    """

    def __init__(self, num_steps: int, programs: Mapping[str, Callable[[], int]] | None = None) -> None:
        self.num_steps, self.programs = check_int("num_steps", num_steps, 1), dict(programs or {})
        self._device, self._host = self._zeros(), {name: [0] * max(x.size, 1) for name, x in self._zeros().items()}

    def _zeros(self) -> Counts:
        one = {name: jnp.zeros((), jnp.uint32) for name in ("rounds", "requests", "invalid")}
        return one | {name: jnp.zeros(self.num_steps, jnp.uint32) for name in ("drafted", "accepted", "certified")}

    def add(self, block: DraftBlock, out: Verified | None = None, live: Any = None) -> None:
        """Count a drafted block [B, S], and what was accepted of it; `live` bool [B] excludes padding requests.

        Returns at once: nothing is read from the device.
        """
        self._device = _add(self._device, block, out, None if live is None else jnp.asarray(live, bool))

    def read(self) -> dict[str, Any]:
        """Wait for the device and return the totals: numbers, lists over positions, and traces by program."""
        # Python numbers hold the totals, so that 32-bit counters on the device may start again.
        fresh, self._device = jax.device_get(self._device), self._zeros()
        for name, value in fresh.items():
            self._host[name] = [a + int(b) for a, b in zip(self._host[name], value.reshape(-1), strict=True)]
        single = ("rounds", "requests", "invalid")
        totals: dict[str, Any] = {name: v[0] if name in single else list(v) for name, v in self._host.items()}
        return totals | {"traces": {name: count() for name, count in self.programs.items()}}


class PrometheusCollector:
    """Exposes a DraftCounters to a prometheus_client registry: registry.register(PrometheusCollector(counters))."""

    def __init__(self, counters: DraftCounters, prefix: str = "dspark") -> None:
        self.counters, self.prefix = counters, prefix
        self._metrics = require("prometheus_client.core", "prometheus", "the Prometheus exporter")

    def collect(self) -> Iterator[Any]:
        """Yield one counter family per total; read at each scrape."""
        family = self._metrics.CounterMetricFamily
        for name, value in self.counters.read().items():
            labels = ["program"] if name == "traces" else ["position"] if isinstance(value, list) else []
            metric = family(f"{self.prefix}_{name}", f"{name} since the start (see DraftCounters)", labels=labels)
            if isinstance(value, dict):
                pairs = list(value.items())
            else:
                pairs = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for label, count in pairs:
                metric.add_metric([] if label is None else [str(label)], count)
            yield metric
