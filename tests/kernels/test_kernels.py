"""The Pallas kernels under the CPU interpreter, equal to the plain form of the same steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_logits, f32, make_head, make_inputs
from kernel_cases import CASES, make_draw, make_rows, write_noise

from dspark_jax import draft_block, draft_from_logits, make_buffer, make_draft_fn, noise
from dspark_jax.config import DraftConfig, DraftOptions
from dspark_jax.drafting.steps import in_kernels, in_xla
from dspark_jax.kernels import dispatch, triton
from dspark_jax.kernels.dense_step import Summary, best_of_blocks, dense_step
from dspark_jax.kernels.walk import walk


def both(head, rows, B, S, draw, dtype, keep=True):
    hidden, anchor = make_inputs(B, S, head.config.hidden_size, head.config.vocab_size)
    hidden = jnp.swapaxes(jnp.asarray(hidden, head.dtype), 0, 1)
    anchor = jnp.asarray(anchor).at[B - 1].set(head.config.vocab_size)  # no such token: a zero embedding
    forms = []
    options = DraftOptions(logits_dtype=jnp.dtype(dtype), outputs="logits" if keep else "tokens")
    for form, extra in ((in_xla, {}), (in_kernels, {"interpret": True})):
        run = jax.jit(lambda *args, f=form, o=extra: f(head, rows, *args, options=options, **o))
        forms.append(jax.device_get(run(anchor, hidden, draw)))
    return forms


def check(head, rows, B, S, draw, dtype):
    (want, tokens, valid), (found, found_tokens, found_valid) = both(head, rows, B, S, draw, dtype)
    np.testing.assert_array_equal(found_valid, valid)
    np.testing.assert_array_equal(found_tokens, tokens)  # the seeds leave no near ties
    live = getattr(rows, "live", None) or want.shape[-1]
    assert_logits(found[..., :live], want[..., :live], dtype)
    assert found.dtype == jnp.dtype(dtype)


@pytest.mark.parametrize(("kind", "dtype", "kept", "B", "V", "Vd", "k", "sampled"), CASES)
def test_kernels_equal_the_plain_form(kind, dtype, kept, B, V, Vd, k, sampled):
    S = 3
    head = make_head(kind, V=V, Vd=Vd, dtype=dtype, r=6 if kind != "vanilla" else 20)
    check(head, make_rows(head, B, S, k, dtype), B, S, make_draw(B) if sampled else None, kept)


@pytest.mark.parametrize(("k", "B"), [(None, 2), (70, 33)])
def test_ranks_that_split_the_product_and_the_candidates(k, B):
    """A rank of 300 is two chunks of the dense product, and leaves 32 candidates to a chunk of the walk."""
    head = make_head("vanilla", V=150, r=300, dtype="float32")
    check(head, make_rows(head, B, 2, k, "float32"), B, 2, make_draw(B), "float32")


@pytest.mark.parametrize("k", [None, 9])
def test_broken_rows_are_flagged_and_leave_neighbours_alone(k):
    B, S = 5, 2
    head = make_head("vanilla", V=300)
    rows = make_rows(head, B, S, k, "float32")
    base = rows.base.at[0, 1, 3].set(jnp.nan).at[0, 2].set(-jnp.inf).at[0, 3, 4].set(-jnp.inf).at[0, 0, 0].set(jnp.inf)
    rows = dataclasses.replace(rows, base=base)
    (want, tokens, valid), (found, found_tokens, found_valid) = both(head, rows, B, S, None, "float32")
    np.testing.assert_array_equal(found_valid, valid)
    np.testing.assert_array_equal(valid[0], [True, False, False, True, True])
    np.testing.assert_array_equal(found_tokens[:, [0, 3, 4]], tokens[:, [0, 3, 4]])
    assert ((found_tokens >= 0) & (found_tokens < 300)).all()
    np.testing.assert_allclose(found[:, [0, 3, 4]], want[:, [0, 3, 4]], rtol=0, atol=1e-4)


def test_tokens_only_write_no_rows():
    head = make_head("vanilla", V=300)
    rows = make_rows(head, 3, 2, None, "float32")
    (want, tokens, _), (found, found_tokens, _) = both(head, rows, 3, 2, make_draw(3), "float32", keep=False)
    assert want is None
    assert found is None
    np.testing.assert_array_equal(found_tokens, tokens)


def test_only_the_named_slab_is_written():
    head = make_head("vanilla", V=300)
    base = make_rows(head, 3, 4, None, "float32").base
    w1, w2 = head.markov.markov_w1[...], head.markov.markov_w2[...]
    out, _, _ = dense_step(
        base=base, out=None, step=jnp.int32(2), prev=jnp.arange(3, dtype=jnp.int32), latents=w1, w2=w2, keep=True,
        dtype=base.dtype, interpret=True,
    )  # fmt: skip
    np.testing.assert_array_equal(out[np.array([0, 1, 3])], base[np.array([0, 1, 3])])
    np.testing.assert_allclose(out[2], base[2] + w1[:3] @ w2.T, rtol=0, atol=1e-4)


def test_ties_go_to_the_lowest_target_id():
    """Equal values across blocks (dense) and across chunks and slots (candidates)."""
    top = jnp.asarray([[1.0, 2.0], [1.0, 3.0], [1.0, 3.0]])
    best = jnp.asarray([[9, 1], [7, 5], [8, 4]], jnp.int32)
    flags = jnp.asarray([[1, 1], [1, 3], [1, 1]], jnp.int8)
    token, valid = best_of_blocks(Summary(jnp.zeros(()), top, best, flags))
    assert token.tolist() == [7, 4]
    assert valid.tolist() == [True, False]
    ids = jnp.asarray([[[200, 3, 40, 7, 5]]], jnp.int32)
    base = jnp.asarray([[[1.0, 2.0, 2.0, 2.0, 2.0]]])
    zero = jnp.zeros((300, 4))
    options = {"prev": jnp.zeros(1, jnp.int32), "latents": zero, "w2": zero, "keep": False, "dtype": jnp.float32}
    _, token, _ = walk(base=base, out=None, ids=ids, interpret=True, **options)
    assert token.tolist() == [[3]]


def test_noise_words_in_a_kernel_equal_the_generator():
    ids = jnp.asarray([0, 1, 151935, 2**29 - 1, 7, 12, 99, 100], jnp.int32)
    for seed, position, step in ((0, 0, 0), (2**32 - 1, 2**31 - 1, 6), (12345, 678, 3)):
        found = write_noise(
            jnp.asarray([seed], jnp.uint32), jnp.asarray([position], jnp.int32), step, ids, interpret=True
        )
        want = noise.noise_bits(jnp.uint32(seed), jnp.int32(position), step, noise.DRAFT, ids)
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("kind", "topk", "outputs"), [("vanilla", None, "logits"), ("gated", 9, "candidates")])
def test_entry_points_take_the_form_and_agree(kind, topk, outputs):
    head = make_head(kind, V=300)
    hidden, anchor = make_inputs(3, 3, 12, 300)
    options = {"topk": topk, "outputs": outputs, "sampling": make_draw(3)}
    plain, fast = (draft_block(head, hidden, anchor, implementation=form, **options) for form in ("xla", "pallas"))
    default = draft_block(head, hidden, anchor, **options)
    for found in (fast, default):
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        if topk is None:
            assert_logits(found.logits, plain.logits)
        else:
            np.testing.assert_array_equal(found.candidate_ids, plain.candidate_ids)
            assert_logits(found.candidate_logits, plain.candidate_logits)


def test_made_functions_take_the_form():
    head = make_head("vanilla", V=300)
    hidden, anchor = make_inputs(2, 3, 12, 300)
    config = DraftConfig(3, draft_topk=9, outputs="logits")
    blocks = []
    for form in ("xla", "pallas"):
        fn, buffer = make_draft_fn(config, implementation=form), make_buffer(head, config, 2)
        for shift in (0, 1):  # the second call meets a filled buffer
            block, buffer = fn(head, hidden + shift, anchor, None, buffer)
        blocks.append(block)
    np.testing.assert_array_equal(blocks[0].tokens, blocks[1].tokens)
    assert_logits(blocks[1].logits, blocks[0].logits)


def test_nothing_unverified_is_a_default():
    """None means the plain form until gpu_check.sh has passed: the traced program holds no kernel."""
    head = make_head("vanilla", V=300)
    base = jnp.zeros((2, 2, 300))

    def text(form):
        return str(
            jax.make_jaxpr(lambda b: draft_from_logits(head, b, [1, 2], topk=5, implementation=form).tokens)(base)
        )

    assert ("pallas_call" in text(None)) == bool(dispatch.VERIFIED)
    assert "pallas_call" in text("pallas")
    assert "pallas_call" not in text("xla")


def test_bad_forms_are_refused():
    head = make_head("vanilla")
    with pytest.raises(ValueError, match="implementation: found 'triton', expected one of xla, pallas"):
        draft_from_logits(head, np.zeros((2, 1, 37), np.float32), [0], implementation="triton")


def test_arrays_beyond_32_bit_offsets_take_the_plain_form():
    small, large = jax.ShapeDtypeStruct((2**15, 2**15), jnp.int8), jax.ShapeDtypeStruct((2**16, 2**15), jnp.int8)
    assert dispatch.addressable(small)
    assert not dispatch.addressable(small, large)


def test_rounding_inside_kernels_is_that_of_the_dtype():
    x = jnp.asarray([1.0, 1.00390625, 1.01171875, 3.1415927, -7.3], jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        for interpret in (True, False):
            np.testing.assert_array_equal(triton.rounded(x, dtype, interpret), f32(x.astype(dtype)))
