"""Pallas (Triton) kernel: the k best of a few thousand elements per row, one program per row, all in registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, Num, UInt

from ..ordered_keys import key_dtype, to_keys
from .triton import load, pallas_call, power_of_two, store

GROUP = 16  # columns per group: one 32-byte sector of half-precision values
MOST = 32768  # elements a program holds in registers


def group_size(V: int, k: int) -> int | None:
    """Return the columns per group, or None where grouping would not shrink the row enough to pay."""
    for size in (GROUP, GROUP // 2):
        if 2 * size * k <= V and size * k <= MOST:
            return size
    return GROUP // 2 if GROUP * k <= V else None


def fits(V: int, k: int) -> bool:
    """Say whether rows of V columns can be selected with this kernel."""
    size = group_size(V, k)
    return V <= MOST if size is None else max(-(-V // size), k * size) <= MOST


def pick_kernel(
    x: Num[Array, "R n"],
    k: int,
    groups: Int32[Array, "R k"] | None = None,
    size: int = 1,
    *,
    interpret: bool = False,
) -> tuple[UInt[Array, "R k"], Int32[Array, "R k"]]:
    """Pick the k largest elements of each row, ties to the lowest id.

    Args:
        x: [R, n] floats, or unsigned keys of them.
        k: how many to pick, static.
        groups: int32 [R, k] ascending, the groups of `size` neighbouring columns to look into; None looks at all.

    Returns:
        keys [R, k] (unsigned, see keys.py) and column ids int32 [R, k], ascending by id.
    """
    R, n = x.shape
    word = key_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    bits = jnp.iinfo(word).bits
    count = n if groups is None else k * size
    lanes = power_of_two(count)

    def kernel(refs: Any, results: Any) -> None:
        row = pl.program_id(0)
        lane = lax.broadcasted_iota(jnp.int32, (lanes,), 0)
        live = lane < count
        ids = lane
        if groups is not None:
            group = load(refs["groups"], (row, lane // size), live, 0)
            ids = group * size + lane % size
            live &= ids < n
        value = load(refs["x"], (row, ids), live, 0)
        key = (to_keys(value) if jnp.issubdtype(value.dtype, jnp.floating) else value).astype(jnp.uint32)
        key = jnp.where(live, key, jnp.uint32(0))

        def refine(i, found):
            raised = found | (jnp.uint32(1) << (jnp.uint32(bits - 1) - jnp.asarray(i, jnp.uint32)))
            reach = jnp.sum((key >= raised).astype(jnp.int32))
            return jnp.where(reach >= k, raised, found)

        threshold = lax.fori_loop(0, bits, refine, jnp.uint32(0))
        above, tie = (key > threshold).astype(jnp.int32), (key == threshold).astype(jnp.int32)
        needed = k - jnp.sum(above)
        keep = (above == 1) | ((tie == 1) & (jnp.cumsum(tie) <= needed))
        # The interpreter writes masked lanes too: they go to a column of their own there.
        slot = jnp.where(keep, jnp.cumsum(keep.astype(jnp.int32)) - 1, k)
        store(results["keys"], (row, slot), key.astype(word), keep)
        store(results["ids"], (row, slot), ids, keep)

    width = k + 1 if interpret else k
    name = "dspark_pick" if groups is None else f"dspark_pick_groups{size}"
    out = pallas_call(
        kernel, {"x": x, "groups": groups},
        {"keys": jax.ShapeDtypeStruct((R, width), word), "ids": jax.ShapeDtypeStruct((R, width), jnp.int32)},
        name=name, interpret=interpret, grid=(R,), num_warps=max(4, min(16, lanes // 1024)),
    )  # fmt: skip
    return out["keys"][:, :k], out["ids"][:, :k]
