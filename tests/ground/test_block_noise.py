"""Case 8b: why noise is keyed by the block's start and not by a token's position in the sequence.

A verification rule that looks at later tokens (here block verification, Sun et al., arXiv 2403.10444, written in the
test) rejects a block because of tokens behind the point it goes back to. If the next block met their noise again, the
output would be biased. Drafts come from the library in both variants; only the position handed in differs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import bigram_weights, build_head
from scipy.stats import chisquare

from dspark_jax import DraftSampling, draft_from_logits
from dspark_jax.noise import ACCEPT, RESIDUAL, gumbel_from_bits, noise_bits, uniform_from_bits

N = 1_000_000
P, Q = np.array([0.2, 0.3, 0.5], np.float32), np.array([0.5, 0.4, 0.1], np.float32)


@functools.partial(jax.jit, static_argnames=("by_start",))
def first_two_tokens(head, by_start):
    """Two rounds of blocks of two tokens, target P and draft Q whatever the context: tokens int32 [N, 2]."""
    seeds, rows, ids = jnp.arange(N, dtype=jnp.uint32), jnp.arange(N)[:, None], jnp.arange(3)[None]
    zeros, one_step = jnp.zeros(N, jnp.int32), jnp.broadcast_to(jnp.log(Q), (1, N, 3))
    temperature = jnp.ones(N)

    def draft(start):
        if by_start:
            draw = DraftSampling(temperature, seeds, start)
            base = jnp.broadcast_to(one_step, (2, N, 3))
            return draft_from_logits(head, base, zeros, sampling=draw).tokens
        steps = [DraftSampling(temperature, seeds, start + i) for i in range(2)]
        return jnp.concatenate([draft_from_logits(head, one_step, zeros, sampling=d).tokens for d in steps], axis=1)

    def bits(start, step, stream, ids):
        position, step = (start, step) if by_start else (start + step, jnp.zeros_like(step))
        return noise_bits(seeds[:, None], position[:, None], step[:, None], stream, ids)

    def block_round(carry, _):
        history, start = carry
        x = draft(start)
        eta = [uniform_from_bits(bits(start, zeros + i, ACCEPT, x[:, i : i + 1]))[:, 0] for i in range(2)]
        p1 = jnp.minimum(1.0, jnp.asarray(P)[x[:, 0]] / jnp.asarray(Q)[x[:, 0]])
        p2 = jnp.minimum(1.0, p1 * jnp.asarray(P)[x[:, 1]] / jnp.asarray(Q)[x[:, 1]])
        p_row, q_row = jnp.asarray(P)[None], jnp.asarray(Q)[None]
        rest = jnp.maximum(p1[:, None] * p_row - q_row, 0.0)
        h1 = rest.sum(axis=1) / jnp.maximum(rest.sum(axis=1) + 1 - p1, 1e-30)
        kept = jnp.where(eta[1] < p2, 2, jnp.where(eta[0] < h1, 1, 0))
        left = jnp.where((kept == 1)[:, None], rest, jnp.maximum(p_row - q_row, 0.0))
        left = jnp.where((kept == 2)[:, None], p_row, left)
        last = jnp.argmax(jnp.log(left) + gumbel_from_bits(bits(start, kept, RESIDUAL, ids)), axis=1)
        index = jnp.arange(3)[None]
        new = jnp.concatenate([x, last[:, None]], axis=1)
        new = jnp.where(index == kept[:, None], last[:, None], new)
        where = jnp.where(index <= kept[:, None], start[:, None] + index, 99)
        return (history.at[rows, where].set(new, mode="drop"), start + kept + 1), None

    (history, _), _ = jax.lax.scan(block_round, (jnp.zeros((N, 6), jnp.int32), zeros), None, length=2)
    return history[:, :2]


def test_absolute_positions_bias_rules_that_look_ahead():
    head = build_head(bigram_weights(np.zeros((3, 3))))
    exact = np.multiply.outer(P, P).astype(np.float64).reshape(-1)
    exact /= exact.sum()
    counts = {
        by_start: np.bincount(np.asarray(first_two_tokens(head, by_start)) @ np.array([3, 1]), minlength=9)
        for by_start in (True, False)
    }
    variation = {by_start: 0.5 * np.abs(c / N - exact).sum() for by_start, c in counts.items()}
    assert chisquare(counts[True], exact * N).pvalue > 1e-4
    assert variation[True] < 0.002
    np.testing.assert_allclose(variation[False], 0.032, atol=0.004)
