"""num_speculative_tokens="auto" and recorded lengths: the same text, a context without gaps, decisions by rule."""

import numpy as np
import pytest
from tiny import make_pair

from dspark_jax import DraftSampling, generate
from dspark_jax.decoding import auto
from dspark_jax.decoding.auto import Pace, Pacer

PROMPTS = [[3, 5, 7, 2, 9, 11, 4], [1, 2], [30, 8, 8, 13]]
S = 5


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(autouse=True)
def given_speeds(monkeypatch):
    """A drafted round costs 3 plain ones; nothing is timed."""
    cost = iter([3.0, 1.0] * 99)
    monkeypatch.setattr(auto, "_seconds", lambda step, state: next(cost))
    auto._PACES.clear()


@pytest.mark.parametrize("lengths", [[0, S] * 20, [S, 0, 0] * 14, [0] * 8 + [S] * 9 + [0] * 24, "auto"], ids=str)
def test_greedy_text_is_the_targets(lengths, pair):
    plain = generate(pair[0], None, PROMPTS, max_new_tokens=[40, 33, 5])
    out = generate(*pair, PROMPTS, max_new_tokens=[40, 33, 5], num_speculative_tokens=lengths)
    for one, other in zip(out.tokens, plain.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    if lengths != "auto":
        assert out.lengths.tolist() == lengths[: len(out.lengths)]
    assert np.isnan(out.confidence_logits[out.lengths == 0]).all()
    assert np.isfinite(out.confidence_logits[out.lengths > 0]).all()


@pytest.mark.parametrize("before", [[0] * n for n in (1, 6, 7, 12, 13, 17)] + [[S, 0], [0, 0, S, 0, 0, 0]], ids=str)
def test_a_block_behind_plain_rounds_is_that_of_a_fresh_prefill(before, pair):
    out = generate(*pair, PROMPTS[:1], max_new_tokens=64, num_speculative_tokens=[*before, S, *[0] * 64])
    at = 1 + int(out.committed[: len(before)].sum())  # tokens written, the prefill's among them
    # The prefill of all but the last written token gives that token, and the context ends just before it.
    prompt = PROMPTS[0] + out.tokens[0][: at - 1].tolist()
    fresh = generate(*pair, [prompt], max_new_tokens=9, num_speculative_tokens=[S, *[0] * 8])
    assert fresh.tokens[0][0] == out.tokens[0][at - 1]
    np.testing.assert_allclose(out.confidence_logits[len(before)], fresh.confidence_logits[0], atol=1e-5)
    np.testing.assert_array_equal(out.num_accepted[len(before)], fresh.num_accepted[0])


def test_sampled_auto_is_repeated_by_its_lengths(pair):
    draw = DraftSampling([0.9, 0.5, 1.2], [1, 2, 3], [0, 0, 0])
    first = generate(*pair, PROMPTS, sampling=draw, max_new_tokens=30, num_speculative_tokens="auto")
    assert 0 < (first.lengths == 0).sum() < len(first.lengths)
    again = generate(*pair, PROMPTS, sampling=draw, max_new_tokens=30, num_speculative_tokens=first.lengths)
    for one, other in zip(first.tokens, again.tokens, strict=True):
        np.testing.assert_array_equal(one, other)


def test_drafting_goes_on_while_it_pays_and_is_probed_where_it_does_not():
    pacer = Pacer(S, Pace(plain=1.0, drafted=3.0, tokens=3.0))
    active = np.array([True, False])

    def play(tokens, rounds):
        lengths = []
        for _ in range(rounds):
            lengths.append(pacer.next_length())
            pacer.record(lengths[-1], np.array([tokens, 99]), active)
        return lengths

    assert play(4, 50) == [S] * 50
    assert pacer.pace.tokens == pytest.approx(4, abs=0.02)
    falling = play(1, 2000)
    first = falling.index(0)
    # 4 -> 1 with weight 0.1: below 3 after ln(2/3) / ln(0.9) = 3.8 rounds.
    assert first == 4
    gaps = np.diff([n for n, length in enumerate(falling) if length and n >= first])
    # A probe loses 3 - tokens plain rounds, which may be one in a hundred: at least 100 * (3 - 2.97) and less than 201.
    assert (gaps[1:] >= 100 * (3 - 2.8)).all()
    assert gaps[-1] <= 202
    assert falling[first:].count(S) * (3 - 1) / 2000 < 0.04


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([3], "found 3, expected lengths of 0 or 5"), ([0], "a length for round 1"), ("fast", "num_steps: found 'fast'")],
)
def test_wrong_lengths_are_refused(lengths, message, pair):
    with pytest.raises(ValueError, match=message):
        generate(*pair, PROMPTS, max_new_tokens=9, num_speculative_tokens=lengths)
