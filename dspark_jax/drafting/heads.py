"""The sequential head as Flax modules: Markov heads, confidence head and the DSparkHead that holds them.

Every Markov head is one map (state, prev, hidden) -> (state, latent z in R^r), and a bias is always latent times rows
of markov_w2: all rows (`bias`) or chosen rows (`bias_at`). So head kinds, projections and sampling methods compose.

    e = markov_w1[prev]                                                   prev is a target id
    vanilla: z = e
    gated:   z = sigmoid(gate_proj([hidden ; e])) * e
    rnn:     g, c, o = split3(joint_proj([state ; e ; hidden]))
             state' = sigmoid(g) * state + (1 - sigmoid(g)) * tanh(c);   z = tanh(o);   state[0] = 0

What depends on hidden states alone is computed for all steps before the scan (`hoist`). Weights keep the orientation
they are stored in, [out, in]: gathers of rows and products both read that form, and loading copies nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ..checks import invalid
from ..confidence.calibration import Calibration
from ..config import DSparkConfig
from ..linear import gather_rows, product


def bias(latent: jax.Array, markov_w2: jax.Array) -> jax.Array:
    """Return the bias of the whole draft vocabulary: latent [..., r] @ markov_w2[Vd, r].T, float32 [..., Vd]."""
    return product(latent, markov_w2)


def bias_at(latent: jax.Array, markov_w2: jax.Array, draft_ids: jax.Array) -> jax.Array:
    """Return the bias of chosen draft ids: latent [B, r] times rows draft_ids [B, k] of markov_w2, float32 [B, k]."""
    chosen = jnp.take(markov_w2, draft_ids, axis=0)
    precision = lax.Precision.HIGHEST if chosen.dtype == jnp.float32 else None
    return lax.dot_general(
        chosen, latent.astype(chosen.dtype), (((2,), (1,)), ((0,), (0,))), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


class VanillaMarkovHead(nnx.Module):
    """z = e: the latent is the previous token's embedding.

    Args:
        markov_w1: [V, r], embedding of the previous (target) token.
        markov_w2: [Vd, r], rows of the bias.
    """

    def __init__(self, markov_w1: jax.Array, markov_w2: jax.Array) -> None:
        self.markov_w1 = nnx.Param(markov_w1)
        self.markov_w2 = nnx.Param(markov_w2)

    def embed(self, prev: jax.Array) -> jax.Array:
        """Return e = markov_w1[prev], prev.shape + [r]; zeros for ids outside [0, V)."""
        return gather_rows(self.markov_w1[...], prev)

    def hoist(self, hidden: jax.Array) -> Any:
        """Return the part of each step that depends on hidden [S, B, H] alone, a pytree of [S, B, ...] arrays."""
        del hidden
        return ()

    def start(self, batch: int) -> Any:
        """Return the state before the first step."""
        del batch
        return ()

    def step(self, state: Any, embedding: jax.Array, hoisted: Any) -> tuple[Any, jax.Array]:
        """Advance one step: (state, e [B, r], hoisted [B, ...]) -> (state, latent float32 [B, r])."""
        del hoisted
        return state, embedding.astype(jnp.float32)


class GatedMarkovHead(VanillaMarkovHead):
    """z = sigmoid(gate_proj([hidden ; e])) * e.

    Args:
        gate_weight: [r, H + r], input order [hidden ; e].
        gate_bias: [r].
    """

    def __init__(
        self, markov_w1: jax.Array, markov_w2: jax.Array, gate_weight: jax.Array, gate_bias: jax.Array
    ) -> None:
        super().__init__(markov_w1, markov_w2)
        self.gate_weight = nnx.Param(gate_weight)
        self.gate_bias = nnx.Param(gate_bias)

    def hoist(self, hidden: jax.Array) -> Any:
        """Return the gate's hidden part and bias, float32 [S, B, r]."""
        return product(hidden, self.gate_weight[:, : hidden.shape[-1]]) + self.gate_bias[...].astype(jnp.float32)

    def step(self, state: Any, embedding: jax.Array, hoisted: Any) -> tuple[Any, jax.Array]:
        """Advance one step; the state stays empty."""
        gate = hoisted + product(embedding, self.gate_weight[:, -embedding.shape[-1] :])
        return state, jax.nn.sigmoid(gate) * embedding.astype(jnp.float32)


