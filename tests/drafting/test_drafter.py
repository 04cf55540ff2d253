"""Whole drafters: loading, `propose` as one jitted call over a donated cache, and errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS
from tiny import block_hidden, build_drafter, drafter_weights, make_drafter, random_features, raw_config, write_model

import dspark_jax
from dspark_jax.drafting import drafter as module
from dspark_jax.types import DraftSampling


def proposal(drafter, *, batch=2, context=4, sampling=None, rows=None, **options):
    """Propose behind a random context, from fresh caches."""
    features = random_features(drafter, batch, context, seed=5)
    if rows is not None:
        features = features[jnp.asarray(rows)]
    size = features.shape[0]
    anchors = np.arange(5, 5 + batch)[:size] if rows is None else np.arange(5, 5 + batch)[np.asarray(rows)]
    cache = drafter.make_cache(size, 32)
    return drafter.propose(cache, features, anchors, [context] * size, sampling, **options)


def test_loaded_drafter_equals_one_built_from_its_weights(tmp_path):
    raw = raw_config(confidence_head_with_markov=True, enable_confidence_head=True, markov_rank=6)
    weights = drafter_weights(raw)
    loaded = dspark_jax.load_drafter(write_model(tmp_path, raw, weights))
    block, _ = proposal(loaded, outputs="logits")
    expected, _ = proposal(build_drafter(raw, weights), outputs="logits")
    np.testing.assert_array_equal(block.tokens, expected.tokens)
    np.testing.assert_array_equal(block.logits, expected.logits)


def test_missing_embedding_and_head_come_from_the_target(tmp_path):
    raw = raw_config(markov_rank=6, enable_confidence_head=True, confidence_head_with_markov=True)
    weights = drafter_weights(raw)
    own = {name: weights.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")}
    write_model(tmp_path / "drafter", raw, weights)
    write_model(tmp_path / "target", {"tie_word_embeddings": False}, own, prefix="model.")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight.*target="):
        dspark_jax.load_drafter(tmp_path / "drafter")
    loaded = dspark_jax.load_drafter(tmp_path / "drafter", target=tmp_path / "target")
    np.testing.assert_array_equal(loaded.backbone.embed_tokens[...], own["embed_tokens.weight"])
    np.testing.assert_array_equal(loaded.head.lm_head[...], own["lm_head.weight"])


def test_head_alone_and_misshapen_backbones_are_refused(tmp_path):
    raw = raw_config(markov_rank=6, enable_confidence_head=True, confidence_head_with_markov=True)
    weights = drafter_weights(raw)
    head = {n: a for n, a in weights.items() if n.startswith(("markov", "confidence", "lm_head", "embed"))}
    with pytest.raises(ValueError, match=r"fc\.weight: .* holds no backbone"):
        dspark_jax.load_drafter(write_model(tmp_path / "a", raw, head))
    wrong = dict(weights)
    wrong["layers.1.self_attn.k_norm.weight"] = np.ones(5, np.float32)
    del wrong["layers.0.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: missing") as error:
        dspark_jax.load_drafter(write_model(tmp_path / "b", raw, wrong))
    assert "layers.1.self_attn.k_norm.weight: found shape [5], expected [6]" in str(error.value)
    three = raw | {"target_layer_ids": [0, 1, 2], "num_target_layers": 9}
    with pytest.raises(ValueError, match=r"fc\.weight: .*columns for 3 target_layer_ids"):
        dspark_jax.load_drafter(write_model(tmp_path / "c", three, weights))


def test_a_request_does_not_depend_on_its_batch():
    drafter = make_drafter()
    sampling = DraftSampling([0.8, 0.0], [11, 12], [0, 0])
    both, _ = proposal(drafter, sampling=sampling, topk=8, outputs="candidates")
    alone = DraftSampling([0.8], [11], [0])
    first, _ = proposal(drafter, rows=[0], sampling=alone, topk=8, outputs="candidates")
    np.testing.assert_array_equal(first.tokens[0], both.tokens[0])
    np.testing.assert_allclose(first.candidate_logits[:, 0], both.candidate_logits[:, 0], atol=1e-5)


def test_fewer_steps_are_a_prefix_of_the_same_draft():
    """The backbone always runs the whole block: bidirectional attention would otherwise see another block."""
    drafter = make_drafter()
    whole, _ = proposal(drafter, outputs="logits")
    short, _ = proposal(drafter, num_steps=2, outputs="logits")
    np.testing.assert_array_equal(short.tokens, whole.tokens[:, :2])
    np.testing.assert_allclose(short.logits, whole.logits[:2], atol=1e-5)


@pytest.mark.parametrize("anchor_first", [True, False])
def test_anchor_conventions(anchor_first):
    """With sample_from_anchor slot k drafts step k, K drafts; else slot 0 is dropped, K - 1 drafts."""
    raw = raw_config(sample_from_anchor=anchor_first)
    drafter = build_drafter(raw, drafter_weights(raw))
    block, _ = proposal(drafter, outputs="logits")
    assert block.tokens.shape == (2, 5 if anchor_first else 4)
    context = drafter.extend(drafter.make_cache(2, 32), random_features(drafter, 2, 4, seed=5), [4, 4])
    ids = jnp.asarray([[5, 1, 1, 1, 1], [6, 1, 1, 1, 1]], jnp.int32)
    hidden, _ = block_hidden(drafter, context, ids)
    first = 0 if anchor_first else 1
    expected = dspark_jax.draft_block(drafter.head, hidden[:, first:], [5, 6], outputs="logits")
    np.testing.assert_array_equal(block.tokens, expected.tokens)
    np.testing.assert_allclose(block.logits, expected.logits, atol=1e-5)


def test_noise_is_keyed_by_the_position_behind_the_anchor():
    """What propose draws is what draft_block draws from the same hidden states at position = anchor's position + 1."""
    drafter = make_drafter()
    context = drafter.extend(drafter.make_cache(2, 32), random_features(drafter, 2, 4, seed=5), [4, 4])
    hidden, _ = block_hidden(drafter, context, jnp.asarray([[5, 1, 1, 1, 1], [6, 1, 1, 1, 1]], jnp.int32))
    draws = [DraftSampling([2.0, 2.0], [7, 8], [position] * 2) for position in (5, 4)]
    expected, other = (dspark_jax.draft_block(drafter.head, hidden, [5, 6], sampling=draw) for draw in draws)
    block, _ = proposal(drafter, sampling=DraftSampling([2.0, 2.0], [7, 8], [0, 0]))
    np.testing.assert_array_equal(block.tokens, expected.tokens)
    assert (np.asarray(block.tokens) != np.asarray(other.tokens)).any()


