"""Conversion: bit-exact, complete, accounted for, all or nothing; and the three commands."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from convert_cases import TAPS, VD, H, R, V, same_heads
from fixture_checkpoints import change_config, change_tensors, fixtures, header_file, make, read_file
from helpers import TESTS

from dspark_jax import load_head
from dspark_jax.checkpoint import convert, open_checkpoint
from dspark_jax.checkpoint.load import load_drafter

REPRESENTATIVES = ("deepspec-rnn", "speculators-reduced", "deepseek-v4", "deepspec-gemma4")


def with_target(fixture, tmp_path):
    lacks = ("specforge", "lfm2", "torchspec", "speculators")
    return make("target", tmp_path) if fixture.startswith(lacks) else None


def raw_bytes(array):
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("fixture", [name for name in fixtures.FAMILIES if name != "ornith"])
def test_safetensors_round_trip(tmp_path, fixture):
    source, target = make(fixture, tmp_path), with_target(fixture, tmp_path)
    manifest = convert(source, tmp_path / "out", target=target)
    before, after = open_checkpoint(source, target), open_checkpoint(tmp_path / "out")
    written = read_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(before.names) - {"t2d"} == set(after.names) == set(manifest["tensors"])
    for name, (dtype, raw) in written.items():
        assert dtype == manifest["tensors"][name]["dtype"]
        assert raw_bytes(raw) == raw_bytes(before.get(name))
        assert hashlib.sha256(raw_bytes(raw)).hexdigest() == manifest["tensors"][name]["sha256"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "dspark_manifest.json", "model.safetensors",
    ]  # fmt: skip
    after.check_backbone()
    # Equal in all but what the source left unsaid.
    for field in before.config.__dataclass_fields__:
        if field != "dtype":
            assert getattr(before.config, field) == getattr(after.config, field), field
    same_heads(load_head(tmp_path / "out"), load_head(source, target=target))


def test_the_file_opens_with_the_official_reader(tmp_path):
    from safetensors import safe_open

    convert(make("deepspec-gated", tmp_path), tmp_path / "out")
    stored = read_file(tmp_path / "deepspec-gated" / "model.safetensors")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        for name in file.keys():  # noqa: SIM118
            found = file.get_tensor(name)
            assert found.dtype == ml_dtypes.bfloat16
            assert raw_bytes(found) == raw_bytes(stored[name][1])


@pytest.mark.parametrize("fixture", REPRESENTATIVES)
def test_orbax_round_trip(tmp_path, fixture):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    source, target = make(fixture, tmp_path), with_target(fixture, tmp_path)
    manifest = convert(source, tmp_path / "out", format="orbax", target=target)
    before, after = open_checkpoint(source, target), open_checkpoint(tmp_path / "out")
    assert set(after.names) == set(before.names) - {"t2d"}
    for name in after.names:
        assert raw_bytes(after.get(name)) == raw_bytes(before.get(name)), name
        assert (after.shapes[name], after.dtypes[name]) == (before.shapes[name], before.dtypes[name])
        assert hashlib.sha256(raw_bytes(after.get(name))).hexdigest() == manifest["tensors"][name]["sha256"]
    same_heads(load_head(tmp_path / "out"), load_head(source, target=target))
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out")
    lm_head, markov = before.get("lm_head.weight"), tree["markov_head"]
    np.testing.assert_array_equal(tree["lm_head"]["kernel"], lm_head.T)  # [in, out]
    np.testing.assert_array_equal(
        markov["markov_w1"]["embedding"], before.get("markov_head.markov_w1.weight")
    )  # [V, r]
    np.testing.assert_array_equal(markov["markov_w2"]["embedding"], before.get("markov_head.markov_w2.weight"))
    assert markov["markov_w2"]["embedding"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tree["norm"]["scale"], before.get("norm.weight"))
    if fixture == "speculators-reduced":
        stored = read_file(source / "model.safetensors")
        assert tree["draft_to_target"].dtype == np.int32
        np.testing.assert_array_equal(tree["draft_to_target"], np.arange(VD) + stored["d2t"][1])
        assert "d2t" not in tree
        assert "t2d" not in tree
    if fixture == "deepspec-rnn":
        stored = read_file(source / "model.safetensors")
        np.testing.assert_array_equal(
            tree["layers"]["1"]["mlp"]["down_proj"]["kernel"], stored["layers.1.mlp.down_proj.weight"][1].T
        )
        np.testing.assert_array_equal(markov["joint_proj"]["kernel"], stored["markov_head.joint_proj.weight"][1].T)
        np.testing.assert_array_equal(markov["joint_proj"]["bias"], stored["markov_head.joint_proj.bias"][1])


def test_orbax_trees_convert_back(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    source = make("speculators-reduced", tmp_path)
    convert(source, tmp_path / "tree", format="orbax")
    convert(tmp_path / "tree", tmp_path / "back")
    convert(source, tmp_path / "straight")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's threads
def test_damaged_orbax_trees_are_errors(tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    out = tmp_path / "out"
    convert(make("deepspec-vanilla", tmp_path), out, format="orbax", head_only=True)
    shutil.copytree(out, tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "d")
    with pytest.raises(ValueError, match=r"other: (not a readable Orbax|\S+ cannot be restored)"):
        load_head(tmp_path / "other")
    for damage in ("", "{", "[]", '{"tree_metadata": 3}'):
        (out / "_METADATA").write_text(damage)
        with pytest.raises(ValueError, match=r"out: not a readable Orbax checkpoint"):
            load_head(out)


def test_large_leaves_are_written_in_blocks(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    from dspark_jax.checkpoint.storage import orbax_tree, tensor

    monkeypatch.setattr(orbax_tree, "CHUNK", 4000)
    monkeypatch.setattr(tensor.Tensor.chunks, "__defaults__", (700,))
    source = make("speculators-reduced", tmp_path, layers=1)
    convert(source, tmp_path / "tree", format="orbax")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "tree")
    assert before.tensors["markov_head.markov_w1.weight"].nbytes < 4000 < before.tensors["lm_head.weight"].nbytes
    for name in after.names:
        assert raw_bytes(after.get(name)) == raw_bytes(before.get(name)), name


@pytest.mark.parametrize(("dtype", "wanted"), [("bf16", ml_dtypes.bfloat16), ("f32", np.float32)])
@pytest.mark.parametrize("format", ["safetensors", "orbax"])
def test_changing_the_dtype(tmp_path, dtype, wanted, format):
    if format == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    exact = fixtures.f32(V, H)[1]
    source = make("speculators-reduced", tmp_path)
    change_tensors(source, lambda t: t.update({"markov_head.markov_w1.weight": ("F32", exact[:, :R])}))
    manifest = convert(source, tmp_path / "out", dtype=dtype, format=format)
    after = open_checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(after.get("markov_head.markov_w1.weight"), exact[:, :R].astype(wanted))
    assert {after.dtypes[name] for name in after.names if name != "d2t"} == {np.dtype(wanted)}
    assert after.dtypes["d2t"] == np.int64
    assert manifest["config"]["dtype"] == np.dtype(wanted).name == after.config.dtype


def test_head_only(tmp_path):
    for fixture in ("deepspec-gated", "deepseek-v4", "ornith"):
        source = make(fixture, tmp_path)
        manifest = convert(source, tmp_path / f"{fixture}-head", head_only=True)
        after = open_checkpoint(tmp_path / f"{fixture}-head")
        assert all(name.startswith(("lm_head", "markov_head", "confidence_head")) for name in after.names)
        assert manifest["head_only"] is True
        assert "backbone tensor (head only)" in {place.get("left_out") for place in manifest["sources"].values()}
        same_heads(load_head(tmp_path / f"{fixture}-head"), load_head(source))
    with pytest.raises(ValueError, match=r"family ornith: .*--head-only"):
        convert(tmp_path / "ornith", tmp_path / "whole")
    (tmp_path / "deepseek-v4" / "model-00001-of-00005.safetensors").unlink()  # embedding and target layers
    convert(tmp_path / "deepseek-v4", tmp_path / "without", head_only=True)


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("fixture", ["deepspec-gemma4", "speculators-reduced", "specforge-early", "torchspec-midlayer"])
def test_whole_drafters_load_from_results(tmp_path, fixture, format):
    if format == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    source, target = make(fixture, tmp_path), make("target", tmp_path)
    convert(source, tmp_path / "out", format=format, target=target)
    found, wanted = load_drafter(tmp_path / "out"), load_drafter(source, target=target)
    same_heads(found, wanted)
    assert found.backbone.config == wanted.backbone.config
    assert found.head.config == wanted.head.config


@pytest.mark.parametrize("fixture", ["ornith", "automodel-v4", "deepseek-v4"])
def test_foreign_backbones_are_not_built(tmp_path, fixture):
    with pytest.raises(ValueError, match=f"family {fixture}: "):
        load_drafter(make(fixture, tmp_path))


def no_nulls(value):
    if isinstance(value, dict):
        return all(map(no_nulls, value.values()))
    return value is not None


@pytest.mark.parametrize("fixture", [name for name in fixtures.FAMILIES if name != "ornith"])
def test_the_config_is_flat_and_explicit(tmp_path, fixture):
    config = convert(make(fixture, tmp_path), tmp_path / "out")["config"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert no_nulls(config)
    for key in ("dflash_config", "dspark_config", "transformer_layer_config", "speculators_config", "auto_map",
                "aux_hidden_state_layer_ids", "quantization_config", "dspark_block_size", "torch_dtype"):  # fmt: skip
        assert key not in config
    assert isinstance(config["sample_from_anchor"], bool)
    assert isinstance(config["target_hidden_size"], int)
    for key in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head"):
        assert key in config
    assert ("draft_vocab_size" in config) == fixture.endswith("reduced")
    rope = config.get("rope_parameters", {})
    theta = rope.get("full_attention", rope).get("rope_theta")
    assert config["rope_theta"] == theta == (10000 if fixture.startswith("deepseek") else 1e6)
    if not fixture.startswith(("deepseek", "automodel", "deepspec-gemma4")):
        assert (config["architectures"], config["model_type"]) == (["Qwen3DSparkModel"], "qwen3")
        assert isinstance(config["causal"], bool)
        assert config["rope_is_neox_style"] == (fixture != "lfm2")
    if fixture == "deepspec-gemma4":
        assert rope["full_attention"] == {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        }  # fmt: skip
        assert (config["global_head_dim"], config["attention_k_eq_v"]) == (32, True)


def test_rules_of_a_jax_server_loader(tmp_path):
    """What sglang-jax's Qwen3 DSpark loader demands of a directory and its config (its pull request 1632)."""
    manifest = convert(make("speculators-full", tmp_path), tmp_path / "out", target=make("target", tmp_path))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1
    allowed = {"BF16", "F16", "F32", "I64", "I32", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"}
    assert {dtype for dtype, _ in read_file(tmp_path / "out" / "model.safetensors").values()} <= allowed
    config = manifest["config"]
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["markov_rank"] > 0
    assert config["markov_head_type"] == "vanilla"
    assert int(config["target_hidden_size"]) == H
    assert config["target_layer_ids"] == list(TAPS)
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight", "markov_head.markov_w1.weight"}
    assert wanted <= set(manifest["tensors"])


def test_legacy_rope_scaling_is_kept(tmp_path):
    source = make("deepspec-vanilla", tmp_path)
    change_config(source, rope_parameters=None, rope_theta=8e6, rope_scaling={"type": "linear", "factor": 4.0})
    config = convert(source, tmp_path / "out")["config"]
    assert config["rope_parameters"] == {"rope_type": "linear", "factor": 4.0, "rope_theta": 8e6}
    assert config["rope_theta"] == 8e6


@pytest.mark.parametrize("fixture", REPRESENTATIVES)
def test_every_source_tensor_is_accounted_for(tmp_path, fixture):
    source = make(fixture, tmp_path)
    manifest = convert(source, tmp_path / "out")
    names = set()
    for file in source.glob("*.safetensors"):
        names |= set(read_file(file))
    assert set(manifest["sources"]) == names
    for name, place in manifest["sources"].items():
        assert (place.get("to") in manifest["tensors"]) != bool(place.get("left_out")), name
    for name, entry in manifest["tensors"].items():
        assert all(manifest["sources"][origin] == {"to": name} for origin in entry["sources"])
    after = open_checkpoint(tmp_path / "out")
    floats = [name for name in after.names if name != "d2t"]
    assert manifest["parameters"] == sum(int(np.prod(after.shapes[name], dtype=np.int64)) for name in floats)
    assert manifest["family"] == open_checkpoint(source).family.name
    assert json.loads((tmp_path / "out" / "dspark_manifest.json").read_text()) == manifest
    if fixture == "speculators-reduced":
        assert manifest["sources"]["t2d"] == {"left_out": "checked against d2t, which says the same"}
    if fixture == "deepseek-v4":
        assert manifest["sources"]["layers.0.attn.wq_a.weight"] == {
            "left_out": "tensor of the target, not of the drafter"
        }
        assert manifest["tensors"]["fc.weight"]["sources"] == ["mtp.0.main_proj.weight", "mtp.0.main_proj.scale"]
        assert manifest["tensors"]["fc.weight"]["transform"] == "fp8"
        assert manifest["tensors"]["layers.0.ffn.experts.0.w1.weight"]["transform"] == "fp4"
        assert "no JAX counterpart" in manifest["backbone"]


def test_where_embedding_and_head_came_from(tmp_path):
    source = make("specforge", tmp_path)
    manifest = convert(source, tmp_path / "alone")
    assert sorted(manifest["missing"]) == ["embed_tokens.weight", "lm_head.weight"]
    assert "--target" in manifest["missing"]["lm_head.weight"]
    with pytest.raises(ValueError, match="stores no LM head; pass target="):
        load_head(tmp_path / "alone")
    same_heads(
        load_head(tmp_path / "alone", target=make("target", tmp_path)), load_head(source, target=tmp_path / "target")
    )
    manifest = convert(source, tmp_path / "own", target=tmp_path / "target")
    assert not manifest["missing"]
    assert {manifest["tensors"][name]["origin"] for name in ("lm_head.weight", "embed_tokens.weight")} == {"target"}
    manifest = convert(source, tmp_path / "tied", target=make("target-tied", tmp_path))
    assert manifest["tensors"]["lm_head.weight"]["origin"] == "target, tied to the embedding"
    written = read_file(tmp_path / "tied" / "model.safetensors")
    assert raw_bytes(written["lm_head.weight"][1]) == raw_bytes(written["embed_tokens.weight"][1])
    assert convert(make("deepspec-vanilla", tmp_path), tmp_path / "d")["tensors"]["lm_head.weight"]["origin"] == "draft"


def test_a_stored_copy_is_compared_with_the_target(tmp_path):
    target = make("target", tmp_path)
    manifest = convert(make("deepspec-vanilla", tmp_path), tmp_path / "other", target=target)
    assert [note.split(":")[0] for note in manifest["notes"]] == ["embed_tokens.weight", "lm_head.weight"]
    stored = read_file(target / "model-00002-of-00002.safetensors")["lm_head.weight"]
    path = change_tensors(tmp_path / "deepspec-vanilla", lambda t: t.update({"lm_head.weight": stored}))
    manifest = convert(path, tmp_path / "same", target=target, head_only=True)
    assert manifest["notes"] == []
    path = make("speculators-reduced", tmp_path)
    ids = load_head(path).target_ids
    rows = ("BF16", stored[1][np.asarray(ids)])
    assert convert(path, tmp_path / "a", target=target, head_only=True)["notes"] != []
    change_tensors(path, lambda t: t.update({"lm_head.weight": rows}))
    assert convert(path, tmp_path / "b", target=target, head_only=True)["notes"] == []


def test_a_calibration_goes_along(tmp_path):
    source = make("deepspec-vanilla", tmp_path)
    (source / "calibration.json").write_text(json.dumps({"temperatures": [1.0, 1.5, 2.0, 1.0, 1.0]}))
    convert(source, tmp_path / "out")
    assert load_head(tmp_path / "out").calibration == load_head(source).calibration
    assert load_head(source).calibration.temperatures[1] == 1.5
    (source / "calibration.json").write_text("[]")
    with pytest.raises(ValueError, match="calibration"):
        convert(source, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """Two matrices of 134 MB, and a peak that exceeds the imports' by a few parts of one."""
    wide, rows = 1024, 65536
    config = json.loads((make("deepspec-dflash", tmp_path, layers=1) / "config.json").read_text())
    shapes = {
        name: array.shape for name, (_, array) in read_file(tmp_path / "deepspec-dflash" / "model.safetensors").items()
    }
    shapes |= {"embed_tokens.weight": (rows, wide), "lm_head.weight": (rows, wide)}
    header, end = {}, 0
    for name, shape in shapes.items():
        shape = tuple(wide if n == H else 3 * wide if n == 3 * H else n for n in shape)
        if name.endswith(("q_proj.weight", "o_proj.weight")):
            shape = (H, wide) if "q_proj" in name else (wide, H)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * int(np.prod(shape))]}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "hidden_size": wide}))
    file = header_file(source / "model.safetensors", header)
    os.truncate(file, file.stat().st_size + end)  # a sparse file: zeros that take no disk
    code = """
import resource, sys
from dspark_jax.checkpoint import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], dtype=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)}
    for dtype, parts in (("keep", 1), ("f32", 2)):
        command = [sys.executable, "-c", code, source, tmp_path / dtype, dtype]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert int(result.stdout) < 100_000 * parts, result.stdout  # KiB
        assert (tmp_path / dtype / "model.safetensors").stat().st_size > parts * 2.5e8
        shutil.rmtree(tmp_path / dtype)
