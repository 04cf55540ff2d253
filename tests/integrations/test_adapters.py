"""Adapters against the stacks' interfaces as their files state them, restated here as plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_head, make_inputs

import dspark_jax
from dspark_jax.integrations.leaves import join_head, split_head
from dspark_jax.integrations.sglang import SglangHead
from dspark_jax.integrations.tpu_inference import draft_probs, make_draft_token_ids

B, K, H, V = 6, 4, 12, 37


def whole(head, dtype):
    """Make weights small integers: sums are then exact in bfloat16 too."""
    return jax.tree.map(lambda x: jnp.round(x).astype(dtype), head)


def their_loop(w1, w2, base, first):
    """sglang-jax's VanillaMarkovHead.sample_block_tokens: K steps, bias added in the logits' dtype, arg-max."""
    prev, tokens = first, []
    for k in range(base.shape[1]):
        logits = base[:, k] + jnp.dot(w1[prev], w2.T)
        prev = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens.append(prev)
    return jnp.stack(tokens, axis=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sglang_tokens_are_those_of_its_own_loop(dtype):
    head = whole(make_head(dtype=dtype), dtype)
    hidden, anchors = make_inputs(B, K, H, V)
    base = jnp.round(jnp.asarray(hidden) @ head.lm_head[...].astype(jnp.float32).T).astype(dtype)
    want = their_loop(head.markov.markov_w1[...], head.markov.markov_w2[...], base, jnp.asarray(anchors))
    adapter = SglangHead(head)
    assert adapter.vocab_size == V
    found = jax.jit(lambda model, base, seed: model.sample_block_tokens(base, seed))(
        adapter, base, jnp.asarray(anchors)
    )
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, want)
    # All V candidates are the whole vocabulary.
    np.testing.assert_array_equal(SglangHead(head, topk=V).sample_block_tokens(base, jnp.asarray(anchors)), want)
    with pytest.raises(ValueError, match="V = 37"):
        adapter.sample_block_tokens(base[..., :-1], anchors)


def test_sglang_heads_that_read_hidden_states():
    head, (hidden, anchors) = make_head("rnn"), make_inputs(B, K, H, V)
    base = head.base_logits(jnp.swapaxes(jnp.asarray(hidden), 0, 1))
    found = SglangHead(head).sample_block_tokens(jnp.swapaxes(base, 0, 1), anchors, hidden)
    np.testing.assert_array_equal(found, dspark_jax.draft_block(head, hidden, anchors).tokens)
    with pytest.raises(ValueError, match="hidden"):
        SglangHead(head).sample_block_tokens(jnp.swapaxes(base, 0, 1), anchors)


@pytest.mark.parametrize("block_size", [K, K + 1])
@pytest.mark.parametrize("padded", [V, 40])
def test_tpu_inference_draft_tokens(block_size, padded):
    """Flat hidden states [B * block, D] and input ids; logits padded with zeros, which would win over negative rows."""
    head, (hidden, anchors) = make_head("gated"), make_inputs(B, block_size, H, V)
    first = block_size - K
    ids = np.zeros((B, block_size), np.int32)
    ids[:, 0] = anchors

    def compute_logits(state, hidden, adapters):
        assert adapters is None
        logits = head.base_logits(hidden[None])[0] - 50
        return jnp.pad(logits, ((0, 0), (0, padded - V)))

    fn = jax.jit(make_draft_token_ids(compute_logits, block_size=block_size, num_draft=K))
    found = fn(head, (), jnp.asarray(hidden.reshape(-1, H)), jnp.asarray(ids.reshape(-1)))
    want = dspark_jax.draft_block(head, hidden[:, first:], anchors).tokens
    np.testing.assert_array_equal(found, want)
    with pytest.raises(ValueError, match="block_size"):
        make_draft_token_ids(compute_logits, block_size=3, num_draft=4)


def test_draft_probs_are_request_major():
    head, (hidden, anchors) = make_head(), make_inputs(3, K, H, V)
    temperature = np.array([0.7, -1.0, 1.3], np.float32)
    draw = dspark_jax.DraftSampling(temperature, np.arange(3), np.zeros(3, int))
    block = dspark_jax.draft_block(head, hidden, anchors, sampling=draw, outputs="logits")
    count = np.array([2, 0, 3], np.int32)
    found = np.asarray(draft_probs(block, jnp.asarray(temperature), jnp.asarray(count), total=8))
    row = 0
    for b in range(3):
        for s in range(count[b]):
            x = np.asarray(block.logits[s, b], np.float64) / temperature[b]
            want = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
            np.testing.assert_allclose(found[row], want, atol=1e-6)
            row += 1
    assert not found[row:].any()
    greedy = np.asarray(draft_probs(block, jnp.asarray(temperature), jnp.full(3, K, jnp.int32)))[K : 2 * K]
    np.testing.assert_array_equal(greedy.argmax(axis=1), np.asarray(block.tokens)[1])
    np.testing.assert_array_equal(greedy.sum(axis=1), 1)


def test_leaves_and_structure_do_not_retrace():
    """A calibration read from a file is another object at each load; the structure must be equal all the same."""
    hidden, anchors = make_inputs(B, K, H, V)
    traces = []

    def round_of(leaves, hidden, anchors, structure):
        traces.append(1)
        return dspark_jax.draft_block(join_head(leaves, structure), hidden, anchors).tokens

    program = jax.jit(round_of, static_argnames="structure")
    heads = [make_head(), make_head()]
    for head, label in zip(heads, ("one", "two"), strict=True):
        head.calibration = label
        leaves, structure = split_head(head)
        want = dspark_jax.draft_block(head, hidden, anchors).tokens
        np.testing.assert_array_equal(program(leaves, hidden, anchors, structure=structure), want)
        assert head.calibration == label
    assert len(traces) == 1