def test_positions_that_do_not_follow_the_cache_draft_nothing():
    drafter = make_drafter()
    features = random_features(drafter, 4, 4)
    # Row 0 fits; 1 skips a position, 2 goes backwards, 3 leaves no room for the block.
    cache = drafter.extend(drafter.make_cache(4, 16), random_features(drafter, 4, 14), [3, 3, 3, 10])
    block, _ = drafter.propose(cache, features, [5] * 4, [5, 8, 2, 12])
    assert block.valid.tolist() == [True, False, False, False]
    assert block.num_draft.tolist() == [5, 0, 0, 0]


def test_cache_is_donated_and_values_do_not_retrace():
    drafter = make_drafter()
    cache = drafter.make_cache(2, 32)
    features = random_features(drafter, 2, 3)
    options = {"topk": 4, "outputs": "candidates"}
    sizes, pointers = [], []
    for step in range(1, 4):
        old = cache
        draw = DraftSampling([0.1 * step, 1.0], [step, 2**32 - 1], [0, 0])
        block, cache = drafter.propose(cache, features, [step, 3], np.array([step, 2 * step]), draw, **options)
        jax.block_until_ready(block)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        sizes.append(module._propose._cache_size())
        pointers.append(cache.kv.keys[0].unsafe_buffer_pointer())
    assert sizes[0] == sizes[-1]
    assert len(set(pointers)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"features": np.zeros((2, 3, 19), np.float32)},
            r"features\.shape: found \(2, 3, 19\), expected .*\[2, any, 20\]",
        ),
        ({"features": np.zeros((3, 3, 20), np.float32)}, r"features\.shape"),
        ({"anchor_ids": [1, 2, 3]}, r"anchor_ids\.shape"),
        ({"positions": [1.5, 2.5]}, "positions"),
        ({"topk": 38}, "topk: found 38, expected an integer from 1 to 37"),
        ({"num_steps": 6}, "num_steps: found 6, expected an integer from 1 to 5"),
        ({"outputs": "candidates"}, "outputs: found 'candidates', expected a topk"),
        ({"min_confidence": 1.5}, "min_confidence: found 1.5"),
        ({"sampling": DraftSampling([1.0, 1.0], [2**32, 0], [0, 0])}, "sampling.seed"),
    ],
)
def test_bad_input_is_refused_before_compilation(change, message):
    drafter = make_drafter()
    good = {"features": np.zeros((2, 3, 20), np.float32), "anchor_ids": [1, 2], "positions": [3, 2]}
    arguments = {**good, **change}
    with pytest.raises(ValueError, match=message):
        drafter.propose(drafter.make_cache(2, 32), **arguments)


def test_threshold_needs_a_confidence_head():
    raw = raw_config()
    weights = {name: a for name, a in drafter_weights(raw).items() if not name.startswith("confidence_head")}
    drafter = build_drafter(raw, weights)
    with pytest.raises(ValueError, match=r"min_confidence: found 0\.5, expected None"):
        proposal(drafter, min_confidence=0.5)


def test_bundled_drafters_load_with_their_stored_dtype():
    for name in ("vanilla", "gated", "rnn"):
        drafter = dspark_jax.load_drafter(CHECKPOINTS / f"dspark-{name}")
        raw = json.loads((CHECKPOINTS / f"dspark-{name}" / "config.json").read_text())
        assert {leaf.dtype for leaf in jax.tree.leaves(drafter)} == {jnp.dtype("bfloat16")}
        assert drafter.config.markov_head_type == raw["markov_head_type"]
