"""Entry points at the edges: no jit, no transfers, empty batches, values that would narrow silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_head, make_inputs
from tiny import make_pair

from dspark_jax import (
    DraftBlock,
    DraftSampling,
    TargetFilter,
    draft_block,
    draft_from_logits,
    generate,
    verify_block,
)

B, S, V = 3, 4, 37
DRAW = DraftSampling(np.ones(B, np.float32), np.arange(B, dtype=np.uint32), np.arange(B, dtype=np.int32))
TARGET = np.random.default_rng(0).normal(size=(B, S + 1, V)).astype(np.float32)


@pytest.fixture(scope="module")
def head():
    return make_head("vanilla", H=12).with_continuations(4)


@pytest.fixture(scope="module")
def block(head):
    return draft_block(head, *make_inputs(B, S, 12, V), sampling=DRAW, outputs="logits")


@pytest.mark.slow
def test_without_jit(head, block):
    hidden, anchors = make_inputs(B, S, 12, V)
    filters = TargetFilter(min_p=0.01, top_k=20, top_p=0.9)
    options = {"topk": 5, "markov_topk": 3, "outputs": "candidates"}
    drafted = draft_block(head, hidden, anchors, **options)
    verified = [verify_block(block, TARGET, DRAW, target_filter=filters, rule=rule) for rule in ("token", "block")]
    with jax.disable_jit():
        np.testing.assert_array_equal(draft_block(head, hidden, anchors, **options).tokens, drafted.tokens)
        for rule, expected in zip(("token", "block"), verified, strict=True):
            out = verify_block(block, TARGET, DRAW, target_filter=filters, rule=rule)
            np.testing.assert_array_equal(out.tokens, expected.tokens)


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"rule": "block"}, {"sampling": None}], ids=str)
def test_a_warmed_call_transfers_nothing(head, block, options):
    greedy = "sampling" in options
    drafted = draft_block(head, *make_inputs(B, S, 12, V)) if greedy else block
    drafted, target, draw = jax.tree.map(jnp.asarray, (drafted, TARGET, None if greedy else DRAW))
    filters = TargetFilter(top_k=jnp.full(B, 9, jnp.int32), top_p=jnp.full(B, 0.9, jnp.float32))
    named = {"target_filter": filters, "stop_ids": jnp.full((B, 1), 5, jnp.int32), **options}
    named.pop("sampling", None)
    first = verify_block(drafted, target, draw, **named)
    with jax.transfer_guard("disallow"):
        second = verify_block(drafted, target, draw, **named)
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_empty_batches(head):
    hidden, anchors = make_inputs(B, S, 12, V)
    nobody = DraftSampling(np.zeros(0, np.float32), np.zeros(0, np.uint32), np.zeros(0, np.int32))
    assert draft_from_logits(head, np.zeros((S, 0, V), np.float32), anchors[:0]).tokens.shape == (0, S)
    for sampling in (None, nobody):
        for options in ({"outputs": "logits"}, {"outputs": "candidates", "topk": 3, "markov_topk": 2}):
            drafted = draft_block(head, hidden[:0], anchors[:0], sampling=sampling, **options)
            assert drafted.tokens.shape == (0, S)
            for rule in ("token", "block", "target_only"):
                out = verify_block(drafted, TARGET[:0], sampling, rule=rule, stop_ids=[1])
                assert out.tokens.shape == (0, S + 1)
                assert out.num_accepted.shape == (0,)


@pytest.mark.parametrize(
    "values",
    [{"top_k": 2**32 + 1}, {"top_k": np.full(B, -(2**40))}, {"top_p": np.nan}, {"min_p": np.array([0.1, np.nan, 0.2])}],
    ids=str,
)
def test_filters_that_would_narrow(block, values):
    with pytest.raises(ValueError, match="target_filter." + next(iter(values))):
        verify_block(block, TARGET, DRAW, target_filter=TargetFilter(**values))


def test_values_of_blocks_are_checked():
    wrong = DraftBlock(
        tokens=np.zeros((B, S), int), num_draft=np.full(B, S), valid=np.ones(B + 1, bool), method="greedy"
    )
    with pytest.raises(ValueError, match=r"block.valid.shape: found \(4,\)"):
        verify_block(wrong, TARGET, None)


def test_until_the_end_of_the_cache():
    target, drafter = make_pair()
    prompts = [[1, 2, 3], [4]]
    out = generate(target, drafter, (iter(p) for p in prompts), max_new_tokens=None, capacity=32)
    room = 32 - (drafter.config.block_size + 1)
    assert [len(tokens) for tokens in out.tokens] == [room - 3, room - 1]
    same = generate(target, drafter, prompts, max_new_tokens=[room - 3, room - 1], capacity=32)
    assert [a.tolist() for a in out.tokens] == [a.tolist() for a in same.tokens]
    with pytest.raises(ValueError, match="max_new_tokens: found None"):
        generate(target, drafter, prompts, max_new_tokens=None)
