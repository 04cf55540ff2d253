"""The abstract Markov head: what the scan, the kernels and the loader may ask of any kind of head."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from .head_kinds import HeadKind
from .linear import gather_rows
from .types import Latents, MarkovW1, MarkovW2, Size, StepHidden


class MarkovHead(nnx.Module, abc.ABC):
    """A map (state, previous token, hidden) -> (state, latent z in R^r); the bias is z times rows of markov_w2.

    A kind subclasses it, adds parameters of its own in the constructor, and registers (head_kinds.register). A step may
    read the hidden states only through what `hoist` computed of them.

    Args:
        markov_w1: [V, r], embedding of the previous (target) token.
        markov_w2: [Vd, r], rows of the bias.
    """

    kind: ClassVar[HeadKind]

    def __init__(self, markov_w1: MarkovW1, markov_w2: MarkovW2) -> None:
        self.markov_w1 = nnx.Param(markov_w1)
        self.markov_w2 = nnx.Param(markov_w2)

    def embed(self, prev: Int[Array, " *rows"]) -> Float[Array, "*rows r"]:
        """Return e = markov_w1[prev], prev.shape + [r]; zeros for ids outside [0, V)."""
        return gather_rows(self.markov_w1[...], prev)

    def hoist(self, hidden: StepHidden | None) -> Any:
        """Return the part of each step that depends on hidden [S, B, H] alone, a pytree of [S, B, ...] arrays."""
        del hidden
        return ()

    def start(self, batch: Size) -> Any:
        """Return the state before the first step, a pytree of [B, ...] arrays."""
        del batch
        return ()

    @abc.abstractmethod
    def step(self, state: Any, embedding: Latents, hoisted: Any) -> tuple[Any, Float32[Array, "B r"]]:
        """Advance one step: (state, e [B, r], the step's hoisted part [B, ...]) -> (state, latent float32 [B, r])."""
