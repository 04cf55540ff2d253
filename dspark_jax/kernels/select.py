"""Exact top-k selection without a sort over the vocabulary.

Group the columns by G = 16 neighbours. If a group is not among the k with the largest maxima (ties: lowest group), then
k other groups hold an element that precedes all of its own in the order (value descending, id ascending): none of its
elements is selected. So the k best groups hold the k best elements, and two small selections replace a large one:

    read x once -> V/G maxima;   k best of V/G groups;   gather k*G elements;   k best of those;   sort k pairs

No threshold is guessed, nothing can overflow, and ties, NaN and -inf need no special case (keys.py). `pick`, the small
selection, finds the k-th largest key digit by digit and compacts; on GPUs it exists in XLA operations and as a Pallas
kernel (pick.py). The CPU takes its partial sort instead of digits, TPUs take lax.top_k on the whole row.

R rows, V columns, k selected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Num, UInt

from ..ordered_keys import key_dtype, to_keys, to_values
from ..types import Floats
from . import dispatch, pick

Picked = tuple[UInt[Array, "R k"], Int32[Array, "R k"]]  # keys and column ids
Selected = tuple[Float[Array, "R k"], Int32[Array, "R k"]]  # values and column ids

DIGIT = 4  # bits of a key found per pass over it


def select_topk(x: Float[Array, "R V"], k: int, *, implementation: str | None = None) -> Selected:
    """Return the k largest values of each row, descending, ties to the lowest id.

    -0 equals +0 (and comes out as +0); NaN of either sign is the largest value.

    Args:
        x: [R, V] bfloat16, float16 or float32.
        k: 1 <= k <= V, static.
        implementation: "xla", "pallas", or None (see dispatch.py); which form runs is settled when the program is
            lowered for a platform.

    Returns:
        values [R, k] in the dtype of x, ids int32 [R, k], distinct within a row.
    """
    plain = partial(_plain, x, k)
    if not pick.fits(x.shape[1], k) or not dispatch.addressable(x):
        return plain()
    return dispatch.run("select", implementation, xla=plain, pallas=partial(_in_kernels, x, k))


def _plain(x: Float[Array, "R V"], k: int) -> Selected:
    digits, sorts, whole = partial(_select, k=k, small=pick_xla), partial(by_partial_sorts, k=k), partial(top_k, k=k)
    return lax.platform_dependent(x, cuda=digits, rocm=digits, cpu=sorts, default=whole)


def _in_kernels(x: Float[Array, "R V"], k: int, *, interpret: bool) -> Selected:
    return _select(x, k, partial(pick.pick_kernel, interpret=interpret))


def top_k(x: Float[Array, "R V"], k: int) -> Selected:
    """Select with lax.top_k: the reference of every other form, and the default on TPUs."""
    values, ids = lax.top_k(_canonical(x), k)
    return values.astype(x.dtype), ids


def _canonical(x: Floats) -> Floats:
    """Return x as float32 with +0 for zeros and the positive NaN for NaN, which lax.top_k orders first."""
    # Through the keys: integers vectorise better than tests for NaN. XLA's CPU partial sort knows float32 alone.
    return to_values(to_keys(x), x.dtype).astype(jnp.float32)


def by_partial_sorts(x: Float[Array, "R V"], k: int) -> Selected:
    """Select by groups with lax.top_k as the small selection: the CPU's default, about half the time of `top_k`.

    A partial sort costs most where many elements enter its heap, so what is known to lose is lowered to -inf first: no
    group or element below the k-th largest of any k disjoint parts' maxima can be selected.
    """
    R, V = x.shape
    size = pick.group_size(V, k)
    if size is None:
        return top_k(x, k)
    n = -(-V // size)
    x = jnp.pad(x, ((0, 0), (0, n * size - V)), constant_values=-jnp.inf)  # ids beyond V lose every tie
    # The barriers keep XLA from computing maxima twice and from turning its partial sort into a full one.
    # Maxima of keys: XLA's float maximum may lose NaN on the CPU.
    maxima = to_values(jnp.max(to_keys(x).reshape(R, n, size), axis=2), x.dtype).astype(jnp.float32)
    maxima = lax.optimization_barrier(maxima)
    if n >= 8 * k:
        parts = jnp.pad(maxima, ((0, 0), (0, -n % 8)), constant_values=-jnp.inf).reshape(R, -1, 8)
        best, _ = _kept_top_k(jnp.max(parts, axis=2), k)
        maxima = jnp.where(maxima < best[:, -1:], -jnp.inf, maxima)
    best, groups = _kept_top_k(maxima, k)
    groups = jnp.sort(groups, axis=1)
    inside = _canonical(_gather_groups(x, groups * size, size)).reshape(R, k * size)
    values, place = lax.top_k(jnp.where(inside < best[:, -1:], -jnp.inf, inside), k)
    ids = jnp.take_along_axis(groups, place // size, axis=1) * size + place % size
    return values.astype(x.dtype), ids


def _kept_top_k(x: Float[Array, "R n"], k: int) -> Selected:
    """lax.top_k whose two results XLA sees used together, as its CPU partial sort requires."""
    # The third operand keeps XLA from handing the barrier top_k's own tuple, on which its partitioned programs crash.
    values, ids, _ = lax.optimization_barrier((*lax.top_k(x, k), jnp.zeros((), jnp.int32)))
    return values, ids


def _select(x: Float[Array, "R V"], k: int, small: Callable[..., Picked]) -> Selected:
    """Select by groups with `small(keys or x, k, groups, G) -> (keys [R, k], ids [R, k] ascending)`."""
    R, V = x.shape
    groups, size = None, pick.group_size(V, k)
    if size is not None:
        n = -(-V // size)
        padded = jnp.pad(to_keys(x), ((0, 0), (0, n * size - V)))  # key 0 is below every float
        _, groups = small(jnp.max(padded.reshape(R, n, size), axis=2), k)
    keys, ids = small(x, k, groups, size or 1)
    # Ids ascend within equal keys, and the inverted keys are distinct from them: a sort of k pairs restores the order.
    inverted, ids = lax.sort((~keys, ids), dimension=1, num_keys=2)
    return to_values(~inverted, x.dtype), ids


def pick_xla(x: Num[Array, "R n"], k: int, groups: Int32[Array, "R k"] | None = None, size: int = 1) -> Picked:
    """Pick the k best columns of each row in XLA operations; see `pick.pick_kernel` for arguments and result."""
    R, n = x.shape
    if groups is None:
        keys, ids = x, lax.broadcasted_iota(jnp.int32, x.shape, 1)
    else:
        # The last group may be short: it is read together with columns of the group before, which do not count again.
        start = jnp.minimum(groups * size, n - size)
        ids = start[:, :, None] + jnp.arange(size, dtype=jnp.int32)[None, None]
        keys, live = _gather_groups(x, start, size), ids >= groups[:, :, None] * size
        keys = jnp.where(live, to_keys(keys), jnp.array(0, key_dtype(x.dtype)))
        keys, ids = keys.reshape(R, k * size), ids.reshape(R, k * size)
    if jnp.issubdtype(keys.dtype, jnp.floating):
        keys = to_keys(keys)
    threshold = kth_largest(keys, k)[:, None]
    above, tie = keys > threshold, keys == threshold
    needed = k - jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    keep = above | (tie & (jnp.cumsum(tie, axis=1, dtype=jnp.int32) <= needed))
    slot = jnp.where(keep, jnp.cumsum(keep, axis=1, dtype=jnp.int32) - 1, k)
    row = lax.broadcasted_iota(jnp.int32, slot.shape, 0)

    def place(v: Num[Array, "R n"]) -> Num[Array, "R k"]:
        return jnp.zeros((R, k), v.dtype).at[row, slot].set(v, mode="drop", unique_indices=True)

    return place(keys), place(ids)


def _gather_groups(x: Num[Array, "R n"], start: Int32[Array, "R k"], size: int) -> Num[Array, "R k size"]:
    """Return [R, k, size]: `size` neighbouring columns of x [R, n] from each of start [R, k]."""
    row = lax.broadcasted_iota(jnp.int32, start.shape, 0)
    numbers = lax.GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    places = jnp.stack([row, start], axis=-1)
    return lax.gather(x, places, numbers, (1, size), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def kth_largest(keys: UInt[Array, "R n"], k: int) -> UInt[Array, " R"]:
    """Return the k-th largest of each row of unsigned keys [R, n], digit by digit: one read of the keys per digit."""
    bits = jnp.iinfo(keys.dtype).bits
    found = jnp.zeros(keys.shape[:1], jnp.uint32)
    for shift in range(bits - DIGIT, -1, -DIGIT):
        steps = [found + jnp.uint32(d << shift) for d in range(1, 1 << DIGIT)]
        reach = [(keys.astype(jnp.uint32) >= s[:, None]).astype(jnp.int32) for s in steps]
        zeros = [jnp.int32(0)] * len(reach)
        # One reduction with 15 results reads the keys once; 15 reductions would read them 15 times.
        counts = lax.reduce(reach, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], (1,))
        digit = sum((c >= k).astype(jnp.uint32) for c in counts)
        found = found + (digit << jnp.uint32(shift))
    return found.astype(keys.dtype)
