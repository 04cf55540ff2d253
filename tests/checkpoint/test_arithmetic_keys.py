"""Config keys that change the arithmetic: right values for eight, and a walk over the whole table in every place."""

import copy
import json
import shutil

import numpy as np
import pytest
from helpers import GOLDENS, read
from tiny import block_hidden

from dspark_jax.checkpoint import convert, open_checkpoint
from dspark_jax.checkpoint.family.arithmetic import READ, REFUSED
from dspark_jax.checkpoint.inspect import inspect
from dspark_jax.checkpoint.load import load_drafter, load_head
from dspark_jax.checkpoint.torch_reference import TorchSource
from dspark_jax.checkpoint.verify import verify

CASES = sorted(path for path in (GOLDENS / "cases").iterdir() if path.is_dir())
PLAIN = GOLDENS / "cases" / "plain"
PLACES = ("top", "dspark_config", "dflash_config", "text_config", "transformer_layer_config")
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}

# key -> a value, the field that it must set, and what that field must be.
CHANGES = {
    "causal": (True, "layer_causal", (True, True)),
    "is_causal": (True, "layer_causal", (True, True)),
    "dflash_query_causal": (True, "layer_causal", (True, True)),
    "rope_is_neox_style": (False, "rope_interleaved", True),
    "is_neox_style": (False, "rope_interleaved", True),
    "input_embedding_scale": (4.0, "embed_scale", 4.0),
    "embedding_multiplier": (4.0, "embed_scale", 4.0),
    "logit_scale": (0.25, "logit_scale", 0.25),
    "output_multiplier": (0.25, "logit_scale", 0.25),
    "logits_scaling": (4.0, "logit_scale", 0.25),
}
SLIDING_KEY = "sliding_window_non_causal"  # it changes nothing without sliding layers: a test of its own
FACTS = {
    "is_causal_top_level": "causal", "speculators_mixed_flag_false": "layer_causal",
    "speculators_sliding_flag_absent": "causal", "speculators_sliding_flag_true": "causal",
    "is_neox_style_false": "rope_is_neox_style", "input_embedding_scale": "input_embedding_scale",
    "output_multiplier": "logit_scale",
}  # fmt: skip
# key -> a neutral value, and one that asks for what is not there.
REFUSALS = {
    "norm_before_fc": (False, True),
    "fc_norm": (False, True),
    "attention_sink_bias": (False, True),
    "use_attention_sinks": (False, True),
    "enable_qwen35_gated_q_proj": (False, True),
    "attn_logit_softcapping": (0, 50.0),
    "residual_multiplier": (1.0, 0.22),
    "query_pre_attn_scalar": (8, 256),
    "attention_multiplier": (8**-0.5, 0.0625),
}


def placed(directory, fields, place="top", top=None):
    """Copy the plain drafter with `fields` in one place of its config (and `top` at the top level)."""
    shutil.copytree(PLAIN, directory)
    raw = json.loads((PLAIN / "config.json").read_text())
    if place == "top":
        raw |= fields
    elif place == "transformer_layer_config":
        own = ("model_type", "vocab_size", "hidden_size", "hidden_act", "intermediate_size", "num_hidden_layers",
               "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "rope_theta",
               "max_position_embeddings")  # fmt: skip
        raw[place] = {key: raw.pop(key) for key in own} | fields
        raw["sample_from_anchor"] = True
    else:
        raw[place] = fields
    (directory / "config.json").write_text(json.dumps(raw | (top or {})))
    return directory


def run(path, golden):
    """Return hidden states, base logits, corrected logits [4, ...] and tokens of a golden's block."""
    drafter = load_drafter(path, dtype="float32")
    features = np.asarray(golden["features"], np.float32)[None]
    ids = np.asarray(golden["block_ids"], np.int32)[None]
    cache = drafter.make_cache(1, 32)
    block, cache = drafter.propose(cache, features, ids[:, 0], np.array([20], np.int32), outputs="logits")
    hidden, base = block_hidden(drafter, cache, ids)
    return hidden[0], base[:, 0], block.logits[:, 0], block.tokens[0]


