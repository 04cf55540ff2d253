"""Drafting on a mesh: the same core on each device's requests and columns (sharding/), and where everything lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, get_abstract_mesh
from jax.sharding import PartitionSpec as P

from ..checks import check_int, invalid
from ..config import DraftOptions
from ..head_kinds import MARKOV_PREFIX
from ..sharding.axes import MeshAxes, find_axes
from ..sharding.run import check_even, cut_requests, missing_requests, over_mesh, pad_requests, size_of
from ..types import DraftBlock, DraftBuffer
from .draft import keeps_split
from .head import DSparkHead
from .union_steps import certifies

SPLIT_TENSORS = ("lm_head.weight", MARKOV_PREFIX + "markov_w2.weight")  # rows are columns of the draft vocabulary

PAD = "pad_vocabulary(head, multiple) pads lm_head and markov_w2"


def head_sharding(head: Any, mesh: Mesh, vocab_axis: str | None) -> Callable[[str], NamedSharding]:
    """Return name -> sharding for load_head: rows of the vocabulary over `vocab_axis`, everything else on all devices.

    Args:
        head: a head or its DSparkConfig, whose Vd the axis must divide.
        mesh: the caller's mesh; vocab_axis: its axis, or None to place everything on all devices.

    Raises:
        ValueError: the mesh has no such axis, or it does not divide Vd.
    """
    config = getattr(head, "config", head)
    if vocab_axis is not None:
        if vocab_axis not in mesh.axis_names:
            raise invalid("vocab_axis", vocab_axis, f"an axis of the mesh {mesh.axis_names}")
        if config.Vd % mesh.shape[vocab_axis]:
            size = mesh.shape[vocab_axis]
            raise invalid("Vd", config.Vd, f"a multiple of {size}, the size of mesh axis {vocab_axis!r}")
    return lambda name: NamedSharding(mesh, P(vocab_axis, None) if name in SPLIT_TENSORS else P())


def axes_of_call(
    head: DSparkHead,
    batch: list[tuple[Any, int]],
    sampling: Any = None,
    *,
    base: Any = None,
    batch_axes: Any = None,
    vocab_axis: str | None = None,
) -> MeshAxes:
    """Return the mesh axes that split a call on `head`; `base` are the caller's base logits [S, B, Vd], where given."""
    drawn = [] if sampling is None else [(leaf, 0) for leaf in jax.tree.leaves(sampling)]
    w2 = None if head.markov is None else head.markov.markov_w2.get_value()
    vocab = [(base, 2), (w2, 0), (None if head.lm_head is None else head.lm_head.get_value(), 0)]
    return find_axes([*batch, *drawn], vocab, batch_axes=batch_axes, vocab_axis=vocab_axis)


def with_axes(options: DraftOptions, axes: MeshAxes) -> DraftOptions:
    """Return the options of a call that `axes` split."""
    if axes.vocab is not None and options.implementation == "pallas":
        raise invalid(
            "implementation", "pallas", f"None or 'xla', since mesh axis {axes.vocab!r} splits the vocabulary"
        )
    if axes.vocab is not None and options.markov_topk:
        raise invalid("markov_topk", options.markov_topk, f"0, since mesh axis {axes.vocab!r} splits the vocabulary")
    return dataclasses.replace(options, batch_axes=axes.batch, vocab_axis=axes.vocab) if axes else options


def is_on_mesh(options: DraftOptions) -> bool:
    """Say whether a program must be run over the visible mesh: something is split, or its axes are Explicit."""
    return options.is_split or AxisType.Explicit in get_abstract_mesh().axis_types


