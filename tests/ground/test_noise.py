"""The pinned noise, and the draws made with it: known answers, distributions, independence of everything else.

Distributions are compared by chi-square at fixed seeds, a million draws in one call. That sees a 1% error:
`test_chi_square_sees_a_one_percent_error` shows that the same counts reject probabilities which are 1% off.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDENS, KINDS, bigram_weights, build_head, f32, make_head, make_inputs, read, softmax
from scipy import stats

import dspark_jax
from dspark_jax import DraftSampling, noise
from dspark_jax.noise import ACCEPT, DRAFT, RESIDUAL

N = 1 << 20  # draws of a chi-square test

# Random123's own vectors (kat_vectors, threefry2x32, 20 rounds): key, counter, result.
THREEFRY = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]

# (seed, position, step, stream, token id): noise word. Made by the Python integers of `python_threefry`, not by the
# library. They are a promise: a change of any of them changes what users' requests draw.
WORDS = {
    (0, 0, 0, 0, 0): 0x6B200159,
    (1, 0, 0, 0, 0): 0xB435A7FA,
    (0, 1, 0, 0, 0): 0x1E3F1835,
    (0, 0, 1, 0, 0): 0x375F238F,
    (0, 0, 0, 1, 0): 0xBAC2CDFC,
    (0, 0, 0, 2, 0): 0x8EE202C6,
    (0, 0, 0, 0, 1): 0x508EFB2C,
    (1234, 97, 3, 0, 151935): 0x8DF2A2DA,
    (2**32 - 1, 2**31 - 1, 65535, 2, 262143): 0x149B5109,
    (42, 7, 6, 1, 4095): 0x554F70B0,
}


def python_threefry(key, counter):
    """Threefry2x32 with 20 rounds in Python integers, from the paper."""
    mask = 0xFFFFFFFF
    k = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x = [(c + k[i]) & mask for i, c in enumerate(counter)]
    for turn in range(20):
        x[0] = (x[0] + x[1]) & mask
        distance = [13, 15, 26, 6, 17, 29, 16, 24][turn % 8]
        x[1] = (((x[1] << distance) | (x[1] >> (32 - distance))) & mask) ^ x[0]
        if turn % 4 == 3:
            n = turn // 4 + 1
            x = [(x[0] + k[n % 3]) & mask, (x[1] + k[(n + 1) % 3] + n) & mask]
    return tuple(x)


def python_word(seed, position, step, stream, token):
    return python_threefry((seed, position), (token, stream * 65536 + step))[0]


def python_gumbel(words):
    """Standard Gumbel noise in float64 from noise words."""
    u = (np.asarray(words, np.float64) + 0.5) / 2.0**32
    return -np.log(-np.log1p(-u))


def chi_square(counts, probabilities) -> float:
    """Return the p-value of counts under probabilities; categories expecting fewer than 10 are pooled."""
    expected = np.asarray(probabilities, np.float64) * counts.sum()
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 1e-3:
            assert counts[-1] == 0
            counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def independence(a, b, size) -> float:
    """Return the p-value of independence of two arrays of categories."""
    table = np.bincount(a * size + b, minlength=size * size).reshape(size, size)
    return float(stats.chi2_contingency(table[table.sum(1) > 0][:, table.sum(0) > 0]).pvalue)


def draw(head, base, temperature, seed, position, anchor=0, **options):
    """Draw N requests that share the base rows [S, Vd]: tokens [N, S]."""
    S, Vd = np.shape(base)
    rows = jnp.broadcast_to(jnp.asarray(base, jnp.float32)[:, None], (S, N, Vd))
    params = DraftSampling(*(np.broadcast_to(x, N) for x in (temperature, seed, position)))
    block = dspark_jax.draft_from_logits(head, rows, np.broadcast_to(anchor, N), sampling=params, **options)
    assert block.method == "probabilistic"
    assert np.asarray(block.valid).all()
    return np.asarray(block.tokens)


ROW = np.asarray([1.0, -0.5, 0.3, 2.0, -1.5, 0.0, 0.9, -3.0], np.float32)
PLAIN = make_head(None, V=8, H=2, confidence=None)  # no Markov bias: every step draws from its own base row
SEEDS = np.arange(N, dtype=np.uint32)


@pytest.fixture(scope="module")
def by_seed():
    """A million seeds at one position, two steps of the same row: tokens [N, 2]."""
    return draw(PLAIN, [ROW, ROW], 0.8, SEEDS, 17)


@pytest.fixture(scope="module")
def by_position():
    """One seed at a million positions: tokens [N, 2]."""
    return draw(PLAIN, [ROW, ROW], 0.8, 5, SEEDS.astype(np.int32))


# ---------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(("key", "counter", "result"), THREEFRY)
def test_threefry_known_answers(key, counter, result):
    assert python_threefry(key, counter) == result
    words = noise.threefry2x32(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(int(word) for word in words) == result


def test_noise_words_are_pinned():
    assert (DRAFT, ACCEPT, RESIDUAL) == (0, 1, 2)
    for (seed, position, step, stream, token), word in WORDS.items():
        assert python_word(seed, position, step, stream, token) == word
        found = noise.noise_bits(jnp.uint32(seed), jnp.int32(position), step, stream, jnp.int32(token))
        assert int(found) == word, (seed, position, step, stream, token)


def test_noise_words_broadcast_under_jit():
    rng = np.random.default_rng(0)
    seed = rng.integers(0, 2**32, (5, 1), dtype=np.uint32)
    position = rng.integers(0, 2**31, (5, 1)).astype(np.int32)
    ids = rng.integers(0, 262144, 7).astype(np.int32)
    bits = jax.jit(lambda *a: noise.noise_bits(*a, DRAFT, jnp.asarray(ids)[None]))(seed, position, jnp.int32(4))
    keys = zip(seed[:, 0].tolist(), position[:, 0].tolist(), strict=True)
    expected = [[python_word(*key, 4, DRAFT, i) for i in ids.tolist()] for key in keys]
    np.testing.assert_array_equal(bits, np.asarray(expected, np.uint32))


def test_gumbel_noise_resolves_both_tails():
    words = np.asarray([0, 1, 2, 1000, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    found = np.asarray(noise.gumbel_from_bits(jnp.asarray(words)))
    assert found.dtype == np.float32
    exact = python_gumbel(words)
    np.testing.assert_allclose(found[:5], exact[:5], rtol=2e-6)
    assert found[0] == pytest.approx(np.log(2.0**33), rel=1e-5)  # the largest value: 22.87
    assert (found[:4] > found[1:5]).all()  # four different values in the tail that decides the draws
    assert np.isfinite(found).all()
    assert (found[5:] > -2.9).all()
    u = np.asarray(noise.uniform_from_bits(jnp.asarray(words)))
    assert (u > 0).all()
    assert (u < 1).all()


def test_gumbel_noise_is_gumbel():
    bits = noise.noise_bits(jnp.asarray(SEEDS), jnp.int32(3), 0, DRAFT, jnp.int32(11))
    drawn = np.asarray(noise.gumbel_from_bits(bits), np.float64)
    assert stats.kstest(drawn, stats.gumbel_r.cdf).pvalue > 1e-4
    assert stats.kstest(drawn * 1.01, stats.gumbel_r.cdf).pvalue < 1e-4


# ------------------------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("key", ["by_seed", "by_position"])
def test_draws_follow_the_softmax(request, key, step):
    counts = np.bincount(request.getfixturevalue(key)[:, step], minlength=8)
    assert chi_square(counts, softmax(ROW / np.float32(0.8))) > 1e-4


def test_chi_square_sees_a_one_percent_error(by_seed):
    """The same counts reject probabilities off by 1% each, and a temperature off by 1%."""
    counts = np.bincount(by_seed[:, 0], minlength=8)
    exact = softmax(ROW / 0.8)
    off = exact * (1 + 0.01 * np.where(np.arange(8) % 2, 1, -1))
    assert chi_square(counts, off / off.sum()) < 1e-6
    assert chi_square(counts, softmax(ROW / 0.808)) < 1e-6


def test_steps_seeds_and_positions_are_independent(by_seed, by_position):
    assert independence(by_seed[:, 0], by_seed[:, 1], 8) > 1e-4
    assert independence(by_position[:, 0], by_position[:, 1], 8) > 1e-4
    for tokens in (by_seed, by_position):
        for lag in (1, 2):
            assert independence(tokens[:-lag, 0], tokens[lag:, 0], 8) > 1e-4
        # The next block's first step must not meet the noise of this block's second step.
        assert independence(tokens[1:, 0], tokens[:-1, 1], 8) > 1e-4
    assert independence(by_seed[:, 0], by_position[:, 0], 8) > 1e-4


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_second_step_is_drawn_given_the_first(kind, topk):
    """Case 8: the previous token counts. The joint distribution of two steps is p(t0) p(t1 | t0), for every head."""
    head = make_head(kind, V=6, H=3, r=4, seed=3, confidence=None)
    hidden, _ = make_inputs(1, 2, 3, 6, seed=4)
    base = 0.5 * f32(head.base_logits(jnp.swapaxes(hidden, 0, 1)))[:, 0]
    rows = jnp.broadcast_to(jnp.asarray(base)[:, None], (2, N, 6))
    params = DraftSampling(np.full(N, 1.3), SEEDS, np.zeros(N, np.int32))
    block = dspark_jax.draft_from_logits(
        head, rows, np.full(N, 2), hidden=np.broadcast_to(hidden, (N, 2, 3)), sampling=params, topk=topk
    )
    prev = np.stack([np.full(6, 2), np.arange(6)], axis=1)
    forced = f32(dspark_jax.teacher_forced_logits(head, np.broadcast_to(hidden, (6, 2, 3)), prev))
    bias = forced - f32(head.base_logits(jnp.swapaxes(np.broadcast_to(hidden, (6, 2, 3)), 0, 1)))
    logits = base[:, None] + bias
    if topk is not None:
        outside = np.argsort(np.argsort(-base, axis=-1), axis=-1) >= topk
        logits = np.where(outside[:, None], -np.inf, logits)
    first, second = softmax(logits[0, 0] / 1.3), softmax(logits[1] / 1.3)
    tokens = np.asarray(block.tokens)
    counts = np.bincount(tokens[:, 0] * 6 + tokens[:, 1], minlength=36)
    assert chi_square(counts, (first[:, None] * second).ravel()) > 1e-4
    ignored = first[:, None] * (first @ second)[None]  # the right marginals, the previous token ignored
    assert chi_square(counts, ignored.ravel()) < 1e-6


def test_draws_follow_the_reference_probabilities():
    """Draws over 1000 tokens at temperature 0.7 follow the golden's probs_t0.7, made by PyTorch."""
    golden = read(GOLDENS / "heads" / "head_vanilla_f32" / "golden.safetensors")
    head = make_head(None, V=1000, H=2, confidence=None)
    B = 1 << 16
    rows = np.broadcast_to(golden["out.corrected_logits"][0, 0], (1, B, 1000))
    params = DraftSampling(np.full(B, 0.7), SEEDS[:B], np.full(B, 9))
    tokens = np.asarray(dspark_jax.draft_from_logits(head, rows, np.zeros(B, int), sampling=params).tokens)
    counts = np.bincount(tokens[:, 0], minlength=1000)
    assert chi_square(counts, golden["out.probs_t0.7"][0, 0]) > 1e-4
    assert chi_square(counts, softmax(golden["out.corrected_logits"][0, 0] / 0.73)) < 1e-4