class RnnMarkovHead(VanillaMarkovHead):
    """A gated recurrent latent: see the module's equations.

    Args:
        joint_weight: [3r, 2r + H], input order [state ; e ; hidden], output thirds gate, candidate, output.
        joint_bias: [3r].
    """

    def __init__(
        self, markov_w1: jax.Array, markov_w2: jax.Array, joint_weight: jax.Array, joint_bias: jax.Array
    ) -> None:
        super().__init__(markov_w1, markov_w2)
        self.joint_weight = nnx.Param(joint_weight)
        self.joint_bias = nnx.Param(joint_bias)

    def hoist(self, hidden: jax.Array) -> Any:
        """Return the joint projection's hidden part and bias, float32 [S, B, 3r]."""
        return product(hidden, self.joint_weight[:, -hidden.shape[-1] :]) + self.joint_bias[...].astype(jnp.float32)

    def start(self, batch: int) -> jax.Array:
        """Return the zero state, float32 [B, r]."""
        return jnp.zeros((batch, self.markov_w1.shape[1]), jnp.float32)

    def step(self, state: Any, embedding: jax.Array, hoisted: Any) -> tuple[Any, jax.Array]:
        """Advance one step; the state is float32 [B, r]."""
        r = embedding.shape[-1]
        recurrent = jnp.concatenate([state.astype(embedding.dtype), embedding], axis=-1)
        g, c, o = jnp.split(hoisted + product(recurrent, self.joint_weight[:, : 2 * r]), 3, axis=-1)
        keep = jax.nn.sigmoid(g)
        return keep * state + (1.0 - keep) * jnp.tanh(c), jnp.tanh(o)


class ConfidenceHead(nnx.Module):
    """Logit of the probability that the target accepts a step, given that it accepted all earlier ones.

    confidence_logit = weight . [hidden ; e] + bias, or weight . hidden + bias where the weight is H wide.

    Args:
        weight: [H + r] or [H]; bias: [] or None.
    """

    def __init__(self, weight: jax.Array, bias: jax.Array | None = None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))

    def __call__(self, hidden: jax.Array, embedding: jax.Array | None) -> jax.Array:
        """Return float32 logits [S, B] from hidden [S, B, H] and e [S, B, r] (unused where the weight is H wide)."""
        H = hidden.shape[-1]
        logit = product(hidden, self.weight[None, :H])[..., 0]
        if self.weight.shape[0] > H:
            assert embedding is not None
            logit = logit + product(embedding, self.weight[None, H:])[..., 0]
        return logit if self.bias is None else logit + self.bias[...].astype(jnp.float32)


class DraftToTarget(nnx.Variable):
    """Absolute target ids of a reduced draft vocabulary, int32 [Vd], strictly increasing; not trained."""


