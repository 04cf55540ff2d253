"""Outputs of the reference implementation: seven random heads, and recorded rounds of the three trained drafters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHECKPOINTS, GOLDENS, HEAD_GOLDENS, KINDS, assert_logits, assert_tokens, bound, f32, margin, read
from safetensors import safe_open

import dspark_jax
from dspark_jax import noise


def test_there_are_seven_head_goldens():
    assert len(HEAD_GOLDENS) == 7
    assert sum("softcap" in name for name in HEAD_GOLDENS) == 1


@pytest.fixture(scope="module", params=HEAD_GOLDENS)
def case(request):
    """One golden folder: head, tensors, dtype name, the head's greedy block with logits."""
    folder = GOLDENS / "heads" / request.param
    head = dspark_jax.load_head(folder)
    tensors = read(folder / "golden.safetensors")
    block = dspark_jax.draft_block(head, tensors["in.hidden"], tensors["in.anchor_ids"], outputs="logits")
    return folder, head, tensors, "bfloat16" if "bf16" in request.param else "float32", block


def test_head_is_as_stored(case):
    folder, head, _, dtype, _ = case
    raw = json.loads((folder / "config.json").read_text())
    stored = read(folder / "model.safetensors")
    assert head.dtype == jnp.dtype(dtype)
    assert head.config.markov_head_type == raw["markov_head_type"]
    assert head.config.final_logit_softcapping == raw.get("final_logit_softcapping")
    assert head.nbytes == sum(tensor.nbytes for tensor in stored.values())
    np.testing.assert_array_equal(f32(head.markov.markov_w1[...]), f32(stored["markov_head.markov_w1.weight"]))
    np.testing.assert_array_equal(f32(head.lm_head[...]), f32(stored["lm_head.weight"]))


def test_base_logits(case):
    _, head, tensors, dtype, _ = case
    base = jax.jit(lambda head, hidden: head.base_logits(hidden))(head, np.swapaxes(tensors["in.hidden"], 0, 1))
    assert base.dtype == jnp.dtype(dtype)
    assert_logits(np.swapaxes(base, 0, 1), tensors["out.base_logits"], dtype)


def test_greedy_tokens(case):
    folder, _, tensors, dtype, block = case
    gaps = margin(f32(tensors["out.corrected_logits"]))
    with safe_open(folder / "golden.safetensors", "np") as file:
        stated = float(file.metadata()["min_greedy_margin"])
    assert gaps.min() == pytest.approx(stated, abs=1e-4)
    assert_tokens(block.tokens, tensors["out.greedy_tokens"], gaps, 2 * bound(tensors["out.corrected_logits"], dtype))
    if dtype == "float32":  # the smallest margin is 10 000 times the bound: every token must agree
        np.testing.assert_array_equal(block.tokens, tensors["out.greedy_tokens"])
    assert block.tokens.dtype == jnp.int32
    assert np.asarray(block.valid).all()
    assert np.asarray(block.num_draft).tolist() == [block.tokens.shape[1]] * block.tokens.shape[0]


def same_past(block, tensors):
    """Say at which steps the walk has the golden's previous tokens, [B, S]; most of them must be."""
    equal = np.asarray(block.tokens) == tensors["out.greedy_tokens"]
    past = np.concatenate([np.ones_like(equal[:, :1]), equal[:, :-1]], axis=1)
    past = np.logical_and.accumulate(past, axis=1)
    assert past.mean() > 0.8
    return past


def test_corrected_logits(case):
    _, _, tensors, dtype, block = case
    past = same_past(block, tensors)
    found = f32(np.swapaxes(block.logits, 0, 1))
    assert block.logits.dtype == jnp.dtype(dtype)
    assert_logits(found[past], f32(tensors["out.corrected_logits"])[past], dtype)


def test_confidence_logits(case):
    _, _, tensors, dtype, block = case
    past = same_past(block, tensors)
    assert block.confidence_logits.dtype == jnp.float32
    assert_logits(f32(block.confidence_logits)[past], tensors["out.confidence_logits"][past], dtype)
    expected = 1 / (1 + np.exp(-f32(block.confidence_logits)))
    np.testing.assert_allclose(block.confidence, expected, atol=1e-6)


def test_teacher_forced_logits(case):
    _, head, tensors, dtype, _ = case
    logits = dspark_jax.teacher_forced_logits(head, tensors["in.hidden"], tensors["in.teacher_prev_ids"])
    assert_logits(np.swapaxes(logits, 0, 1), tensors["out.teacher_forced_logits"], dtype)


def test_probabilities_at_temperature(case):
    _, _, tensors, _, _ = case
    logits = jnp.asarray(tensors["out.corrected_logits"]).astype(jnp.float32)
    temperature = noise.safe_temperature(jnp.asarray([0.7]))
    np.testing.assert_allclose(jax.nn.softmax(logits / temperature[0]), tensors["out.probs_t0.7"], atol=1e-6, rtol=0)


def recorded_rounds(kind):
    """Stack the recorded rounds of a trained drafter: each tensor [rounds, ...]."""
    rounds: dict[str, list[np.ndarray]] = {}
    for path in sorted((GOLDENS / "rounds" / kind).glob("prompt*.safetensors")):
        for name, value in read(path).items():
            field = name.split(".", 1)[1]
            if field != "context_features":
                rounds.setdefault(field, []).append(value)
    return {field: np.stack(values) for field, values in rounds.items()}


@pytest.fixture(scope="module", params=KINDS)
def trained(request):
    head = dspark_jax.load_head(CHECKPOINTS / f"dspark-{request.param}", dtype="float32")
    rounds = recorded_rounds(request.param)
    assert rounds["block_hidden"].shape == (6, 7, 192)
    block = dspark_jax.draft_block(head, rounds["block_hidden"], rounds["draft_input_ids"][:, 0], outputs="logits")
    return request.param, head, rounds, block


def test_recorded_rounds(trained):
    kind, head, rounds, block = trained
    assert head.config.markov_head_type == kind
    assert head.dtype == jnp.float32
    assert margin(rounds["corrected_logits"]).min() > 2 * bound(rounds["corrected_logits"])
    np.testing.assert_array_equal(block.tokens, rounds["tokens"])
    base = head.base_logits(jnp.asarray(np.swapaxes(rounds["block_hidden"], 0, 1)))
    assert_logits(np.swapaxes(base, 0, 1), rounds["base_logits"])
    assert_logits(np.swapaxes(block.logits, 0, 1), rounds["corrected_logits"])
    assert_logits(block.confidence_logits, rounds["confidence_logits"])


def test_recorded_rounds_top_k(trained):
    """Trained drafters: the recorded tokens rank up to 382 in the base logits, so 512 of 4096 candidates draft them."""
    _, head, rounds, block = trained
    anchors = rounds["draft_input_ids"][:, 0]
    top = dspark_jax.draft_block(head, rounds["block_hidden"], anchors, topk=512, outputs="candidates")
    np.testing.assert_array_equal(top.tokens, rounds["tokens"])
    base, ids, allowed = np.swapaxes(rounds["base_logits"], 0, 1), np.asarray(top.candidate_ids), 4e-6 * 12
    assert all(len(set(row)) == 512 for row in ids.reshape(-1, 512).tolist())
    chosen = np.take_along_axis(base, ids, -1)
    assert (np.diff(chosen, axis=-1) <= allowed).all()  # descending
    assert (chosen[..., -1] >= -np.sort(-base, axis=-1)[..., 511] - allowed).all()  # the largest ones
    assert_logits(top.candidate_logits, np.take_along_axis(f32(block.logits), ids, -1))
