"""The library against the independent PyTorch reference (reference.py), on random shapes of every kind of head."""

import numpy as np
import pytest
from helpers import (
    KINDS,
    assert_logits,
    assert_tokens,
    base_logits,
    bound,
    build_head,
    f32,
    make_inputs,
    make_weights,
    margin,
)

import dspark_jax

torch = pytest.importorskip("torch", reason="the reference is written in PyTorch, a test extra on Python 3.11 only")
from reference import ReferenceHead  # noqa: E402

torch.set_num_threads(1)  # the reference's products are tiny

# (V, Vd, H, r, S, B, k): sizes that are no multiple of anything, S from 1 to 16, B from 1 to 33, r from 1 up.
SHAPES = [
    (7, 7, 3, 1, 1, 1, 1),
    (37, 37, 12, 6, 7, 5, 4),
    (101, 61, 9, 5, 16, 3, 61),
    (1009, 1009, 33, 17, 3, 33, 13),
    (29, 34, 5, 2, 5, 4, 9),
]
FIELDS = [
    {},
    {"final_logit_softcapping": 3.0},
    {"logit_scale": 0.35},
    {"final_logit_softcapping": 5.0, "logit_scale": 2.5},
]


def cases():
    """Return every kind with every shape; dtype, options, confidence head and seed change along."""
    cases = [(kind, shape) for kind in KINDS for shape in SHAPES] + [(None, SHAPES[1]), (None, SHAPES[4])]
    return [
        pytest.param(kind, shape, ("float32", "bfloat16")[n % 2], n, id=f"{kind}-{'x'.join(map(str, shape))}-{n}")
        for n, (kind, shape) in enumerate(cases)
    ]


def to_target(rows, head, V):
    """Bring reference rows [..., Vd] to the target vocabulary [..., V]."""
    offsets = np.asarray(head.offsets)
    dense = np.full((*rows.shape[:-1], V), -np.inf)
    for draft in range(rows.shape[-1]):
        if draft + offsets[draft] < V:
            dense[..., draft + offsets[draft]] = rows[..., draft]
    return dense


@pytest.mark.parametrize(("kind", "shape", "dtype", "number"), cases())
def test_random_heads(kind, shape, dtype, number):
    V, Vd, H, r, S, B, k = shape
    confidence = ("markov" if kind else "hidden", "hidden", None)[number % 3]
    fields = FIELDS[number % 4]
    weights = make_weights(kind, V=V, Vd=Vd, H=H, r=r, seed=number + 40, confidence=confidence)
    if number % 5 == 1:
        weights.pop("confidence_head.proj.bias", None)
    hidden, anchors = make_inputs(B, S, H, V, seed=number)
    head = build_head(weights, dtype, vocab_size=V, **fields)
    softcap, scale = fields.get("final_logit_softcapping"), fields.get("logit_scale", 1.0)
    reference = ReferenceHead(weights, dtype, vocab_size=V, softcap=softcap, logit_scale=scale)

    rows = base_logits(head, hidden)
    base = np.swapaxes(rows, 0, 1)
    exact_base = reference.base_logits(hidden).numpy()
    assert_logits(base, exact_base, dtype)

    # Both walk from the library's base logits, so that rounding cannot change the candidates. Biases are part of the
    # sum's error whatever the sum, so bounds are of the largest of all logits.
    for topk in ((None, k), (k,), (None,))[(number + number // 3) % 3]:
        walk = reference.greedy(hidden, anchors, topk=topk, base=f32(base))
        options = {"hidden": hidden, "topk": topk, "outputs": "logits"}
        block = dspark_jax.draft_from_logits(head, rows, anchors, **options)
        allowed = bound(np.append(walk.logits[np.isfinite(walk.logits)], exact_base.ravel()), dtype)
        gaps = margin(walk.logits)
        assert_tokens(block.tokens, walk.tokens, gaps, 2 * allowed)
        clear = np.logical_and.accumulate(np.concatenate([np.ones((B, 1), bool), gaps[:, :-1] > 2 * allowed], 1), 1)
        found = f32(np.swapaxes(block.logits, 0, 1))
        assert found.shape == (B, S, V)
        wanted = to_target(walk.logits, reference, V)
        np.testing.assert_array_equal(np.isfinite(found)[clear], np.isfinite(wanted)[clear])
        error = np.abs(np.where(np.isfinite(wanted), found, 0) - np.where(np.isfinite(wanted), wanted, 0))
        assert error[clear].max() <= allowed
        if confidence is None:
            assert block.confidence_logits is None
        else:
            assert_logits(f32(block.confidence_logits)[clear], walk.confidence_logits[clear], dtype)
        if topk is not None and Vd <= V:
            top = dspark_jax.draft_from_logits(head, rows, anchors, hidden=hidden, topk=topk, outputs="candidates")
            ids = walk.candidates + np.asarray(reference.offsets)[walk.candidates]
            np.testing.assert_array_equal(np.swapaxes(top.candidate_ids, 0, 1), ids)

    prev = np.random.default_rng(number).integers(0, V, (B, S))
    forced = f32(np.swapaxes(dspark_jax.teacher_forced_logits(head, hidden, prev), 0, 1))
    columns = np.arange(Vd) + np.asarray(reference.offsets) < V
    exact = reference.teacher_forced(hidden, prev)[..., columns]
    assert_logits(forced[..., columns], exact, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_ties_go_to_the_lowest_id(kind):
    """Base logits of few values, both zeros among them, and no bias: candidates and tokens are the lowest ids."""
    V, S, B, k = 23, 4, 9, 6
    weights = make_weights(kind, V=V, H=5, r=3, confidence=None)
    weights["markov_head.markov_w2.weight"][:] = 0
    rng = np.random.default_rng(8)
    base = rng.choice(np.asarray([-1.0, -0.0, 0.0, 0.5], np.float32), (B, S, V), p=[0.3, 0.4, 0.25, 0.05])
    base[:, 1] = np.where(base[:, 1] > 0, -1, base[:, 1])  # rows whose best values are the zeros
    hidden, anchors = make_inputs(B, S, 5, V)
    walk = ReferenceHead(weights).greedy(hidden, anchors, topk=k, base=base)
    dense = ReferenceHead(weights).greedy(hidden, anchors, base=base)
    options = {"hidden": hidden}
    head, rows = build_head(weights), np.swapaxes(base, 0, 1)
    top = dspark_jax.draft_from_logits(head, rows, anchors, topk=k, outputs="candidates", **options)
    np.testing.assert_array_equal(np.swapaxes(top.candidate_ids, 0, 1), walk.candidates)
    np.testing.assert_array_equal(top.tokens, walk.tokens)
    np.testing.assert_array_equal(dspark_jax.draft_from_logits(head, rows, anchors, **options).tokens, dense.tokens)
    np.testing.assert_array_equal(dense.tokens, walk.tokens)
