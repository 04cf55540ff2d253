"""sglang-jax: an object with the one method that its DSpark worker calls inside its jitted draft.

    model.sample_block_tokens(base_logits [B, K, V], first_prev_tokens [B]) -> tokens [B, K]

Its mesh has Explicit axes ("data", "tensor"); base logits arrive split over both. Drafts there are greedy, tokens only.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..checks import invalid
from ..drafting.api import draft_from_logits
from ..drafting.inputs import check_head


class SglangHead:
    """What stands for `markov_head` in sglang-jax's DSpark model; a pytree whose only children are the head's weights.

    Args:
        head: a DSparkHead, placed on the server's mesh (head_sharding; markov_w2 stays [V, r], not transposed).
        topk: k candidates, or None for dense drafts.
    """

    def __init__(self, head: Any, topk: int | None = None) -> None:
        self.head, self.topk = check_head(head), topk

    @property
    def vocab_size(self) -> int:
        """The target's vocabulary, which the worker compares with its own."""
        return self.head.config.vocab_size

    def sample_block_tokens(
        self, base_logits: jax.Array, first_prev_tokens: jax.Array, hidden: Any = None
    ) -> jax.Array:
        """Return greedy tokens int32 [B, K].

        Args:
            base_logits: [B, K, V]; first_prev_tokens: int [B], the anchors.
            hidden: [B, K, H], which gated and rnn heads read (a model subclass keeps them from its __call__).
        """
        if base_logits.ndim != 3 or base_logits.shape[2] != self.head.config.Vd:
            raise invalid("base_logits.shape", base_logits.shape, f"[B, K, V] with V = {self.head.config.Vd}")
        base = jnp.swapaxes(base_logits, 0, 1)
        return draft_from_logits(self.head, base, first_prev_tokens, hidden=hidden, topk=self.topk).tokens


jax.tree_util.register_pytree_node(
    SglangHead, lambda x: ((x.head,), x.topk), lambda topk, children: _rebuild(topk, children[0])
)


def _rebuild(topk: int | None, head: Any) -> SglangHead:
    """Rebuild without checks: JAX maps over the leaves with whatever it works on."""
    adapter = object.__new__(SglangHead)
    adapter.head, adapter.topk = head, topk
    return adapter
