"""The target: its own greedy continuation as recorded, loading, and errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS, GOLDENS
from tiny import make_target, target_config, target_weights, write_model

from dspark_jax.checkpoint.load import load_target
from dspark_jax.transformer.target import Target


def test_argmax_of_the_recorded_outputs_is_the_recorded_continuation():
    recorded = json.loads((GOLDENS / "rounds" / "vanilla" / "greedy.json").read_text())
    target = load_target(CHECKPOINTS / "target", dtype="float32")
    tokens = jnp.asarray([entry["output_ids"][:160] for entry in recorded], jnp.int32)

    @jax.jit
    def best(target, tokens):
        start = jnp.zeros((tokens.shape[0],), jnp.int32)
        hidden, _, _ = target.forward(tokens, start, target.make_cache(*tokens.shape), ())
        return target.logits(hidden).argmax(-1)

    np.testing.assert_array_equal(best(target, tokens)[:, 95:-1], tokens[:, 96:])


def test_it_is_a_target():
    target = make_target()
    assert isinstance(target, Target)
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.max_length) == (37, 10, 3, None)
    assert load_target(CHECKPOINTS / "target").max_length == 2048


def test_stored_dtype_is_kept_and_names_may_lack_the_prefix(tmp_path):
    raw = target_config(tie_word_embeddings=True)
    weights = target_weights(raw, tied=True)
    model = load_target(write_model(tmp_path, raw, weights))
    np.testing.assert_array_equal(model.embed_tokens[...], weights["embed_tokens.weight"])
    assert model.lm_head is None
    assert load_target(CHECKPOINTS / "target").embed_tokens.dtype == jnp.bfloat16


def test_every_wrong_tensor_is_named_in_one_error(tmp_path):
    raw = target_config(tie_word_embeddings=False)
    weights = target_weights(raw)
    del weights["norm.weight"]
    weights["layers.1.mlp.up_proj.weight"] = weights["layers.1.mlp.up_proj.weight"][:, :-1]
    weights["layers.0.self_attn.q_proj.weight"][0, 0] = np.nan
    weights["layers.7.self_attn.sinks"] = np.zeros(4, np.float32)
    write_model(tmp_path, raw, weights, prefix="model.")
    with pytest.raises(ValueError, match=r"norm\.weight: missing, expected shape \[10\]") as error:
        load_target(tmp_path)
    message = str(error.value)
    assert "layers.1.mlp.up_proj.weight: found shape [20, 9], expected [20, 10]" in message
    assert "layers.0.self_attn.q_proj.weight: holds NaN" in message
    assert "layers.7.self_attn.sinks: not a tensor of this model" in message


def test_untied_target_without_head_is_refused(tmp_path):
    raw = target_config(tie_word_embeddings=False)
    write_model(tmp_path / "a", raw, target_weights(raw, tied=True))
    with pytest.raises(ValueError, match=r"lm_head\.weight: missing"):
        load_target(tmp_path / "a")


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED = {
    "architectures": ({"architectures": ["Phi3ForCausalLM"]}, r"found \['Phi3ForCausalLM'\], expected one of Qwen3For"),
    "model_type": ({"architectures": None, "model_type": "phi3"}, "found 'phi3', expected one of Qwen3ForCausalLM"),
    "model_type ": ({**LLAMA, "model_type": "qwen2"}, "model_type: found 'qwen2', expected 'llama'"),
    "mlp_bias": ({**LLAMA, "mlp_bias": True}, "mlp_bias: found True, expected False or no such key"),
    "num_experts": ({"num_experts": 8}, "num_experts: found 8"),
    "quantization_config": ({"quantization_config": {"bits": 4}}, "quantization_config: found"),
    "layer_types": ({"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                     "layer_types": ["full_attention"] * 3}, "layer_types: found"),
    "yarn": ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: found 'yarn'"),
    "llama3": ({**LLAMA, "rope_parameters": LLAMA3}, "original_max_position_embeddings: found None"),
    "low above high": ({**LLAMA, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32,
                                                     "low_freq_factor": 4.0}}, "low_freq_factor: found 4.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name, tmp_path):
    fields, message = REFUSED[name]
    write_model(tmp_path, target_config(**fields), {})
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)
