"""Sampled speculative decoding keeps the target's distribution: counts over many requests of the real loop.

A random Qwen3 target over eight tokens; the exact joint distribution of the first three tokens comes from its own
logits after every prefix. The first is drawn behind the prompt, the others by a round of draft and verification.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from tiny import build_drafter, drafter_weights, make_target, raw_config

from dspark_jax import DraftSampling, generate
from dspark_jax.verification.distributions import DenseDraft

V, BATCH = 8, 16384
PROMPT = [3]
SMALL = {"vocab_size": V, "block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [-1, 0], "num_target_layers": 2}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Prompts and caches are padded to four tokens, which makes large batches cheap."""
    monkeypatch.setattr("dspark_jax.decoding.inputs.BUCKET", 4)


@pytest.fixture(scope="module")
def target():
    """A target of two layers whose rows are neither flat nor one-hot."""
    return make_target(num_hidden_layers=2, vocab_size=V)


def joint(target, temperature):
    """Return the exact joint distribution [V, V, V] of three tokens behind the prompt."""
    heads = np.array(list(itertools.product(range(V), repeat=2)), np.int32)
    tokens = np.concatenate([np.tile(PROMPT, (V * V, 1)), heads], axis=1).astype(np.int32)

    @jax.jit
    def logits(target, tokens):
        start = jnp.zeros((tokens.shape[0],), jnp.int32)
        hidden, _, _ = target.forward(tokens, start, target.make_cache(*tokens.shape), ())
        return target.logits(hidden)

    rows = np.asarray(jax.nn.softmax(logits(target, tokens) / temperature, axis=-1), np.float64)
    rows = rows.reshape(V, V, len(PROMPT) + 2, V)[:, :, len(PROMPT) - 1 :]
    return rows[0, 0, 0][:, None, None] * rows[:, 0, 1][:, :, None] * rows[:, :, 2]


def counts(target, drafter, temperature, calls, **options):
    """Count the first three tokens of calls * BATCH requests."""
    table, lengths = np.zeros((V, V, V), np.int64), []
    for call in range(calls):
        seeds = np.arange(BATCH, dtype=np.uint32) + np.uint32(call * BATCH)
        draw = DraftSampling(np.full(BATCH, temperature, np.float32), seeds, np.zeros(BATCH, np.int32))
        out = generate(target, drafter, [PROMPT] * BATCH, sampling=draw, max_new_tokens=3, **options)
        np.add.at(table, tuple(np.stack(out.tokens).T), 1)
        lengths.append(out.acceptance_length)
    return table, float(np.mean(lengths))


def p_value(table, expected):
    """Chi-square p-value; cells expected fewer than five times are pooled."""
    table, expected = table.reshape(-1), expected.reshape(-1) * table.sum()
    rare = expected < 5
    observed = np.append(table[~rare], table[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = (x[expected > 0] for x in (observed, expected))
    return scipy.stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


CASES = {  # temperature, calls of 16384 requests, options, fields of the drafter's config
    "candidates": (0.6, 25, {"draft_topk": 2}, {}),
    "dense, confidence threshold": (1.0, 7, {"min_confidence": 0.3}, {}),
    "plain round, then drafted": (1.0, 7, {"num_speculative_tokens": [0, 3, 3]}, {}),
    "greedy draft": (1.5, 7, {"draft_sample_method": "greedy"}, {}),
    "target only, slot 0 dropped": (
        1.0,
        7,
        {"rule": "target_only", "num_speculative_tokens": 2},
        {"sample_from_anchor": False, "block_size": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_joint_distribution_of_three_tokens_is_the_targets(name, target):
    temperature, calls, options, fields = CASES[name]
    raw = raw_config(**SMALL | fields)
    drafter = build_drafter(raw, drafter_weights(raw, seed=8))
    table, length = counts(target, drafter, temperature, calls, **options)
    assert table.sum() == BATCH * calls
    assert p_value(table, joint(target, temperature)) > 1e-4
    assert length > 1.02


@pytest.mark.slow
def test_the_count_notices_a_wrong_rule(target, monkeypatch):
    """With q taken 1.15 times too large where tokens are accepted, the same counts are rejected."""
    raw = raw_config(**SMALL)
    drafter = build_drafter(raw, drafter_weights(raw, seed=8))
    right = DenseDraft.at
    monkeypatch.setattr(DenseDraft, "at", lambda self, tokens: right(self, tokens) * 1.15)
    table, _ = counts(target, drafter, 1.0, 7, logits_dtype="bfloat16")
    assert p_value(table, joint(target, 1.0)) < 1e-6


@pytest.mark.slow
def test_plain_sampling_draws_from_the_target(target):
    table, length = counts(target, None, 0.8, 7)
    assert p_value(table, joint(target, 0.8)) > 1e-4
    assert length == 1
