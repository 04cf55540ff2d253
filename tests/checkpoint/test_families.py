"""Every family's fixture: recognised, each tensor with its own bits under its name, each config fact normalised."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from families_cases import by_hand, stored
from fixture_checkpoints import fixtures, header_file, make

from dspark_jax.checkpoint import open_checkpoint

EXPECTED = {
    "speculators": "speculators", "specforge": "specforge", "lfm2": "specforge", "torchspec": "torchspec",
    "automodel-v4": "automodel-v4", "deepseek-v4.1": "deepseek-v4.1", "deepseek-v4": "deepseek-v4", "ornith": "ornith",
}  # fmt: skip


def family_of(fixture):
    return next((family for start, family in EXPECTED.items() if fixture.startswith(start)), "deepspec")


@pytest.mark.parametrize("fixture", list(fixtures.FAMILIES))
def test_every_tensor_arrives_bit_for_bit(tmp_path, fixture):
    path = make(fixture, tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.family.name == family_of(fixture)
    source = stored(path)
    used = {name for tensor in checkpoint.tensors.values() for name in tensor.sources}
    assert used | set(checkpoint.left_out) == set(source)
    assert not used & set(checkpoint.left_out)
    for name, tensor in checkpoint.tensors.items():
        dtype, raw = source[tensor.source]
        assert by_hand(tensor.source) == name
        if tensor.transform == "copy":
            array = checkpoint.get(name)
            assert (array.shape, array.tobytes()) == (raw.shape, raw.tobytes())
            assert dtype in ("BF16", "F32", "I64", "BOOL")
    checkpoint.check_backbone()


@pytest.mark.parametrize("fixture", list(fixtures.REFUSED))
def test_other_families_are_refused_by_name(tmp_path, fixture):
    with pytest.raises(ValueError, match=f"family {fixture}: .*not supported"):
        open_checkpoint(make(fixture, tmp_path))


def test_gguf_is_refused_by_name(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ValueError, match="family gguf"):
            open_checkpoint(path)


@pytest.mark.parametrize("L", [1, 5])
@pytest.mark.parametrize(
    ("fixture", "count"),
    [
        ("deepspec-vanilla", lambda L: 11 * L + 9),
        ("deepspec-no-confidence", lambda L: 11 * L + 7),
        ("deepspec-gated", lambda L: 11 * L + 11),
        ("deepspec-rnn", lambda L: 11 * L + 11),
        ("deepspec-dflash", lambda L: 11 * L + 5),
        ("deepspec-gemma4", lambda L: 13 * L + 9),
        ("specforge", lambda L: 11 * L + 7),
        ("speculators-full", lambda L: 11 * L + 7),
        ("speculators-reduced", lambda L: 11 * L + 10),
        ("speculators-old-full", lambda L: 11 * L + 9),
        ("speculators-old-reduced", lambda L: 11 * L + 11),
    ],
)
def test_tensor_counts(tmp_path, fixture, L, count):
    checkpoint = open_checkpoint(make(fixture, tmp_path, layers=L))
    assert len(checkpoint.files) == len(checkpoint.tensors) + len(checkpoint.left_out) == count(L)


def test_deepseek_v4_counts(tmp_path):
    for experts in (1, 5):
        checkpoint = open_checkpoint(fixtures.deepseek_v4(tmp_path / str(experts), experts))
        assert sum(name.startswith("mtp.") for name in checkpoint.files) == (6 * experts + 29) * 3 + 3 + 7
    assert (6 * 256 + 29) * 3 + 3 + 7 == 4705


RELEASES = {
    "qwen3-4b": (2560, 32, 8, 128, 9728, 151936, 1_393_133_569),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936, 2_371_081_729),
    "qwen3-14b": (5120, 40, 8, 128, 17408, 151936, 3_416_263_169),
    "gemma4-12b": (3840, 16, 1, 512, 15360, 262144, 3_430_444_550),
}


@pytest.mark.parametrize("release", list(RELEASES))
def test_released_sizes(tmp_path, release, monkeypatch):
    """The real shapes in a sparse file: the parameter counts that the releases' file sizes confirm, and quickly."""
    H, nh, nkv, hd, inner, V, parameters = RELEASES[release]
    for key, value in {"H": H, "I": inner, "V": V, "R": 256, "HEADS": nh, "KV_HEADS": nkv, "HEAD": hd}.items():
        monkeypatch.setattr(fixtures, key, value)
    monkeypatch.setattr(fixtures, "TAPS", (1, 9, 17, 25, 33))
    monkeypatch.setattr(fixtures, "DEPTH", 36)

    def empty(*shape, **_):
        return ("BF16", np.broadcast_to(ml_dtypes.bfloat16(0), shape))

    monkeypatch.setattr(fixtures, "bf16", empty)

    def write_sparse(path, config, tensors):
        if config["model_type"] == "gemma4_text":  # the fixture's own small sizes are spelled out in it
            config |= {"global_head_dim": hd, "num_global_key_value_heads": nkv}
            for name in list(tensors):
                if "_norm" in name and "self_attn" in name:
                    tensors[name] = empty(hd)
                elif "q_proj" in name or "o_proj" in name:
                    tensors[name] = empty(nh * hd, H) if "q_proj" in name else empty(H, nh * hd)
                elif "k_proj" in name:
                    tensors[name] = empty(nkv * hd, H)
        header, end = {}, 0
        for name, (dtype, array) in tensors.items():
            size = int(np.prod(array.shape, dtype=np.int64)) * 2
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + size]}
            end += size
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        header_file(path / "model.safetensors", header)
        os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size + end)
        return path

    monkeypatch.setattr(fixtures, "write", write_sparse)
    maker = fixtures.gemma4 if release == "gemma4-12b" else fixtures.deepspec
    checkpoint = open_checkpoint(maker(tmp_path / release, 5))
    checkpoint.check_backbone()
    assert sum(int(np.prod(shape, dtype=np.int64)) for shape in checkpoint.shapes.values()) == parameters
    assert checkpoint.get("embed_tokens.weight").shape == (V, H)
