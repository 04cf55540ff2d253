"""Batches of any size through a few compiled programs: padded to the next bucket, compiled before they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_int, invalid
from ..drafting.factories import DraftFunction
from ..types import DraftBlock, DraftSampling


class BatchBuckets:
    """Pads a batch to the next of a few sizes and drafts it; refuses to compile in the hot path.

    Padding requests have anchor -1: they are invalid (num_draft 0) and touch no other request. Results keep the
    bucket's size, since cutting them on a device would be another program for every batch size; read the first B rows.

    Args:
        fn: a function of make_draft_fn whose config needs no DraftBuffer.
        sizes: the buckets.
        data_axis_size: devices that split the batch; every bucket must be a multiple.
        allow_compile: compile a bucket at its first use instead of refusing.
    """

    def __init__(
        self, fn: DraftFunction, sizes: Iterable[int], data_axis_size: int = 1, *, allow_compile: bool = False
    ) -> None:
        if not isinstance(fn, DraftFunction):
            raise invalid("fn", type(fn).__name__, "a function of make_draft_fn")
        config = fn.config
        if config.draft_topk is not None and config.outputs == "logits":
            raise invalid("fn.config.outputs", "logits", '"tokens" or "candidates" with draft_topk (no DraftBuffer)')
        self.fn, self.allow_compile = fn, allow_compile
        self.sizes = tuple(sorted({check_int("sizes", size, 1) for size in sizes}))
        if not self.sizes:
            raise invalid("sizes", [], "at least one bucket")
        check_int("data_axis_size", data_axis_size, 1)
        if uneven := [size for size in self.sizes if size % data_axis_size]:
            raise invalid("sizes", uneven, f"multiples of data_axis_size {data_axis_size}")
        self.seconds: dict[int, float] = {}

    def compile(self, head: Any, place: Any = None) -> dict[int, float]:
        """Compile every bucket for this head; return the seconds that each took.

        Args:
            place: puts an array [B, ...] where batches will lie (a jax.device_put onto a mesh), or None.
        """
        config = self.fn.config
        for size in self.sizes:
            hidden = np.zeros((size, config.num_speculative_tokens, head.config.hidden_size), head.dtype)
            zeros, drawn = np.zeros(size, np.int32), None
            if config.draft_sample_method == "probabilistic":
                drawn = DraftSampling(zeros.astype(np.float32), zeros.astype(np.uint32), zeros)
            operands = (hidden, zeros - 1, drawn)
            start = time.perf_counter()
            jax.block_until_ready(self.fn(head, *(operands if place is None else jax.tree.map(place, operands))))
            self.seconds[size] = time.perf_counter() - start
        return dict(self.seconds)

    def bucket(self, batch: int) -> int:
        """Return the smallest bucket that holds `batch` requests."""
        fitting = [size for size in self.sizes if size >= batch]
        if not fitting or batch < 1:
            raise invalid("batch", batch, f"1 to {self.sizes[-1]} requests")
        return fitting[0]

    def __call__(self, head: Any, hidden: Any, anchor_ids: Any, sampling: DraftSampling | None = None) -> DraftBlock:
        """Draft hidden [B, S, H] behind anchors [B]; the block has as many requests as the bucket.

        Host arrays are padded on the host. Arrays on a device must have a bucket's size already.

        Raises:
            ValueError: more requests than the largest bucket, an array on a device of another size than a bucket's, or
                a bucket that was not compiled (unless allow_compile).
        """
        batch = int(np.shape(anchor_ids)[0])
        size = self.bucket(batch)
        if size not in self.seconds:
            if not self.allow_compile:
                raise invalid("batch", batch, f"a compiled bucket ({sorted(self.seconds)}): call compile(head) first")
            self.seconds[size] = 0.0
        operands = [("hidden", hidden, 0), ("anchor_ids", anchor_ids, -1)]
        padded = [_pad(name, value, size, fill) for name, value, fill in operands]
        drawn = None
        if sampling is not None:
            fields = ("temperature", "seed", "position")
            drawn = DraftSampling(*(_pad(f"sampling.{name}", getattr(sampling, name), size, 0) for name in fields))
        before = self.fn.trace_count()
        block, _ = self.fn(head, *padded, drawn)
        if not self.allow_compile and self.fn.trace_count() > before:
            raise invalid("operands", "new dtypes or a new head", "those that compile(head) was called with")
        return block


def _pad(field: str, value: Any, size: int, fill: int) -> Any:
    if np.ndim(value) == 0:  # one temperature for all
        return value
    missing = size - np.shape(value)[0]
    if not missing:
        return value
    if isinstance(value, jax.Array):
        raise invalid(f"{field}.shape[0]", value.shape[0], f"a host array, or the bucket's size {size}")
    array = np.asarray(value)
    if field == "sampling.temperature":
        array = array.astype(jnp.float32)
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, array.dtype)])