# ------------------------------------------------------------------------------------------- cases of the pitfalls list


def test_case_1_bfloat16_logits_reach_the_whole_vocabulary():
    """200 requests with equal bf16 logits over V = 151936: noise in bf16 never passes id 983."""
    V = 151936
    head = make_head(None, V=V, H=2, dtype="bfloat16", confidence=None)
    params = DraftSampling(np.ones(200), np.arange(200), np.zeros(200, int))
    rows = jnp.zeros((1, 200, V), jnp.bfloat16)
    tokens = np.asarray(dspark_jax.draft_from_logits(head, rows, np.zeros(200, int), sampling=params).tokens)[:, 0]
    assert tokens.max() > 140_000
    assert stats.kstest(tokens / V, "uniform").pvalue > 1e-4


def test_case_2_streams_are_independent():
    """Rejection sampling, p = [.1,.6,.3], q = [.7,.25,.05]: the residual's own stream gives p, the draft's does not."""
    p, q = np.asarray([0.1, 0.6, 0.3]), np.asarray([0.7, 0.25, 0.05])
    ids = jnp.arange(3)

    def gumbel(stream, ids=ids):
        bits = noise.noise_bits(jnp.asarray(SEEDS)[:, None], jnp.int32(0), 0, stream, ids[None])
        return np.asarray(noise.gumbel_from_bits(bits))

    drafted = np.argmax(np.log(q)[None] + gumbel(DRAFT), axis=1)
    u = np.asarray(noise.uniform_from_bits(noise.noise_bits(jnp.asarray(SEEDS), jnp.int32(0), 0, ACCEPT, ids[0])))
    residual = np.log(np.maximum(np.maximum(p - q, 0), 1e-300))

    def committed(stream):
        again = np.argmax(residual + gumbel(stream), axis=1)
        return np.bincount(np.where(u * q[drafted] < p[drafted], drafted, again), minlength=3)

    assert chi_square(committed(RESIDUAL), p) > 1e-4
    np.testing.assert_allclose(committed(DRAFT) / N, [0.101, 0.559, 0.340], atol=2e-3)
    for a, b in ((DRAFT, ACCEPT), (DRAFT, RESIDUAL), (ACCEPT, RESIDUAL)):
        assert independence(np.argmax(gumbel(a), 1), np.argmax(gumbel(b), 1), 3) > 1e-4


