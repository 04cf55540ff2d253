"""The target's processing before verification: allowed tokens, temperature, min-p, top-k, top-p, in this order.

Every filter keeps the tokens above some value, so a processed row is described by the row itself and three numbers: a
cutoff, the largest value and the log of the kept mass. Rows are never copied to be sorted or renormalised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from ..checks import LARGEST
from ..noise import canonical, safe_temperature
from ..ordered_keys import to_keys, to_values
from ..types import Bools, Ints, Words

Values = Float32[Array, "*rows n"]  # tempered logits, or weights made of them
PerRow = Float32[Array, "*rows 1"]
Totals = Num[Array, "*rows 1"]  # counts, or sums of weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetFilter:
    """What each request's target is restricted to; None leaves a filter out. Greedy rows read `allowed` only.

    Tokens that tie with the last one kept are kept as well, so that a filter never depends on the order of ids.

    Attributes:
        allowed: bool [B, V], or [B, S+1, V] with a mask for each row; False forbids the token (for example a grammar).
        min_p: float32 [B] or a number, keeps tokens with p >= min_p * max p; <= 0 keeps all.
        top_k: int32 [B] or a number, keeps the k largest; <= 0 keeps all.
        top_p: float32 [B] or a number, keeps the fewest largest tokens whose mass, among those left by the filters
            before, reaches top_p; >= 1 keeps all, <= 0 keeps the largest.
    """

    allowed: Bool[Array, "B V"] | Bool[Array, "B R V"] | None = None
    min_p: Float32[Array, "..."] | None = None
    top_k: Int32[Array, "..."] | None = None
    top_p: Float32[Array, "..."] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSummary:
    """All that is needed of rows [..., V] to turn any of their values into a probability; each field is [..., 1].

    Attributes:
        top: float32, the largest value.
        cut: float32, values below it have probability 0; None keeps all.
        log_mass: float32, log of the sum of exp(value - top) over the kept values.
    """

    top: Float32[Array, "... 1"]
    cut: Float32[Array, "... 1"] | None
    log_mass: Float32[Array, "... 1"]


def temper(
    logits: Float[Array, "*rows n"],
    temperature: Float32[Array, "#*rows 1"],
    allowed: Bool[Array, "#*rows n"] | None = None,
) -> Values:
    """Return allowed logits / temperature in float32 (divided by 1 in greedy rows), -inf where not allowed.

    Args:
        logits: [..., n]; temperature: float32, of as many axes; allowed: bool, likewise, or None.
    """
    values = logits.astype(jnp.float32)
    if allowed is not None:
        values = jnp.where(allowed, values, -jnp.inf)
    # Overflow and +inf become the largest finite value, which keeps differences of values free of NaN.
    return canonical(jnp.minimum(values / safe_temperature(temperature), LARGEST["float32"]))


def summarise(values: Values, target_filter: TargetFilter | None = None) -> RowSummary:
    """Summarise tempered rows [..., V]; a filter's min_p, top_k and top_p broadcast against [..., 1]."""
    top = jnp.max(values, axis=-1, keepdims=True)
    # A row of -inf (nothing allowed) must not give NaN: its tokens have probability 0.
    top = jnp.where(top == -jnp.inf, 0.0, top)
    cut = None if target_filter is None else _cutoff(values, top, target_filter)
    return RowSummary(top, cut, jnp.log(steady_sum(_weights(values, top, cut))))


def log_prob(values: Values, rows: RowSummary) -> Values:
    """Return log-probabilities of tempered values float32 [..., n] of the summarised rows, -inf for those cut off."""
    log_p = (values - rows.top) - rows.log_mass
    # Without a finite value log_mass is -inf: -inf - -inf is no probability.
    log_p = jnp.where(values == -jnp.inf, -jnp.inf, log_p)
    return log_p if rows.cut is None else jnp.where(values >= rows.cut, log_p, -jnp.inf)


def _weights(values: Values, top: PerRow, cut: PerRow | None) -> Values:
    weight = jnp.exp(values - top)
    return weight if cut is None else jnp.where(values >= cut, weight, 0.0)


def steady_sum(weights: Values) -> PerRow:
    """Sum float32 weights in [0, 1] over the last axis [..., n], to the same bits whatever the order: [..., 1].

    A compiler orders a float sum by the shape around it, so a request's probabilities would change in the last bits
    with the batch or the chunk. Here each weight is cut exactly into three integers, whose sums have no order; what is
    left out of a weight is below 2**-36 for n up to 2**18.
    """
    bits = min(24, 31 - weights.shape[-1].bit_length())
    scale, total, parts = 2.0**bits, 0.0, []
    for _ in range(3):
        weights = weights * scale
        whole = jnp.floor(weights)
        parts.append(jnp.sum(whole.astype(jnp.int32), axis=-1, keepdims=True))
        weights = weights - whole
    for part in reversed(parts):
        total = (total + part.astype(jnp.float32)) / scale
    return jnp.asarray(total)


def _cutoff(values: Values, top: PerRow, target_filter: TargetFilter) -> PerRow | None:
    """Return the smallest kept value of each row [..., 1]: the largest of the three filters' cutoffs."""
    cuts = []
    if target_filter.min_p is not None:
        share = jnp.clip(target_filter.min_p, 0.0, 1.0)
        cuts.append(jnp.where(share > 0, top + jnp.log(share), -jnp.inf))
    if target_filter.top_k is not None:
        k = jnp.clip(target_filter.top_k, 0, values.shape[-1])
        at_k = _largest_reaching(values, lambda keep: jnp.sum(keep, axis=-1, keepdims=True, dtype=jnp.int32), k)
        cuts.append(jnp.where(k > 0, at_k, -jnp.inf))
    if target_filter.top_p is not None:
        # Keep x iff the mass above x is below top_p: from the largest value on whose mass, with all above, reaches it.
        weight = _weights(values, top, reduce(jnp.maximum, cuts) if cuts else None)
        need = target_filter.top_p * steady_sum(weight)
        at_p = _largest_reaching(
            values, lambda keep: steady_sum(jnp.where(keep, weight, 0.0)), jnp.maximum(need, 1e-30)
        )
        cuts.append(jnp.where(target_filter.top_p < 1, at_p, -jnp.inf))
    return reduce(jnp.maximum, cuts) if cuts else None


def _largest_reaching(
    values: Values, total: Callable[[Bools], Num[Array, "*rows 1"]], need: Num[Array, "#*rows 1"]
) -> PerRow:
    """Return each row's largest c [..., 1] with total(values >= c) >= need, or -inf: a search, no sort.

    It fixes one bit after the other of an integer key in the order of the values. The total only changes at values that
    are present, so the answer is one of them.
    """
    keys = to_keys(values)

    def try_bit(i: Ints | int, found: Words) -> Words:
        trial = found | (jnp.uint32(1 << 31) >> jnp.asarray(i, jnp.uint32))  # a Python number under disable_jit
        return jnp.where(total(keys >= trial) >= need, trial, found)

    found = lax.fori_loop(0, 32, try_bit, jnp.zeros((*keys.shape[:-1], 1), jnp.uint32))
    lowest = to_keys(jnp.full((), -jnp.inf, jnp.float32))
    return jnp.where(found <= lowest, -jnp.inf, to_values(found, jnp.float32))
