"""DeepSeek-V4 checkpoints: decoding, shards, names."""

import json

import ml_dtypes
import numpy as np
import pytest
from families_cases import V, stored
from fixture_checkpoints import e2m1, e4m3, e8m0, fixtures, make, read_file

from dspark_jax.checkpoint import open_checkpoint
from dspark_jax.checkpoint.family import table as families
from dspark_jax.checkpoint.hub import needed_shards


def decode(tensors, name):
    """Decode a quantised weight by hand, in float64."""
    dtype, raw = tensors[name + ".weight"]
    scale = e8m0(tensors[name + ".scale"][1])
    if dtype == "F8_E4M3":
        side = next(b for b in (128, 32) if tuple(-(-n // b) for n in raw.shape) == scale.shape)
        wide = e4m3(raw)
        return np.array(
            [[wide[i, j] * scale[i // side, j // side] for j in range(raw.shape[1])] for i in range(raw.shape[0])]
        )
    bits = raw.view(np.uint8)
    values = np.zeros((raw.shape[0], 2 * raw.shape[1]))
    values[:, 0::2], values[:, 1::2] = e2m1(bits & 15), e2m1(bits >> 4)
    return values * np.repeat(scale, 32, axis=1)


@pytest.mark.parametrize("fixture", ["deepseek-v4", "deepseek-v4.1"])
def test_dequantisation_equals_a_hand_written_decode(tmp_path, fixture):
    path = make(fixture, tmp_path)
    checkpoint, tensors = open_checkpoint(path), stored(path)
    assert tensors["mtp.0.main_proj.scale"][1].shape == ((2, 6) if fixture == "deepseek-v4" else (8, 24))
    for name, source in (
        ("fc", "mtp.0.main_proj"), ("layers.2.attn.wo_b", "mtp.2.attn.wo_b"),
        ("layers.1.ffn.shared_experts.w2", "mtp.1.ffn.shared_experts.w2"),
        ("layers.0.ffn.experts.3.w1", "mtp.0.ffn.experts.3.w1"),
        ("layers.2.ffn.experts.0.w2", "mtp.2.ffn.experts.0.w2"),
    ):  # fmt: skip
        found = checkpoint.get(name + ".weight")
        assert found.dtype == ml_dtypes.bfloat16
        wanted = decode(tensors, source)
        assert len(np.unique(wanted)) > 8
        np.testing.assert_array_equal(found.astype(np.float64), wanted)  # exact: both formats fit into bfloat16
        tensor = checkpoint.tensors[name + ".weight"]
        np.testing.assert_array_equal(np.concatenate(list(tensor.chunks(5000))), found)
        np.testing.assert_array_equal(tensor.rows(7, 70), found[7:70])


def test_low_nibbles_are_even_columns():
    from dspark_jax.checkpoint.storage.dequantize import fp4_rows

    packed = np.array([[0x21, 0xF7] + [0] * 14], np.uint8).view(np.int8)
    scale = np.array([[128]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert fp4_rows("x", packed, scale)[0, :4].tolist() == [1.0, 2.0, 12.0, -12.0]


def test_all_codes_decode():
    from dspark_jax.checkpoint.storage.dequantize import fp8_rows

    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = np.array([[127]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    found = fp8_rows("x", codes.view(ml_dtypes.float8_e4m3fn)[None], scale, 256)
    np.testing.assert_array_equal(found[0].astype(np.float64), e4m3(codes))


def test_bad_scales_are_refused(tmp_path):
    path = make("deepseek-v4", tmp_path)
    shard = path / "model-00003-of-00005.safetensors"
    tensors = read_file(shard)
    tensors["mtp.0.main_proj.scale"] = ("F8_E8M0", np.full((2, 6), 255, np.uint8))
    fixtures.write_file(shard, tensors)
    with pytest.raises(ValueError, match=r"fc\.weight: holds NaN scales"):
        open_checkpoint(path).get("fc.weight")
    tensors["mtp.0.main_proj.scale"] = ("F8_E8M0", np.full((3, 6), 127, np.uint8))
    tensors["mtp.0.ffn.experts.0.w1.scale"] = ("F8_E8M0", np.full((128, 7), 127, np.uint8))
    tensors["mtp.0.attn.wq_a.scale"] = ("F32", np.ones((1, 2), np.float32))
    fixtures.write_file(shard, tensors)
    with pytest.raises(ValueError, match="scale") as caught:
        open_checkpoint(path)
    assert "mtp.0.main_proj.weight: found scale shape [3, 6]" in str(caught.value)
    assert "mtp.0.ffn.experts.0.w1.weight: found packed FP4 [128, 128] with scales [128, 7]" in str(caught.value)
    assert "mtp.0.attn.wq_a.scale: found dtype F32, expected F8_E8M0" in str(caught.value)


def test_lost_scales_and_lost_weights_are_errors(tmp_path):
    path = make("deepseek-v4", tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shard = path / "model-00004-of-00005.safetensors"
    tensors = read_file(shard)
    for name in ("mtp.1.attn.wkv.scale", "mtp.1.ffn.experts.2.w3.weight"):
        del tensors[name], index["weight_map"][name]
    fixtures.write_file(shard, tensors)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"mtp\.1") as caught:
        open_checkpoint(path)
    assert "mtp.1.attn.wkv.weight: found dtype F8_E4M3 without block scales" in str(caught.value)
    assert "mtp.1.ffn.experts.2.w3.scale: scales of layers.1.ffn.experts.2.w3.weight, which is missing" in str(
        caught.value
    )


def test_only_the_drafters_shards_are_opened(tmp_path):
    path = make("deepseek-v4", tmp_path)
    (path / "model-00001-of-00005.safetensors").unlink()
    (path / "model-00002-of-00005.safetensors").unlink()
    (path / "stray.safetensors").write_bytes(b"junk")
    checkpoint = open_checkpoint(path)
    checkpoint.check_backbone()
    assert checkpoint.files.opened == [f"model-0000{n}-of-00005.safetensors" for n in (3, 4, 5)]
    assert checkpoint.missing == ["embed_tokens.weight", "lm_head.weight"]
    assert checkpoint.left_out["head.weight"] == "tensor of the target, whose shard is not here"


def test_a_repacks_own_head_goes_before_the_targets_in_any_order(tmp_path):
    own = fixtures.bf16(V, 256)
    for name in ("first", "last"):  # the shard order must not matter
        path = fixtures.deepseek_v4(tmp_path / name)
        number = 1 if name == "first" else 5
        shard = path / f"model-0000{number}-of-00005.safetensors"
        fixtures.write_file(shard, read_file(shard) | {"mtp.2.head.weight": own})
        index = json.loads((path / "model.safetensors.index.json").read_text())
        index["weight_map"]["mtp.2.head.weight"] = shard.name
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        checkpoint = open_checkpoint(path)
        np.testing.assert_array_equal(checkpoint.get("lm_head.weight"), own[1])
        assert checkpoint.left_out["head.weight"] == "tensor of the target; the drafter has its own"


def test_needed_shards_by_the_index_alone(tmp_path):
    index = json.loads((make("deepseek-v4", tmp_path) / "model.safetensors.index.json").read_text())
    many = index["weight_map"] | {f"layers.{n}.attn.wkv.weight": f"far-{n}.safetensors" for n in range(30)}
    shards = [f"model-0000{n}-of-00005.safetensors" for n in (1, 2, 3, 4, 5)]
    assert needed_shards(many) == shards
    assert needed_shards(many, head_only=True) == [shards[1], shards[4]]


def test_an_mtp_block_without_main_proj_is_not_dspark(tmp_path):
    assert families.detect(["mtp.0.attn.wq_a.weight", "mtp.0.norm.weight"], {}).name == "deepspec"
