"""verify_block against an independent NumPy reference, and the cases that verifiers of this kind have got wrong."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDENS, KINDS, make_head, make_inputs, read
from scipy.stats import chisquare
from verify_reference import processed, softmax, verify_one

import dspark_jax.verification.verify as verify_module
from dspark_jax import DraftBlock, DraftSampling, TargetFilter, draft_block, verify_block
from dspark_jax.trace_count import Program

N = 400_000


def make_block(tokens, *, logits=None, ids=None, values=None, method="probabilistic", num_draft=None) -> DraftBlock:
    """A block by hand; tokens [B, S], logits [S, B, V] or candidates [S, B, k]."""
    tokens = np.asarray(tokens)
    B, S = tokens.shape
    return DraftBlock(
        tokens=tokens,
        num_draft=np.full(B, S) if num_draft is None else np.asarray(num_draft),
        valid=np.ones(B, bool),
        confidence_logits=None,
        logits=logits,
        candidate_ids=ids,
        candidate_logits=values,
        method=method,
    )


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
    drafted = np.asarray(jnp.argmax(log(q) + gumbel_from_bits(bits), axis=1))[:, None]
    found, _ = frequencies(p, q, noise=drafted)
    assert_frequencies(found, p)
    monkeypatch.setattr(verify_module, "RESIDUAL", DRAFT)
    monkeypatch.setattr(verify_module, "VERIFY", fresh_program())
    found, _ = frequencies(p, q, noise=drafted)
    np.testing.assert_allclose(found, [0.101, 0.559, 0.340], atol=0.004)


def fresh_program():
    """The jitted program without what it has cached, so that it sees a patched module."""
    return Program(verify_module._verify_chunks, static=("rule", "chunk_size"))


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


def random_case(rng, B, S, V, form, method, with_filter):
    """Random logits with some -inf, random temperatures (greedy ones too), lengths and seeds."""
    T = rng.choice([0.0, 1e-6, 0.3, 1.0, 1.7], B).astype(np.float32)
    draft = (2 * rng.normal(size=(S, B, V))).astype(np.float32)
    draft[rng.random(draft.shape) < 0.2] = -np.inf
    draft[..., 0] = np.where(np.isfinite(draft).any(-1), draft[..., 0], 0.0)
    target = (2 * rng.normal(size=(B, S + 1, V)) + 0.7 * np.maximum(draft[0], -3)[:, None]).astype(np.float32)
    k = V if form == "logits" else rng.integers(1, V + 1)
    ids = np.argsort(-draft, axis=-1, kind="stable")[..., :k].astype(np.int32)
    if form == "candidates":
        kept = np.full_like(draft, -np.inf)
        np.put_along_axis(kept, ids, np.take_along_axis(draft, ids, -1), -1)
        draft = kept
    q = np.zeros((B, S, V))
    tokens = np.zeros((B, S), np.int32)
    for b in range(B):
        for s in range(S):
            row = draft[s, b].astype(np.float64)
            if method == "greedy" or not T[b] >= 1e-5:
                q[b, s] = np.eye(V)[np.argmax(row)]
            else:
                q[b, s] = softmax(row / np.float64(T[b]))
            tokens[b, s] = rng.choice(V, p=q[b, s])
    kw = {"logits": draft} if form == "logits" else {"ids": ids, "values": np.take_along_axis(draft, ids, -1)}
    block = make_block(tokens, method=method, num_draft=rng.integers(0, S + 1, B), **kw)
    draw = DraftSampling(T, rng.integers(0, 2**32, B, dtype=np.uint64), rng.integers(0, 10**6, B))
    filters = {}
    if with_filter:
        filters = {
            "allowed": rng.random((B, V)) < 0.7,
            "min_p": rng.choice([0.0, 0.1, 0.5], B).astype(np.float32),
            "top_k": rng.choice([-1, 0, 1, 3, V, V + 5], B),
            "top_p": rng.choice([1.0, 0.9, 0.4, 0.0], B).astype(np.float32),
        }
        filters["allowed"][np.arange(B), rng.integers(0, V, B)] = True
    return block, draw, target, q, filters


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


def test_bad_draft_rows_end_the_draft():
    """Cases 21 to 23 end to end: NaN hidden states and anchors outside [0, V) shorten the draft, the target goes on."""
    V, S, H, B = 11, 4, 12, 6
    head = make_head("gated", V=V, H=H)
    hidden, anchor = make_inputs(B, S, H, V)
    draw = DraftSampling(np.ones(B), np.arange(B), np.zeros(B, int))
    target = np.random.default_rng(0).normal(size=(B, S + 1, V)).astype(np.float32)
    clean_block = draft_block(head, hidden, anchor, sampling=draw, outputs="logits")
    clean = verify_block(clean_block, target, draw)
    hidden[1, 2] = np.nan
    anchor = anchor.copy()
    anchor[2], anchor[3] = V, -1
    block = draft_block(head, hidden, anchor, sampling=draw, outputs="logits")
    np.testing.assert_array_equal(block.valid, [True, False, False, False, True, True])
    np.testing.assert_array_equal(block.num_draft, [4, 2, 0, 0, 4, 4])
    out = verify_block(block, target, draw)
    assert bool(out.valid.all())
    tokens = np.asarray(out.tokens)
    assert (tokens[:, 0] >= 0).all()
    assert (tokens < V).all()
    assert (tokens[1, 3:] == -1).all()
    assert (tokens[2:4, 1:] == -1).all()
    keep = [0, 4, 5]
    np.testing.assert_array_equal(tokens[keep], np.asarray(clean.tokens)[keep])
    # What the target gives without a draft does not depend on what was wrong with the draft.
    plain = verify_block(clean_block, target, draw, num_draft=0)
    np.testing.assert_array_equal(tokens[2:4], np.asarray(plain.tokens)[2:4])


def test_num_draft_only_lowers():
    rng = np.random.default_rng(5)
    block, draw, target, _, _ = random_case(rng, 8, 3, 9, "logits", "probabilistic", False)
    block = dataclasses.replace(block, num_draft=np.array([0, 1, 2, 3, 0, 1, 2, 3]))
    same = verify_block(block, target, draw, num_draft=3)
    for a, b in zip(jax.tree.leaves(verify_block(block, target, draw)), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(same.num_accepted) <= block.num_draft).all()
    assert (np.asarray(same.accept_prob) > 0).sum(axis=1).max() <= 3
    none = verify_block(block, target, draw, num_draft=np.full(8, -2))
    np.testing.assert_array_equal(none.num_accepted, 0)
    np.testing.assert_array_equal(none.num_committed, 1)


@pytest.mark.parametrize(("form", "sizes"), [("logits", (5,)), ("candidates", (1, 99))])
def test_chunks_rows_and_batches_change_nothing(form, sizes):
    """Every output bit of a request is the same in any chunk, row or batch, and beside any neighbour (case 24)."""
    rng = np.random.default_rng(9)
    B, S, V = 13, 3, 301
    block, draw, target, _, filters = random_case(rng, B, S, V, form, "probabilistic", True)
    filters = filters if form == "candidates" else {"allowed": filters["allowed"]}
    kw = {"target_filter": TargetFilter(**filters), "stop_ids": np.arange(0, V, 5)}
    whole = verify_block(block, target, draw, **kw)
    for size in sizes:
        chunked = verify_block(block, target, draw, chunk_size=size, **kw)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"chunk_size {size}")
    order = rng.permutation(B)[:7]
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    part = {n: None if x is None else x[:, order] if n in wide else x[order] for n, x in fields.items()}
    out = verify_block(
        DraftBlock(method="probabilistic", **part), target[order],
        DraftSampling(draw.temperature[order], draw.seed[order], draw.position[order]),
        target_filter=TargetFilter(**{n: x[order] for n, x in filters.items()}), stop_ids=kw["stop_ids"],
    )  # fmt: skip
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)


def test_chunk_of_one_request_reads_no_other():
    """Chunks never cross a request: NaN in request 4 leaves the requests before and after it alone at every size."""
    rng = np.random.default_rng(10)
    block, draw, target, _, _ = random_case(rng, 9, 2, 17, "logits", "probabilistic", False)
    block = dataclasses.replace(block, num_draft=np.full(9, 2))
    clean = verify_block(block, target, draw)
    target[4] = np.nan
    for size in (2, 4):
        out = verify_block(block, target, draw, chunk_size=size)
        keep = np.arange(9) != 4
        np.testing.assert_array_equal(np.asarray(out.tokens)[keep], np.asarray(clean.tokens)[keep])
        np.testing.assert_array_equal(out.valid, keep)


def test_stop_tokens():
    """Nothing after the first stop token; one among the accepted tokens ends the block without a bonus token."""
    p = np.full((4, 4, 5), -np.inf, np.float32)
    for s, token in enumerate([1, 2, 3, 4]):
        p[:, s, token] = 0.0
    block = make_block(np.tile([1, 2, 3], (4, 1)), method="greedy")
    stop = np.array([[-1, -1], [2, -1], [4, 0], [1, 4]])
    out = verify_block(block, p, None, stop_ids=stop)
    np.testing.assert_array_equal(out.tokens, [[1, 2, 3, 4], [1, 2, -1, -1], [1, 2, 3, 4], [1, -1, -1, -1]])
    np.testing.assert_array_equal(out.num_accepted, [3, 2, 3, 1])
    np.testing.assert_array_equal(out.stopped, [False, True, True, True])


def test_allowed_mask_per_row():
    """A mask per row forbids a drafted token; a row beyond the rejection may forbid everything."""
    logits = np.zeros((1, 3, 4), np.float32)
    allowed = np.ones((1, 3, 4), bool)
    allowed[0, 0, 2] = False
    allowed[0, 1:] = False
    block = make_block([[2, 1]], method="greedy")
    draw = DraftSampling([1.0], [5], [0])
    out = verify_block(block, logits, draw, target_filter=TargetFilter(allowed=allowed))
    assert bool(out.valid[0])
    assert int(out.num_accepted[0]) == 0
    assert int(out.tokens[0, 0]) in (0, 1, 3)
    np.testing.assert_allclose(out.logprobs[0, 0], np.log(1 / 3), rtol=1e-6)
    allowed[0, 0] = False
    out = verify_block(block, logits, draw, target_filter=TargetFilter(allowed=allowed))
    assert not bool(out.valid[0])
    np.testing.assert_array_equal(out.tokens, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_rounds_of_the_trained_checkpoints(kind):
    """Case 27: the reference's drafts and greedy output give its acceptance lengths; one slot off they fall apart."""
    recorded = json.loads((GOLDENS / "rounds" / kind / "greedy.json").read_text())
    right, wrong = [], []
    for prompt in (0, 1):
        tensors, output = (
            read(GOLDENS / "rounds" / kind / f"prompt{prompt}.safetensors"),
            recorded[prompt]["output_ids"],
        )
        rounds = sum(name.endswith(".tokens") for name in tensors)
        for r in range(rounds):
            start = int(tensors[f"round{r}.start"])
            drafted = tensors[f"round{r}.tokens"].reshape(1, -1).astype(np.int32)
            want = recorded[prompt]["acceptance_lengths"][r]
            truth = np.array(output[start + 1 : start + 2 + drafted.shape[1]])
            truth = np.pad(truth, (0, drafted.shape[1] + 1 - len(truth)))
            logits = np.eye(4096, dtype=np.float32)[truth][None]
            out = verify_block(make_block(drafted, method="greedy"), logits, None)
            np.testing.assert_array_equal(out.tokens[0, :want], truth[:want])
            right.append((int(out.num_committed[0]), want))
            off = np.eye(4096, dtype=np.float32)[np.roll(truth, -1)][None]
            wrong.append(int(verify_block(make_block(drafted, method="greedy"), off, None).num_committed[0]))
    found, want = np.array(right).T
    np.testing.assert_array_equal(found, want)
    assert np.mean(wrong) < 0.7 * np.mean(want)


