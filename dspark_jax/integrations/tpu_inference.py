"""tpu-inference: what replaces the arg-max in DFlashProposer._get_draft_token_ids, and q for its RejectionSampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import invalid
from ..drafting.api import draft_from_logits
from ..drafting.split import pad_vocabulary
from ..noise import is_greedy, safe_temperature
from ..types import DraftBlock


def make_draft_token_ids(
    compute_logits: Callable[[Any, jax.Array, Any], jax.Array],
    *,
    block_size: int,
    num_draft: int,
    topk: int | None = None,
    batch_axes: tuple[str, ...] | None = None,
    vocab_axis: str | None = None,
) -> Callable[..., jax.Array]:
    """Return fn(head, state_leaves, hidden_states, input_ids) -> draft tokens int32 [B, K], for use inside their jit.

    The anchors are `input_ids.reshape(-1, block_size)[:, 0]`. The first drafting slot is block_size - K: DSpark
    checkpoints draft from the anchor's slot on (block_size = K), DFlash ones from the slot behind it (K + 1).

    Args:
        compute_logits: their compute_logits_fn(state_leaves, hidden [T, D], None) -> [T, V or padded V].
        batch_axes, vocab_axis: their mesh's axes are Auto, which a trace hides: name them, ("data",) and "model".
    """
    if not 1 <= num_draft <= block_size:
        raise invalid("num_draft", num_draft, f"1 to block_size {block_size}")

    def draft_token_ids(head: Any, state_leaves: Any, hidden_states: jax.Array, input_ids: jax.Array) -> jax.Array:
        if input_ids.shape[0] % block_size:
            raise invalid("input_ids.shape[0]", input_ids.shape[0], f"a multiple of block_size {block_size}")
        anchors = input_ids.reshape(-1, block_size)[:, 0]
        hidden = hidden_states.reshape(-1, block_size, hidden_states.shape[-1])[:, block_size - num_draft :]
        steps = jnp.swapaxes(hidden, 0, 1)
        base = compute_logits(state_leaves, steps.reshape(-1, steps.shape[-1]), None)
        base = base.reshape(num_draft, anchors.shape[0], -1)
        if base.shape[-1] > head.config.Vd:  # their vocabulary is padded to the tensor-parallel size
            head = pad_vocabulary(head, base.shape[-1])
        block = draft_from_logits(
            head, base, anchors, hidden=hidden, topk=topk, batch_axes=batch_axes, vocab_axis=vocab_axis
        )
        return block.tokens

    return draft_token_ids


def draft_probs(block: DraftBlock, temperature: jax.Array, num_draft: jax.Array, *, total: int | None = None) -> Any:
    """Return q of a probabilistic block in the layout of their RejectionSampler: float32 [tokens, V], request-major.

    q = softmax(logits / T); one-hot in rows with T below 1e-5 (their fill value -1 too). Row t is the t-th proposed
    token, counting the first num_draft[b] of every request b.

    Args:
        block: drafted with outputs="logits"; temperature: float32 [B]; num_draft: int32 [B].
        total: rows of the result, at least the sum of num_draft; None takes B * S. Rows beyond the sum are zero.
    """
    if block.logits is None:
        raise invalid("block.logits", None, 'a block drafted with outputs="logits"')
    B, S = block.tokens.shape
    total = B * S if total is None else total
    count = jnp.minimum(num_draft.astype(jnp.int32), S)
    end = jnp.cumsum(count, dtype=jnp.int32)
    row = jnp.arange(total, dtype=jnp.int32)
    request = jnp.minimum(jnp.searchsorted(end, row, side="right").astype(jnp.int32), B - 1)
    step = jnp.clip(row - (end - count)[request], 0, S - 1)
    temperature = temperature[request][:, None]
    logits = block.logits[step, request].astype(jnp.float32) / safe_temperature(temperature)
    one_hot = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == block.tokens[request, step][:, None]
    q = jnp.where(is_greedy(temperature), one_hot.astype(jnp.float32), jax.nn.softmax(logits, axis=1))
    return jnp.where((row < end[-1])[:, None], q, 0.0)
