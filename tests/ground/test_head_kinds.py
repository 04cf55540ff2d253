"""A head kind registered in a test loads, drafts and runs in the kernels with no line of the package changed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_logits, make_weights
from safetensors.numpy import save_file

import dspark_jax
from dspark_jax import DraftSampling, draft_block, head_kinds, noise
from dspark_jax.head_kinds import HeadKind, HeadParameter
from dspark_jax.linear import product
from dspark_jax.markov import MarkovHead

V, H, R, S, B = 41, 8, 6, 4, 3
TENSOR = "markov_head.mix.weight"


class LinearMarkovHead(MarkovHead):
    """z = A e."""

    def __init__(self, markov_w1, markov_w2, mix):
        super().__init__(markov_w1, markov_w2)
        self.mix = nnx.Param(mix)

    def step(self, state, embedding, hoisted):
        return state, product(embedding, self.mix[...])


@pytest.fixture
def linear(monkeypatch):
    """Register the kind for one test."""
    monkeypatch.setattr(head_kinds, "_KINDS", dict(head_kinds._KINDS))
    own = (HeadParameter("mix", TENSOR, ("r", "r")),)
    return head_kinds.register(HeadKind("linear", LinearMarkovHead, own, reads_hidden=False))


@pytest.fixture
def checkpoint(linear, tmp_path):
    """A checkpoint directory of that kind, and its weights."""
    rng = np.random.default_rng(5)
    weights = make_weights("vanilla", V=V, H=H, r=R, seed=2)
    weights[TENSOR] = rng.standard_normal((R, R)).astype(np.float32)
    config = {
        "architectures": ["Qwen3DSparkModel"], "vocab_size": V, "hidden_size": H, "block_size": S + 1,
        "mask_token_id": 0, "markov_rank": R, "markov_head_type": "linear", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path, weights


def numpy_draft(weights, hidden, anchor, sampling, topk):
    """Walk the block in NumPy float64; noise words are the library's, which have known answers of their own."""
    w1, w2, mix, lm_head = (
        weights[name].astype(np.float64)
        for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", TENSOR, "lm_head.weight")
    )
    tokens = np.zeros((B, S), int)
    for b in range(B):
        prev = anchor[b]
        for s in range(S):
            base = lm_head @ hidden[b, s].astype(np.float64)
            kept = np.sort(np.lexsort((np.arange(V), -base))[: topk or V])
            score = (base + w2 @ (mix @ w1[prev]))[kept]
            if sampling is not None:
                words = noise.noise_bits(
                    jnp.uint32(sampling.seed[b]), jnp.int32(sampling.position[b]), s, noise.DRAFT, jnp.asarray(kept)
                )
                score = score / sampling.temperature[b] + np.asarray(noise.gumbel_from_bits(words), np.float64)
            prev = tokens[b, s] = kept[np.argmax(score)]
    return tokens


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("topk", [None, 7])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_kind_registered_here_loads_and_drafts(checkpoint, implementation, topk, sampled):
    path, weights = checkpoint
    head = dspark_jax.load_head(path)
    assert isinstance(head.markov, LinearMarkovHead)
    rng = np.random.default_rng(0)
    hidden, anchor = 2 * rng.standard_normal((B, S, H)).astype(np.float32), np.array([3, 0, 40])
    sampling = DraftSampling(np.array([0.7, 1.2, 0.4]), np.array([1, 2, 3]), np.array([5, 6, 7])) if sampled else None
    block = draft_block(head, hidden, anchor, sampling=sampling, topk=topk, implementation=implementation)
    np.testing.assert_array_equal(block.tokens, numpy_draft(weights, hidden, anchor, sampling, topk))


def test_teacher_forced_logits_of_the_kind(checkpoint):
    path, weights = checkpoint
    head = dspark_jax.load_head(path)
    hidden = np.random.default_rng(0).standard_normal((B, S, H)).astype(np.float32)
    prev = np.arange(B * S).reshape(B, S)
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    want = hidden @ weights["lm_head.weight"].T + (w1[prev] @ weights[TENSOR].T) @ w2.T
    assert_logits(dspark_jax.teacher_forced_logits(head, hidden, prev), want.swapaxes(0, 1), "float32")


def test_its_tensors_are_checked_like_those_of_the_built_in_kinds(checkpoint):
    path, weights = checkpoint
    for change, message in (
        ({TENSOR: np.zeros((R, R + 1), np.float32)}, r"mix.weight: found shape \[6, 7\], expected \[6, 6\] = \[r, r\]"),
        ({TENSOR: None}, "mix.weight: missing, though markov_head_type is 'linear'"),
        ({"markov_head.gate_proj.bias": np.zeros(R, np.float32)}, "holds both markov_head"),
        ({"markov_head.what.bias": np.zeros(R, np.float32)}, "markov_head.what.bias: unknown tensor"),
    ):
        changed = {name: array for name, array in (weights | change).items() if array is not None}
        save_file(changed, path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            dspark_jax.load_head(path)


def test_an_unknown_kind_and_a_taken_name_are_refused(linear):
    with pytest.raises(ValueError, match=r"markov_head_type: found 'cubic', expected .* vanilla, gated, rnn, linear"):
        head_kinds.head_kind("cubic")
    with pytest.raises(ValueError, match="a name that no other kind has"):
        head_kinds.register(HeadKind("rnn", LinearMarkovHead))


@pytest.mark.parametrize(("size", "value"), [("1", 1), ("r", 6), ("3r", 18), ("2r+H", 20), ("Vd", 30)])
def test_symbolic_sizes(size, value):
    assert head_kinds.evaluate(size, {"V": 40, "Vd": 30, "H": 8, "r": 6}) == value


@pytest.mark.parametrize("size", ["", "r+", "r*2", "-r"])
def test_symbolic_sizes_of_another_form_are_refused(size):
    with pytest.raises((ValueError, KeyError)):
        head_kinds.evaluate(size, {"r": 6})
