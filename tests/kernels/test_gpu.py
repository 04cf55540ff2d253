"""The kernels on a real GPU (scripts/gpu_check.sh runs these): compiled, not interpreted, against the plain form.

Rows are compared given the tokens that the kernel itself drew, so that a near tie in one step cannot hide or fake a
fault in a later one; tokens are compared with the rows that the kernel itself wrote.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_logits, make_head, make_inputs
from kernel_cases import CASES, make_draw, make_rows, write_noise

from dspark_jax import draft_from_logits, noise
from dspark_jax.config import DraftOptions
from dspark_jax.drafting.heads import bias, bias_at
from dspark_jax.drafting.steps import in_kernels
from dspark_jax.kernels import pick, select

if jax.default_backend() != "gpu":
    pytest.skip("no GPU here: scripts/gpu_check.sh runs these where there is one", allow_module_level=True)

pytestmark = pytest.mark.gpu
# More requests and a real vocabulary than under the interpreter.
LARGE = [
    ("vanilla", "bfloat16", "bfloat16", 64, 151936, None, None, False),
    ("vanilla", "bfloat16", "bfloat16", 64, 151936, None, 512, True),
]


@pytest.mark.parametrize(("kind", "dtype", "kept", "B", "V", "Vd", "k", "sampled"), CASES + LARGE)
def test_kernels_write_and_draw_what_they_should(kind, dtype, kept, B, V, Vd, k, sampled):
    S = 3
    head = make_head(kind, V=V, Vd=Vd, dtype=dtype, r=256 if V > 1000 else 20)
    markov, rows, draw = head.markov, make_rows(head, B, S, k, dtype), make_draw(B) if sampled else None
    hidden, anchor = make_inputs(B, S, head.config.hidden_size, V)
    hidden = jnp.swapaxes(jnp.asarray(hidden, head.dtype), 0, 1)
    anchor = jnp.asarray(anchor).at[B - 1].set(V)
    options = DraftOptions(logits_dtype=jnp.dtype(kept), outputs="logits")
    run = jax.jit(partial(in_kernels, head, rows, options=options, interpret=False))
    found, tokens, valid = run(anchor, hidden, draw)
    assert valid.all()

    def step(state, xs):
        return markov.step(state, *xs)

    prev = jnp.concatenate([anchor[None], tokens[:-1]])
    _, latents = jax.lax.scan(step, markov.start(B), (markov.embed(prev), markov.hoist(hidden)))
    w2 = markov.markov_w2[...]
    live = getattr(rows, "live", None) or rows.base.shape[-1]
    for s in range(S):
        added = bias(latents[s], w2) if k is None else bias_at(latents[s], w2, rows.draft_ids[s])
        want = (rows.base[s].astype(jnp.float32) + added).astype(kept)
        assert_logits(found[s][:, :live], want[:, :live], kept, slack=4)
        ids = rows.target_ids if k is None else rows.target_ids[s]
        named = jnp.arange(rows.base.shape[-1]) if ids is None else ids
        score = jnp.where(jnp.arange(rows.base.shape[-1]) < live, found[s].astype(jnp.float32), -jnp.inf)
        if draw is not None:
            bits = noise.noise_bits(draw.seed[:, None], draw.position[:, None], s, noise.DRAFT, named)
            score = noise.scores(score, draw.temperature, bits)
        best = jnp.max(jnp.where(jnp.isnan(score), -jnp.inf, score), axis=1)
        chosen = jnp.max(jnp.where(jnp.broadcast_to(named, score.shape) == tokens[s][:, None], score, -jnp.inf), axis=1)
        np.testing.assert_allclose(chosen, best, rtol=0, atol=0 if draw is None else 1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("k", [1, 64, 512, 4096])
def test_selection_equals_a_full_sort(dtype, k):
    rng = np.random.default_rng(k)
    x = (3 * rng.standard_normal((14, 151936))).astype(np.float32)
    x[1], x[2], x[3] = np.round(x[1]), -np.inf, 1.0
    x[4, 77], x[5, -1], x[6, ::3] = np.nan, -np.nan, -0.0
    x = jnp.asarray(x, dtype)
    want_values, want_ids = select.top_k(x, k)
    for form in ("xla", "pallas"):
        values, ids = jax.jit(lambda x, f=form: select.select_topk(x, k, implementation=f))(x)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_array_equal(values.astype(jnp.float32), want_values.astype(jnp.float32))
    assert pick.fits(151936, k)


def test_noise_words_in_a_kernel_equal_the_generator():
    ids = jnp.asarray([0, 1, 151935, 2**29 - 1, 7, 12, 99, 100], jnp.int32)
    found = write_noise(jnp.asarray([2**32 - 1], jnp.uint32), jnp.asarray([678], jnp.int32), 6, ids, interpret=False)
    want = noise.noise_bits(jnp.uint32(2**32 - 1), jnp.int32(678), 6, noise.DRAFT, ids)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("k", [None, 9])
def test_broken_rows_are_flagged(k):
    head = make_head("vanilla", V=300)
    base = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 300)), jnp.float32)
    base = base.at[0, 1, 3].set(jnp.nan).at[0, 2].set(-jnp.inf)
    block = draft_from_logits(head, base, [1, 2, 3, 300], topk=k, implementation="pallas")
    assert block.valid.tolist() == [True, False, False, False]
    assert ((block.tokens >= 0) & (block.tokens < 300)).all()
