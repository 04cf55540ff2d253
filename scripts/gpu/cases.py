"""The drafting programs that the GPU report is about: what is static about each, its byte floor, and its figures."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from .compile import H200, Target  # isort: skip  (sets what jax reads when it is imported)
import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax import DraftBuffer, DraftConfig, DraftSampling, DSparkConfig, make_draft_fn, make_draft_from_logits_fn
from dspark_jax.config import DraftOptions
from dspark_jax.drafting.draft import draft
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.head_kinds import head_kind

from .count import report
from .kernel_rules import RULES

S, V, H, RANK = 7, 151936, 2560, 256
DTYPE = jnp.dtype("bfloat16")
BATCHES, TOPKS, HEADS = (1, 8, 64, 256), (None, 64, 512, 4096), ("vanilla", "gated", "rnn")
METHODS, FORMS = ("greedy", "probabilistic"), ("pallas", "xla")
LAUNCH_SECONDS = 2e-6


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: everything static about a draft."""

    batch: int = 64
    topk: int | None = None
    head: str = "vanilla"
    method: str = "greedy"
    outputs: str = "logits"
    implementation: str = "pallas"
    lm_head: bool = False  # hidden states in and the LM-head product inside, instead of base logits

    @property
    def name(self) -> str:
        """A file name."""
        k = "dense" if self.topk is None else f"top{self.topk}"
        lm = "-lmhead" if self.lm_head else ""
        return f"{k}-b{self.batch}-{self.head}-{self.method}-{self.outputs}-{self.implementation}{lm}"

    @property
    def floor(self) -> int:
        """Bytes that any program must move: w2 or its gathered rows, the base once, the kept rows once."""
        item = DTYPE.itemsize
        slab = S * self.batch * V * item
        if self.topk is None:
            total = S * V * RANK * item + slab * (2 if self.outputs == "logits" else 1)
        else:
            total = slab + S * self.batch * self.topk * RANK * item
        return total + (V * H * item + slab if self.lm_head else 0)


DEFAULT = (
    Case(),
    Case(outputs="tokens"),
    Case(batch=1),
    Case(batch=256),
    Case(method="probabilistic"),
    Case(lm_head=True),
    Case(topk=512, outputs="candidates"),
    Case(topk=512, outputs="candidates", batch=1),
    Case(topk=512, outputs="candidates", method="probabilistic"),
    Case(topk=512, outputs="candidates", head="gated"),
    Case(topk=512, outputs="candidates", head="rnn"),
    Case(topk=512, outputs="logits"),
    Case(topk=4096, outputs="candidates"),
    Case(implementation="xla"),
    Case(topk=512, outputs="candidates", implementation="xla"),
)


def every_case() -> Iterable[Case]:
    """Yield the whole matrix."""
    for form, head, method, B, k in itertools.product(FORMS, HEADS, METHODS, BATCHES, TOPKS):
        for outputs in ("tokens", "logits") if k is None else ("tokens", "logits", "candidates"):
            yield Case(B, k, head, method, outputs, form)


def abstract_head(kind: str, lm_head: bool) -> DSparkHead:
    """Build a head of real size without allocating it."""

    def build() -> DSparkHead:
        def zeros(*shape: int) -> jax.Array:
            return jnp.zeros(shape, DTYPE)

        sizes = {"V": V, "Vd": V, "H": H, "r": RANK}
        found = head_kind(kind)
        markov = found.module(**{part.attribute: zeros(*part.sizes(sizes)) for part in found.parameters})
        config = DSparkConfig(
            vocab_size=V, hidden_size=H, block_size=S + 1, mask_token_id=0, markov_rank=RANK, markov_head_type=kind
        )
        return DSparkHead(config, zeros(V, H) if lm_head else None, markov)

    return nnx.eval_shape(build)


def lower(case: Case, target: Target) -> jax.stages.Lowered:
    """Lower a case's public function for the target."""
    B, k = case.batch, case.topk
    config = DraftConfig(S, k, case.method, case.outputs)
    head = target.place(abstract_head(case.head, case.lm_head))
    hidden = target.array((B, S, H), DTYPE) if case.lm_head or head_kind(case.head).reads_hidden else None
    base, anchor = target.array((S, B, V), DTYPE), target.array((B,), jnp.int32)
    vector = partial(target.array, (B,))
    draw = None
    if case.method == "probabilistic":
        draw = DraftSampling(vector(jnp.float32), vector(jnp.uint32), vector(jnp.int32))
    buffer = None
    if k is not None and case.outputs == "logits":
        shapes: Any = (target.array((S, B, V), DTYPE), target.array((S, B, k), jnp.int32))
        buffer = DraftBuffer(*shapes)
    with target.lowering():
        if case.lm_head:
            fn = make_draft_fn(config, implementation=case.implementation)
            return fn.lower(head, hidden, anchor, draw, buffer)
        if buffer is None:
            fn = make_draft_from_logits_fn(config, implementation=case.implementation)
            return fn.lower(head, base, anchor, draw, hidden)

        # Base logits together with a reused buffer: the core inside a jit that donates the buffer.
        def refill(head: Any, base: Any, anchor: Any, hidden: Any, draw: Any, buffer: Any) -> Any:
            hidden = None if hidden is None else jnp.swapaxes(hidden, 0, 1)
            options = DraftOptions(
                topk=k, outputs="logits", logits_dtype=jnp.dtype(DTYPE), implementation=case.implementation
            )
            return draft(head, base, anchor, hidden, draw, buffer, options=options)

        return jax.jit(refill, donate_argnums=5).lower(head, base, anchor, hidden, draw, buffer)


def measure(case: Case, target: Target, folder: pathlib.Path | None = None) -> dict[str, Any]:
    """Compile a case and return its row of the report."""
    compiled = lower(case, target).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    counted = report(text, RULES)
    path = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{case.name}.hlo"
        path.write_text(text)
    long = [n for n in counted.sorts if n > (case.topk or 0) and n >= V // 32]
    return {
        **dataclasses.asdict(case),
        "megabytes": counted.nbytes / 1e6,
        "floor_megabytes": case.floor / 1e6,
        "kernels": counted.kernels,
        "kernels_per_step": counted.kernels / S,
        "temp_megabytes": memory.temp_size_in_bytes / 1e6,
        "aliased_megabytes": memory.alias_size_in_bytes / 1e6,
        "vocabulary_sorts": len(long),
        "sort_lengths": counted.sorts,
        "conditionals": len(counted.branches),
        "seconds_bound": max(counted.nbytes / bandwidth(), counted.kernels * LAUNCH_SECONDS),
        "hlo_file": None if path is None else str(path),
    }


def bandwidth(path: pathlib.Path = H200) -> float:
    """Read the memory bandwidth of a target file, bytes per second."""
    found = re.search(r"memory_bandwidth:\s*(\d+)", path.read_text())
    if found is None:
        raise ValueError(f"{path}: no memory_bandwidth")
    return float(found[1])
