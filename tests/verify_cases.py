"""What the tests of verify share."""

import numpy as np
from verify_reference import softmax

from dspark_jax import DraftBlock, DraftSampling


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
