"""The parallel backbone against the reference's recorded rounds, and what its cache must keep apart."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS, GOLDENS, KINDS, read
from tiny import block_hidden, make_drafter, random_features, raw_config

from dspark_jax.checkpoint.family.read_config import flatten
from dspark_jax.checkpoint.load import load_drafter
from dspark_jax.transformer.cache import make_kv_cache
from dspark_jax.transformer.geometry import BackboneConfig
from dspark_jax.transformer.layers import visible
from dspark_jax.transformer.rope import rope_frequencies

RECORDED = [
    (CHECKPOINTS / f"dspark-{kind}", sorted((GOLDENS / "rounds" / kind).glob("*.safetensors"))) for kind in KINDS
]
RECORDED += [(path, [path / "golden.safetensors"]) for path in sorted((GOLDENS / "backbones").iterdir())]


def rounds_of(golden):
    """Yield the recorded rounds as dictionaries."""
    number = 0
    while f"round{number}.start" in golden:
        at = f"round{number}."
        yield {name.removeprefix(at): array for name, array in golden.items() if name.startswith(at)}
        number += 1


@pytest.mark.parametrize(("checkpoint", "files"), [pytest.param(*case, id=case[0].name) for case in RECORDED])
def test_rounds_equal_the_recorded_ones(checkpoint, files):
    """Block hidden states, base and corrected logits, tokens and confidence over rounds with growing context."""
    drafter, count = load_drafter(checkpoint, dtype="float32"), 0
    for path in files:
        cache = drafter.make_cache(1, 128)
        for step in rounds_of(read(path)):
            features = np.zeros((1, 96, drafter.backbone.feature_size), np.float32)
            features[0, : len(step["context_features"])] = step["context_features"]
            start = np.array([step["start"]], np.int32)
            block, cache = drafter.propose(cache, features, step["draft_input_ids"][:1], start, outputs="logits")
            hidden, base = block_hidden(drafter, cache, jnp.asarray(step["draft_input_ids"])[None])
            assert np.abs(hidden[0] - step["block_hidden"]).max() <= 2e-4
            assert np.abs(base[:, 0] - step["base_logits"]).max() <= 2e-4
            assert np.abs(block.logits[:, 0] - step["corrected_logits"]).max() <= 2e-4
            np.testing.assert_array_equal(block.tokens[0], step["tokens"])
            assert np.abs(block.confidence_logits[0] - step["confidence_logits"]).max() <= 2e-4
            assert bool(block.valid[0])
            assert int(cache.lengths[0]) == int(start[0])
            count += 1
    assert count >= 3


def test_context_in_pieces_equals_context_at_once():
    drafter = make_drafter()
    features = random_features(drafter, 1, 9)
    whole = drafter.extend(drafter.make_cache(1, 32), features, [9])
    parts = drafter.make_cache(1, 32)
    for begin, end in ((0, 2), (2, 3), (3, 9)):
        # Rows beyond the new length are ignored, whatever they hold.
        padded = jnp.concatenate([features[:, begin:end], jnp.full((1, 4, features.shape[2]), 1e3)], axis=1)
        parts = drafter.extend(parts, padded, [end])
    ids = jnp.array([[5, 1, 1, 1, 1]], jnp.int32)
    np.testing.assert_allclose(block_hidden(drafter, parts, ids)[0], block_hidden(drafter, whole, ids)[0], atol=1e-6)


def test_rows_of_different_lengths_do_not_see_each_other():
    drafter = make_drafter()
    features, lengths = random_features(drafter, 3, 8), np.array([8, 3, 0], np.int32)
    ids = jnp.array([[5, 1, 1, 1, 1], [7, 1, 1, 1, 1], [9, 1, 1, 1, 1]], jnp.int32)
    together, _ = block_hidden(drafter, drafter.extend(drafter.make_cache(3, 32), features, lengths), ids)
    for row in range(3):
        cache = drafter.extend(drafter.make_cache(1, 32), features[row : row + 1], lengths[row : row + 1])
        alone, _ = block_hidden(drafter, cache, ids[row : row + 1])
        np.testing.assert_allclose(together[row], alone[0], atol=2e-6)
    assert np.abs(together[0] - together[1]).max() > 0.1


def test_block_is_bidirectional_unless_causal():
    ids = jnp.array([[5, 1, 1, 1, 1]], jnp.int32)
    changed = ids.at[0, 4].set(9)
    for causal in (False, True):
        drafter = make_drafter(causal=causal)
        cache = drafter.extend(drafter.make_cache(1, 32), random_features(drafter, 1, 4), [4])
        before, after = (block_hidden(drafter, cache, x)[0][0] for x in (ids, changed))
        moved = np.abs(before - after).max(axis=1) > 1e-4
        assert moved.tolist() == ([False] * 4 + [True] if causal else [True] * 5)


def test_visible_slots():
    positions = jnp.array([[3, 4]], jnp.int32)

    def see(**how):
        return visible(positions, 7, **how)[0, 0].astype(int).tolist()

    assert see(causal=False, window=None) == [[1, 1, 1, 1, 1, 0, 0]] * 2
    assert see(causal=True, window=None) == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    assert see(causal=True, window=2) == [[0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0]]
    assert see(causal=False, window=2) == [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0]]


def test_proportional_rope_rotates_a_quarter_of_the_pairs():
    config = BackboneConfig.from_flat(raw_config("gemma4", global_head_dim=16))
    expected = [100.0 ** (-2 * i / 16) if i < 2 else 0.0 for i in range(8)]
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-6)


def test_writes_beyond_the_capacity_are_dropped_not_wrapped():
    cache = make_kv_cache(make_drafter().backbone.config, 2, 4, jnp.float32)
    ones = jnp.ones((2, 3, 2, 6))
    written = cache.written(1, jnp.array([3, -1], jnp.int32), ones, ones)
    assert written.keys[1][..., 0, 0].tolist() == [[0, 0, 0, 1], [1, 1, 0, 0]]
    assert float(jnp.abs(written.keys[0]).max()) == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_kv_heads: found 3, expected a divisor of num_heads = 4"),
        ({"head_dim": 5}, "head_dim: found 5, expected an even number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: found 'yarn'"),
        ({"hidden_act": "relu"}, "activation: found 'relu'"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window: found None"),
        ({"intermediate_size": None}, "intermediate_size: found None, expected a value in config.json"),
        ({"attention_bias": "no"}, "attention_bias: found 'no'"),
    ],
)
def test_bad_geometry_is_refused(fields, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BackboneConfig.from_flat(raw_config(**fields))


def test_gemma4_experts_are_refused():
    with pytest.raises(ValueError, match="enable_moe_block: found True"):
        BackboneConfig.from_flat(raw_config("gemma4", enable_moe_block=True))


def test_geometry_is_read_from_every_place():
    nested = raw_config()
    moved = ("num_", "hidden", "inter", "head", "vocab", "rope")
    layer = {key: nested.pop(key) for key in list(nested) if key.startswith(moved)}
    config = BackboneConfig.from_flat(flatten(nested | {"text_config": layer}, "deepspec"))
    assert config == BackboneConfig.from_flat(raw_config())
    nested = flatten(raw_config(dflash_config={"causal": True}), "specforge")
    assert BackboneConfig.from_flat(nested).layer_causal == (True, True)
    window = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    sliding = BackboneConfig.from_flat(raw_config(**window, sliding_window_non_causal=False))
    assert (sliding.windows, sliding.layer_causal) == ((8, None), (True, False))
    assert not any(BackboneConfig.from_flat(raw_config(**window)).layer_causal)
    released = json.loads((CHECKPOINTS / "dspark-vanilla" / "config.json").read_text())
    assert BackboneConfig.from_flat(released).windows == (None, None)
