"""Candidates from two lists: against a NumPy draft over the union of the base top-k and the strongest continuations."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_head, make_inputs
from verify_reference import uniform

from dspark_jax import DraftConfig, DraftSampling, draft_block, make_buffer, make_draft_fn, verify_block
from dspark_jax.drafting.head import DSparkHead

S, B, H = 4, 5, 12


def numpy_latent(
    head: DSparkHead, state: np.ndarray, e: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(state, z) of one request's step, float64."""
    markov = head.markov

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def weight(name: str) -> np.ndarray:
        return np.asarray(getattr(markov, name)[...], np.float64)

    kind = head.config.markov_head_type
    if kind == "vanilla":
        return state, e
    if kind == "gated":
        return state, sigmoid(weight("gate_weight") @ np.concatenate([hidden, e]) + weight("gate_bias")) * e
    g, c, o = np.split(weight("joint_weight") @ np.concatenate([state, e, hidden]) + weight("joint_bias"), 3)
    return sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c), np.tanh(o)


def numpy_draft(head: DSparkHead, hidden, anchors, sampling, k, m):
    """Draft over the union, float64: tokens [B, S], and each step's {target id: corrected logit}."""
    c = head.config
    w1, w2 = (np.asarray(x[...], np.float64) for x in (head.markov.markov_w1, head.markov.markov_w2))
    names = np.arange(c.Vd) if head.target_ids is None else np.asarray(head.target_ids)
    live = min(c.Vd, c.vocab_size)
    tokens, rows = np.zeros((B, S), int), []
    for b in range(B):
        state, prev = np.zeros(w1.shape[1]), anchors[b]
        for s in range(S):
            base = (np.asarray(head.lm_head[...], np.float64) @ hidden[b, s])[:live]
            zero, first = numpy_latent(head, np.zeros_like(state), w1[prev], np.zeros(H))
            del zero
            state, z = numpy_latent(head, state, w1[prev], hidden[b, s].astype(np.float64))
            known = w2[:live] @ first
            union = set(np.argsort(-base, kind="stable")[:k]) | set(np.argsort(-known, kind="stable")[:m])
            corrected = {int(names[i]): base[i] + w2[i] @ z for i in union}
            rows.append(((s, b), corrected))
            score = dict(corrected)
            if sampling is not None and sampling.temperature[b] >= 1e-5:
                for i in score:
                    u = uniform(sampling.seed[b], sampling.position[b], s, 0, i)
                    score[i] = corrected[i] / sampling.temperature[b] - np.log(-np.log1p(-u))
            prev = tokens[b, s] = max(sorted(score), key=lambda i: score[i])
    return tokens, rows


DRAW = DraftSampling(
    np.array([1.0, 0.0, 0.5, 2.0, 1.0], np.float32), np.arange(B, dtype=np.uint32), np.arange(B, dtype=np.int32)
)
VOCABULARIES = {"full": (37, 37), "reduced": (37, 21), "padded": (37, 48)}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_draft_over_the_union(kind, vocabulary):
    V, Vd = VOCABULARIES[vocabulary]
    head = make_head(kind, V=V, Vd=Vd, H=H, seed=3).with_continuations(6)
    hidden, anchors = make_inputs(B, S, H, V)
    for sampling, k, m in [(None, 4, 6), (DRAW, 5, 3)]:
        block = draft_block(head, hidden, anchors, sampling=sampling, topk=k, markov_topk=m, outputs="candidates")
        tokens, rows = numpy_draft(head, hidden, anchors, sampling, k, m)
        np.testing.assert_array_equal(np.asarray(block.tokens), tokens)
        ids, logits = np.asarray(block.candidate_ids), np.asarray(block.candidate_logits)
        assert ids.shape == (S, B, k + m)
        for (s, b), corrected in rows:
            row = ids[s, b]
            assert len(set(row.tolist())) == k + m
            dead = row >= V
            np.testing.assert_array_equal(row[dead], V + np.flatnonzero(dead))
            assert (logits[s, b][dead] == -np.inf).all()
            assert set(row[~dead].tolist()) == set(corrected)
            np.testing.assert_allclose(logits[s, b][~dead], [corrected[i] for i in row[~dead].tolist()], atol=2e-5)


