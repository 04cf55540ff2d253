"""Every family's fixture: recognised, each tensor with its own bits under its name, each config fact normalised."""

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
from fixture_checkpoints import change_config, change_tensors, e2m1, e4m3, e8m0, fixtures, header_file, make, read_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.checkpoint import inspect, open_checkpoint
from dspark_jax.checkpoint.family import table as families
from dspark_jax.checkpoint.hub import needed_shards
from dspark_jax.checkpoint.inspect import to_text
from dspark_jax.config import DSparkConfig

V, VD, H, R, TAPS, MASK = (getattr(fixtures, name) for name in ("V", "VD", "H", "R", "TAPS", "MASK"))
EXPECTED = {
    "speculators": "speculators", "specforge": "specforge", "lfm2": "specforge", "torchspec": "torchspec",
    "automodel-v4": "automodel-v4", "deepseek-v4.1": "deepseek-v4.1", "deepseek-v4": "deepseek-v4", "ornith": "ornith",
}  # fmt: skip


def family_of(fixture):
    return next((family for start, family in EXPECTED.items() if fixture.startswith(start)), "deepspec")


def stored(path):
    """Read all shards of a fixture by hand."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= read_file(file)
    return tensors


def by_hand(name):
    """Rename a source tensor as each family spells it, written out again without the library's table."""
    for prefix in ("_orig_mod.", "model.", "logit_head."):
        name = name.removeprefix(prefix)
    for old, new in (
        ("context_proj.", "fc."), ("context_norm.", "hidden_norm."), ("final_norm.", "norm."),
        ("midlayer.", "layers.0."),
        ("mtp.0.main_proj.", "fc."), ("mtp.0.main_norm.", "hidden_norm."), ("mtp.2.norm.", "norm."),
        ("mtp.2.hc_head_", "hc_head_"), ("mtp.2.markov_head.embed.", "markov_head.markov_w1."),
        ("mtp.2.markov_head.head.", "markov_head.markov_w2."), ("mtp.2.markov_head.", "markov_head."),
        ("mtp.2.confidence_head.", "confidence_head."), ("embed.weight", "embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
    ):  # fmt: skip
        if name.startswith(old):
            return new + name.removeprefix(old)
    return re.sub(r"^mtp\.(\d)\.", r"layers.\1.", name)


# ---- recognition and counts ---------------------------------------------------------------------------------------


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


# ---- config facts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", [name for name in fixtures.FAMILIES if not name.startswith("deepseek")])
def test_facts_are_the_same_in_every_family(tmp_path, fixture):
    config = open_checkpoint(make(fixture, tmp_path)).config
    assert (config.vocab_size, config.hidden_size, config.block_size, config.mask_token_id) == (V, H, 5, MASK)
    assert config.target_layer_ids == TAPS
    assert config.rope_theta == 1e6
    assert config.Vd == (VD if fixture.endswith("reduced") else V)
    assert config.num_target_layers == (None if fixture.startswith("speculators") else fixtures.DEPTH)
    kind = {
        "deepspec-gated": "gated",
        "deepspec-rnn": "rnn",
        "specforge-dspark-config": "gated",
        "deepspec-dflash": None,
    }
    assert config.markov_head_type == kind.get(fixture, "vanilla")
    assert config.markov_rank == (0 if fixture == "deepspec-dflash" else R)
    headless = fixture in ("deepspec-dflash", "deepspec-no-confidence")
    assert config.enable_confidence_head == config.confidence_head_with_markov == (not headless)
    assert config.sample_from_anchor == (not fixture.startswith("speculators-old"))
    assert config.final_logit_softcapping == (30 if fixture == "deepspec-gemma4" else None)


@pytest.mark.parametrize("fixture", ["deepseek-v4", "deepseek-v4.1"])
def test_facts_of_deepseek_v4(tmp_path, fixture):
    checkpoint = open_checkpoint(make(fixture, tmp_path))
    config, flat = checkpoint.config, checkpoint.flat
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (5, MASK, (2, 3, 4))
    assert (config.num_target_layers, flat["num_hidden_layers"]) == (5, 3)  # not num_nextn_predict_layers = 1
    assert (config.markov_rank, config.markov_head_type, config.sample_from_anchor) == (R, "vanilla", True)
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov
    assert "confidence_head.proj.bias" not in checkpoint
    assert checkpoint.origins["lm_head.weight"] == "target"


@pytest.mark.parametrize(
    ("keys", "tokens", "wanted"),
    [
        ({"sample_from_anchor": None}, 4, False),
        ({"sample_from_anchor": None}, 5, True),
        ({"sample_from_anchor": None}, None, False),  # before the field existed
        ({"sample_from_anchor": True}, None, True),
        ({"sample_from_anchor": False}, None, False),
        ({"sample_from_anchor": False}, 4, False),
        ({"sample_from_anchor": True}, 4, "speculative_tokens: found 4, expected block_size 5"),
        ({"sample_from_anchor": False}, 5, "speculative_tokens: found 5"),
        ({"sample_from_anchor": None}, 3, "nothing else tells what slot 0 means"),
    ],
)
def test_anchor_rule_of_speculators(tmp_path, keys, tokens, wanted):
    def change(config):
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens

    path = change_config(make("speculators-full", tmp_path), change, **keys)
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            open_checkpoint(path)
    else:
        assert open_checkpoint(path).config.sample_from_anchor is wanted


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"])
def test_shifted_layer_ids(tmp_path, key):
    path = change_config(make("deepspec-vanilla", tmp_path), **{key: [k + 1 for k in TAPS]}, target_layer_ids=None)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.target_layer_ids == TAPS
    assert key not in checkpoint.flat
    change_config(path, target_layer_ids=list(TAPS))
    assert open_checkpoint(path).config.target_layer_ids == TAPS
    change_config(path, target_layer_ids=[k + 1 for k in TAPS])  # the off-by-one
    with pytest.raises(ValueError, match=f"target_layer_ids: found .*{key} - 1"):
        open_checkpoint(path)
    change_config(path, target_layer_ids=None, **{key: [0, 2, 6]})  # 0 is the embedding, 6 the last of 6 layers
    assert open_checkpoint(path).config.target_layer_ids == (-1, 1, 5)


def test_nested_and_flat_keys_must_agree(tmp_path):
    path = make("specforge", tmp_path)
    change_config(path, mask_token_id=MASK)
    assert open_checkpoint(path).config.mask_token_id == MASK
    change_config(path, mask_token_id=MASK + 1)
    with pytest.raises(ValueError, match="mask_token_id: found 8, expected the value that dflash_config has"):
        open_checkpoint(path)


@pytest.mark.parametrize("key", ["dspark_noise_token_id", "pard_token", "ptd_token_id"])
def test_other_spellings_of_the_mask(tmp_path, key):
    path = change_config(make("deepspec-vanilla", tmp_path), mask_token_id=None, **{key: 11})
    assert open_checkpoint(path).config.mask_token_id == 11


def test_defaults_of_the_layer_config(tmp_path):
    def change(config):
        for key in ("hidden_act", "max_position_embeddings", "rope_parameters"):
            del config["transformer_layer_config"][key]

    flat = open_checkpoint(change_config(make("speculators-full", tmp_path), change)).flat
    assert (flat["rms_norm_eps"], flat["attention_bias"], flat["hidden_act"]) == (1e-6, False, "silu")
    assert (flat["max_position_embeddings"], flat["rope_theta"]) == (32768, 10000.0)


def test_a_default_that_the_tensors_contradict_is_an_error(tmp_path):
    path = change_config(
        make("speculators-full", tmp_path), lambda config: config["transformer_layer_config"].pop("hidden_size")
    )
    with pytest.raises(ValueError, match=r"hidden_size 4096"):
        open_checkpoint(path)


def test_causality_of_speculators(tmp_path):
    from dspark_jax.transformer.geometry import BackboneConfig

    def change(config):
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}

    path = change_config(make("speculators-full", tmp_path), change)
    geometry = BackboneConfig.from_flat(open_checkpoint(path).flat)
    assert (geometry.causal, geometry.windows) == (True, (16, 16))
    change_config(path, sliding_window_non_causal=True)
    assert not BackboneConfig.from_flat(open_checkpoint(path).flat).causal


