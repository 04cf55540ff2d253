"""Speculative decoding keeps the target's distribution: statistics over 400,000 requests in each of 24 settings.

The simulation is scripts/losslessness.py, which runs the whole matrix; its exact probabilities are float64 NumPy and
know nothing of drafting. Broken forms of q, of the residual and of the noise must be caught by the same test.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import losslessness as sim
import numpy as np
import pytest
from helpers import softmax

import dspark_jax.verification.verify as verify_module
from dspark_jax import DraftBlock, DraftSampling, teacher_forced_logits, verify_block
from dspark_jax.verification import block_rule

N = 400_000
SETTINGS = sim.pairwise()


def test_settings_cover_every_pair():
    fields = [f.name for f in dataclasses.fields(sim.Setting) if f.name != "rule"]
    values = {name: {getattr(s, name) for s in sim.whole_matrix()} for name in fields}
    for a, b in itertools.combinations(fields, 2):
        found = {(getattr(s, a), getattr(s, b)) for s in SETTINGS}
        assert found == set(itertools.product(values[a], values[b])), (a, b)
    assert len(SETTINGS) <= 24


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_first_three_tokens(setting):
    """Sampled requests have the target's joint distribution, greedy ones beside them its own greedy continuation."""
    result = sim.run(setting, N)
    assert result.p_value > 1e-4
    assert result.greedy_equal


@pytest.mark.slow
def test_target_only_rule():
    result = sim.run(sim.Setting(("candidates", 4), "gated", 1.0, True, "prefix", "target_only"), N)
    assert result.p_value > 1e-4
    assert result.greedy_equal


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", sim.KINDS)
def test_continuations(kind, rule):
    """Candidates of two lists, by both rules."""
    result = sim.run(sim.Setting(("continued", 2), kind, 1.0, kind == "gated", "prefix", rule), N)
    assert result.p_value > 1e-4
    assert result.greedy_equal


@pytest.mark.slow
@pytest.mark.parametrize("form", [("dense", None), ("candidates", 4), ("greedy", None)], ids=str)
@pytest.mark.parametrize("schedule", sim.SCHEDULES)
def test_block_rule(form, schedule):
    result = sim.run(sim.Setting(form, "rnn", 1.0, False, schedule, "block"), N)
    assert result.p_value > 1e-4
    assert result.greedy_equal


# The power of the test: each of these is a small fault, and each must fail by far.
POWER = sim.Setting(("dense", None), "vanilla", 1.0, False, "none")


def shifted_q(block: DraftBlock) -> DraftBlock:
    """Tell the verifier a q with 2% of its mass moved from the likeliest token to the one after it."""
    T = 1.0
    q = jax.nn.softmax(block.logits / T, axis=-1)
    best = jax.nn.one_hot(jnp.argmax(q, axis=-1), sim.V)
    q = q + 0.02 * (jnp.roll(best, 1, axis=-1) - best)
    return dataclasses.replace(block, logits=jnp.log(q))


def patched(monkeypatch, **names):
    """Patch the verifier and drop compiled programs, so that the patch takes part in the simulation."""
    for name, value in names.items():
        monkeypatch.setattr(verify_module, name, value)
    jax.clear_caches()


@pytest.fixture
def clean_caches():
    yield
    jax.clear_caches()


@pytest.mark.slow
def test_moved_mass_in_q_is_caught():
    assert sim.run(POWER, N, distort=shifted_q).p_value < 1e-6


@pytest.mark.slow
def test_moved_mass_in_the_residual_is_caught(monkeypatch, clean_caches):
    """2% of the residual's mass goes from its likeliest token to the one after it."""
    original = verify_module.gumbel_from_bits

    def choose_moved(score):
        left = jnp.exp(score - original(choose_moved.bits))
        left = left / left.sum(axis=1, keepdims=True)
        best = jax.nn.one_hot(jnp.argmax(left, axis=1), sim.V)
        left = left + 0.02 * (jnp.roll(best, 1, axis=1) - best)
        return choose(jnp.log(jnp.maximum(left, 1e-30)) + original(choose_moved.bits))

    choose = verify_module.choose

    def remember(bits):
        choose_moved.bits = bits
        return original(bits)

    patched(monkeypatch, gumbel_from_bits=remember, choose=choose_moved)
    assert sim.run(POWER, N).p_value < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("streams", [{"RESIDUAL": 0}, {"ACCEPT": 0}], ids=str)
