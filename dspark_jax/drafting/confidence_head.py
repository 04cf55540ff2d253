"""The confidence head: the chance that the target accepts a step."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..linear import product
from ..types import StepConfidence, StepHidden, StepLatents


class ConfidenceHead(nnx.Module):
    """Logit of the probability that the target accepts a step, given that it accepted all earlier ones.

    confidence_logit = weight . [hidden ; e] + bias, or weight . hidden + bias where the weight is H wide.

    Args:
        weight: [H + r] or [H]; bias: [] or None.
    """

    def __init__(self, weight: Float[Array, " m"], bias: Float[Array, ""] | None = None) -> None:
        self.weight = nnx.Param(weight)
        self.bias = nnx.data(None if bias is None else nnx.Param(bias))

    def __call__(self, hidden: StepHidden, embedding: StepLatents | None) -> StepConfidence:
        """Return float32 logits [S, B] from hidden [S, B, H] and e [S, B, r] (unused where the weight is H wide)."""
        H = hidden.shape[-1]
        logit = product(hidden, self.weight[None, :H])[..., 0]
        if self.weight.shape[0] > H:
            assert embedding is not None
            logit = logit + product(embedding, self.weight[None, H:])[..., 0]
        return logit if self.bias is None else logit + self.bias[...].astype(jnp.float32)