def test_labels_do_not_decide(tmp_path):
    # Published files are labelled DFlash with Markov weights inside, or DSpark with none: the tensors count.
    path = change_config(make("deepspec-vanilla", tmp_path), architectures=["DFlashDraftModel"])
    assert open_checkpoint(path).config.markov_rank == R
    path = change_config(make("deepseek-v4", tmp_path), architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert open_checkpoint(path).family.name == "deepseek-v4"


def test_torchspec_counts_taps_where_others_count_layers(tmp_path):
    config = json.loads((make("torchspec", tmp_path) / "config.json").read_text())
    assert config["num_target_layers"] == len(TAPS)
    assert open_checkpoint(tmp_path / "torchspec").config.num_target_layers == fixtures.DEPTH
    change_config(tmp_path / "torchspec", target_num_hidden_layers=None)
    assert open_checkpoint(tmp_path / "torchspec").config.num_target_layers is None


# ---- the backbone is whole -------------------------------------------------------------------------------------------


def backbone_error(path):
    checkpoint = open_checkpoint(path)
    with pytest.raises(ValueError, match=r"layers|fc|norm") as caught:
        checkpoint.check_backbone()
    return str(caught.value)


def test_missing_and_misshapen_backbone_tensors_are_all_listed(tmp_path):
    def change(tensors):
        del (
            tensors["layers.1.mlp.up_proj.weight"],
            tensors["hidden_norm.weight"],
            tensors["layers.0.self_attn.k_norm.weight"],
        )
        tensors["fc.weight"] = fixtures.bf16(H, 4 * H)
        tensors["layers.0.self_attn.q_proj.weight"] = fixtures.bf16(H + 2, H)

    message = backbone_error(change_tensors(make("deepspec-vanilla", tmp_path), change))
    for part in (
        "layers.1.mlp.up_proj.weight: missing", "hidden_norm.weight: missing",
        "layers.0.self_attn.k_norm.weight: missing",
        "fc.weight: found shape [64, 256], expected [64, 192] = [H, T*Ht]",
        "layers.0.self_attn.q_proj.weight: found shape [66, 64], expected [64, 64] = [Q, H]",
    ):  # fmt: skip
        assert part in message


@pytest.mark.parametrize(
    ("fixture", "keys", "words"),
    [
        (
            "deepspec-vanilla",
            {"num_hidden_layers": 3},
            "num_hidden_layers: config says 3, the tensors are of layers [0, 1]",
        ),
        ("deepspec-vanilla", {"target_layer_ids": [0, 2]}, "fc.weight: found shape [64, 192], expected [64, 128]"),
        ("deepspec-vanilla", {"target_layer_ids": None}, "target_layer_ids: missing"),
        (
            "deepspec-vanilla",
            {"num_key_value_heads": 4},
            "k_proj.weight: found shape [32, 64], expected [64, 64] = [K, H]",
        ),
        (
            "deepspec-vanilla",
            {"intermediate_size": 97},
            "mlp.down_proj.weight: found shape [64, 96], expected [64, 97]",
        ),
        ("deepspec-vanilla", {"attention_bias": True}, "layers.0.self_attn.q_proj.bias: missing"),
        ("deepspec-gemma4", {"attention_k_eq_v": False}, "layers.0.self_attn.v_proj.weight: missing"),
        ("deepseek-v4", {"q_lora_rank": 96}, "layers.0.attn.wq_a.weight: found shape [128, 256], expected [96, 256]"),
    ],
)
def test_geometry_and_tensors_disagreeing_names_both(tmp_path, fixture, keys, words):
    path = change_config(make(fixture, tmp_path), **keys)
    message = backbone_error(path) if "mask" not in words else ""
    assert words in message


def test_a_lost_layer_is_an_error(tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            del tensors[name]

    assert "the tensors are of layers [1]" in backbone_error(change_tensors(make("deepspec-vanilla", tmp_path), change))


# ---- DeepSeek-V4 -----------------------------------------------------------------------------------------------------


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


# ---- left out, and never left out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mask_embedding", "mask_embedding.weight", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq",
             "verifier_lm_head.weight", "verifier_norm.weight"],
)  # fmt: skip
def test_named_reasons(tmp_path, name):
    checkpoint = open_checkpoint(
        change_tensors(make("speculators-full", tmp_path), lambda t: t.update({name: fixtures.f32(3)}))
    )
    assert list(checkpoint.left_out) == [name]
    assert len(checkpoint.left_out[name]) > 10


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w3.weight", "confidence_head.proj2.weight", "layers.0.mlp.gate_proj.weight_scale",
             "layers.0.mlp.gate_proj.bias", "fc.bias", "hc_head_fn", "norm", "xnorm.weight", "layers.x.layer_scalar"],
)  # fmt: skip
@pytest.mark.parametrize("fixture", ["deepspec-vanilla", "speculators-full", "specforge", "torchspec"])
def test_nothing_else_is_left_out(tmp_path, name, fixture):
    path = change_tensors(make(fixture, tmp_path), lambda t: t.update({name: fixtures.f32(3)}))
    with pytest.raises(ValueError, match=re.escape(f"{name}: unknown tensor of the")):
        open_checkpoint(path)


