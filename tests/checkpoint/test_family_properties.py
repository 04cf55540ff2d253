"""What is left out and what never is; properties over changed configs and tensors."""

import json
import re

import pytest
from families_cases import V, by_hand
from fixture_checkpoints import change_tensors, fixtures, make, read_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.checkpoint import inspect, open_checkpoint
from dspark_jax.checkpoint.inspect import to_text
from dspark_jax.config import DSparkConfig


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
