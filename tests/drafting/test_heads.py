"""DSparkHead holds its weights to its config, by shape and kind: a wrong shape would draft wrong tokens silently."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, build_head, make_head, make_weights

from dspark_jax.config import DSparkConfig
from dspark_jax.drafting.confidence_head import ConfidenceHead
from dspark_jax.drafting.head import DSparkHead
from dspark_jax.drafting.heads import GatedMarkovHead, RnnMarkovHead, VanillaMarkovHead

SIZES = {"V": 11, "Vd": 7, "H": 4, "r": 3}
EXPECTED = {
    "lm_head": (7, 4), "markov_w1": (11, 3), "markov_w2": (7, 3), "gate_weight": (3, 7), "gate_bias": (3,),
    "joint_weight": (9, 10), "joint_bias": (9,),
    "confidence.weight": (7,), "confidence.bias": (), "draft_to_target": (7,),
}  # fmt: skip
OF_KIND = {"gate": "gated", "join": "rnn"}


def parts(kind):
    """The arrays of a reduced-vocabulary head of this kind, by the names that errors use."""
    w = make_weights(kind, **SIZES)
    named = {
        "lm_head": w["lm_head.weight"],
        "markov_w1": w["markov_head.markov_w1.weight"],
        "markov_w2": w["markov_head.markov_w2.weight"],
        "confidence.weight": w["confidence_head.proj.weight"][0],
        "confidence.bias": w["confidence_head.proj.bias"][0],
        "draft_to_target": np.arange(7) + w["d2t"],
    }
    for module, short in (("gate_proj", "gate"), ("joint_proj", "joint")):
        if f"markov_head.{module}.weight" in w:
            named[f"{short}_weight"] = w[f"markov_head.{module}.weight"]
            named[f"{short}_bias"] = w[f"markov_head.{module}.bias"]
    return {name: jnp.asarray(array) for name, array in named.items()}


def assemble(kind, p, **fields):
    config = DSparkConfig(
        vocab_size=11, draft_vocab_size=7, hidden_size=4, block_size=7, mask_token_id=0, markov_rank=3,
        markov_head_type=kind, enable_confidence_head=True, confidence_head_with_markov=True, **fields,
    )  # fmt: skip
    module = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}[kind]
    extra = [p[name] for name in ("gate_weight", "gate_bias", "joint_weight", "joint_bias") if name in p]
    confidence = ConfidenceHead(p["confidence.weight"], p["confidence.bias"])
    return DSparkHead(
        config, p["lm_head"], module(p["markov_w1"], p["markov_w2"], *extra), confidence, p["draft_to_target"]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_right_shapes_are_taken(kind):
    head, p = assemble(kind, parts(kind)), parts(kind)
    assert head.nbytes == sum(array.nbytes for array in p.values())
    assert head.target_ids is not None


@pytest.mark.parametrize("name", EXPECTED)
def test_wrong_shapes_are_refused_by_name(name):
    kind = OF_KIND.get(name[:4], "vanilla")
    p = parts(kind)
    assert p[name].shape == EXPECTED[name]
    wrong = [p[name][None]] if name == "confidence.bias" else [p[name][1:], jnp.concatenate([p[name], p[name][:1]])]
    for array in wrong:
        found = re.escape(f"{name}.shape: found {array.shape}, expected {EXPECTED[name]}")
        with pytest.raises(ValueError, match=found):
            assemble(kind, {**p, name: array})


def test_a_module_of_another_kind_is_refused():
    p = parts("gated")
    head = assemble("gated", p)
    for kind in ("vanilla", "rnn"):
        config = DSparkConfig(**{**vars(head.config), "markov_head_type": kind})
        with pytest.raises(ValueError, match="markov: found 'GatedMarkovHead', expected"):
            DSparkHead(config, p["lm_head"], head.markov, head.confidence, p["draft_to_target"])
    with pytest.raises(ValueError, match="confidence: found 'NoneType'"):
        DSparkHead(head.config, p["lm_head"], head.markov, None, p["draft_to_target"])
    with pytest.raises(ValueError, match="draft_to_target: found None"):
        DSparkHead(head.config, p["lm_head"], head.markov, head.confidence, None)
    with pytest.raises(ValueError, match=r"draft_to_target.dtype: found 'float32'"):
        assemble("gated", {**p, "draft_to_target": p["draft_to_target"].astype(jnp.float32)})


def test_dtype_is_that_of_the_weights():
    assert make_head("gated", dtype="bfloat16").dtype == jnp.bfloat16
    assert build_head({"lm_head.weight": np.zeros((5, 2), np.float32)}, "float16").dtype == jnp.float16
    config = DSparkConfig(vocab_size=5, hidden_size=2, block_size=3, mask_token_id=0)
    assert DSparkHead(config, None).dtype == jnp.float32