def test_one_trace_for_all_values():
    """Lists, NumPy of any width and JAX arrays, temperatures, seeds, lengths and thresholds share one trace."""
    rng = np.random.default_rng(1)
    B, S, V = 3, 2, 29
    block, draw, target, _, _ = random_case(rng, B, S, V, "logits", "probabilistic", False)
    before = verify_module.VERIFY.traces
    verify_block(block, target, draw, num_draft=2, stop_ids=[1])
    lists = DraftSampling([0.5, 1, 0], [1, 2, 3], [4, 5, 6])
    verify_block(block, target.tolist(), lists, num_draft=[1, 2, 0], stop_ids=np.array([5], np.int64))
    weak = DraftSampling(jnp.full(B, 0.7), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32))
    verify_block(jax.tree.map(jnp.asarray, block), jnp.asarray(target), weak, num_draft=jnp.ones(B, int), stop_ids=(2,))
    assert verify_module.VERIFY.traces == before + 1
    jitted = jax.jit(lambda block, target, draw: verify_block(block, target, draw, num_draft=2, stop_ids=[1]))
    got, want = jitted(block, target, draw), verify_block(block, target, draw, num_draft=2, stop_ids=[1])
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def test_candidates_are_never_expanded_but_for_one_row():
    """The compiled program for candidates holds no [S, B, V] array; only the target's [B, S+1, V] and rows [B, V]."""
    B, S, V, k = 5, 3, 1009, 4
    ids = np.broadcast_to(np.arange(k), (S, B, k))
    block = make_block(np.zeros((B, S), int), ids=ids, values=np.zeros((S, B, k), np.float32))
    draw = DraftSampling(np.ones(B), np.arange(B), np.zeros(B, int))
    trace = jax.make_jaxpr(lambda block, logits: verify_block(block, logits, draw))(
        block, np.zeros((B, S + 1, V), np.float32)
    )
    shapes = {v.aval.shape for eqn in equations(trace.jaxpr) for v in eqn.outvars}
    assert (B, V) in shapes
    assert (S, B, V) not in shapes
    assert (B, S, V) in shapes or (B, S + 1, V) in shapes


