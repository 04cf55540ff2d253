"""What goes into and comes out of drafting. The notation of all docstrings:

S draft steps, B requests, V target vocabulary, Vd draft vocabulary, H hidden size, r Markov rank, k candidates.
Inside the package arrays are step-major [S, B, ...]; callers see small arrays batch-major [B, S].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftSampling:
    """How each request of a batch samples. Lists, NumPy and JAX arrays are accepted; entry points coerce and check.

    Attributes:
        temperature: float32 [B], or one number for all; below 1e-5 the row is greedy.
        seed: uint32 [B], the request's seed, from 0 to 2**32 - 1.
        position: int32 [B], index in the sequence of the first drafted token (the anchor's position + 1).
    """

    temperature: Any
    seed: Any
    position: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftBlock:
    """A drafted block. All ids are target ids; logits are corrected (base + Markov bias) and before temperature.

    Attributes:
        tokens: int32 [B, S], the drafted tokens, without the anchor.
        num_draft: int32 [B], how many of them to propose: min(S, first invalid step, first step below min_confidence).
        valid: bool [B], False where a step's row held NaN or nothing finite, or the anchor was outside [0, V).
        confidence_logits: float32 [B, S], or None without a confidence head; conditional on all earlier acceptances.
        logits: [S, B, V] in the logits dtype, -inf outside the draft distribution's support; None unless asked for.
        candidate_ids, candidate_logits: int32 and logits dtype [S, B, k], in descending order of their base value
            (ties: lowest id first); None unless asked for.
        method: "greedy" or "probabilistic" (static): the distribution q that tokens were drawn from is one-hot, or
            softmax(logits / temperature) (one-hot in rows with a temperature below 1e-5).
    """

    tokens: jax.Array
    num_draft: jax.Array
    valid: jax.Array
    confidence_logits: jax.Array | None = None
    logits: jax.Array | None = None
    candidate_ids: jax.Array | None = None
    candidate_logits: jax.Array | None = None
    method: str = dataclasses.field(metadata={"static": True})

    @property
    def confidence(self) -> jax.Array | None:
        """Conditional probability [B, S] that the target accepts each step, float32 (sigmoid of confidence_logits)."""
        return None if self.confidence_logits is None else jax.nn.sigmoid(self.confidence_logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftBuffer:
    """Reused rows for top-k drafts with outputs="logits": hand it in, take the new one back, never use the old one.

    Attributes:
        logits: [S, B, V] in the logits dtype, -inf everywhere but in the columns `ids`.
        ids: int32 [S, B, k], target ids of the columns written by the last call; distinct within a row.
    """

    logits: jax.Array
    ids: jax.Array