def assert_right(path, golden):
    for found, name in zip(run(path, golden), ("hidden", "base_logits", "corrected_logits", "tokens"), strict=True):
        assert np.abs(np.asarray(found) - golden[name]).max() <= (0 if name == "tokens" else 2e-4), name


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_cases_equal_the_independent_pass(case):
    assert_right(case, read(case / "golden.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_a_conversion_says_the_same_again(tmp_path, case):
    """Nothing of the source is beside the result, so its config alone has to carry the meaning."""
    convert(case, tmp_path / "out", format="safetensors")
    before, after = open_checkpoint(case), open_checkpoint(tmp_path / "out")
    assert (after.geometry, after.config.logit_scale) == (before.geometry, before.config.logit_scale)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    mixed = case.name == "speculators_mixed_flag_false"
    assert written.get("layer_causal") == ([True, False] if mixed else None)
    assert ("causal" in written) is not mixed
    assert_right(tmp_path / "out", read(case / "golden.safetensors"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_verify_reads_the_same_facts(tmp_path, case):
    """Its own reading agrees with a right result, and sees a wrong one whose manifest says the same."""
    pytest.importorskip("torch", reason="verify reads with PyTorch")
    convert(case, tmp_path / "out", format="safetensors")
    assert verify(case, tmp_path / "out").passed
    source = TorchSource(str(case)).facts()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {"layer_causal", "causal", "rope_is_neox_style", "input_embedding_scale", "logit_scale"}
    assert all(written[key] == source[key] for key in wanted if source.get(key) is not None)
    stated = {key for key in wanted if source.get(key) is not None}
    assert stated == ({FACTS[case.name]} if case.name != "plain" else set())


@pytest.mark.parametrize("fields", [{"logits_scaling": "x"}, {"layer_causal": 5}, {"layer_types": 5}])
def test_verify_reports_facts_of_a_wrong_type(tmp_path, fields):
    """A source that became nonsense after its conversion is a problem in the report, or one line."""
    pytest.importorskip("torch", reason="verify reads with PyTorch")
    source = placed(tmp_path / "source", SLIDING, "transformer_layer_config")
    convert(source, tmp_path / "out", format="safetensors")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | fields))
    try:
        said = "".join(verify(source, tmp_path / "out").problems)
    except ValueError as error:
        said = str(error)
    assert next(iter(fields)) in said or "config.json" in said


def test_every_key_of_the_table_is_walked():
    assert {*CHANGES, SLIDING_KEY} == set(READ)
    assert set(REFUSALS) == set(REFUSED)


def value_of(checkpoint, field):
    assert not isinstance(checkpoint.geometry, str), checkpoint.geometry
    return getattr(checkpoint.config if field == "logit_scale" else checkpoint.geometry, field)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", CHANGES)
def test_a_key_is_read_in_every_place(tmp_path, key, place):
    value, field, expected = CHANGES[key]
    found = open_checkpoint(placed(tmp_path / "with", {key: value}, place))
    without = open_checkpoint(placed(tmp_path / "without", {}, place))
    assert value_of(found, field) == expected != value_of(without, field)
    assert any(line.startswith(f"{key} ") for line in inspect(tmp_path / "with")["arithmetic"])


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_the_computation(tmp_path, key):
    """Spellings beside the eight cases compute what the case of their fact holds."""
    case = {
        "layer_causal": "is_causal_top_level", "rope_interleaved": "is_neox_style_false",
        "embed_scale": "input_embedding_scale", "logit_scale": "output_multiplier",
    }[CHANGES[key][1]]  # fmt: skip
    golden = read(GOLDENS / "cases" / case / "golden.safetensors")
    shutil.copytree(GOLDENS / "cases" / case, tmp_path / "c")
    raw = json.loads((PLAIN / "config.json").read_text()) | {key: CHANGES[key][0]}
    (tmp_path / "c" / "config.json").write_text(json.dumps(raw))
    assert_right(tmp_path / "c", golden)


@pytest.mark.parametrize("place", PLACES)
def test_sliding_layers_follow_their_flag_in_every_place(tmp_path, place):
    for flag in (True, False):
        path = placed(tmp_path / str(flag), {SLIDING_KEY: flag, **SLIDING}, place)
        assert value_of(open_checkpoint(path), "layer_causal") == (not flag,) * 2


def test_a_noise_level_without_its_tensors_is_refused(tmp_path):
    with pytest.raises(ValueError, match="log_snr_embed: missing"):
        load_drafter(placed(tmp_path / "x", {"log_snr_conditioning": True}))


def test_sliding_layers_without_a_flag_are_reported(tmp_path):
    plain = open_checkpoint(placed(tmp_path / "plain", SLIDING))
    assert value_of(plain, "layer_causal") == (False, False)
    assert "taken as bidirectional" in plain.notes[0]
    other = open_checkpoint(GOLDENS / "cases" / "speculators_sliding_flag_absent")
    assert "counts as false" in other.notes[0]
    assert not open_checkpoint(GOLDENS / "cases" / "speculators_sliding_flag_true").notes


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", REFUSALS)
def test_a_key_without_counterpart_is_refused_unless_neutral(tmp_path, key, place):
    neutral, wrong = REFUSALS[key]
    if key == "enable_qwen35_gated_q_proj" and place == "top":
        neutral = None  # at the top level the key alone marks the Ornith family, whose backbone is refused
    assert not isinstance(open_checkpoint(placed(tmp_path / "neutral", {key: neutral}, place)).geometry, str)
    path = placed(tmp_path / "wrong", {key: wrong}, place)
    with pytest.raises(ValueError, match=f"{key}: found|family ornith"):
        load_drafter(path)
    assert load_head(path).lm_head is not None  # a head alone has no such part


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize("place", PLACES[1:])
def test_two_places_that_disagree_are_an_error(tmp_path, key, place):
    value = CHANGES[key][0]
    other = (not value) if isinstance(value, bool) else value * 2
    path = placed(tmp_path / "x", {key: value}, place, top={key: other})
    with pytest.raises(ValueError, match=f"{key}: found"):
        open_checkpoint(path)


def test_two_spellings_that_disagree_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="is_causal: found False"):
        open_checkpoint(placed(tmp_path / "a", {"causal": True, "is_causal": False}))
    with pytest.raises(ValueError, match=r"logits_scaling: found 0\.5"):
        open_checkpoint(placed(tmp_path / "b", {"output_multiplier": 0.25, "logits_scaling": 2.0}))
    with pytest.raises(ValueError, match="causal: found True, expected what layer_causal says"):
        load_drafter(placed(tmp_path / "c", {"causal": True, "layer_causal": [True, False]}))


@pytest.mark.parametrize(
    "fields",
    [{"layer_causal": [True]}, {"layer_causal": [1, 0]}, {"layer_causal": True}, {"input_embedding_scale": -1.0},
     {"is_causal": "yes"}, {"logits_scaling": 0}],
)  # fmt: skip
def test_bad_values_are_refused_by_name(tmp_path, fields):
    (key,) = fields
    with pytest.raises(ValueError, match=f"{key}: found"):
        load_drafter(placed(tmp_path / "x", copy.deepcopy(fields)))


def test_a_softcap_of_zero_is_none(tmp_path):
    assert (
        open_checkpoint(placed(tmp_path / "x", {"final_logit_softcapping": 0})).config.final_logit_softcapping is None
    )


@pytest.mark.parametrize(
    ("add", "drop", "family"),
    [
        (["layers.0.mlp.up_proj.qweight", "layers.0.mlp.up_proj.qzeros"], "layers.0.mlp.up_proj.weight", "gptq-awq"),
        (["layers.0.mlp.up_proj.scales", "layers.0.mlp.up_proj.biases"], None, "mlx"),
        (["layers.0.mlp.up_proj.weight_packed"], "layers.0.mlp.up_proj.weight", "compressed-tensors"),
    ],
)
def test_quantised_formats_are_named(tmp_path, add, drop, family):
    from safetensors.numpy import save_file

    path = placed(tmp_path / "x", {})
    tensors = read(path / "model.safetensors") | {name: np.zeros((2, 2), np.int32) for name in add}
    tensors.pop(drop, None)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"family {family}: .*not supported"):
        open_checkpoint(path)