def equations(jaxpr):
    """All equations of a jaxpr and of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def good():
    block, draw, target, _, _ = random_case(np.random.default_rng(0), 2, 3, 7, "logits", "probabilistic", False)
    return {"block": block, "target_logits": target, "sampling": draw}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"block": dataclasses.replace(a["block"], logits=None)}, r'block.logits.*outputs="logits" or "cand'),
        (lambda a: {"block": "tokens"}, "block: found 'str'"),
        (lambda a: {"block": dataclasses.replace(a["block"], logits=np.zeros((3, 2, 6), "f"))}, "block.logits.shape"),
        (lambda a: {"target_logits": a["target_logits"][:, :3]}, r"target_logits.shape.*\[2, 4, any\]"),
        (lambda a: {"target_logits": a["target_logits"].astype(int)}, "target_logits.dtype.*float"),
        (lambda a: {"sampling": None}, "sampling: found None"),
        (lambda a: {"sampling": dataclasses.replace(a["sampling"], seed=np.array([-1, 2]))}, "sampling.seed.*-1"),
        (lambda a: {"sampling": dataclasses.replace(a["sampling"], seed=np.array([2**40, 2]))}, "sampling.seed"),
        (lambda a: {"num_draft": [1, 2, 3]}, r"num_draft.shape.*\[2\]"),
        (lambda a: {"num_draft": 1.5}, "num_draft.dtype.*integer"),
        (lambda a: {"rule": "fast"}, "rule: found 'fast', expected one of token, target_only"),
        (lambda a: {"chunk_size": 0}, "chunk_size: found 0"),
        (lambda a: {"stop_ids": [[1], [2], [3]]}, "stop_ids.shape"),
        (lambda a: {"stop_ids": [0.5]}, "stop_ids.dtype"),
        (lambda a: {"target_filter": 0.9}, "target_filter: found 'float'"),
        (lambda a: {"target_filter": TargetFilter(allowed=np.ones((2, 6), bool))}, "target_filter.allowed.shape"),
        (lambda a: {"target_filter": TargetFilter(allowed=np.ones((2, 7)))}, "target_filter.allowed.dtype.*bool"),
        (lambda a: {"target_filter": TargetFilter(top_k=0.5)}, "target_filter.top_k.dtype"),
        (lambda a: {"target_filter": TargetFilter(top_p=[0.5])}, "target_filter.top_p.shape"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = good()
    arguments |= change(arguments)
    with pytest.raises(ValueError, match=message):
        verify_block(**arguments)


def test_tokens_only_block_is_an_error_whatever_the_temperature():
    a = good()
    block = dataclasses.replace(a["block"], logits=None)
    greedy = dataclasses.replace(a["sampling"], temperature=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="outputs="):
        verify_block(block, a["target_logits"], greedy)
    verify_block(block, a["target_logits"], greedy, rule="target_only")
