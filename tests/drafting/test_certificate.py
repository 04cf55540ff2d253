"""A certified token is the dense one: random steps of many heads, ties included, against the dense draft of each."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, build_head, make_head, make_inputs, make_weights
from safetensors.numpy import load_file

from dspark_jax import DraftSampling, draft_block, draft_from_logits, load_head

N = 4096  # steps at a time
# V, r, k, m, dtype of the weights, dtype of the logits
SHAPES = [
    (64, 4, 4, 4, "float32", "float32"),
    (300, 16, 8, 8, "float32", "bfloat16"),
    (300, 16, 16, 5, "bfloat16", "bfloat16"),
    (97, 64, 6, 12, "bfloat16", "float32"),
    (150, 8, 10, 0, "float32", "float16"),
]


def steps(head, base, anchors, k, m, dtype):
    """Draft one step for each of N rows: (certified [N], its tokens, the dense tokens)."""
    block = draft_from_logits(head, base[None], anchors, topk=k, markov_topk=m, logits_dtype=dtype)
    dense = draft_from_logits(head, base[None], anchors, logits_dtype=dtype)
    return np.asarray(block.certified)[:, 0], np.asarray(block.tokens)[:, 0], np.asarray(dense.tokens)[:, 0]


def random_steps(shape, seed: int) -> tuple[int, int]:
    """Return how many of N random steps are certified, and how many of those are not dense."""
    V, r, k, m, dtype, logits_dtype = shape
    rng = np.random.default_rng(seed)
    weights = make_weights("vanilla", V=V, r=r, seed=seed, confidence=None)
    # Small coarse values make ties and near ties; a bias of the base's size makes both lists matter.
    coarse = rng.choice([0.0, 0.125, 0.5])
    base = rng.normal(size=(N, V)) * rng.choice([0.5, 2.0, 8.0])
    base = np.round(base / coarse) * coarse if coarse else base
    head = build_head(weights, dtype).with_continuations(m)
    base = jnp.asarray(base.astype(np.float32), "float32" if coarse else logits_dtype)
    proof, tokens, dense = steps(head, base, rng.integers(0, V, N), k, m, logits_dtype)
    return int(proof.sum()), int((proof & (tokens != dense)).sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_certified_means_dense(shape):
    found = [random_steps(shape, seed) for seed in range(3)]
    assert sum(wrong for _, wrong in found) == 0
    assert sum(count for count, _ in found) > 0.02 * 3 * N


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_certified_means_dense_in_a_million_steps(shape):
    assert sum(random_steps(shape, seed)[1] for seed in range(100, 150)) == 0


@pytest.mark.parametrize("m", [0, 3])
def test_whole_numbers_need_no_margin(m):
    """Sums are exact, so a step is certified exactly where its token exceeds the unseen bound."""
    V, r, k = 40, 5, 3
    rng = np.random.default_rng(m)
    weights = make_weights("vanilla", V=V, r=r, confidence=None)
    w1, w2 = rng.integers(-2, 3, (V, r)), rng.integers(-2, 3, (V, r))
    weights |= {
        "markov_head.markov_w1.weight": w1.astype(np.float32),
        "markov_head.markov_w2.weight": w2.astype(np.float32),
    }
    base, anchors = rng.integers(-9, 10, (N, V)), rng.integers(0, V, N)
    bias = w1[anchors] @ w2.T
    order, known = np.argsort(-base, kind="stable"), np.argsort(-bias, kind="stable")
    at = np.arange(N)
    seen = np.zeros((N, V), bool)
    seen[at[:, None], order[:, :k]] = True
    seen[at[:, None], known[:, :m]] = True
    total = base + bias
    token = np.argmax(np.where(seen, total, -1000), axis=1)
    bound = base[at, order[:, k - 1]] + bias[at, known[:, max(m - 1, 0)]]
    for dtype in ("float32", "bfloat16"):
        for table in {m, m and m + 2}:  # a larger table gives the same certificate
            head = build_head(weights, dtype).with_continuations(table)
            proof, tokens, dense = steps(head, jnp.asarray(base, dtype), anchors, k, m, "float32")
            np.testing.assert_array_equal(tokens, token)
            np.testing.assert_array_equal(dense, np.argmax(total, axis=1))
            np.testing.assert_array_equal(proof, total[at, token] > bound)
    # Rows of this kind tell a strict bound from a loose one: equal to the bound, some are not dense.
    tied = total[at, token] == bound
    assert (token[tied] != np.argmax(total, axis=1)[tied]).any()


def test_the_margin_covers_every_order_of_summation():
    """Biases summed in random orders in float32 stay within the bound of each other."""
    weights = make_weights("vanilla", V=50, r=33, confidence=None)
    table = build_head(weights).with_continuations(0).continuations
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    slack = np.asarray(table.slack[...])
    rng = np.random.default_rng(0)
    products = w1[:, None] * w2[None]
    sums = []
    for _ in range(20):
        total = np.zeros((50, 50), np.float32)
        for i in rng.permutation(33):
            total = (total + products[..., i]).astype(np.float32)
        sums.append(total)
    spread = np.max(sums, axis=0) - np.min(sums, axis=0)
    assert (spread > 0).any()
    assert (spread <= (np.abs(w1) @ slack)[:, None]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_certified(kind):
    head = make_head(kind, H=12)
    hidden, anchors = make_inputs(2, 3, 12, 37)
    draw = DraftSampling(np.ones(2, np.float32), np.arange(2), np.arange(2))
    assert draft_block(head, hidden, anchors, topk=4).certified is None
    more = head.with_continuations(0)
    assert draft_block(more, hidden, anchors, topk=4, sampling=draw).certified is None
    for topk in (4, None):
        found = draft_block(more, hidden, anchors, topk=topk).certified
        assert (found is not None) == (kind == "vanilla")
        assert found is None or found.shape == (2, 3)


def test_broken_rows_prove_nothing():
    head = make_head("vanilla", H=12).with_continuations(4)
    base = np.random.default_rng(0).normal(size=(2, 3, 37)).astype(np.float32)
    base[0, 0, 5], base[0, 1], base[1, 2, 7] = np.nan, -np.inf, np.inf
    block = draft_from_logits(head, base, [1, 2, 3], topk=5, markov_topk=4)
    assert not np.asarray(block.certified)[[0, 1], 0].any()
    assert not np.asarray(block.valid)[[0, 1]].any()


def test_recorded_rounds_of_the_bundled_drafter(checkpoints, goldens):
    """Budgets whose steps are proven on the recorded rounds; the dense argmax is found in all of them."""
    head = load_head(checkpoints / "dspark-vanilla", dtype="float32", target=checkpoints / "target")
    head = head.with_continuations(64)
    files = [load_file(path) for path in sorted((goldens / "rounds" / "vanilla").glob("*.safetensors"))]
    rounds = [(f, f"round{i}.") for f in files for i in range(9) if f"round{i}.base_logits" in f]
    base = np.stack([f[name + "base_logits"] for f, name in rounds], axis=1)
    anchors = np.array([f[name + "draft_input_ids"][0] for f, name in rounds])
    recorded = np.stack([f[name + "tokens"] for f, name in rounds])
    for k, m, share in ((64, 64, 0.96 * 0.97), (64, 0, 0.3)):
        block = draft_from_logits(head, base, anchors, topk=k, markov_topk=m)
        proof, tokens = np.asarray(block.certified), np.asarray(block.tokens)
        assert proof.mean() >= share
        # Certified from the first step on, the draft is the dense one.
        np.testing.assert_array_equal(tokens[proof.cumprod(axis=1) > 0], recorded[proof.cumprod(axis=1) > 0])
        if m:
            np.testing.assert_array_equal(tokens, recorded)
