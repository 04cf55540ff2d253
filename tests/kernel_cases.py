"""Cases of the kernels that the interpreter, the lowered programs and a real GPU all run."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import DraftSampling, noise
from dspark_jax.drafting.rows import CandidateRows, DenseRows
from dspark_jax.kernels import select, triton


def make_rows(head, B, S, topk, dtype, seed=0):
    """Return rows of base logits, dense or over candidates."""
    rng = np.random.default_rng(seed)
    base = jnp.asarray(4 * rng.standard_normal((S, B, head.config.Vd)), dtype)
    if topk is None:
        live = head.config.vocab_size if head.target_ids is None and head.config.Vd > head.config.vocab_size else None
        if live is not None:
            base = base.at[..., live:].set(100.0)  # padding never wins, however large
        return DenseRows(base, head.target_ids, live)
    values, draft_ids = select.select_topk(base.reshape(S * B, -1), topk)
    values, draft_ids = values.reshape(S, B, topk), draft_ids.reshape(S, B, topk)
    return CandidateRows(values, draft_ids, draft_ids if head.target_ids is None else head.target_ids[draft_ids])


def make_draw(B):
    """Greedy, cold and hot rows."""
    return DraftSampling(
        jnp.asarray(np.resize([0.0, 0.6, 1.3], B), jnp.float32), jnp.arange(B, dtype=jnp.uint32) * 7919,
        jnp.arange(B, dtype=jnp.int32) + 11,
    )  # fmt: skip


def write_noise(seed, position, step, ids, *, interpret):
    """Draw noise words inside a kernel, the way the kernels' scores do."""

    def kernel(refs, results):
        words = noise.noise_bits(refs["seed"][...], refs["position"][...], step, noise.DRAFT, refs["ids"][...])
        results["words"][...] = words

    shapes = {"words": jax.ShapeDtypeStruct(ids.shape, jnp.uint32)}
    operands = {"seed": seed, "position": position, "ids": ids}
    return triton.pallas_call(kernel, operands, shapes, name="noise", grid=(), interpret=interpret)["words"]


CASES = [
    # kind, weights' dtype, rows' dtype, B, V, Vd, k, sampled
    ("vanilla", "float32", "float32", 3, 300, None, None, False),
    ("vanilla", "bfloat16", "bfloat16", 33, 389, 301, None, True),
    ("vanilla", "float16", "float32", 1, 129, None, None, True),
    ("vanilla", "bfloat16", "bfloat16", 256, 131, None, None, False),
    ("vanilla", "float32", "float32", 2, 290, 300, None, True),
    ("gated", "float32", "float32", 3, 257, None, None, True),
    ("rnn", "bfloat16", "bfloat16", 3, 200, 150, None, False),
    ("vanilla", "bfloat16", "bfloat16", 33, 389, 301, 37, True),
    ("vanilla", "float16", "float32", 1, 129, None, 64, True),
    ("gated", "bfloat16", "bfloat16", 3, 257, 200, 9, True),
    ("rnn", "float32", "float32", 3, 200, None, 1, False),
    ("rnn", "float16", "float16", 256, 140, None, 5, False),
]