# ---- properties of configs -----------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "vocab_size", "hidden_size", "block_size", "mask_token_id", "draft_vocab_size", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "final_logit_softcapping", "logit_scale", "rope_theta",
    "sample_from_anchor", "target_layer_ids", "num_target_layers", "rope_parameters", "rope_scaling", "dtype",
    "model_type",
    "architectures", "dspark_config", "dflash_config", "transformer_layer_config", "text_config", "speculators_config",
    "aux_hidden_state_layer_ids", "quantization_config", "num_hidden_layers", "layer_types", "sliding_window",
    "head_dim",
    "num_attention_heads", "target_hidden_size", "attention_bias", "tie_word_embeddings", "dspark_block_size",
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared")
    paths = {name: make(name, directory) for name in ("deepspec-vanilla", "speculators-reduced", "deepseek-v4")}
    return {name: (path, json.loads((path / "config.json").read_text())) for name, path in paths.items()}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_config_gives_a_value_error_or_a_checked_one(shared, data):
    path, config = shared[data.draw(st.sampled_from(sorted(shared)))]
    changes = data.draw(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3))
    lost = data.draw(st.lists(st.sampled_from(sorted(config)), max_size=2))
    text = json.dumps({key: value for key, value in (config | changes).items() if key not in lost})
    (path / "config.json").write_text(text)
    try:
        checkpoint = open_checkpoint(path)
        assert to_text(inspect(path))
        checkpoint.check_backbone()
    except ValueError as error:
        assert str(error)  # noqa: PT017
        return
    assert isinstance(checkpoint.config, DSparkConfig)
    assert checkpoint.config.vocab_size == V


