"""The facts of every family's config, and backbones that are whole."""

import json

import pytest
from families_cases import MASK, TAPS, VD, H, R, V
from fixture_checkpoints import change_config, change_tensors, fixtures, make

from dspark_jax.checkpoint import open_checkpoint


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
    assert (geometry.layer_causal, geometry.windows) == ((True, True), (16, 16))
    change_config(path, sliding_window_non_causal=True)
    assert not any(BackboneConfig.from_flat(open_checkpoint(path).flat).layer_causal)


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
