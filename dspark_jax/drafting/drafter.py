"""A whole drafter: backbone and head. `Drafter.propose` drafts a block in one jitted call."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, get_abstract_mesh
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike

from ..checks import check_int, invalid
from ..coerce import coerce_floats, coerce_ids, coerce_sampling
from ..config import DraftOptions, DSparkConfig
from ..sharding.axes import find_axes
from ..sharding.run import check_even, over_mesh
from ..transformer.backbone import Backbone
from ..transformer.cache import ContextCache
from ..types import DraftBlock, DraftSampling, Features, RequestInts, Scalar
from .draft import draft
from .head import DSparkHead
from .inputs import check_threshold, resolve_options
from .split import PAD, axes_of_call, block_specs, is_on_mesh, module_specs, with_axes


class Drafter(nnx.Module):
    """Backbone and head of one checkpoint: a pytree that jitted functions take as an argument.

    Args:
        backbone: turns target features and a block of tokens into hidden states.
        head: turns hidden states into a drafted block; its config describes both.
    """

    def __init__(self, backbone: Backbone, head: DSparkHead) -> None:
        H, found = head.config.hidden_size, backbone.config.hidden_size
        if found != H:
            raise invalid("backbone.config.hidden_size", found, f"the head's hidden_size {H}")
        if head.lm_head is None:
            raise invalid("head.lm_head", None, "an LM head")
        self.backbone, self.head = backbone, head

    @property
    def config(self) -> DSparkConfig:
        """The drafter's DSparkConfig."""
        return self.head.config

    def with_continuations(self, m: int, *, show_progress: bool = True) -> Drafter:
        """Return this drafter with a head that knows each token's m strongest continuations; weights are shared."""
        return Drafter(self.backbone, self.head.with_continuations(m, show_progress=show_progress))

    def make_cache(self, batch: int, capacity: int) -> ContextCache:
        """Return an empty context cache for `batch` requests of at most capacity - block_size context positions."""
        check_int("capacity", capacity, self.config.block_size + 1)
        return self.backbone.make_cache(batch, capacity)

    def extend(
        self, cache: ContextCache, features: ArrayLike, lengths: ArrayLike, *, batch_axes: tuple[str, ...] | None = None
    ) -> ContextCache:
        """Append context without drafting, in one jitted call that donates the cache (a long prompt, say).

        Args:
            features: float [B, F, T * Ht], the target's taps of positions cache.lengths .. lengths - 1.
            lengths: int [B], the new lengths; rows of `features` beyond them are ignored.
            batch_axes: as in draft_block.
        """
        features = self._features(cache, features)
        lengths = coerce_ids("lengths", lengths, (features.shape[0],), "[B]")
        axes = find_axes([(cache.lengths, 0), (features, 0), (lengths, 0)], batch_axes=batch_axes)
        with axes.context():
            return _extend(self.backbone, cache, features, lengths, batch_axes=axes.batch)

    def propose(
        self,
        cache: ContextCache,
        features: ArrayLike,
        anchor_ids: ArrayLike,
        positions: ArrayLike,
        sampling: DraftSampling | None = None,
        *,
        num_steps: int | None = None,
        topk: int | None = None,
        outputs: str = "tokens",
        logits_dtype: Any = None,
        min_confidence: float | None = None,
        implementation: str | None = None,
        markov_topk: int = 0,
        batch_axes: tuple[str, ...] | None = None,
        vocab_axis: str | None = None,
    ) -> tuple[DraftBlock, ContextCache]:
        """Append new context and draft the block behind it, in one jitted call that donates the cache.

        Args:
            cache: the context so far; use the returned one afterwards.
            features: float [B, F, T * Ht], the target's taps of the positions since, cache.lengths .. positions - 1;
                further rows are ignored. F is static, so a loop always hands in as many rows as a block can add.
            anchor_ids: int [B], the last committed token, whose own features the target has not given yet.
            positions: int [B], the anchor's index in the sequence. The block drafts positions + 1 and on.
            sampling: None drafts greedily. Its `position` is not read: it is positions + 1.
            num_steps: S, at most the checkpoint's; None takes it. The backbone always runs the whole block, which it
                was trained on, so fewer steps give a prefix of the same draft.
            topk, outputs, logits_dtype, min_confidence, implementation, markov_topk, batch_axes, vocab_axis: as in
                draft_block; on a mesh the axes must divide the batch.

        Returns:
            The block (invalid for a request whose positions do not follow its cache or do not fit it), and the cache.

        Raises:
            ValueError: wrong shape, dtype, range or option; the message names field, value and what was expected.
        """
        features = self._features(cache, features)
        count = features.shape[0]
        positions = coerce_ids("positions", positions, (count,), "[B]")
        if sampling is not None:
            # JAX arrays are taken as they are: the true positions are filled in on the device.
            sampling = coerce_sampling(dataclasses.replace(sampling, position=jnp.zeros((count,), jnp.int32)), count)
        options = self.resolve_options(num_steps, topk, outputs, logits_dtype, implementation, markov_topk)
        threshold = self.check_threshold(min_confidence)
        anchor = coerce_ids("anchor_ids", anchor_ids, (count,), "[B]")
        batch = [(cache.lengths, 0), (features, 0), (anchor, 0), (positions, 0)]
        axes = axes_of_call(self.head, batch, sampling, batch_axes=batch_axes, vocab_axis=vocab_axis)
        options = with_axes(options, axes)
        with axes.context():
            return _propose(self, cache, features, anchor, positions, sampling, threshold, options=options)

    def resolve_options(
        self,
        num_steps: Any,
        topk: Any,
        outputs: str,
        logits_dtype: Any,
        implementation: str | None,
        markov_topk: Any = 0,
    ) -> DraftOptions:
        """Return the options of `propose_block`, checked; num_steps None is all that the checkpoint was trained for."""
        steps = self.config.max_steps if num_steps is None else num_steps
        return resolve_options(self.head, topk, outputs, logits_dtype, implementation, steps, markov_topk)

    def check_threshold(self, min_confidence: Any) -> Scalar | None:
        """Return the confidence threshold as a float32 scalar, or None."""
        return check_threshold(self.head, min_confidence, has_hidden=True)

    def _features(self, cache: ContextCache, features: ArrayLike) -> Features:
        batch, width = cache.lengths.shape[0], self.backbone.feature_size
        return coerce_floats("features", features, (batch, None, width), "[B, F, T * Ht]", self.backbone.dtype)