OPTIONAL = {"embed_tokens.weight", "lm_head.weight", "confidence_head.proj.bias"}  # the first two come from targets


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_lost_reshaped_or_foreign_tensor_is_named(tmp_path, data):
    """One error names all tensors that were taken out, reshaped or put in, whichever they are."""
    fixture = data.draw(st.sampled_from(["deepspec-gated", "deepspec-rnn", "deepspec-gemma4", "specforge-early"]))
    path = make(fixture, tmp_path)
    names = sorted(read_file(path / "model.safetensors"))

    def layer(name):
        return re.sub(r"layers\.\d+", "layers.N", name)

    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique_by=layer))
    ways = [data.draw(st.sampled_from(["lost", "reshaped", "foreign"])) for _ in chosen]

    def change(tensors):
        for name, way in zip(chosen, ways, strict=True):
            dtype, array = tensors.pop(name)
            if way == "reshaped":
                tensors[name] = (dtype, array[..., None])
            if way == "foreign":
                tensors |= {name: (dtype, array), "x" + name: (dtype, array)}

    change_tensors(path, change)
    try:
        open_checkpoint(path).check_backbone()
        named = ""
    except ValueError as error:
        named = str(error)
    lost_optional = [way == "lost" and by_hand(name) in OPTIONAL for name, way in zip(chosen, ways, strict=True)]
    assert (named == "") == all(lost_optional)
    for name, way, optional in zip(chosen, ways, lost_optional, strict=True):
        # Where the head contradicts its config, its shapes are not compared further.
        if not optional and (
            way == "foreign" or not by_hand(name).startswith(("markov_head", "confidence_head", "lm_"))
        ):
            assert ("x" + name if way == "foreign" else by_hand(name)) in named
    # A head lost as a whole is named by its key: markov_rank or enable_confidence_head.
    assert any(by_hand(name).split(".")[0] in named for name in chosen) or all(lost_optional)
