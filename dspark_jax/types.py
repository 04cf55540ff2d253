"""Notation, the shapes of arrays as types, and the results that go into and come out of drafting.

Every docstring and annotation counts in these letters:

    S  draft steps of a block          V   target vocabulary          H  hidden size
    B  requests of a batch             Vd  draft vocabulary           r  rank of the Markov head
    k  candidates of a top-k draft     n   columns of a row: V, Vd or k, whichever it has
    R  rows of the target, S + 1       T   tokens per request         N, D  attention heads, their size
    C  slots of a cache                W   width of the target's concatenated taps

`StepLogits = Float[Array, "S B V"]` is a float array of any width with three axes; within one call the same letter is
the same number, so swapped axes are refused wherever their sizes differ. Annotations cost nothing at run time; only the
tests check them (tests/conftest.py). Inside the package arrays are step-major [S, B, ...]; callers see small
arrays batch-major [B, S].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt, UInt32

# A size: an int, or a symbolic dimension while a program is exported.
Size = Any

# One number, or numbers of any shape.
Scalar = Float32[Array, ""]  # a threshold, a total
Index = Int32[Array, ""]  # a step, an offset
Floats = Float[Array, "..."]  # elementwise functions
Ints = Int32[Array, "..."]  # ids, positions
Bools = Bool[Array, "..."]  # what is said of each element, or of each row
Words = UInt32[Array, "..."]  # bits of the generator
Keys = UInt[Array, "..."]  # order-preserving integers of floats, as wide as they

# Per request.
RequestFloats = Float32[Array, "B"]  # temperatures
RequestSeeds = UInt32[Array, "B"]  # seeds of the generator
RequestInts = Int32[Array, "B"]  # anchors, positions, lengths, one token each
RequestFlags = Bool[Array, "B"]  # valid, active, stopped

# Per request and step, batch-major as callers see them, and step-major as the scan makes them.
Tokens = Int32[Array, "B S"]  # drafted or previous tokens, target ids
Flags = Bool[Array, "B S"]  # something said of each drafted token
Confidence = Float32[Array, "B S"]  # logits or probabilities of acceptance
Hidden = Float[Array, "B S H"]  # hidden states of the draft slots
StepTokens = Int32[Array, "S B"]  # drafted or previous tokens, target ids
StepFlags = Bool[Array, "S B"]  # valid steps
StepConfidence = Float32[Array, "S B"]  # logits of acceptance
StepHidden = Float[Array, "S B H"]  # hidden states of the draft slots

# Rows of logits.
StepLogits = Float[Array, "S B V"]  # rows over the target vocabulary
DraftLogits = Float[Array, "S B Vd"]  # rows over the draft vocabulary
StepRows = Float[Array, "S B n"]  # rows of n columns
CandidateLogits = Float[Array, "S B k"]  # the candidates' logits
CandidateIds = Int32[Array, "S B k"]  # the candidates' ids
TargetLogits = Float[Array, "B R V"]  # the target's rows
StopIds = Int32[Array, "B n"]  # stop tokens, padded with -1
Committed = Int32[Array, "B R"]  # committed tokens, padded with -1
RequestRows = Float[Array, "B n"]  # one row per request
RowIds = Int32[Array, "B n"]  # ids of such a row's columns

# Weights of the head, stored [out, in], and what lies between them.
LmHead = Float[Array, "Vd H"]  # rows of the base logits
MarkovW1 = Float[Array, "V r"]  # embedding of the previous token
MarkovW2 = Float[Array, "Vd r"]  # rows of the bias
TargetIds = Int32[Array, "Vd"]  # the target id of each draft id
Latents = Float[Array, "B r"]  # z, or the embedding e, of one step
StepLatents = Float[Array, "S B r"]  # z or e of all steps

# Transformer layers.
Sequences = Int32[Array, "B T"]  # token ids or positions
Features = Float[Array, "B T W"]  # the target's taps
Activations = Float[Array, "B T H"]  # the residual stream
HeadStates = Float[Array, "B T N D"]  # queries, keys or values
CachedStates = Float[Array, "B C N D"]  # keys or values of all slots
Visible = Bool[Array, "B 1 T C"]  # the slots that each token sees


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
            (ties: lowest id first); None unless asked for. With continuations k + m slots, the continuations last; one
            that stands among the first k is dead: id V + slot, logit -inf.
        certified: bool [B, S], True only where the token is proven to be the argmax of the whole corrected row for the
            drafted prefix. Greedy drafts of a vanilla head with continuations have it (head.with_continuations).
        method: "greedy" or "probabilistic" (static): the distribution q that tokens were drawn from is one-hot, or
            softmax(logits / temperature) (one-hot in rows with a temperature below 1e-5).
    """

    tokens: Tokens
    num_draft: RequestInts
    valid: RequestFlags
    confidence_logits: Confidence | None = None
    logits: StepLogits | None = None
    candidate_ids: CandidateIds | None = None
    candidate_logits: CandidateLogits | None = None
    certified: Flags | None = None
    method: str = dataclasses.field(metadata={"static": True})

    @property
    def confidence(self) -> Confidence | None:
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

    logits: StepLogits
    ids: CandidateIds
