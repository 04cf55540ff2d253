"""load_head: the right arrays in the right places, or an error that names tensor or key (pitfalls 17-20, 29-33)."""

import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixture_checkpoints import change_config, change_tensors, fixtures, make, read_file
from flax import nnx
from helpers import TESTS, make_weights, save_checkpoint
from jax.sharding import NamedSharding, PartitionSpec

import dspark_jax
from dspark_jax import load_head
from dspark_jax.checkpoint import open_checkpoint
from dspark_jax.drafting.heads import GatedMarkovHead, RnnMarkovHead, VanillaMarkovHead

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
GATE, JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"
CONFIDENCE = "confidence_head.proj.weight"
V, VD, H, R = fixtures.V, fixtures.VD, fixtures.H, fixtures.R


def same(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]


# ---- the right arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "type_"), [("vanilla", VanillaMarkovHead), ("gated", GatedMarkovHead), ("rnn", RnnMarkovHead)]
)
def test_arrays_are_the_files_bit_for_bit(tmp_path, kind, type_):
    path = make(f"deepspec-{kind}", tmp_path)
    stored = {name: array for name, (_, array) in read_file(path / "model.safetensors").items()}
    head = load_head(path)
    assert type(head.markov) is type_
    same(head.lm_head, stored["lm_head.weight"])
    same(head.markov.markov_w1, stored[W1])
    same(head.markov.markov_w2, stored[W2])
    if kind == "gated":
        same(head.markov.gate_weight, stored[GATE])
        same(head.markov.gate_bias, stored["markov_head.gate_proj.bias"])
    if kind == "rnn":
        same(head.markov.joint_weight, stored[JOINT])
        same(head.markov.joint_bias, stored["markov_head.joint_proj.bias"])
    same(head.confidence.weight, stored[CONFIDENCE][0])
    same(head.confidence.bias, stored["confidence_head.proj.bias"][0])
    assert head.draft_to_target is None
    names = [name for name in stored if name.startswith(("lm_head", "markov_head", "confidence_head"))]
    assert head.nbytes == sum(stored[name].nbytes for name in names)


def test_bundled_checkpoints_load(checkpoints):
    for kind in ("vanilla", "gated", "rnn"):
        head = load_head(str(checkpoints / f"dspark-{kind}"))
        assert head.config.markov_head_type == kind
        assert head.dtype == jnp.bfloat16
        assert head.config.max_steps == 7


def test_a_directory_with_only_head_tensors_loads(goldens):
    head = load_head(goldens / "heads" / "head_gated_f32")
    assert head.lm_head.shape == (1000, 64)
    assert head.dtype == jnp.float32