def test_shared_streams_are_caught(monkeypatch, clean_caches, streams):
    """The residual, or the accept test, reads the noise that the draft was drawn with (stream 0)."""
    patched(monkeypatch, **streams)
    assert sim.run(POWER, N).p_value < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["weight", "last"])
def test_faults_of_the_block_rule_are_caught(monkeypatch, clean_caches, fault):
    """Chances of 3% less, or weights that rejected steps lower too little."""
    chances, weights = block_rule.chances, block_rule.running_weights
    if fault == "last":
        monkeypatch.setattr(block_rule, "chances", lambda *args: 0.97 * chances(*args))
    else:
        monkeypatch.setattr(block_rule, "running_weights", lambda p, q: jnp.sqrt(weights(p, q)))
    jax.clear_caches()
    assert sim.run(dataclasses.replace(POWER, rule="block"), N).p_value < 1e-6


def test_accepted_length_is_the_sum_of_products():
    """With rows that depend on no context, the mean accepted length is sum over j of prod over i <= j of (1 - TV_i)."""
    rng = np.random.default_rng(0)
    n, S, V = N, 4, 6
    p, q = softmax(rng.normal(size=(S + 1, V))), softmax(0.8 * rng.normal(size=(S, V)))
    tokens = np.stack([rng.choice(V, n, p=q[s]) for s in range(S)], axis=1)
    block = DraftBlock(
        tokens=tokens, num_draft=np.full(n, S), valid=np.ones(n, bool), confidence_logits=None,
        logits=np.broadcast_to(np.log(q)[:, None].astype(np.float32), (S, n, V)), candidate_ids=None,
        candidate_logits=None, method="probabilistic",
    )  # fmt: skip
    draw = DraftSampling(np.ones(n), np.arange(n), np.zeros(n, int))
    out = verify_block(block, np.broadcast_to(np.log(p).astype(np.float32), (n, S + 1, V)), draw)
    keep = 1 - 0.5 * np.abs(p[:S] - q).sum(axis=1)
    expected, found = np.cumprod(keep).sum(), np.asarray(out.num_accepted)
    assert abs(found.mean() - expected) < 4 * found.std() / n**0.5
    # The running product of acceptance probabilities is an estimate of the same number.
    chances = np.cumprod(np.asarray(out.accept_prob), axis=1).sum(axis=1)
    assert abs(chances.mean() - expected) < 4 * chances.std() / n**0.5


@pytest.mark.slow
def test_accepted_length_of_a_drafter():
    """With context: sum over j of the sum over all prefixes x of prod over i <= j of min(p_i(x_i), q_i(x_i))."""
    setting = sim.Setting(("dense", None), "rnn", 1.0, False, "none")
    length = sim.run(setting, N).tokens
    table = sim.target_table(sim.WORLD)
    head = sim.make_head("rnn", False, table, sim.WORLD)
    hidden = np.random.default_rng(sim.WORLD + 2).normal(size=(sim.V, sim.S, sim.H)).astype(np.float32)[1]
    first, second = np.divmod(np.arange(64), 8)
    prev = np.stack([np.ones(64, int), first, second], axis=1)
    q = softmax(teacher_forced_logits(head, np.broadcast_to(hidden, (64, *hidden.shape)), prev)).transpose(1, 0, 2)
    p = softmax(table)
    one = np.minimum(p[0, 1], q[0, 0])
    two = one[:, None] * np.minimum(p[1], q[::8, 1])
    three = two[:, :, None] * np.minimum(p, q[:, 2].reshape(8, 8, 8))
    expected = 1 + one.sum() + two.sum() + three.sum()
    assert abs(length - expected) < 4 * 1.2 / N**0.5, (length, expected)
    assert expected > 2