class DSparkHead(nnx.Module):
    """LM head, Markov head and confidence head of a drafter: a pytree that jitted functions take as an argument.

    Args:
        config: the drafter's description (static).
        lm_head: [Vd, H], or None where callers bring base logits.
        markov: one of the Markov heads, or None (a plain parallel drafter).
        confidence: the confidence head, or None.
        draft_to_target: int32 [Vd] target ids of a reduced vocabulary, or None (draft ids are target ids).
    """

    def __init__(
        self,
        config: DSparkConfig,
        lm_head: jax.Array | None,
        markov: VanillaMarkovHead | None = None,
        confidence: ConfidenceHead | None = None,
        draft_to_target: jax.Array | None = None,
    ) -> None:
        self.config = config
        self.lm_head = nnx.data(None if lm_head is None else nnx.Param(lm_head))
        self.markov = nnx.data(markov)
        self.confidence = nnx.data(confidence)
        self.draft_to_target = nnx.data(None if draft_to_target is None else DraftToTarget(draft_to_target))
        # Temperatures for confidence_logits, from calibration.json beside the checkpoint (static; for schedule.py).
        self.calibration: Calibration | None = None
        self._check()

    def _check(self) -> None:
        """Hold the weights to the config: a wrong shape would broadcast, clamp or read the wrong columns silently."""
        c, markov, confidence = self.config, self.markov, self.confidence
        V, Vd, H, r = c.vocab_size, c.Vd, c.hidden_size, c.markov_rank
        kinds = {VanillaMarkovHead: "vanilla", GatedMarkovHead: "gated", RnnMarkovHead: "rnn", type(None): None}
        if kinds.get(type(markov), "unknown") != c.markov_head_type:
            raise invalid("markov", type(markov).__name__, f"the module of markov_head_type {c.markov_head_type!r}")
        if (confidence is not None) != c.enable_confidence_head:
            raise invalid("confidence", type(confidence).__name__, f"enable_confidence_head {c.enable_confidence_head}")
        if Vd < V and self.draft_to_target is None:
            raise invalid("draft_to_target", None, f"a table, since Vd = {Vd} < V = {V}")
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
            "lm_head": (self.lm_head, (Vd, H)),
            "draft_to_target": (self.draft_to_target, (Vd,)),
        }
        if markov is not None:
            wanted |= {"markov_w1": (markov.markov_w1, (V, r)), "markov_w2": (markov.markov_w2, (Vd, r))}
        if isinstance(markov, GatedMarkovHead):
            wanted |= {"gate_weight": (markov.gate_weight, (r, H + r)), "gate_bias": (markov.gate_bias, (r,))}
        if isinstance(markov, RnnMarkovHead):
            wanted |= {
                "joint_weight": (markov.joint_weight, (3 * r, 2 * r + H)),
                "joint_bias": (markov.joint_bias, (3 * r,)),
            }
        if confidence is not None:
            width = H + r if c.confidence_head_with_markov else H
            wanted |= {"confidence.weight": (confidence.weight, (width,)), "confidence.bias": (confidence.bias, ())}
        for name, (array, shape) in wanted.items():
            if array is not None and tuple(array.shape) != shape:
                raise invalid(f"{name}.shape", tuple(array.shape), f"{shape} from the config")
        table = self.draft_to_target
        if table is not None and not jnp.issubdtype(table.dtype, jnp.integer):
            raise invalid("draft_to_target.dtype", str(table.dtype), "an integer dtype")

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def dtype(self) -> Any:
        """Dtype of the weights (that of the LM head, else of markov_w2; float32 where there is neither)."""
        if self.lm_head is not None:
            return self.lm_head.dtype
        return jnp.dtype(jnp.float32) if self.markov is None else self.markov.markov_w2.dtype

    @property
    def target_ids(self) -> jax.Array | None:
        """Target id of each draft id, int32 [Vd]; None where they are the same."""
        return None if self.draft_to_target is None else self.draft_to_target[...]

    def base_logits(self, hidden: jax.Array, dtype: Any = None) -> jax.Array:
        """Return softcap(lm_head(hidden) * logit_scale) for step-major hidden [S, B, H]: [S, B, Vd].

        Args:
            hidden: [S, B, H], cast to the weights' dtype.
            dtype: of the result; None takes the weights'. The product emits it directly (no float32 copy of the
                vocabulary is kept); scale and cap are applied in float32 and rounded once more.
        """
        if self.lm_head is None:
            raise invalid("lm_head", None, "an LM head in the head, or base logits from the caller (draft_from_logits)")
        config, dtype = self.config, self.lm_head.dtype if dtype is None else dtype
        logits = product(hidden, self.lm_head[...], dtype)
        if config.logit_scale == 1.0 and config.final_logit_softcapping is None:
            return logits
        scaled = logits.astype(jnp.float32) * config.logit_scale
        if (cap := config.final_logit_softcapping) is not None:
            scaled = cap * jnp.tanh(scaled / cap)
        return scaled.astype(dtype)
