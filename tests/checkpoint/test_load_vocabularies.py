"""Spellings, mask token, rope, vocabularies, and the LM head from the target."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture_checkpoints import change_config, change_tensors, fixtures, make, read_file
from flax import nnx
from helpers import make_weights, save_checkpoint
from load_cases import CONFIDENCE, VD, W1, V, drop, same

import dspark_jax
from dspark_jax import load_head
from dspark_jax.checkpoint import open_checkpoint


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "_orig_mod.model.", "model._orig_mod."])
def test_prefixes_case_30(tmp_path, prefix):
    path = make("deepspec-gated", tmp_path)
    wanted = load_head(path)

    def change(tensors):
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    found = load_head(change_tensors(path, change))
    jax.tree.map(same, nnx.to_pure_dict(nnx.state(found)), nnx.to_pure_dict(nnx.state(wanted)))


def test_confidence_spelling_and_absent_bias_case_30(tmp_path):
    path = make("deepspec-vanilla", tmp_path)

    def change(tensors):
        tensors["confidence_head.weight"] = tensors.pop(CONFIDENCE)
        del tensors["confidence_head.proj.bias"]

    head = load_head(change_tensors(path, change))
    assert head.confidence.bias is None
    same(head.confidence.weight, read_file(path / "model.safetensors")["confidence_head.weight"][1][0])


@pytest.mark.parametrize(
    ("first", "second"),
    [("lm_head.weight", "model.lm_head.weight"), (CONFIDENCE, "confidence_head.weight"), (W1, f"logit_head.{W1}")],
)
def test_two_spellings_at_once_are_an_error_case_30(tmp_path, first, second):
    path = change_tensors(make("deepspec-vanilla", tmp_path), lambda t: t.update({second: t[first]}))
    with pytest.raises(ValueError, match="second spelling") as caught:
        load_head(path)
    assert first in str(caught.value)
    assert second in str(caught.value)


@pytest.mark.parametrize("mask", [None, -1, V, 1.5, True])
def test_mask_token_case_32(tmp_path, mask):
    with pytest.raises(ValueError, match="mask_token_id"):
        load_head(change_config(make("deepspec-vanilla", tmp_path), mask_token_id=mask))


def test_rope_theta_flat_or_nested_case_32(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    assert load_head(path).config.rope_theta == 1e6
    change_config(path, rope_parameters=None, rope_theta=1e6)
    assert load_head(path).config.rope_theta == 1e6
    change_config(path, rope_parameters={"rope_theta": 5e5}, rope_theta=1e6)
    with pytest.raises(ValueError, match="rope_theta"):
        load_head(path)


def reduced(tmp_path, offsets=(1, 2, 4, 6), V=10, **fields):
    weights = make_weights("vanilla", V=V, Vd=len(offsets), reduced=False)
    weights["d2t"] = np.array(offsets, np.int64)
    return save_checkpoint(tmp_path / "reduced", weights, **fields)


def test_offsets_become_absolute_ids_case_17(tmp_path):
    head = load_head(reduced(tmp_path))
    assert head.target_ids.dtype == jnp.int32
    assert head.target_ids.tolist() == [1, 3, 6, 9]
    assert (head.config.Vd, head.config.vocab_size) == (4, 10)
    block = dspark_jax.draft_block(head, np.zeros((1, 3, 12), np.float32), [5])
    assert set(block.tokens[0].tolist()) <= {1, 3, 6, 9}


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ((1, 3, 6, 9), "draft id 2 stands for target id 8|draft id 3 stands for target id 12"),  # ids taken as offsets
        ((1, 2, 4, 7), "draft id 3 stands for target id 10, expected strictly increasing ids below vocab_size 10"),
        ((-1, 2, 4, 6), "draft id 0 stands for target id -1"),
        ((1, 0, 4, 6), "draft id 1 stands for target id 1"),
        ((5, 2, 4, 6), "draft id 1 stands for target id 3"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, offsets, words):
    with pytest.raises(ValueError, match=words):
        load_head(reduced(tmp_path, offsets))


def test_the_mask_must_say_what_the_table_says(tmp_path):
    path = make("speculators-reduced", tmp_path)
    tensors = read_file(path / "model.safetensors")
    ids = np.arange(VD) + tensors["d2t"][1]
    same(load_head(path).target_ids, ids.astype(np.int32))

    def move_one(tensors):
        mask = tensors["t2d"][1].copy()
        free = np.flatnonzero(mask == 0)[0]
        mask[ids[0]], mask[free] = 0, 1
        tensors["t2d"] = ("BOOL", mask)

    with pytest.raises(ValueError, match="t2d: marks other target ids"):
        load_head(change_tensors(path, move_one))
    change_tensors(path, lambda t: t.update({"t2d": ("BOOL", np.ones(V - 1, np.uint8))}))
    with pytest.raises(ValueError, match=r"t2d: found shape \[159\], expected \[160\]"):
        load_head(path)
    change_tensors(path, lambda t: t.update({"t2d": tensors["t2d"], "d2t": fixtures.f32(VD)}))
    with pytest.raises(ValueError, match=r"d2t: found float32 \[48\], expected I64"):
        load_head(path)


def test_padded_draft_vocabulary_case_18(tmp_path):
    weights = make_weights("vanilla", V=5, Vd=6, H=12)
    weights["lm_head.weight"][5] = 100.0
    head = load_head(save_checkpoint(tmp_path / "padded", weights, vocab_size=5))
    assert (head.config.Vd, head.config.vocab_size) == (6, 5)
    assert head.draft_to_target is None
    block = dspark_jax.draft_block(head, np.ones((2, 4, 12), np.float32), [0, 4])
    assert int(block.tokens.max()) < 5


def test_softcap_and_scale_are_read_cases_19_20(tmp_path):
    weights = make_weights(None, V=7, H=4, confidence=None)
    head = load_head(save_checkpoint(tmp_path / "a", weights, final_logit_softcapping=3.0, logit_scale=0.5))
    assert (head.config.final_logit_softcapping, head.config.logit_scale) == (3.0, 0.5)
    hidden = np.ones((1, 1, 4), np.float32)
    wanted = 3 * np.tanh(0.5 * weights["lm_head.weight"].sum(1) / 3)
    np.testing.assert_allclose(np.asarray(head.base_logits(jnp.asarray(hidden)))[0, 0], wanted, rtol=2e-6)


def test_without_an_lm_head_the_error_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"lm_head\.weight: .*specforge stores no LM head; pass target="):
        load_head(make("specforge", tmp_path))
    with pytest.raises(ValueError, match=r"target model \(the config names 'org/target'\)"):
        load_head(make("speculators-full", tmp_path))


def test_only_shards_with_head_tensors_are_needed(tmp_path):
    path = make("deepseek-v4", tmp_path)
    wanted = load_head(path)
    for number in (1, 3, 4):
        (path / f"model-0000{number}-of-00005.safetensors").unlink()
    found = load_head(path)
    same(found.lm_head, wanted.lm_head)
    same(found.markov.markov_w2, wanted.markov.markov_w2)
    assert found.confidence.bias is None
    (path / "model-00005-of-00005.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"missing shard; the index places mtp\.2\.\S+ in it, and 59"):
        load_head(path)


def test_the_target_supplies_the_lm_head(tmp_path):
    path, target = make("specforge", tmp_path), make("target", tmp_path)
    (target / "model-00001-of-00002.safetensors").unlink()  # the embedding's shard is not needed for this
    stored = read_file(target / "model-00002-of-00002.safetensors")
    config = json.loads((target / "model.safetensors.index.json").read_text())
    assert config["weight_map"]["lm_head.weight"] == "model-00002-of-00002.safetensors"
    shutil.copytree(target, tmp_path / "copy")
    with pytest.raises(FileNotFoundError, match="missing shard"):
        open_checkpoint(path, target)  # a whole drafter needs the embedding
    same(load_head(path, target=target).lm_head, stored["lm_head.weight"][1])


def test_a_tied_target_supplies_its_embedding(tmp_path):
    path, target = make("specforge", tmp_path), make("target-tied", tmp_path)
    stored = read_file(target / "model-00001-of-00002.safetensors")
    same(load_head(path, target=target).lm_head, stored["model.embed_tokens.weight"][1])
    assert open_checkpoint(path, target).origins["lm_head.weight"] == "target, tied to the embedding"
    change_config(target, tie_word_embeddings=None)  # left out by writers whose default is true
    same(load_head(path, target=target).lm_head, stored["model.embed_tokens.weight"][1])
    change_config(target, text_config={"tie_word_embeddings": True})
    same(load_head(path, target=target).lm_head, stored["model.embed_tokens.weight"][1])
    change_config(target, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings is false and there is no LM head"):
        load_head(path, target=target)


def test_the_drafters_own_head_counts_before_the_targets(tmp_path):
    path, target = make("deepspec-vanilla", tmp_path), make("target", tmp_path)
    same(load_head(path, target=target).lm_head, load_head(path).lm_head)


def test_a_reduced_vocabulary_cuts_the_targets_head(tmp_path):
    path, target = make("speculators-reduced", tmp_path), make("target", tmp_path)
    change_tensors(path, drop("lm_head.weight"))
    ids = load_head(path, target=target).target_ids
    stored = read_file(target / "model-00002-of-00002.safetensors")["lm_head.weight"][1]
    same(load_head(path, target=target).lm_head, stored[np.asarray(ids)])


def test_a_target_of_another_size_is_refused(tmp_path):
    target = fixtures.target(tmp_path / "wide", hidden=80)
    with pytest.raises(
        ValueError, match=r"lm_head\.weight of the target: found shape \[160, 80\], expected \[160, 64\]"
    ):
        load_head(make("specforge", tmp_path), target=target)


def test_the_bundled_target_supplies_a_tied_head(tmp_path, checkpoints):
    shutil.copytree(checkpoints / "dspark-vanilla", tmp_path / "drafter")
    change_tensors(tmp_path / "drafter", drop("lm_head.weight", "embed_tokens.weight"))
    found = load_head(tmp_path / "drafter", target=checkpoints / "target")
    # The drafter's own copy is the target's matrix.
    same(found.lm_head, load_head(checkpoints / "dspark-vanilla").lm_head)
