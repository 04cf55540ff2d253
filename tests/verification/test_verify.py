"""verify_block against an independent NumPy reference, and the cases that verifiers of this kind have got wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from verify_cases import make_block, random_case
from verify_reference import processed, softmax, verify_one

import dspark_jax.verification.api as api_module
import dspark_jax.verification.verify as verify_module
from dspark_jax import DraftSampling, TargetFilter, verify_block
from dspark_jax.trace_count import Program

N = 400_000


def log(p):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, np.float64)).astype(np.float32)


def frequencies(p, q, *, draft_from=None, form="logits", method="probabilistic", rule="token", noise=None, n=N):
    """Frequencies of the first committed token over n requests with target p; tokens drawn from draft_from or q."""
    p, q = np.asarray(p), np.asarray(q)
    V = len(p)
    if noise is None:
        tokens = np.random.default_rng(0).choice(V, size=(n, 1), p=q if draft_from is None else draft_from)
    else:
        tokens = noise
    rows = np.broadcast_to(log(q), (1, n, V))
    if form == "candidates":
        ids = np.flatnonzero(q > 0)[::-1].astype(np.int32)
        block = make_block(tokens, ids=np.broadcast_to(ids, (1, n, len(ids))), values=rows[:, :, ids])
    else:
        block = make_block(tokens, logits=rows, method=method)
    draw = DraftSampling(np.ones(n, np.float32), np.arange(n), np.full(n, 7))
    out = verify_block(block, np.broadcast_to(log(p), (n, 2, V)), draw, rule=rule)
    return np.bincount(np.asarray(out.tokens)[:, 0], minlength=V) / n, out


def assert_frequencies(found, p, n=N):
    assert chisquare(found * n, np.asarray(p) / np.sum(p) * n).pvalue > 1e-4, found


@pytest.mark.parametrize("form", ["logits", "candidates"])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.1, 0.6, 0.3], [0.7, 0.25, 0.05]),
        ([0.2, 0.3, 0.5], [0.5, 0.4, 0.1]),
        ([0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0]),
    ],
)
def test_output_is_the_targets(p, q, form):
    """Cases 2, 9 and 10: independent streams, a truncated q, and a residual that subtracts all of q."""
    found, out = frequencies(p, q, form=form)
    assert_frequencies(found, p)
    expected = 1 - 0.5 * np.abs(np.subtract(p, q)).sum()
    error = 4 * (0.25 / N) ** 0.5
    assert abs(float(out.num_accepted.mean()) - expected) < error
    assert abs(float(out.accept_prob.mean()) - expected) < error


def test_wrong_q_is_caught():
    """Case 9's wrong form: with q taken dense and uniform over all four, the output is .50/.50/0/0 x (1 - residual)."""
    found, _ = frequencies([0.4, 0.3, 0.2, 0.1], [0.25] * 4, draft_from=[0.5, 0.5, 0, 0])
    assert chisquare(found[:2] / found[:2].sum(), [0.5, 0.5]).pvalue > 1e-4
    np.testing.assert_allclose(found, [0.5, 0.5, 0, 0], atol=0.004)


def test_shared_streams_are_caught(monkeypatch):
    """Case 2 with one stream for draft and residual: .101/.559/.340 instead of .1/.6/.3."""
    from dspark_jax.noise import DRAFT, gumbel_from_bits, noise_bits

    p, q, n = [0.1, 0.6, 0.3], [0.7, 0.25, 0.05], N
    seeds, zero = jnp.arange(n, dtype=jnp.uint32)[:, None], jnp.full((n, 1), 7, jnp.int32)
    bits = noise_bits(seeds, zero, 0, DRAFT, jnp.arange(3)[None])
    drafted = np.asarray(jnp.argmax(log(q)[None] + gumbel_from_bits(bits), axis=1))[:, None]
    found, _ = frequencies(p, q, noise=drafted)
    assert_frequencies(found, p)
    monkeypatch.setattr(verify_module, "RESIDUAL", DRAFT)
    monkeypatch.setattr(api_module, "VERIFY", fresh_program())
    found, _ = frequencies(p, q, noise=drafted)
    np.testing.assert_allclose(found, [0.101, 0.559, 0.340], atol=0.004)


def fresh_program():
    """The jitted program without what it has cached, so that it sees a patched module."""
    return Program(api_module._verify_chunks, static=("rule", "chunk_size"))


def test_greedy_draft_is_one_hot():
    """Case 7: a greedy draft is verified as one-hot; verified against softmax q it would lose the target."""
    logits = np.array([2, 1.5, 1, 0.5])
    q = softmax(logits)
    np.testing.assert_allclose(q[0], 0.455, atol=5e-4)
    p = [0.1, 0.2, 0.3, 0.4]
    greedy = np.zeros((N, 1), np.int32)
    found, out = frequencies(p, q, noise=greedy, method="greedy")
    assert_frequencies(found, p)
    np.testing.assert_allclose(float(out.num_accepted.mean()), 0.1, atol=0.003)
    found, _ = frequencies(p, q, noise=greedy)
    assert chisquare(found * N, np.array(p) * N).pvalue < 1e-10
    found, _ = frequencies(p, q)
    assert_frequencies(found, p)


def test_target_only_rule():
    """The rule that reads no q is exact too, and accepts with probability p(x)."""
    p, q = [0.1, 0.6, 0.3], [0.7, 0.25, 0.05]
    found, out = frequencies(p, q, rule="target_only")
    assert_frequencies(found, p)
    np.testing.assert_allclose(float(out.num_accepted.mean()), np.dot(p, q), atol=0.004)
    np.testing.assert_allclose(float(out.accept_prob.mean()), np.dot(p, q), atol=0.004)


