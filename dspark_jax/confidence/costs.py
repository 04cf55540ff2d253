"""What a target step costs by its number of tokens: the table that the prefix scheduler reads, and its profiler."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32
from numpy.typing import ArrayLike

from ..atomic_files import write_json
from ..checks import check_int, invalid
from ..json_files import read_json


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CostTable:
    """Measured target steps, at least one: seconds[i] for a step of tokens[i] tokens. A pytree; see `make` and `load`.

    Between two measurements seconds are linear in tokens. Below the first they are constant (a step has a fixed cost);
    beyond the last they go on with the last slope, never a falling one, so that tokens beyond the table are not free.

    Attributes:
        tokens: float32 [n], increasing; seconds: float32 [n].
    """

    tokens: Float32[Array, " n"]
    seconds: Float32[Array, " n"]

    @classmethod
    def make(cls, tokens: ArrayLike, sps: ArrayLike) -> CostTable:
        """Build a table from batch sizes in tokens and target steps per second (SPS) at each.

        Raises:
            ValueError: not two lists of one length, tokens not increasing integers >= 1, or SPS not finite and > 0.
        """
        sizes, rates = np.asarray(tokens), np.asarray(sps)
        if sizes.ndim != 1 or sizes.size == 0 or sizes.dtype.kind not in "iu":
            raise invalid("tokens", tokens, "a list of increasing integers >= 1")
        if (sizes < 1).any() or (np.diff(sizes) <= 0).any():
            raise invalid("tokens", sizes.tolist(), "increasing integers >= 1")
        if rates.shape != sizes.shape or rates.dtype.kind not in "iuf":
            raise invalid("sps", sps, f"{sizes.size} numbers > 0, one for each of `tokens`")
        if not np.isfinite(rates).all() or (rates <= 0).any():
            raise invalid("sps", rates.tolist(), "finite numbers > 0")
        return cls(jnp.asarray(sizes, jnp.float32), jnp.asarray(1.0 / rates, jnp.float32))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Read a JSON object with `tokens` and `sps` (what `dspark-jax profile-sps` writes)."""
        name = os.fspath(path)
        try:
            raw = read_json(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"{name}: no such file; `dspark-jax profile-sps` writes one") from None
        if not {"tokens", "sps"} <= raw.keys():
            raise ValueError(f"{name}: expected an object with `tokens` and `sps`")
        try:
            return cls.make(raw["tokens"], raw["sps"])
        except ValueError as error:  # NumPy's own for a ragged list among them
            raise ValueError(f"{name}: {error}") from None

    def save(self, path: str | os.PathLike[str], **facts: Any) -> None:
        """Write JSON that `load` reads; `facts` (JSON values) are kept beside the table."""
        tokens, seconds = np.asarray(self.tokens), np.asarray(self.seconds, np.float64)
        table = {"tokens": [int(n) for n in tokens], "sps": [float(f"{1 / t:.6g}") for t in seconds]}
        write_json(path, table | facts)

    def seconds_at(self, tokens: ArrayLike) -> Float32[Array, "..."]:
        """Return the seconds of a step of `tokens` tokens (any shape), float32."""
        n = jnp.asarray(tokens).astype(jnp.float32)
        inside = jnp.interp(n, self.tokens, self.seconds)
        if self.tokens.shape[0] == 1:
            return inside
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])
        return inside + jnp.maximum(slope, 0.0) * jnp.maximum(n - self.tokens[-1], 0.0)

    def sps(self, tokens: ArrayLike) -> Float32[Array, "..."]:
        """Return target steps per second at a batch of `tokens` tokens (any shape), float32."""
        return 1.0 / self.seconds_at(tokens)


def profile_sps(
    make_step: Callable[[int], Callable[[], Any]],
    tokens: Sequence[int],
    *,
    warmup: int = 2,
    repeats: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure target steps per second over batch sizes.

    Args:
        make_step: make_step(n) prepares a step of n tokens and returns a function without arguments that runs it; what
            that returns is waited for. Preparing is not timed.
        tokens: increasing batch sizes in tokens.
        warmup: runs before timing (they compile); repeats: timed runs, of which the median counts.

    Raises:
        ValueError: sizes that do not increase, or counts below 1.
    """
    sizes = [check_int("tokens", n, 1) for n in tokens]
    if not sizes or sorted(set(sizes)) != sizes:
        raise invalid("tokens", sizes, "increasing integers >= 1")
    warmup, repeats = check_int("warmup", warmup, 0), check_int("repeats", repeats, 1)
    rates = []
    for size in sizes:
        step, times = make_step(size), []
        for _ in range(warmup):
            jax.block_until_ready(step())
        for _ in range(repeats):
            begin = clock()
            jax.block_until_ready(step())
            times.append(clock() - begin)
        rates.append(1.0 / max(float(np.median(times)), 1e-9))
    return CostTable.make(sizes, rates)
