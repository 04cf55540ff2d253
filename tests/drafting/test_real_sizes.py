"""Real sizes by shape alone: jax.eval_shape and nnx.eval_shape trace the released drafters' heads."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import KINDS

import dspark_jax
from dspark_jax import DraftConfig, DraftSampling, DSparkConfig
from dspark_jax.drafting.confidence_head import ConfidenceHead
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.drafting.heads import GatedMarkovHead, RnnMarkovHead, VanillaMarkovHead

# name: (V, H, softcap, parameters of the head: LM head, w1, w2, confidence head)
RELEASED = {
    "qwen3_4b": (151936, 2560, None, 151936 * (2560 + 512) + 2816 + 1),
    "qwen3_8b": (151936, 4096, None, 151936 * (4096 + 512) + 4352 + 1),
    "qwen3_14b": (151936, 5120, None, 151936 * (5120 + 512) + 5376 + 1),
    "gemma4_12b": (262144, 3840, 30.0, 262144 * (3840 + 512) + 4096 + 1),
}
R, S, B = 256, 7, 64
MASK = 4


@functools.cache
def abstract_head(V, H, kind="vanilla", softcap=None, Vd=None, dtype=jnp.bfloat16):
    """A head of shapes only."""
    Vd = V if Vd is None else Vd
    config = DSparkConfig(
        vocab_size=V,
        draft_vocab_size=Vd,
        hidden_size=H,
        block_size=7,
        mask_token_id=MASK,
        markov_rank=R,
        markov_head_type=kind,
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        final_logit_softcapping=softcap,
    )

    def make():
        def zeros(*shape):
            return jnp.zeros(shape, dtype)

        w1, w2 = zeros(V, R), zeros(Vd, R)
        markov = {
            "vanilla": lambda: VanillaMarkovHead(w1, w2),
            "gated": lambda: GatedMarkovHead(w1, w2, zeros(R, H + R), zeros(R)),
            "rnn": lambda: RnnMarkovHead(w1, w2, zeros(3 * R, 2 * R + H), zeros(3 * R)),
        }[kind]()
        table = None if Vd == V else jnp.arange(Vd)
        return DSparkHead(config, zeros(Vd, H), markov, ConfidenceHead(zeros(H + R), zeros()), table)

    return nnx.eval_shape(make)


def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = DraftSampling(struct((B,), jnp.float32), struct((B,), jnp.uint32), struct((B,), jnp.int32))


def shapes_of(head, sampling=PARAMS, **options):
    def call(head, hidden, anchors, params):
        return dspark_jax.draft_block(head, hidden, anchors, sampling=params, **options)

    return jax.eval_shape(
        call, head, struct((B, S, head.config.hidden_size), jnp.bfloat16), struct((B,), jnp.int32), sampling
    )


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes(name):
    V, H, softcap, parameters = RELEASED[name]
    head = abstract_head(V, H, softcap=softcap)
    assert sum(leaf.size for leaf in jax.tree.leaves(head)) == parameters
    dense = shapes_of(head, outputs="logits")
    assert dense.logits.shape == (S, B, V)
    assert dense.logits.dtype == jnp.bfloat16
    assert dense.tokens.shape == dense.confidence_logits.shape == (B, S)
    assert dense.confidence_logits.dtype == jnp.float32
    top = shapes_of(head, topk=64, outputs="candidates")
    assert top.candidate_ids.shape == top.candidate_logits.shape == (S, B, 64)
    assert top.candidate_logits.dtype == jnp.bfloat16
    assert top.logits is None


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_at_real_size(kind):
    head = abstract_head(151936, 4096, kind)
    for topk, outputs in ((None, "tokens"), (64, "logits"), (64, "candidates")):
        block = shapes_of(head, None, topk=topk, outputs=outputs)
        assert block.tokens.shape == (B, S)
        assert block.method == "greedy"
    forced = jax.eval_shape(
        dspark_jax.teacher_forced_logits, head, struct((B, S, 4096), jnp.bfloat16), struct((B, S), jnp.int32)
    )
    assert (forced.shape, forced.dtype) == ((S, B, 151936), jnp.bfloat16)


def test_reduced_vocabulary_and_wide_dtype_at_real_size():
    """32000 of 248320 tokens, as a published reduced drafter has: rows come back in target columns."""
    head = abstract_head(248320, 2048, Vd=32000)
    block = shapes_of(head, outputs="logits", logits_dtype="float32")
    assert (block.logits.shape, block.logits.dtype) == ((S, B, 248320), jnp.float32)
    assert shapes_of(head, topk=32, outputs="logits").logits.shape == (S, B, 248320)


def test_buffers_and_base_logits_at_real_size():
    head = abstract_head(151936, 2560)
    config = DraftConfig(S, 64, "probabilistic", "logits")
    buffer = jax.eval_shape(lambda head: dspark_jax.make_buffer(head, config, B), head)
    assert (buffer.logits.shape, buffer.logits.dtype) == ((S, B, 151936), jnp.bfloat16)
    assert (buffer.ids.shape, buffer.ids.dtype) == ((S, B, 64), jnp.int32)
    base = jax.eval_shape(lambda head, hidden: head.base_logits(hidden), head, struct((S, B, 2560), jnp.bfloat16))
    assert (base.shape, base.dtype) == ((S, B, 151936), jnp.bfloat16)


def test_shapes_alone_allocate_nothing():
    """Tracing the biggest head, dense and top-k, makes no array of its 2.3 GB."""
    head = abstract_head(262144, 3840, softcap=30.0)
    before = sum(array.nbytes for array in jax.live_arrays())
    shapes_of(head, outputs="logits")
    for topk in (33, 34):
        shapes_of(head, topk=topk, outputs="candidates")
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1 << 20