def test_case_3_noise_belongs_to_the_token_not_to_the_slot():
    """V = 5, k = 3: wherever the dense draw is a candidate, the top-k draw is the same token."""
    head, rng = make_head(None, V=5, H=2, confidence=None), np.random.default_rng(1)
    rows = rng.standard_normal((1, 4096, 5)).astype(np.float32)
    params = DraftSampling(np.ones(4096), SEEDS[:4096], np.zeros(4096, int))
    dense = dspark_jax.draft_from_logits(head, rows, np.zeros(4096, int), sampling=params)
    top = dspark_jax.draft_from_logits(head, rows, np.zeros(4096, int), sampling=params, topk=3, outputs="candidates")
    dense, tokens, ids = np.asarray(dense.tokens)[:, 0], np.asarray(top.tokens)[:, 0], np.asarray(top.candidate_ids)[0]
    inside = (ids == dense[:, None]).any(1)
    assert 0.7 < inside.mean() < 1
    np.testing.assert_array_equal(tokens[inside], dense[inside])
    assert (ids == tokens[:, None]).any(1).all()


def test_case_4_a_request_draws_the_same_tokens_anywhere():
    """The same (seed, position) in rows 0 and 3, alone, in a batch of 8, and in a vocabulary padded with -inf."""
    rng = np.random.default_rng(2)
    rows = (rng.standard_normal((3, 1, 50)) * 0.3).astype(np.float32)
    alone = DraftSampling([1.0], [77], [5])
    batch = DraftSampling(
        [1.0, 0.5, 2.0, 1.0, 1.0, 1.0, 0.0, 1.0], [77, 1, 2, 77, 78, 77, 77, 3], [5, 5, 5, 5, 5, 6, 5, 9]
    )
    head = make_head(None, V=50, H=2, confidence=None)
    one = np.asarray(dspark_jax.draft_from_logits(head, rows, [0], sampling=alone).tokens)[0]
    many = np.asarray(dspark_jax.draft_from_logits(head, np.repeat(rows, 8, 1), [0] * 8, sampling=batch).tokens)
    np.testing.assert_array_equal(many[0], one)
    np.testing.assert_array_equal(many[3], one)
    for other in (1, 4, 5):  # another seed or another position draws anew
        assert (many[other] != one).any()
    wide = np.pad(rows, ((0, 0), (0, 0), (0, 14)), constant_values=-np.inf)
    padded = dspark_jax.draft_from_logits(make_head(None, V=64, H=2, confidence=None), wide, [0], sampling=alone)
    np.testing.assert_array_equal(np.asarray(padded.tokens)[0], one)


