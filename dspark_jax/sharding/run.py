"""Running a function of whole arrays on each device's part of them: jax.shard_map over the caller's mesh.

The body is the code of a single device. Requests never meet, so a body split over them alone communicates nothing; what
a split vocabulary exchanges is written out in drafting/split_rows.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from ..checks import invalid

Specs = Any  # a pytree prefix of PartitionSpecs


def over_mesh(function: Callable[..., Any], args: tuple[Any, ...], specs: Specs, out_specs: Specs) -> Any:
    """Return function(*args), run on each device's part; must be called in a trace that sees the mesh.

    Args:
        specs: a PartitionSpec for each argument or each part of one; arrays that lie otherwise are brought there.
        out_specs: the same for what `function` returns.
    """
    mesh = get_abstract_mesh()
    specs = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), specs, args, is_leaf=is_spec)
    if AxisType.Explicit in mesh.axis_types:
        args = jax.tree.map(jax.sharding.reshard, args, specs)
    # Axes that are Manual belong to a shard_map of the caller; everything else becomes manual here.
    names = {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}
    body = jax.shard_map(function, in_specs=specs, out_specs=out_specs, axis_names=names, check_vma=False)
    return body(*args)


def is_spec(x: Any) -> bool:
    """Say whether x is a PartitionSpec, which is a leaf here."""
    return isinstance(x, P)


def size_of(axes: tuple[str, ...]) -> int:
    """Return the number of parts that these axes of the visible mesh make."""
    return math.prod(get_abstract_mesh().shape[name] for name in axes)


def missing_requests(batch: int, axes: tuple[str, ...]) -> int:
    """Return how many requests a batch lacks to be split evenly."""
    return -batch % size_of(axes)


def pad_requests(tree: Any, count: int, axis: int, value: int = 0) -> Any:
    """Append `count` requests of `value` at `axis` of every array of a pytree."""

    def pad(x: jax.Array) -> jax.Array:
        widths = [(0, count if n == axis else 0) for n in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=jnp.asarray(value, x.dtype))

    return jax.tree.map(pad, tree) if count else tree


def cut_requests(tree: Any, count: int, axis: int) -> Any:
    """Drop the last `count` requests at `axis` of every array of a pytree."""
    if not count:
        return tree
    if AxisType.Explicit in get_abstract_mesh().axis_types:  # a split axis cannot be cut unevenly
        tree = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), tree)
    return jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, x.shape[axis] - count, axis=axis), tree)


def check_even(field: str, size: int, axes: tuple[str, ...], cure: str) -> None:
    """Refuse a size that the axes of the visible mesh do not divide."""
    if size % (parts := size_of(axes)):
        raise invalid(field, size, f"a multiple of {parts}, the size of mesh axes {axes}; {cure}")