def module_specs(module: Any, vocab_axis: str | None) -> tuple[P, ...]:
    """Return a PartitionSpec for each leaf of a head or drafter."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(module)[0]]
    return tuple(P(vocab_axis) if "lm_head" in path or "markov_w2" in path else P() for path in paths)


def block_specs(
    head: DSparkHead, options: DraftOptions, sampling: Any, *, has_hidden: bool, buffered: bool = False
) -> tuple[DraftBlock, DraftBuffer | None]:
    """Return where the parts of a drafted block and of its buffer lie."""
    V = head.config.vocab_size
    rows: Any = P(options.batch_axes)  # specs stand where arrays will
    steps: Any = P(None, options.batch_axes)
    axis = columns = options.vocab_axis
    if axis is not None and not (keeps_split(head) if options.topk is None else V % size_of((axis,)) == 0):
        columns = None
    logits: Any = P(None, options.batch_axes, columns)
    candidates = steps if options.outputs == "candidates" else None
    block = DraftBlock(
        tokens=rows,
        num_draft=rows,
        valid=rows,
        confidence_logits=rows if head.confidence is not None and has_hidden else None,
        logits=logits if options.outputs == "logits" and not buffered else None,
        candidate_ids=candidates,
        candidate_logits=candidates,
        certified=rows if certifies(head, sampling) and (options.topk is None or axis is None) else None,
        method="greedy" if sampling is None else "probabilistic",
    )
    return block, DraftBuffer(logits, steps) if buffered else None


def draft_over_mesh(
    core: Callable[..., tuple[DraftBlock, DraftBuffer | None]],
    head: DSparkHead,
    base: Any,
    hidden: Any,
    anchor: Any,
    sampling: Any,
    buffer: DraftBuffer | None,
    min_confidence: Any,
    *,
    options: DraftOptions,
) -> tuple[DraftBlock, DraftBuffer | None]:
    """Run core(head, base, hidden, anchor, sampling, buffer, min_confidence) on each device's requests and columns.

    A batch that the devices do not divide is filled up with requests without an anchor, which are invalid.
    """
    axes, vocab = options.batch_axes, options.vocab_axis
    if vocab is not None:
        check_even("draft_vocab_size", head.config.Vd, (vocab,), PAD)
    lacking = missing_requests(anchor.shape[0], axes)
    if lacking and buffer is not None:
        check_even(
            "buffer.ids.shape[1]", anchor.shape[0], axes, "pad the batch (anchors -1), or draft without a buffer"
        )
    base = pad_requests(base, lacking, 1)
    hidden, sampling = pad_requests(hidden, lacking, 0), pad_requests(sampling, lacking, 0)
    anchor = pad_requests(anchor, lacking, 0, -1)
    leaves, structure = jax.tree.flatten(head)
    block_at, buffer_at = block_specs(
        head, options, sampling, has_hidden=hidden is not None, buffered=buffer is not None
    )
    rows = P(axes)

    def body(leaves: Any, *rest: Any) -> tuple[DraftBlock, DraftBuffer | None]:
        return core(jax.tree.unflatten(structure, leaves), *rest)

    args = (tuple(leaves), base, hidden, anchor, sampling, buffer, min_confidence)
    specs = (module_specs(head, vocab), P(None, axes, vocab), rows, rows, rows, buffer_at, P())
    block, buffer = over_mesh(body, args, specs, (block_at, buffer_at))
    return _cut(block, lacking), buffer


def teacher_forced_over_mesh(core: Callable[..., Any], head: DSparkHead, hidden: Any, prev: Any, axes: MeshAxes) -> Any:
    """Run core(head, hidden, prev) -> [S, B, Vd] on each device's requests and columns, where there is a mesh."""
    if not axes and AxisType.Explicit not in get_abstract_mesh().axis_types:
        return core(head, hidden, prev)
    if axes.vocab is not None:
        check_even("draft_vocab_size", head.config.Vd, (axes.vocab,), PAD)
    check_even("hidden.shape[0]", hidden.shape[0], axes.batch, "fill the batch up")
    leaves, structure = jax.tree.flatten(head)

    def body(leaves: Any, *rest: Any) -> Any:
        return core(jax.tree.unflatten(structure, leaves), *rest)

    specs = (module_specs(head, axes.vocab), P(axes.batch), P(axes.batch))
    return over_mesh(body, (tuple(leaves), hidden, prev), specs, P(None, axes.batch, axes.vocab))


def _cut(block: DraftBlock, count: int) -> DraftBlock:
    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {name: cut_requests(value, count, 1 if name in wide else 0) for name, value in fields.items()}
    return DraftBlock(method=block.method, **fields)


def pad_vocabulary(head: DSparkHead, multiple: int) -> DSparkHead:
    """Return the head with rows of zeros after lm_head and markov_w2, so that Vd is a multiple of `multiple`.

    Draft the result as any head: its config's Vd is beyond V, and columns from V on never win. The call copies the two
    tables once; base logits of the caller are as wide as the new Vd.

    Raises:
        ValueError: a head with a reduced draft vocabulary, whose ids a table maps.
    """
    config, count = head.config, -head.config.Vd % check_int("multiple", multiple, 1)
    if not count:
        return head
    if head.draft_to_target is not None:
        raise invalid("draft_vocab_size", config.Vd, f"a multiple of {multiple} (a reduced vocabulary is not padded)")

    def wider(table: jax.Array) -> jax.Array:
        return jnp.pad(table, ((0, count), (0, 0)))

    markov = None if head.markov is None else nnx.clone(head.markov)
    if markov is not None:
        markov.markov_w2 = nnx.Param(wider(markov.markov_w2[...]))
    return DSparkHead(
        dataclasses.replace(config, draft_vocab_size=config.Vd + count),
        None if head.lm_head is None else wider(head.lm_head[...]),
        markov,
        head.confidence,
        None,
        head.calibration,
        head.continuations,
    )
