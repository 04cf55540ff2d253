"""Which axes of the caller's mesh split the requests of a batch and which one splits the vocabulary.

Arrays say it themselves wherever JAX lets them: arrays outside a trace carry their sharding, and inside one do axes of
type Explicit. Auto axes inside a caller's jit are invisible until XLA partitions the program, so there the caller names
them (`batch_axes`, `vocab_axis`). Axes that are Manual already belong to a shard_map around us and are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, get_abstract_mesh

from ..checks import invalid

Axis = tuple[Any, int]  # an array (or None), and which of its axes is meant


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """How a call is split: names of mesh axes; none of them on a single device.

    Attributes:
        batch: axes that split the requests.
        vocab: axis that splits the draft vocabulary's columns, or None.
        mesh: the mesh, where the context does not hold it already, else None.
    """

    batch: tuple[str, ...] = ()
    vocab: str | None = None
    mesh: Mesh | AbstractMesh | None = None

    def __bool__(self) -> bool:
        """Say whether anything is split."""
        return bool(self.batch) or self.vocab is not None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the program is called, so that its trace sees the mesh."""
        if self.mesh is None:
            return contextlib.nullcontext()
        if isinstance(self.mesh, AbstractMesh):
            return jax.sharding.use_abstract_mesh(self.mesh)
        return jax.set_mesh(self.mesh)


def find_axes(
    batch: Sequence[Axis],
    vocab: Sequence[Axis] = (),
    *,
    batch_axes: Iterable[str] | str | None = None,
    vocab_axis: str | None = None,
) -> MeshAxes:
    """Return the axes that split a call.

    Args:
        batch: arrays that hold one entry per request, each with that axis; vocab: arrays with an axis of columns of the
            draft vocabulary. What the arrays show is used where the caller names nothing.
        batch_axes, vocab_axis: names of mesh axes; () means that the batch is not split.

    Raises:
        ValueError: named axes without a visible mesh, or that the mesh does not have; one axis for both.
    """
    named = (batch_axes,) if isinstance(batch_axes, str) else None if batch_axes is None else tuple(batch_axes)
    context = get_abstract_mesh()
    mesh = context if not context.empty else _mesh_of([array for array, _ in (*batch, *vocab)])
    if mesh is None or mesh.empty:
        if named or vocab_axis is not None:
            raise invalid(
                "batch_axes" if named else "vocab_axis",
                named if named else vocab_axis,
                "a visible mesh: call under jax.set_mesh(mesh), or hand in arrays that lie on one",
            )
        return MeshAxes()
    free = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    for field, names in (("batch_axes", named or ()), ("vocab_axis", () if vocab_axis is None else (vocab_axis,))):
        if unknown := [name for name in names if name not in mesh.axis_names]:
            raise invalid(field, unknown, f"axes of the mesh {mesh.axis_names}")
    if vocab_axis is not None and vocab_axis in (named or ()):
        raise invalid("vocab_axis", vocab_axis, f"an axis that is not one of batch_axes {named}")
    if named is None:
        named = next((axes for axes in (_axes_at(*axis) for axis in batch) if axes), ())
        named = tuple(name for name in named if name != vocab_axis)
    if vocab_axis is None:
        shown = [axes for axes in (_axes_at(*axis) for axis in vocab) if axes]
        taken = [name for axes in shown for name in axes if name not in named]
        vocab_axis = taken[0] if taken else None
    return MeshAxes(
        batch=tuple(name for name in named if name in free and mesh.shape[name] > 1),
        vocab=vocab_axis if vocab_axis in free and mesh.shape[vocab_axis] > 1 else None,
        mesh=None if not context.empty else mesh,
    )


def _mesh_of(arrays: Iterable[Any]) -> Mesh | AbstractMesh | None:
    """Return the mesh that the first array with one lies on."""
    for array in arrays:
        if isinstance(array, Tracer):
            mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
            if mesh is not None and not mesh.empty:
                return mesh
        elif isinstance(getattr(array, "sharding", None), NamedSharding):
            return array.sharding.mesh
    return None


def _axes_at(array: Any, axis: int) -> tuple[str, ...]:
    """Return the mesh axes that visibly split one axis of an array."""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else getattr(array, "sharding", None)
    spec = tuple(getattr(sharding, "spec", ()))
    entry: Any = spec[axis] if axis < len(spec) else None
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(name for name in entry if isinstance(name, str))
