"""A real model: SmolLM2-135M-Instruct against transformers, recorded answers and recorded rounds of the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDENS
from safetensors.numpy import load_file
from smollm2_cases import MODEL, PROMPTS, STOP, load, needs_model

from dspark_jax import generate

pytestmark = [pytest.mark.slow, needs_model]


@jax.jit
def all_logits(target, tokens):
    start = jnp.zeros((tokens.shape[0],), jnp.int32)
    hidden, _, _ = target.forward(tokens, start, target.make_cache(*tokens.shape), ())
    return target.logits(hidden)


@pytest.mark.parametrize("part", range(3))
def test_argmax_behind_every_prompt_is_the_recorded_answer(part):
    target, _ = load()
    rows = [(e["prompt_ids"], e["greedy_ids"]) for e in PROMPTS[8 * part : 8 * part + 8]]
    padded = np.zeros((8, 192), np.int32)
    for row, (prompt, answer) in zip(padded, rows, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer
    best = np.asarray(all_logits(target, padded).argmax(-1))
    for row, (prompt, answer) in zip(best, rows, strict=True):
        assert row[len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer


def test_logits_equal_transformers():
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    tokens = np.array([PROMPTS[1]["prompt_ids"] + PROMPTS[1]["greedy_ids"]], np.int32)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        wanted = model(torch.tensor(tokens).long()).logits.numpy()
    np.testing.assert_allclose(all_logits(load()[0], tokens), wanted, atol=2e-3, rtol=0)


@pytest.mark.parametrize("options", [{}, {"draft_topk": 128}], ids=["dense", "top-k"])
def test_speculative_greedy_text_is_the_recorded_answer(options):
    target, drafter = load()
    prompts = [e["prompt_ids"] for e in PROMPTS[:8]]
    out = generate(target, drafter, prompts, max_new_tokens=64, stop_ids=STOP, **options)
    assert [tokens.tolist() for tokens in out.tokens] == [e["greedy_ids"] for e in PROMPTS[:8]]
    assert out.acceptance_length > 1.3


def test_rounds_of_the_reference():
    _, drafter = load()
    rounds = load_file(GOLDENS / "smollm2" / "rounds.safetensors")
    context = load_file(GOLDENS / "smollm2" / "context.safetensors")
    cache, last = None, -1
    for n in range(len(rounds["anchor_ids"])):
        prompt = int(rounds["prompt_index"][n])
        first = prompt != last
        turn = 0 if first else turn + 1  # noqa: F821
        if first:
            cache, last = drafter.make_cache(1, 192), prompt
        taps = context[f"prompt{prompt}_round{turn}"]
        features = np.zeros((1, 64 if first else 8, taps.shape[1]), np.float32)
        features[0, : len(taps)] = taps
        block, cache = drafter.propose(
            cache, features, rounds["anchor_ids"][n : n + 1], rounds["anchor_position"][n : n + 1], outputs="logits"
        )
        np.testing.assert_array_equal(block.tokens[0], rounds["tokens"][n])
        np.testing.assert_allclose(block.confidence_logits[0], rounds["confidence_logits"][n], atol=1e-3)
        ids = rounds["corrected_top64_ids"][n]
        found = np.take_along_axis(np.asarray(block.logits[:, 0]), ids, axis=1)
        np.testing.assert_allclose(found, rounds["corrected_top64_values"][n], atol=2e-3)
    assert last == 3
