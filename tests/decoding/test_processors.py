"""Processors of target logits: greedy speculative output is the plain output, and the plain output is NumPy's."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_pair

from dspark_jax import DraftSampling, generate, stream
from dspark_jax.decoding.processors import Chain, LogitBias, Penalties, TokenAutomaton

V = 37


def automaton() -> TokenAutomaton:
    """Random transitions of 5 states, each of which forbids half of the tokens."""
    rng = np.random.default_rng(0)
    return TokenAutomaton(np.where(rng.random((5, V)) < 0.5, -1, rng.integers(0, 5, (5, V))))


PROCESSORS = {
    "presence": Penalties(presence=1.5),
    "frequency": Penalties(frequency=0.8),
    "repetition": Penalties(repetition=1.7),
    "bias": LogitBias(((3, 2.0), (5, float("-inf")), (11, -1.0))),
    "automaton": automaton(),
    "chain": Chain((Penalties(0.5, 0.25, 1.2), LogitBias(((7, 1.0),)), automaton())),
}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


def prompts(count):
    rng = np.random.default_rng(1)
    return [rng.integers(0, V, rng.integers(1, 9)).tolist() for _ in range(count)]


def numpy_processed(name, logits, prompt, written):
    """The processed row behind prompt and output, from the definition."""
    x = np.array(logits, np.float64)

    def penalties(presence=0.0, frequency=0.0, repetition=1.0):
        for i in set(prompt) | set(written):
            x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
        for i in set(written):
            x[i] -= frequency * written.count(i) + presence

    def mask():
        table, state = automaton().transitions, 0
        for token in written:
            state = table[state, token]
        x[table[state] < 0] = -np.inf

    if name == "bias":
        x[3], x[5], x[11] = x[3] + 2, -np.inf, x[11] - 1
    elif name == "automaton":
        mask()
    elif name == "chain":
        penalties(0.5, 0.25, 1.2)
        x[7] += 1
        mask()
    else:
        penalties(**{name: {"presence": 1.5, "frequency": 0.8, "repetition": 1.7}[name]})
    return x


FAST = ("chain",)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PROCESSORS]
)
def test_speculative_equals_plain(name, pair):
    """40 prompts, greedy, token for token; and it is not what the target writes by itself."""
    target, drafter = pair
    options = {"max_new_tokens": 24, "processor": PROCESSORS[name]}
    plain = generate(target, None, prompts(40), **options)
    fast = generate(target, drafter, prompts(40), **options)
    for a, b in zip(plain.tokens, fast.tokens, strict=True):
        assert a.tolist() == b.tolist()
    assert fast.acceptance_length > 1.05
    bare = generate(target, None, prompts(40), max_new_tokens=24)
    assert any(a.tolist() != b.tolist() for a, b in zip(plain.tokens, bare.tokens, strict=True))


@pytest.mark.parametrize("name", PROCESSORS)
def test_rows_along_a_draft(name):
    """Row s stands behind prompt, output and the first s drafted tokens; also after advance and reset."""
    rng = np.random.default_rng(3)
    processor, B, S = PROCESSORS[name], 3, 4
    prompt = [[1, 2, 3], [4, 4], [9]]
    padded = np.array([row + [-1] * (3 - len(row)) for row in prompt], np.int32)
    state = processor.start(jnp.asarray(padded), V)
    written: list[list[int]] = [[], [], []]

    def allowed_token(b, before):
        row = numpy_processed(name, np.zeros(V), prompt[b], before)
        return int(rng.choice(np.flatnonzero(row > -np.inf)))

    for count in (2, 3):
        committed = np.full((B, 3), -1, np.int32)
        for b in range(B):
            for j in range(min(count, 1 + b)):
                committed[b, j] = allowed_token(b, written[b])
                written[b].append(int(committed[b, j]))
        state = processor.advance(state, jnp.asarray(committed))
    drafts = np.zeros((B, S), np.int32)
    for b in range(B):
        for s in range(S):
            drafts[b, s] = allowed_token(b, written[b] + drafts[b, :s].tolist())
    logits = rng.normal(size=(B, S + 1, V)).astype(np.float32)
    found = np.asarray(processor.apply(state, jnp.asarray(logits), jnp.asarray(drafts)))
    for b in range(B):
        for s in range(S + 1):
            expected = numpy_processed(name, logits[b, s], prompt[b], written[b] + drafts[b, :s].tolist())
            np.testing.assert_allclose(found[b, s], expected, atol=1e-5)
    state = processor.reset(state, jnp.asarray([1]))
    found = np.asarray(processor.apply(state, jnp.asarray(logits[:, :1]), jnp.zeros((B, 0), jnp.int32)))
    np.testing.assert_allclose(found[1, 0], numpy_processed(name, logits[1, 0], [], []), atol=1e-5)
    np.testing.assert_allclose(found[0, 0], numpy_processed(name, logits[0, 0], prompt[0], written[0]), atol=1e-5)


def test_log_probabilities_before_and_after_processing(pair):
    target, drafter = pair
    options = {"max_new_tokens": 12, "processor": PROCESSORS["chain"], "logprobs": True, "logits_dtype": None}
    sampling = DraftSampling(np.full(3, 0.8, np.float32), np.arange(3), np.zeros(3, int))
    for given in (None, sampling):
        seen = {}
        for which, model in (("plain", None), ("fast", drafter)):
            events = list(stream(target, model, prompts(3), sampling=given, **options))
            keep = [e.tokens >= 0 for e in events]
            for e, k in zip(events, keep, strict=True):
                assert (e.logprobs[~k] == 0).all()
                assert (e.raw_logprobs[~k] == 0).all()
            for b in range(3):
                tokens = np.concatenate([e.tokens[b][k[b]] for e, k in zip(events, keep, strict=True)])
                raw = np.concatenate([e.raw_logprobs[b][k[b]] for e, k in zip(events, keep, strict=True)])
                logs = np.concatenate([e.logprobs[b][k[b]] for e, k in zip(events, keep, strict=True)])
                seen[which, b] = (tokens, raw, logs)
        if given is None:  # the same tokens, so the same raw numbers; greedy targets are one-hot
            for b in range(3):
                assert seen["plain", b][0].tolist() == seen["fast", b][0].tolist()
                np.testing.assert_allclose(seen["plain", b][1], seen["fast", b][1], atol=1e-4)
                assert (seen["plain", b][2] == 0).all()
                assert (seen["plain", b][1] < 0).all()
        else:
            assert (seen["fast", 0][2] < 0).any()


@pytest.mark.slow
def test_sampled_output_with_every_rule(pair):
    """Tokens of an automaton's language only, by every rule and with continuations."""
    target, drafter = pair
    more = drafter.with_continuations(4)
    sampling = DraftSampling(np.ones(4, np.float32), np.arange(4), np.zeros(4, int))
    table = automaton().transitions
    for rule, m in (("token", 4), ("block", 4), ("target_only", 0)):
        out = generate(
            target, more, prompts(4), sampling=sampling, draft_topk=6, draft_markov_topk=m, rule=rule,
            processor=PROCESSORS["automaton"], max_new_tokens=16,
        )  # fmt: skip
        for tokens in out.tokens:
            state = 0
            for token in tokens:
                state = table[state, token]
                assert state >= 0


def test_bad_processors_are_refused(pair):
    target, drafter = pair
    with pytest.raises(ValueError, match="processor: found 'str'"):
        generate(target, drafter, prompts(1), processor="none")
    with pytest.raises(ValueError, match="repetition: found 0"):
        Penalties(repetition=0)
    with pytest.raises(ValueError, match=r"transitions.shape\[1\]: found 3, expected the vocabulary's size, 37"):
        generate(target, drafter, prompts(1), processor=TokenAutomaton(np.zeros((1, 3), int)))
    with pytest.raises(ValueError, match="bias: found 37"):
        generate(target, drafter, prompts(1), processor=LogitBias(((37, 1.0),)))
    with pytest.raises(ValueError, match="draft_markov_topk: found 2, expected 0, since there is no drafter"):
        generate(target, None, prompts(1), draft_markov_topk=2)