def test_zero_noise_never_accepts_zero_probability(monkeypatch):
    """Case 12: with u = 0 a token of p = 0 is rejected and one of p > 0 accepted."""
    logits = np.zeros((2, 2, 3), np.float32)
    logits[:, 0, 1] = -np.inf
    draw = DraftSampling(jnp.ones(2), jnp.zeros(2, jnp.uint32), jnp.zeros(2, jnp.int32))
    block = make_block(jnp.array([[1], [2]]), logits=jnp.zeros((1, 2, 3)))
    block = dataclasses.replace(block, num_draft=jnp.ones(2, jnp.int32))
    monkeypatch.setattr(verify_module, "uniform_from_bits", lambda bits: jnp.zeros(bits.shape))
    verify = jax.jit(functools.partial(verify_module.verify, rule="token"))
    out = verify(block, jnp.asarray(logits), draw, block.num_draft, None, None)
    np.testing.assert_array_equal(out.num_accepted, [0, 1])
    assert out.tokens[0, 0] != 1
    np.testing.assert_array_equal(out.accept_prob, [[0], [1]])


@pytest.mark.parametrize("with_filter", [False, True])
@pytest.mark.parametrize(
    ("form", "method"), [("logits", "probabilistic"), ("candidates", "probabilistic"), ("logits", "greedy")]
)
@pytest.mark.parametrize("rule", ["token", "target_only"])
def test_equals_the_reference(form, method, with_filter, rule):
    rng = np.random.default_rng(11)
    B, S, V = 96, 4, 11
    block, draw, target, q, filters = random_case(rng, B, S, V, form, method, with_filter)
    num_draft = rng.integers(0, S + 2, B)
    stop = np.array([3, 7])
    out = verify_block(
        block, target, draw, num_draft=num_draft, stop_ids=stop, rule=rule,
        target_filter=TargetFilter(**filters) if filters else None,
    )  # fmt: skip
    assert bool(out.valid.all())
    compared = 0
    for b in range(B):
        rows = [
            processed(target[b, s], draw.temperature[b], **{name: value[b] for name, value in filters.items()})
            for s in range(S + 1)
        ]
        n = int(min(block.num_draft[b], num_draft[b]))
        q_rows = q[b] if rule == "token" else np.eye(V)[block.tokens[b]]
        want = verify_one(block.tokens[b], n, q_rows, rows, draw.seed[b], draw.position[b], stop.tolist())
        np.testing.assert_allclose(out.accept_prob[b, :n], want.accept_prob, rtol=2e-5, atol=1e-7)
        np.testing.assert_array_equal(out.accept_prob[b, n:], 0)
        if want.closest < 1e-5:
            continue
        compared += 1
        c = len(want.tokens)
        assert out.tokens[b].tolist() == want.tokens + [-1] * (S + 1 - c), b
        assert int(out.num_accepted[b]) == want.num_accepted
        assert int(out.num_committed[b]) == c
        assert bool(out.stopped[b]) == (want.tokens[-1] in (3, 7))
        np.testing.assert_allclose(out.logprobs[b, :c], want.logprobs, rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(out.logprobs[b, c:], 0)
    assert compared > 0.9 * B


def test_greedy_and_sampled_rows_in_one_batch():
    """Case 6: temperatures [0, 1] (and below 1e-5, and NaN as greedy) in one batch; no NaN anywhere."""
    n = 4000
    p = np.array([0.1, 0.2, 0.3, 0.4])
    T = np.tile([0.0, 1.0, 1e-6], n).astype(np.float32)
    logits = np.broadcast_to(log(p), (3 * n, 2, 4))
    rows = np.broadcast_to(log([0.25] * 4), (1, 3 * n, 4))
    block = make_block(np.tile([[3], [3], [1]], (n, 1)), logits=rows)
    draw = DraftSampling(T, np.arange(3 * n), np.zeros(3 * n, int))
    out = verify_block(block, logits, draw)
    tokens = np.asarray(out.tokens).reshape(n, 3, 2)
    assert (tokens[:, 0] == [3, 3]).all()
    assert (tokens[:, 2] == [3, -1]).all()
    assert len(np.unique(tokens[:, 1, 1])) == 4
    assert all(np.isfinite(np.asarray(x)).all() for x in (out.accept_prob, out.logprobs))
    np.testing.assert_array_equal(np.asarray(out.logprobs).reshape(n, 3, 2)[:, 0], 0)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_bad_target_rows_commit_nothing(bad):
    """Cases 21 and 22: a row of NaN or of -inf empties its own request only; rows beyond num_draft may hold it."""
    rng = np.random.default_rng(3)
    block, draw, target, _, _ = random_case(rng, 6, 3, 9, "logits", "probabilistic", False)
    block = dataclasses.replace(block, num_draft=np.array([3, 3, 3, 1, 0, 3]))
    clean = verify_block(block, target, draw)
    broken = target.copy()
    broken[1, 0], broken[2, 3], broken[3, 2:], broken[4, 1] = bad, bad, bad, bad
    out = verify_block(block, broken, draw)
    np.testing.assert_array_equal(out.valid, [True, False, False, True, True, True])
    np.testing.assert_array_equal(np.asarray(out.tokens)[[1, 2]], -1)
    np.testing.assert_array_equal(np.asarray(out.num_accepted)[[1, 2]], 0)
    keep = [0, 3, 4, 5]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[keep], np.asarray(b)[keep])
    for x in (out.accept_prob, out.logprobs):
        assert np.isfinite(np.asarray(x)).all()
    one = target.copy()
    one[1, 0, 4] = np.nan
    assert not bool(verify_block(block, one, draw).valid[1])