@pytest.mark.parametrize(
    ("seed", "shown"),
    [
        ([2**40], 2**40),
        ([-1], -1),
        (np.asarray([2**32]), 2**32),
        (np.asarray([-1], np.int32), -1),
        (jnp.asarray([-1]), -1),
    ],
)
def test_case_5_seeds_beyond_uint32_are_refused(seed, shown):
    with pytest.raises(ValueError, match=rf"seed.*{shown}.*0 to 4294967295"):
        dspark_jax.draft_from_logits(
            PLAIN, np.zeros((1, 1, 8), np.float32), [0], sampling=DraftSampling([1.0], seed, [0])
        )


def test_case_5_all_of_uint32_is_distinct():
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    rows = np.zeros((16, 5, 8), np.float32)
    params = DraftSampling([1.0] * 5, seeds, [0] * 5)
    tokens = np.asarray(dspark_jax.draft_from_logits(PLAIN, rows, [0] * 5, sampling=params).tokens)
    assert len({tuple(row) for row in tokens}) == 5


@pytest.mark.parametrize("topk", [None, 8, 3])
def test_case_6_greedy_and_sampled_rows_in_one_batch(topk):
    """Temperatures [0, 1]: row 0 greedy, row 1 as if alone; 0.9e-5 is greedy and 1.1e-5 is not; NaN spreads nowhere."""
    rows = np.broadcast_to(np.where(np.arange(8) % 4 == 1, 1.0, 0.0).astype(np.float32), (16, 6, 8))
    temperature = np.asarray([0, 1, 0.9e-5, 1.1e-5, 1e-30, -1], np.float32)

    def draw(t):
        return np.asarray(
            dspark_jax.draft_from_logits(
                PLAIN, rows, [0] * 6, sampling=DraftSampling(t, [9] * 6, [4] * 6), topk=topk
            ).tokens
        )

    tokens, all_sampled = draw(temperature), draw(np.ones(6, np.float32))
    for row in (0, 2, 4, 5):
        assert (tokens[row] == 1).all()  # the lowest id of the two largest
    np.testing.assert_array_equal(tokens[1], all_sampled[1])
    assert set(tokens[3]) == {1, 5}  # so cold that only the tie is drawn
    assert len(set(tokens[1])) > 2 - (topk == 3)