@pytest.mark.parametrize("sampling", [None, DRAW], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_all_continuations_are_the_dense_draft(vocabulary, sampling):
    V, Vd = VOCABULARIES[vocabulary]
    head = make_head("vanilla", V=V, Vd=Vd, H=H, seed=5).with_continuations(min(V, Vd))
    hidden, anchors = make_inputs(B, S, H, V, seed=5)
    dense = draft_block(head, hidden, anchors, sampling=sampling, outputs="logits")
    for k, m in [(1, Vd), (3, Vd), (Vd, 1)]:
        block = draft_block(head, hidden, anchors, sampling=sampling, topk=k, markov_topk=m, outputs="logits")
        np.testing.assert_array_equal(np.asarray(block.tokens), np.asarray(dense.tokens))
        np.testing.assert_allclose(np.asarray(block.logits), np.asarray(dense.logits), atol=2e-5)
        if sampling is None:
            assert np.asarray(block.certified).all()


@pytest.mark.parametrize("sampling", [None, DRAW], ids=["greedy", "sampled"])
def test_no_continuations_change_no_bit(sampling):
    plain = make_head("vanilla", H=H, dtype="bfloat16", seed=2)
    head = plain.with_continuations(4)
    hidden, anchors = make_inputs(B, S, H, 37)
    for outputs in ("tokens", "logits", "candidates"):
        blocks = [draft_block(x, hidden, anchors, sampling=sampling, topk=5, outputs=outputs) for x in (plain, head)]
        assert (blocks[1].certified is None) == (sampling is not None)
        old, new = (dataclasses.replace(block, certified=None) for block in blocks)
        for field in dataclasses.fields(old):
            a, b = getattr(old, field.name), getattr(new, field.name)
            assert (a is None and b is None) or np.array_equal(np.asarray(a), np.asarray(b)), field.name


def test_a_buffer_forgets_dead_slots():
    head = make_head("vanilla", H=H, seed=4).with_continuations(5)
    config = DraftConfig(S, draft_topk=4, draft_markov_topk=5, outputs="logits")
    fn, buffer = make_draft_fn(config), make_buffer(head, config, B)
    for seed in range(3):
        hidden, anchors = make_inputs(B, S, H, 37, seed=seed)
        block, buffer = fn(head, hidden, anchors, None, buffer)
        expected = draft_block(head, hidden, anchors, topk=4, markov_topk=5, outputs="logits").logits
        np.testing.assert_array_equal(np.asarray(block.logits), np.asarray(expected))
    assert fn.trace_count() == 1


def test_an_invalid_anchor_has_no_continuations():
    head = make_head("vanilla", H=H).with_continuations(5)
    hidden, _ = make_inputs(2, S, H, 37)
    block = draft_block(head, hidden, [-1, 37], topk=3, markov_topk=5, outputs="candidates")
    assert not np.asarray(block.valid).any()
    assert not np.asarray(block.certified).any()
    assert (np.asarray(block.candidate_ids)[0, :, 3:] >= 37).all()


def test_verification_reads_rows_with_dead_slots():
    """As candidates and as dense rows the same block gives the same tokens."""
    head = make_head("vanilla", H=H, seed=1).with_continuations(6)
    hidden, anchors = make_inputs(B, S, H, 37)
    target = np.random.default_rng(0).normal(size=(B, S + 1, 37)).astype(np.float32)
    out = []
    for outputs in ("logits", "candidates"):
        block = draft_block(head, hidden, anchors, sampling=DRAW, topk=4, markov_topk=6, outputs=outputs)
        out.append(verify_block(block, target, DRAW))
    np.testing.assert_array_equal(np.asarray(out[0].tokens), np.asarray(out[1].tokens))
    np.testing.assert_allclose(np.asarray(out[0].accept_prob), np.asarray(out[1].accept_prob), atol=1e-6)


def test_options_are_checked():
    head = make_head("vanilla", H=H)
    hidden, anchors = make_inputs(2, S, H, 37)
    with pytest.raises(ValueError, match=r"markov_topk: found 3, expected a head with as many continuations"):
        draft_block(head, hidden, anchors, topk=3, markov_topk=3)
    with pytest.raises(ValueError, match=r"markov_topk: found 3, expected a topk beside it"):
        draft_block(head.with_continuations(3), hidden, anchors, markov_topk=3)
    with pytest.raises(ValueError, match=r"m: found 38, expected an integer from 0 to 37"):
        head.with_continuations(38)
    with pytest.raises(ValueError, match="draft_markov_topk"):
        DraftConfig(S, draft_markov_topk=3)
    with pytest.raises(ValueError, match="markov: found None"):
        make_head(None, H=H).with_continuations(3)


def test_the_table_is_part_of_the_head():
    head = make_head("vanilla", H=H)
    more = head.with_continuations(4)
    assert more.nbytes == head.nbytes + 4 * 37 * 6 + 4 * 6
    assert jnp.array_equal(more.markov.markov_w2[...], head.markov.markov_w2[...])
