"""Markov heads as Flax modules. Each is one map (state, prev, hidden) -> (state, latent z in R^r).

    e = markov_w1[prev]                                                   prev is a target id
    vanilla: z = e
    gated:   z = sigmoid(gate_proj([hidden ; e])) * e
    rnn:     g, c, o = split3(joint_proj([state ; e ; hidden]))
             state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c);   z = tanh(o);   state[0] = 0

A bias is always latent times rows of markov_w2: all rows (`bias`) or chosen rows (`bias_at`). So head kinds,
projections and sampling methods compose. What depends on hidden states alone is computed for all steps before the scan
(`hoist`). Weights keep the orientation they are stored in, [out, in]: gathers of rows and products both read that form,
and loading copies nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from ..head_kinds import MARKOV_PREFIX, HeadKind, HeadParameter, register
from ..linear import as_last_axis, product
from ..markov import MarkovHead
from ..types import Latents, MarkovW1, MarkovW2, RowIds, Size, StepHidden


def bias(latent: Float[Array, "*rows r"], markov_w2: MarkovW2) -> Float32[Array, "*rows Vd"]:
    """Return the bias of the whole draft vocabulary: latent [..., r] @ markov_w2[Vd, r].T, float32 [..., Vd]."""
    return product(latent, markov_w2)


def bias_at(latent: Latents, markov_w2: MarkovW2, draft_ids: RowIds) -> Float32[Array, "B n"]:
    """Return the bias of chosen draft ids: latent [B, r] times rows draft_ids [B, k] of markov_w2, float32 [B, k]."""
    chosen = jnp.take(markov_w2, draft_ids, axis=0)
    precision = lax.Precision.HIGHEST if chosen.dtype == jnp.float32 else None
    return lax.dot_general(
        chosen, latent.astype(chosen.dtype), (((2,), (1,)), ((0,), (0,))), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


class VanillaMarkovHead(MarkovHead):
    """z = e: the latent is the previous token's embedding."""

    def step(self, state: Any, embedding: Latents, hoisted: Any) -> tuple[Any, Float32[Array, "B r"]]:
        """Return the embedding as float32; the state stays empty."""
        del hoisted
        return state, embedding.astype(jnp.float32)


class GatedMarkovHead(MarkovHead):
    """z = sigmoid(gate_proj([hidden ; e])) * e.

    Args:
        gate_weight: [r, H + r], input order [hidden ; e].
        gate_bias: [r].
    """

    def __init__(
        self,
        markov_w1: MarkovW1,
        markov_w2: MarkovW2,
        gate_weight: Float[Array, "r H+r"],
        gate_bias: Float[Array, " r"],
    ) -> None:
        super().__init__(markov_w1, markov_w2)
        self.gate_weight, self.gate_bias = nnx.Param(gate_weight), nnx.Param(gate_bias)

    def hoist(self, hidden: StepHidden) -> Float32[Array, "S B r"]:
        """Return the gate's hidden part and bias, float32 [S, B, r]."""
        bias = as_last_axis(self.gate_bias[...].astype(jnp.float32), 3)
        return product(hidden, self.gate_weight[:, : hidden.shape[-1]]) + bias

    def step(self, state: Any, embedding: Latents, hoisted: Any) -> tuple[Any, Float32[Array, "B r"]]:
        """Advance one step; the state stays empty."""
        gate = hoisted + product(embedding, self.gate_weight[:, -embedding.shape[-1] :])
        return state, jax.nn.sigmoid(gate) * embedding.astype(jnp.float32)


class RnnMarkovHead(MarkovHead):
    """A gated recurrent latent: see the module's equations.

    Args:
        joint_weight: [3r, 2r + H], input order [state ; e ; hidden], output thirds gate, candidate, output.
        joint_bias: [3r].
    """

    def __init__(
        self,
        markov_w1: MarkovW1,
        markov_w2: MarkovW2,
        joint_weight: Float[Array, "3*r 2*r+H"],
        joint_bias: Float[Array, " 3*r"],
    ) -> None:
        super().__init__(markov_w1, markov_w2)
        self.joint_weight = nnx.Param(joint_weight)
        self.joint_bias = nnx.Param(joint_bias)

    def hoist(self, hidden: StepHidden) -> Float32[Array, "S B n"]:
        """Return the joint projection's hidden part and bias, float32 [S, B, 3r]."""
        bias = as_last_axis(self.joint_bias[...].astype(jnp.float32), 3)
        return product(hidden, self.joint_weight[:, -hidden.shape[-1] :]) + bias

    def start(self, batch: Size) -> Float32[Array, "B r"]:
        """Return the zero state, float32 [B, r]."""
        return jnp.zeros((batch, self.markov_w1.shape[1]), jnp.float32)

    def step(self, state: Any, embedding: Latents, hoisted: Any) -> tuple[Any, Float32[Array, "B r"]]:
        """Advance one step; the state is float32 [B, r]."""
        r = embedding.shape[-1]
        recurrent = jnp.concatenate([state.astype(embedding.dtype), embedding], axis=-1)
        g, c, o = jnp.split(hoisted + product(recurrent, self.joint_weight[:, : 2 * r]), 3, axis=-1)
        keep = jax.nn.sigmoid(g)
        return keep * state + (1.0 - keep) * jnp.tanh(c), jnp.tanh(o)


GATE, JOINT = MARKOV_PREFIX + "gate_proj", MARKOV_PREFIX + "joint_proj"

register(HeadKind("vanilla", VanillaMarkovHead, latent_is_embedding=True, reads_hidden=False))
register(
    HeadKind(
        "gated",
        GatedMarkovHead,
        (
            HeadParameter("gate_weight", GATE + ".weight", ("r", "H+r")),
            HeadParameter("gate_bias", GATE + ".bias", ("r",)),
        ),
    )
)
register(
    HeadKind(
        "rnn",
        RnnMarkovHead,
        (
            HeadParameter("joint_weight", JOINT + ".weight", ("3r", "2r+H")),
            HeadParameter("joint_bias", JOINT + ".bias", ("3r",)),
        ),
    )
)