@pytest.mark.parametrize("topk", [None, 5])
def test_an_infinite_temperature_draws_among_the_finite_tokens(topk):
    """A device array is not read for checks, so an infinite temperature can arrive: -inf / inf must not become NaN."""
    row = np.where(np.arange(8) % 2, -np.inf, ROW).astype(np.float32)
    params = DraftSampling(jnp.full((6,), jnp.inf, jnp.float32), np.arange(6), np.zeros(6, int))
    block = dspark_jax.draft_from_logits(PLAIN, np.broadcast_to(row, (16, 6, 8)), [0] * 6, sampling=params, topk=topk)
    assert np.asarray(block.valid).all()
    assert set(np.asarray(block.tokens).ravel().tolist()) == {0, 2, 4, 6}


@pytest.mark.parametrize("topk", [None, 3])
@pytest.mark.parametrize("logits", [[20, 20, -5], [np.inf, np.inf, 3]])
def test_equal_logits_are_drawn_equally_at_any_temperature(logits, topk):
    """logits / T = 2e6 would swallow the noise (48.5% against 51.5%); two infinite logits have a half each."""
    B = 1 << 18
    for temperature in (1.1e-5, 1e-3, 1.0):
        params = DraftSampling(np.full(B, temperature), np.arange(B), np.zeros(B, int))
        rows = np.broadcast_to(np.asarray(logits, np.float32), (1, B, 3))
        head = make_head(None, V=3, H=2, confidence=None)
        block = dspark_jax.draft_from_logits(head, rows, np.zeros(B, int), sampling=params, topk=topk)
        counts = np.bincount(np.asarray(block.tokens)[:, 0], minlength=3)
        assert counts[2] == 0
        assert abs(counts[0] / B - 0.5) < 5 * 0.5 / B**0.5


