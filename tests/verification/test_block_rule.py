"""Block verification: losslessness summed over all blocks, expectations against an independent NumPy version."""

import itertools

import jax
import numpy as np
import pytest
from helpers import softmax
from verify_cases import make_block, random_case
from verify_reference import processed, uniform

from dspark_jax import DraftSampling, TargetFilter, verify_block


def numpy_rule(tokens, q, p, n):
    """w [n+1] and h [n+1] (h[0] unused) of one block as the paper's algorithm 2 writes them; q [S, V], p [S+1, V]."""
    w, h = [1.0], [1.0]
    for i in range(1, n + 1):
        x = tokens[i - 1]
        w.append(min(1.0, w[-1] * p[i - 1][x] / q[i - 1][x]))
        if i == n:
            h.append(w[-1])
        else:
            left = np.maximum(w[-1] * p[i] - q[i], 0).sum()
            h.append(1.0 if left + 1 - w[-1] == 0 else left / (left + 1 - w[-1]))
    return np.array(w), np.array(h)


def world(seed, V=3, S=3):
    """Context-dependent target and draft: probabilities by prefix, and all blocks."""
    rng = np.random.default_rng(seed)
    prefixes = [c for n in range(S + 1) for c in itertools.product(range(V), repeat=n)]
    p = {c: softmax(1.5 * rng.normal(size=V)) for c in prefixes}
    q = {c: softmax(1.5 * rng.normal(size=V)) for c in prefixes}
    return p, q, list(itertools.product(range(V), repeat=S))


def verify_all(p, q, blocks, rule, **options):
    """Verify every block at once, at temperature 1."""
    S = len(blocks[0])
    rows_q = np.array([[np.log(q[x[:s]]) for x in blocks] for s in range(S)], np.float32)
    rows_p = np.array([[np.log(p[x[:s]]) for s in range(S + 1)] for x in blocks], np.float32)
    n = len(blocks)
    draw = DraftSampling(np.ones(n, np.float32), np.arange(n), np.zeros(n, int))
    return verify_block(make_block(np.array(blocks), logits=rows_q), rows_p, draw, rule=rule, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_sum_over_all_blocks_is_the_target(seed, n):
    """Chances of the library, residuals by NumPy: together they give the target's joint distribution exactly."""
    V, S = 3, 3
    p, q, blocks = world(seed)
    chance = np.asarray(verify_all(p, q, blocks, "block", num_draft=n).accept_prob, np.float64)
    joint = np.zeros((V,) * (S + 1))
    for x, keep in zip(blocks, chance, strict=True):
        rows_q, rows_p = [q[x[:s]] for s in range(S)], [p[x[:s]] for s in range(S + 1)]
        drawn = np.prod([rows_q[s][x[s]] for s in range(S)])
        w, _ = numpy_rule(x, rows_q, rows_p, n)
        at_least = np.concatenate([[1.0], np.cumprod(keep[:n]), [0.0]])
        for a in range(n + 1):
            left = rows_p[n] if a == n else np.maximum(w[a] * rows_p[a] - rows_q[a], 0)
            weight = drawn * (at_least[a] - at_least[a + 1])
            if weight < 1e-12:
                continue
            for y in range(V):
                head = (*x[:a], y)
                for more in itertools.product(range(V), repeat=S - a):  # what follows is the target's own
                    full = head + more
                    chance_of_rest = np.prod([p[full[:i]][full[i]] for i in range(a + 1, S + 1)]) if more else 1.0
                    joint[full] += weight * left[y] / left.sum() * chance_of_rest
    expected = np.zeros_like(joint)
    for full in itertools.product(range(V), repeat=S + 1):
        expected[full] = np.prod([p[full[:i]][full[i]] for i in range(S + 1)])
    np.testing.assert_allclose(joint, expected, atol=2e-6)


def test_it_accepts_at_least_as_many():
    """Expected accepted lengths: the library's chances against NumPy, and against the token rule."""
    gains = []
    for seed in range(20):
        p, q, blocks = world(seed)
        drawn = np.array([np.prod([q[x[:s]][x[s]] for s in range(3)]) for x in blocks])

        def length(rule, p=p, q=q, blocks=blocks, drawn=drawn):
            chance = np.asarray(verify_all(p, q, blocks, rule).accept_prob, np.float64)
            return (drawn * np.cumprod(chance, axis=1).sum(axis=1)).sum()

        expected = 0.0
        for x, weight in zip(blocks, drawn, strict=True):
            _, h = numpy_rule(x, [q[x[:s]] for s in range(3)], [p[x[:s]] for s in range(4)], 3)
            expected += weight * sum(1 - np.prod(1 - h[i:]) for i in range(1, 4))
        token, block = length("token"), length("block")
        assert abs(block - expected) < 1e-5
        assert block > token - 1e-6
        gains.append(block - token)
    assert max(gains) > 0.01


@pytest.mark.parametrize("form", ["logits", "candidates"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("with_filter", [False, True])
def test_rows_of_any_kind(form, method, with_filter):
    """Random rows, filters, lengths and temperatures: each request as NumPy verifies it."""
    rng = np.random.default_rng(7)
    B, S, V = 40, 4, 9
    block, draw, target, q, filters = random_case(rng, B, S, V, form, method, with_filter)
    target_filter = TargetFilter(**filters) if with_filter else None
    out = verify_block(block, target, draw, target_filter=target_filter, rule="block")
    chunked = verify_block(block, target, draw, target_filter=target_filter, rule="block", chunk_size=7)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), out, chunked)
    for b in range(B):
        one = {name: value[b] for name, value in filters.items()}
        p = [processed(target[b, s], np.float64(draw.temperature[b]), **one) for s in range(S + 1)]
        n, x = int(block.num_draft[b]), block.tokens[b]
        w, h = numpy_rule(x, q[b], p, n)
        u = np.array([uniform(draw.seed[b], draw.position[b], s, 1, x[s]) for s in range(n)])
        if n and np.abs(u - h[1:]).min() < 1e-4:
            continue
        accepted = max([i for i in range(1, n + 1) if u[i - 1] < h[i]], default=0)
        assert int(out.num_accepted[b]) == accepted
        left = p[n] if accepted == n else np.maximum(w[accepted] * p[accepted] - q[b, accepted], 0)
        left = left if (left > 0).any() else p[accepted]
        last = int(out.tokens[b, accepted])
        noise = [-np.log(-np.log1p(-uniform(draw.seed[b], draw.position[b], accepted, 2, i))) for i in range(V)]
        with np.errstate(divide="ignore"):
            score = np.log(left) + np.array(noise)
        assert score[last] > score.max() - 1e-3


def test_stop_tokens_end_a_block():
    p, q, blocks = world(1)
    out = verify_all(p, q, blocks, "block")
    stopped = verify_all(p, q, blocks, "block", stop_ids=[1])
    for whole, cut in zip(np.asarray(out.tokens), np.asarray(stopped.tokens), strict=True):
        end = list(whole).index(1) + 1 if 1 in whole else 4
        np.testing.assert_array_equal(cut[:end], whole[:end])
        assert (cut[end:] == -1).all()