def test_one_file_and_one_index_load_too(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    same(load_head(path / "model.safetensors").lm_head, load_head(path).lm_head)


@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32", "bf16", jnp.float32])
def test_dtypes_case_30(tmp_path, stored, dtype):
    types = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    exact = np.linspace(-2, 2, V * H).astype(np.float32).reshape(V, H).astype(types[stored])

    def change(tensors):
        for name, (_, array) in list(tensors.items()):
            tensors[name] = (stored, array.astype(types[stored]))
        tensors["lm_head.weight"] = (stored, exact)

    head = load_head(change_tensors(make("deepspec-vanilla", tmp_path), change), dtype=dtype)
    wanted = types[stored] if dtype is None else jnp.dtype({"bf16": "bfloat16"}.get(dtype, dtype))
    same(head.lm_head, exact.astype(wanted))
    assert {leaf.dtype for leaf in jax.tree.leaves(head)} == {jnp.dtype(wanted)}


def test_wrong_dtypes_are_refused(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    with pytest.raises(ValueError, match="dtype: found 'int8'"):
        load_head(path, dtype="int8")
    change_tensors(path, lambda t: t.update({W2: ("F64", np.zeros((V, R)))}))
    with pytest.raises(ValueError, match=rf"{W2}: found dtype float64"):
        load_head(path)
    change_tensors(path, lambda t: t.update({W2: ("F8_E4M3", np.zeros((V, R), np.uint8))}))
    with pytest.raises(ValueError, match=rf"{W2}: found dtype F8_E4M3 without block scales"):
        load_head(path)


def test_float16_does_not_overflow_silently(tmp_path):
    def change(tensors):
        tensors[W1] = ("BF16", np.full((V, R), 1e5, ml_dtypes.bfloat16))

    path = change_tensors(make("deepspec-vanilla", tmp_path), change)
    with pytest.raises(ValueError, match=rf"{W1}: holds 99840, expected at most 65504 for dtype float16"):
        load_head(path, dtype="float16")
    assert np.isfinite(np.asarray(load_head(path, dtype="float32").markov.markov_w1)).all()


def test_loaded_arrays_do_not_alias_the_file(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    file = path / "model.safetensors"
    before, content = read_file(file)["lm_head.weight"][1], file.read_bytes()
    head = load_head(path)
    with open(file, "r+b") as stream:  # in place: a mapped page would show it
        stream.write(content[:2000] + b"\x41" * (len(content) - 2000))
    same(head.lm_head, before)


# ---- presence, flags and shapes (case 29, 31) -----------------------------------------------------------------------


def test_rank_without_markov_tensors_fails_case_29(tmp_path):
    path = change_tensors(make("deepspec-no-confidence", tmp_path), drop(W1, W2))
    with pytest.raises(ValueError, match="markov_rank: config says 8, but the checkpoint holds no markov_head tensors"):
        load_head(path)


def test_unknown_names_are_listed_and_substrings_do_not_match_case_29(tmp_path):
    def change(tensors):
        tensors["layers.0.mlp.w1.weight"] = fixtures.bf16(4, 4)  # "w1" also occurs in markov_w1
        tensors["xmarkov_head.markov_w1.weight"] = fixtures.bf16(V, R)
        tensors["confidence_head.proj.weight_scale"] = fixtures.f32(1)

    path = change_tensors(make("deepspec-vanilla", tmp_path), change)
    with pytest.raises(ValueError, match="unknown tensor") as caught:
        load_head(path)
    for name in ("layers.0.mlp.w1.weight", "xmarkov_head.markov_w1.weight", "confidence_head.proj.weight_scale"):
        assert f"{name}: unknown tensor of the deepspec family" in str(caught.value)


@pytest.mark.parametrize(
    ("base", "lost", "words"),
    [
        ("deepspec-vanilla", W1, f"{W1}: missing, though the checkpoint holds {W2}"),
        ("deepspec-vanilla", W2, f"{W2}: missing, though the checkpoint holds {W1}"),
        ("deepspec-gated", GATE, f"{GATE}: missing, though markov_head_type is 'gated'"),
        ("deepspec-gated", "markov_head.gate_proj.bias", "markov_head.gate_proj.bias: missing"),
        ("deepspec-rnn", JOINT, f"{JOINT}: missing, though markov_head_type is 'rnn'"),
        (
            "deepspec-vanilla",
            CONFIDENCE,
            f"{CONFIDENCE}: missing, though the checkpoint holds confidence_head.proj.bias",
        ),
        ("speculators-reduced", "d2t", "d2t: missing, though the draft vocabulary 48 is smaller than vocab_size 160"),
    ],
)
def test_missing_tensors_are_named(tmp_path, base, lost, words):
    with pytest.raises(ValueError, match="missing") as caught:
        load_head(change_tensors(make(base, tmp_path), drop(lost)))
    assert words in str(caught.value)


def test_confidence_flag_true_without_tensors_fails(tmp_path):
    path = change_tensors(make("deepspec-vanilla", tmp_path), drop(CONFIDENCE, "confidence_head.proj.bias"))
    with pytest.raises(ValueError, match="enable_confidence_head: config says True, but there are no"):
        load_head(path)


def test_missing_flags_are_resolved_from_the_tensors(tmp_path):
    silent = {"enable_confidence_head": None, "confidence_head_with_markov": None, "markov_head_type": None}
    for kind in ("vanilla", "gated", "rnn"):
        head = load_head(change_config(make(f"deepspec-{kind}", tmp_path), **silent, markov_rank=None))
        assert (head.config.markov_head_type, head.config.markov_rank) == (kind, R)
        assert head.config.enable_confidence_head
        assert head.config.confidence_head_with_markov
    path = change_config(make("deepspec-vanilla", tmp_path), **silent)
    head = load_head(change_tensors(path, lambda t: t.update({CONFIDENCE: fixtures.bf16(1, H)})))
    assert head.config.enable_confidence_head
    assert not head.config.confidence_head_with_markov
    head = load_head(change_tensors(path, drop(CONFIDENCE, "confidence_head.proj.bias")))
    assert head.confidence is None
    assert not head.config.enable_confidence_head


@pytest.mark.parametrize(
    ("base", "keys", "words"),
    [
        ("deepspec-vanilla", {"markov_rank": 9}, f"markov_rank: config says 9, {W1} has shape [160, 8]"),
        ("deepspec-vanilla", {"markov_rank": 0}, f"markov_rank: config says 0, {W1} has shape [160, 8]"),
        ("deepspec-vanilla", {"vocab_size": 161}, f"{W1}: found shape [160, 8], expected [161, 8] = [V, r]"),
        ("deepspec-vanilla", {"hidden_size": 65}, f"{CONFIDENCE}: found shape [1, 72], expected [1, 73] or [1, 65]"),
        ("deepspec-vanilla", {"markov_head_type": "gated"}, "markov_head.gate_proj.bias: missing"),
        (
            "deepspec-gated",
            {"markov_head_type": "vanilla"},
            "config says 'vanilla', but the checkpoint holds markov_head.gate",
        ),
        (
            "deepspec-rnn",
            {"markov_head_type": "gated"},
            "config says 'gated', but the checkpoint holds markov_head.joint",
        ),
        ("deepspec-vanilla", {"markov_head_type": "bilinear"}, "markov_head_type: found 'bilinear'"),
        ("deepspec-vanilla", {"confidence_head_with_markov": False}, "confidence_head_with_markov: config says False"),
        ("deepspec-vanilla", {"enable_confidence_head": False}, "enable_confidence_head: config says False, but"),
        (
            "deepspec-vanilla",
            {"draft_vocab_size": 100},
            "draft vocabulary: draft_vocab_size in the config says 100, lm_head",
        ),
        ("speculators-reduced", {"draft_vocab_size": 47}, "draft_vocab_size in the config says 47, d2t says 48"),
    ],
)
def test_config_and_shapes_disagreeing_names_both(tmp_path, base, keys, words):
    with pytest.raises(ValueError, match=r"config|expected") as caught:
        load_head(change_config(make(base, tmp_path), **keys))
    assert words in str(caught.value)


def test_heads_of_other_shapes_are_refused(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    change_tensors(path, lambda t: t.update({"lm_head.weight": fixtures.bf16(V, H + 1)}))
    with pytest.raises(ValueError, match=r"lm_head\.weight: found shape \[160, 65\], expected \[160, 64\]"):
        load_head(path)
    change_tensors(path, lambda t: t.update({"lm_head.weight": fixtures.bf16(V - 1, H)}))
    with pytest.raises(ValueError, match=rf"lm_head\.weight says 159, {W2} says 160"):
        load_head(path)


def test_nested_flags_case_31(tmp_path):
    head = load_head(make("specforge-dspark-config", tmp_path), target=make("target", tmp_path))
    assert head.config.enable_confidence_head
    assert head.config.markov_head_type == "gated"
    path = change_tensors(make("deepspec-dflash", tmp_path), lambda t: None)
    change_config(path, dspark_config={"markov_rank": 0, "confidence_head_with_markov": True})
    with pytest.raises(
        ValueError, match="confidence_head_with_markov: found True, expected false, since markov_rank is 0"
    ):
        load_head(path)
    change_config(path, dspark_config={"block_size": 6})
    with pytest.raises(ValueError, match="block_size: found 5, expected the value that dspark_config has"):
        load_head(path)


def test_a_plain_parallel_drafter_loads(tmp_path):
    head = load_head(make("deepspec-dflash", tmp_path))
    assert head.markov is None
    assert head.confidence is None


# ---- names (case 30) ---------------------------------------------------------------------------------------------


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


# ---- mask token and rope (case 32) ------------------------------------------------------------------------------


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


# ---- vocabularies, softcap, scale (cases 17-20) --------------------------------------------------------------------


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


# ---- the LM head from the target -----------------------------------------------------------------------------------


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


# ---- bad values, bad paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm_head.weight", W1, W2, CONFIDENCE, "confidence_head.proj.bias"])
def test_nan_sentinels_are_refused(tmp_path, name):
    def change(tensors):
        array = tensors[name][1].copy()
        array.reshape(-1)[-1] = np.nan
        tensors[name] = ("BF16", array)

    with pytest.raises(ValueError, match=f"{name}: holds NaN"):
        load_head(change_tensors(make("deepspec-vanilla", tmp_path), change))


def test_nan_in_the_backbone_does_not_concern_the_head(tmp_path):
    nan = ("BF16", np.full(H, np.nan, ml_dtypes.bfloat16))
    load_head(change_tensors(make("deepspec-vanilla", tmp_path), lambda t: t.update({"norm.weight": nan})))


def test_wrong_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent: no such checkpoint"):
        load_head(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_head(tmp_path)


def test_configs_of_absurd_kind_or_size_are_not_read(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json: not a regular file"):
        load_head(path)
    (path / "config.json").unlink()
    with open(path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"config\.json: 1099511627776 bytes, expected at most"):
        load_head(path)


def test_truncated_files_are_errors(tmp_path):
    path = make("deepspec-vanilla", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors.*truncated"):
        load_head(path.parent)


def test_writers_of_transposed_views_are_case_33(tmp_path):
    # safetensors' numpy writer stores such a view's bytes untransposed; our writer does not.
    from dspark_jax.checkpoint.storage.write import write_safetensors

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(str(tmp_path / "x.safetensors"), {"x": ((3, 2), x.dtype)}, lambda name: [x.T[:2], x.T[2:]])
    np.testing.assert_array_equal(read_file(tmp_path / "x.safetensors")["x"][1], [[0, 3], [1, 4], [2, 5]])


# ---- sharding ------------------------------------------------------------------------------------------------------


def test_sharding_places_arrays(tmp_path):
    path = make("speculators-reduced", tmp_path)
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    wanted = load_head(path)
    head = load_head(path, sharding=whole)
    assert {leaf.sharding for leaf in jax.tree.leaves(head)} == {whole}
    for sharding in ({"lm_head.weight": rows, W2: rows}, lambda name: rows if name in ("lm_head.weight", W2) else None):
        head = load_head(path, sharding=sharding, dtype="float32")
        assert head.lm_head.sharding == rows
        assert head.markov.markov_w2.sharding == rows
        same(head.lm_head, np.asarray(wanted.lm_head).astype(np.float32))
        same(head.target_ids, wanted.target_ids)
    with pytest.raises(ValueError, match=r"sharding: found \['lm_head'\], expected names of tensors"):
        load_head(path, sharding={"lm_head": rows})


def test_sharding_over_four_devices(tmp_path):
    """Each device holds its rows of the vocabulary, and the draft is that of one device."""
    code = """
import sys, jax, numpy as np, dspark_jax
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
split = ("lm_head.weight", "markov_head.markov_w2.weight")
head = dspark_jax.load_head(sys.argv[1], sharding=lambda name: rows if name in split else whole)
for array in (head.lm_head[...], head.markov.markov_w2[...]):
    assert [shard.data.shape[0] for shard in array.addressable_shards] == [40] * 4
one = dspark_jax.load_head(sys.argv[1])
np.testing.assert_array_equal(np.asarray(head.lm_head), np.asarray(one.lm_head))
hidden = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
drafts = [dspark_jax.draft_block(h, hidden, [3, 5]).tokens for h in (head, one)]
np.testing.assert_array_equal(*map(np.asarray, drafts))
"""
    path = make("deepspec-gated", tmp_path)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(TESTS.parent),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