def test_case_7_sampling_draws_and_greedy_does_not():
    """Logits [2, 1.5, 1, .5] at T = 1: token 0 with p = .455, not always."""
    head = make_head(None, V=4, H=2, confidence=None)
    tokens = draw(head, [[2, 1.5, 1, 0.5]], 1.0, SEEDS, 0)
    counts = np.bincount(tokens[:, 0], minlength=4)
    assert counts[0] / N == pytest.approx(0.455, abs=2e-3)
    assert chi_square(counts, softmax([2, 1.5, 1, 0.5])) > 1e-4
    greedy = dspark_jax.draft_from_logits(head, np.full((1, 3, 4), [2, 1.5, 1, 0.5], np.float32), [0] * 3)
    assert greedy.method == "greedy"
    assert (np.asarray(greedy.tokens) == 0).all()


@pytest.mark.parametrize("topk", [None, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_case_8c_tokens_are_drawn_from_the_stored_values(topk, dtype):
    """Every token is the argmax of what is stored, over T, plus the noise; of the unrounded values it often is not."""
    B, V = 4096, 16
    rng = np.random.default_rng(5)
    head = build_head(bigram_weights(rng.standard_normal((V, V)) * 2))
    base = (rng.standard_normal((1, B, V)) * 2).astype(np.float32)
    anchors = rng.integers(0, V, B)
    params = DraftSampling(np.full(B, 0.9), SEEDS[:B], np.zeros(B, int))
    options = {"sampling": params, "topk": topk, "outputs": "logits"}
    block = dspark_jax.draft_from_logits(head, base, anchors, logits_dtype=dtype, **options)
    exact = dspark_jax.draft_from_logits(head, base, anchors, logits_dtype="float32", **options)
    assert block.logits.dtype == jnp.dtype(dtype)
    bits = noise.noise_bits(jnp.asarray(SEEDS[:B])[:, None], jnp.int32(0), 0, DRAFT, jnp.arange(V)[None])
    gumbel = python_gumbel(bits)
    score = f32(block.logits)[0].astype(np.float64) / np.float32(0.9) + gumbel
    tokens = np.asarray(block.tokens)[:, 0]
    lost = score.max(1) - np.take_along_axis(score, tokens[:, None], 1)[:, 0]
    assert lost.max() < 2e-5  # nothing but the last bits of float32 noise
    if dtype == "bfloat16":
        assert 0.001 < (tokens != np.asarray(exact.tokens)[:, 0]).mean() < 0.05
    stored = f32(jnp.where(jnp.isfinite(block.logits), exact.logits, -jnp.inf).astype(dtype))
    np.testing.assert_array_equal(f32(block.logits), stored)  # rounded once, to the nearest


# ------------------------------------------------------------------------------------------- nothing else matters


@pytest.mark.parametrize(
    ("option", "value"),
    [("jax_default_prng_impl", "rbg"), ("jax_default_prng_impl", "unsafe_rbg"), ("jax_enable_x64", True)],
)
def test_draws_do_not_depend_on_jax_settings(option, value):
    params = DraftSampling([1.0, 0.7, 0.0], [1, 2, 3], [10, 20, 30])
    rows = np.random.default_rng(6).standard_normal((4, 3, 8)).astype(np.float32)

    def draw():
        return dspark_jax.draft_from_logits(PLAIN, rows, [0, 1, 2], sampling=params)

    expected, before = draw(), getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        found = draw()
    finally:
        jax.config.update(option, before)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.tokens.dtype == jnp.int32


def test_choose_breaks_ties_by_the_lowest_id():
    score = jnp.asarray([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [-jnp.inf, -jnp.inf, -jnp.inf]])
    assert noise.choose(score).tolist() == [1, 0, 0]
    ids = jnp.asarray([[4, 9, 2], [8, 1, 3], [7, 5, 6]])
    assert noise.choose(score, ids).tolist() == [2, 1, 1]
    # A row that the caller flags still has a slot.
    bad = jnp.asarray([[jnp.nan, 1.0, 2.0], [1.0, -jnp.nan, jnp.inf], [jnp.nan] * 3])
    for slots in (noise.choose(bad), noise.choose(bad, ids)):
        assert all(0 <= slot < 3 for slot in slots.tolist())