def propose_block(
    drafter: Drafter,
    cache: ContextCache,
    features: Features,
    anchor: RequestInts,
    positions: RequestInts,
    sampling: DraftSampling | None,
    min_confidence: Scalar | None,
    *,
    options: DraftOptions,
) -> tuple[DraftBlock, ContextCache]:
    """Extend the context and draft; the pure core of `Drafter.propose`, for callers that jit a larger round."""
    config = drafter.config
    assert options.num_steps is not None
    new = positions - cache.lengths
    # Values cannot raise inside a compiled program; a request that does not fit its cache drafts nothing.
    fits = (new >= 0) & (new <= features.shape[1]) & (positions + config.block_size <= cache.kv.capacity)
    cache = drafter.backbone.extend(cache, features, positions)
    masks = jnp.full((anchor.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
    with jax.named_scope("backbone"):
        hidden, kv = drafter.backbone(cache, jnp.concatenate([anchor[:, None], masks], axis=1))
    first = 0 if config.sample_from_anchor else 1
    steps = jnp.swapaxes(hidden[:, first : first + options.num_steps], 0, 1)
    with jax.named_scope("lm_head"):
        base = drafter.head.base_logits(steps, options.logits_dtype)
    draw = None if sampling is None else dataclasses.replace(sampling, position=positions + 1)
    block, _ = draft(drafter.head, base, anchor, steps, draw, None, min_confidence, options=options)
    valid = block.valid & fits
    block = dataclasses.replace(block, valid=valid, num_draft=jnp.where(fits, block.num_draft, 0))
    return block, dataclasses.replace(cache, kv=kv)


@jax.jit(static_argnames=("options",), donate_argnames=("cache",))
def _propose(
    drafter: Drafter,
    cache: ContextCache,
    features: Features,
    anchor: RequestInts,
    positions: RequestInts,
    sampling: DraftSampling | None,
    min_confidence: Scalar | None,
    *,
    options: DraftOptions,
) -> tuple[DraftBlock, ContextCache]:
    args = (cache, features, anchor, positions, sampling, min_confidence)
    if not is_on_mesh(options):
        return propose_block(drafter, *args, options=options)
    head, rows = drafter.head, P(options.batch_axes)
    check_even("anchor_ids.shape[0]", anchor.shape[0], options.batch_axes, "fill the batch up with anchors -1")
    if options.vocab_axis is not None:
        check_even("draft_vocab_size", head.config.Vd, (options.vocab_axis,), PAD)
    block_at, _ = block_specs(head, options, sampling, has_hidden=True)
    leaves, structure = jax.tree.flatten(drafter)

    def body(leaves: Any, *args: Any) -> tuple[DraftBlock, ContextCache]:
        return propose_block(jax.tree.unflatten(structure, leaves), *args, options=options)

    specs = (module_specs(drafter, options.vocab_axis), rows, rows, rows, rows, rows, P())
    return over_mesh(body, (tuple(leaves), *args), specs, (block_at, rows))


@jax.jit(static_argnames=("batch_axes",), donate_argnames=("cache",))
def _extend(
    backbone: Backbone,
    cache: ContextCache,
    features: Features,
    lengths: RequestInts,
    *,
    batch_axes: tuple[str, ...],
) -> ContextCache:
    if not batch_axes and AxisType.Explicit not in get_abstract_mesh().axis_types:
        return backbone.extend(cache, features, lengths)
    check_even("lengths.shape[0]", lengths.shape[0], batch_axes, "fill the batch up")
    leaves, structure = jax.tree.flatten(backbone)

    def body(leaves: Any, *args: Any) -> ContextCache:
        return jax.tree.unflatten(structure, leaves).extend(*args)

    rows = P(batch_axes)
    return over_mesh(body, (tuple(leaves), cache, features, lengths), (P(), rows, rows, rows), rows)
