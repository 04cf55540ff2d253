"""load_head: the right arrays in the right places, or an error that names tensor or key (pitfalls 17-20, 29-33)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixture_checkpoints import change_config, change_tensors, fixtures, make, read_file
from load_cases import CONFIDENCE, W1, W2, H, R, V, drop, same

from dspark_jax import load_head
from dspark_jax.drafting.heads import GatedMarkovHead, RnnMarkovHead, VanillaMarkovHead

GATE, JOINT = "markov_head.gate_proj.weight", "markov_head.joint_proj.weight"


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
