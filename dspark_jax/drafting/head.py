"""The DSparkHead: LM head, Markov head and confidence head of a drafter, the pytree that jitted functions take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..checks import check_int, invalid
from ..confidence.calibration import Calibration
from ..config import DSparkConfig
from ..linear import product
from ..markov import MarkovHead
from ..types import DraftLogits, LmHead, StepHidden, TargetIds
from .confidence_head import ConfidenceHead
from .continuations import Continuations, build_continuations


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
        calibration: temperatures for confidence_logits (static; see confidence/schedule.py), or None.
        continuations: the strongest continuations of every token (see with_continuations), or None.
    """

    def __init__(
        self,
        config: DSparkConfig,
        lm_head: LmHead | None,
        markov: MarkovHead | None = None,
        confidence: ConfidenceHead | None = None,
        draft_to_target: TargetIds | None = None,
        calibration: Calibration | None = None,
        continuations: Continuations | None = None,
    ) -> None:
        self.config = config
        self.lm_head = nnx.data(None if lm_head is None else nnx.Param(lm_head))
        self.markov = nnx.data(markov)
        self.confidence = nnx.data(confidence)
        self.draft_to_target = nnx.data(None if draft_to_target is None else DraftToTarget(draft_to_target))
        self.calibration = calibration
        self.continuations = nnx.data(continuations)
        self._check()

    def _check(self) -> None:
        """Hold the weights to the config: a wrong shape would broadcast, clamp or read the wrong columns silently."""
        c, markov, confidence = self.config, self.markov, self.confidence
        V, Vd, H, r = c.vocab_size, c.Vd, c.hidden_size, c.markov_rank
        if (None if markov is None else markov.kind.name) != c.markov_head_type:
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
            sizes = {"V": V, "Vd": Vd, "H": H, "r": r}
            for part in markov.kind.parameters:
                wanted[part.attribute] = (getattr(markov, part.attribute), part.sizes(sizes))
        if confidence is not None:
            width = H + r if c.confidence_head_with_markov else H
            wanted |= {"confidence.weight": (confidence.weight, (width,)), "confidence.bias": (confidence.bias, ())}
        if (table := self.continuations) is not None:
            if markov is None:
                raise invalid("continuations", type(table).__name__, "None, since there is no Markov head")
            wanted |= {
                "continuations.ids": (table.ids, (V, table.m)),
                "continuations.largest": (table.largest, (V,)),
                "continuations.last": (table.last, (V,)),
                "continuations.slack": (table.slack, (r,)),
            }
        for name, (array, shape) in wanted.items():
            if array is not None and tuple(array.shape) != shape:
                raise invalid(f"{name}.shape", tuple(array.shape), f"{shape} from the config")
        table = self.draft_to_target
        if table is not None and not jnp.issubdtype(table.dtype, jnp.integer):
            raise invalid("draft_to_target.dtype", str(table.dtype), "an integer dtype")

    def with_continuations(self, m: int, *, show_progress: bool = True) -> DSparkHead:
        """Return this head with a table of each token's m strongest continuations, which `markov_topk` drafts from.

        The table takes 4 * V * (m + 2) bytes (continuations.table_bytes). With m = 0 it holds the largest biases alone,
        which is enough for certificates. The weights are shared.

        Args:
            m: from 0 to the number of draftable ids.
            show_progress: a bar on stderr, where that is a terminal and the work takes over a second.
        """
        if self.markov is None:
            raise invalid("markov", None, "a Markov head, whose biases make the continuations")
        config = self.config
        m = check_int("m", m, 0, config.draftable)
        table = build_continuations(self.markov, m, config.draftable, config.hidden_size, show_progress=show_progress)
        return self.replace_continuations(table)

    def replace_continuations(self, table: Continuations | None) -> DSparkHead:
        """Return this head with another table of continuations, or none; the weights are shared."""
        lm_head = None if self.lm_head is None else self.lm_head[...]
        return DSparkHead(self.config, lm_head, self.markov, self.confidence, self.target_ids, self.calibration, table)

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
    def target_ids(self) -> TargetIds | None:
        """Target id of each draft id, int32 [Vd]; None where they are the same."""
        return None if self.draft_to_target is None else self.draft_to_target[...]

    def base_logits(self, hidden: StepHidden, dtype: Any = None) -> DraftLogits:
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
