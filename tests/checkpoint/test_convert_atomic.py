"""Conversions appear whole or not at all."""

import os
import sys

import numpy as np
import pytest
from fixture_checkpoints import change_tensors, make

from dspark_jax.checkpoint import convert, open_checkpoint


def test_existing_results_are_kept_without_force(tmp_path):
    source, out = make("deepspec-vanilla", tmp_path), tmp_path / "out"
    convert(source, out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="--force"):
        convert(make("deepspec-rnn", tmp_path), out)
    assert (out / "model.safetensors").read_bytes() == before
    convert(tmp_path / "deepspec-rnn", out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="not the result of an earlier conversion"):
        convert(source, tmp_path / "mine", force=True)
    with pytest.raises(FileExistsError, match="not the result of an earlier conversion"):
        convert(source, source, force=True)
    with pytest.raises(ValueError, match=r"destination: .*does not hold the source"):
        convert(out, out, force=True)
    assert sorted(os.listdir(tmp_path)) == ["deepspec-rnn", "deepspec-vanilla", "mine", "out"]


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize("force", [False, True])
def test_a_failing_conversion_leaves_nothing(tmp_path, format, force):
    if format == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    good, bad, out = make("deepspec-vanilla", tmp_path), make("deepspec-gated", tmp_path), tmp_path / "out"

    def poison(tensors):  # the last one written
        array = tensors["norm.weight"][1].copy()
        array[3] = np.nan
        tensors["norm.weight"] = ("BF16", array)

    change_tensors(bad, poison)
    if force:
        convert(good, out)
    with pytest.raises(ValueError, match=r"norm\.weight: holds NaN"):
        convert(bad, out, format=format, force=force)
    assert out.exists() == force
    if force:
        assert open_checkpoint(out).config.markov_head_type == "vanilla"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    from dspark_jax.checkpoint import convert as _  # noqa: F401

    module = sys.modules["dspark_jax.checkpoint.convert"]

    def interrupted(path, value, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(make("deepspec-vanilla", tmp_path), tmp_path / "out")
    assert os.listdir(tmp_path) == ["deepspec-vanilla"]


def test_errors_come_before_anything_is_written(tmp_path):
    path = change_tensors(make("deepspec-vanilla", tmp_path), lambda t: t.pop("layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight: missing"):
        convert(path, tmp_path / "out")
    convert(path, tmp_path / "head", head_only=True)
    with pytest.raises(ValueError, match="format: found 'gguf'"):
        convert(path, tmp_path / "out", format="gguf")
    with pytest.raises(ValueError, match="dtype: found 'int4'"):
        convert(path, tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()
