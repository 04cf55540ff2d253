"""`verify` covers every byte of a result: its config, calibration and manifest, and its tensors."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
from fixture_checkpoints import change_config, fixtures, make, read_file

import dspark_jax.checkpoint.convert  # noqa: F401, the module, of which `convert` the function hides the name
from dspark_jax import Calibration
from dspark_jax.checkpoint import convert
from dspark_jax.checkpoint.manifest import changed_json, read_manifest
from dspark_jax.checkpoint.storage.appear import MANIFEST

MODULE = sys.modules["dspark_jax.checkpoint.convert"]
FIXTURES = ("deepspec-rnn", "speculators-reduced", "deepspec-gemma4")


def verify(source, out):
    pytest.importorskip("torch", reason="verification reads the source with PyTorch")
    from dspark_jax.checkpoint import verify

    return verify(source, out)


@pytest.fixture
def result(tmp_path, request):
    source = make(getattr(request, "param", "deepspec-rnn"), tmp_path)
    Calibration([1.5] * 4).save(source / "calibration.json", bins=7)
    convert(source, tmp_path / "out")
    return source, tmp_path / "out"


def other(value):
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [*value, 1] if isinstance(value, list) else {**value, "x": 1}


def spellings(value):
    """Yield a JSON object with one key changed, removed or added, at every place, inner objects included."""
    for key in value:
        yield {k: v for k, v in value.items() if k != key}
        yield value | {key: other(value[key])}
        if isinstance(value[key], dict):
            for inner in spellings(value[key]):
                yield value | {key: inner}
    yield value | {"x": 1}


@pytest.mark.parametrize("result", FIXTURES, indirect=True)
@pytest.mark.parametrize("name", ["config.json", "calibration.json", MANIFEST])
def test_every_changed_removed_or_added_key_is_found(result, name):
    _, out = result
    original = json.loads((out / name).read_text())
    assert changed_json(str(out), read_manifest(str(out)), json.loads((out / "config.json").read_text())) == []
    count = 0
    for changed in spellings(original):
        (out / name).write_text(json.dumps(changed))
        try:
            manifest = read_manifest(str(out))
        except ValueError:
            continue  # refused outright: the manifest lacks what a verification needs
        assert changed_json(str(out), manifest, json.loads((out / "config.json").read_text())), changed
        count += 1
    assert count >= (3 if name == "calibration.json" else 40)


def test_removed_and_foreign_files_are_found(result):
    source, out = result
    (out / "calibration.json").unlink()
    assert "calibration.json: missing" in verify(source, out).problems
    shutil.rmtree(source)
    source = make("deepspec-vanilla", out.parent)
    convert(source, out.parent / "plain")
    shutil.copy(source / "config.json", out.parent / "plain" / "calibration.json")
    with pytest.raises(ValueError, match="calibration"):
        verify(source, out.parent / "plain")


@pytest.mark.parametrize("result", ["deepspec-gated"], indirect=True)
def test_flipped_bits_of_the_tensors_are_found(result):
    """Every byte is under a checksum; here some bits of the header and of each tensor."""
    source, out = result
    path = out / "model.safetensors"
    original = path.read_bytes()
    end = 8 + int.from_bytes(original[:8], "little")
    generator = random.Random(3)
    places = [generator.randrange(0, end) for _ in range(10)] + [
        generator.randrange(end, len(original)) for _ in range(6)
    ]
    for place in (*places, end, len(original) - 1):
        data = bytearray(original)
        data[place] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(data))
        try:
            passed = verify(source, out).passed
        except (ValueError, FileNotFoundError):  # the file is no longer one
            continue
        # A bit of the header may change nothing that is read: blanks, or the format note.
        same = place < end and all(
            np.array_equal(a[1].view(np.uint8), b[1].view(np.uint8))
            for a, b in zip(read_file(path).values(), read_file(source / "model.safetensors").values(), strict=False)
        )
        assert not passed or same, place


@pytest.mark.parametrize(
    ("fixture", "stated", "key", "value"),
    [
        ("deepspec-vanilla", {"rms_norm_eps": 1e-5}, "rms_norm_eps", 1e-6),
        ("deepspec-vanilla", {"causal": True}, "causal", False),
        ("deepspec-vanilla", {"rope_is_neox_style": False}, "rope_is_neox_style", True),
        ("deepspec-vanilla", {"layer_types": ["full_attention"] * 2}, "layer_types", ["sliding_attention"] * 2),
        ("deepspec-vanilla", {}, "num_hidden_layers", 3),
        ("deepspec-vanilla", {}, "head_dim", fixtures.H),
        ("deepspec-vanilla", {}, "rope_theta", 10.0),
        ("deepspec-vanilla", {}, "num_key_value_heads", 1),
        ("speculators-full", {}, "sample_from_anchor", False),
        ("deepspec-gemma4", {}, "final_logit_softcapping", 7.0),
        ("specforge", {}, "mask_token_id", 3),
        ("deepseek-v4", {}, "target_layer_ids", [1, 2, 3]),
    ],
)
def test_a_wrong_fact_is_found_although_manifest_and_config_agree(tmp_path, monkeypatch, fixture, stated, key, value):
    """The source is read once more, by other code: a fault of the conversion itself is seen."""
    source = make(fixture, tmp_path)
    if stated:
        change_config(source, **stated)
    original = MODULE.explicit_config

    def wrong(checkpoint, dtype):
        config, why = original(checkpoint, dtype)
        assert config.get(key) != value
        return config | {key: value}, why

    convert(source, tmp_path / "right")
    assert not [p for p in verify(source, tmp_path / "right").problems if "source says" in p]
    monkeypatch.setattr(MODULE, "explicit_config", wrong)
    convert(source, tmp_path / "out")
    try:
        problems = verify(source, tmp_path / "out").problems
    except ValueError as error:  # the tensors contradict it
        problems = [str(error)]
    assert any(key in problem for problem in problems), problems
