"""Target filters on their own: order-free sums, thresholds with ties, and rows without anything to keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_reference import processed

from dspark_jax.verification.distributions import TargetDistribution
from dspark_jax.verification.filter import TargetFilter, steady_sum


@pytest.mark.parametrize("n", [8, 300, 1009, 152_000])
def test_sums_do_not_depend_on_order_or_batch(n):
    """The same bits for any order of the weights and any batch around them; float32's accuracy."""
    rng = np.random.default_rng(n)
    weights = np.exp(-rng.exponential(4, (3, n))).astype(np.float32)
    weights[:, 0] = 1.0
    total = np.asarray(jax.jit(steady_sum)(weights))
    np.testing.assert_allclose(total[:, 0], weights.astype(np.float64).sum(axis=1), rtol=3e-7)
    order = rng.permutation(n)
    np.testing.assert_array_equal(jax.jit(steady_sum)(weights[:, order]), total)
    np.testing.assert_array_equal(jax.jit(steady_sum)(weights[1:2]), total[1:2])
    np.testing.assert_array_equal(steady_sum(jnp.asarray(weights)), total)
    tiny = np.full((1, n), 2.0**-30, np.float32)
    np.testing.assert_allclose(steady_sum(jnp.asarray(tiny)), n * 2.0**-30, rtol=1e-6)


def distribution(row, temperature=1.0, **filters):
    arrays = {name: jnp.asarray([value]) for name, value in filters.items()}
    target = TargetDistribution.of(
        jnp.asarray([[row]], jnp.float32), jnp.asarray([temperature]), TargetFilter(**arrays)
    )
    return np.exp(np.asarray(target.log_row(jnp.zeros(1, jnp.int32))))[0]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.0, "top_k": 0, "top_p": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.0}, [1, 0, 0, 0]),
        ({"min_p": 5.0}, [1, 0, 0, 0]),
        # top-p counts the mass that top-k left: of [4/7, 3/7] the first alone reaches .5; of the whole row it does not.
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"allowed": [False, True, True, True], "top_k": 1}, [0, 1, 0, 0]),
    ],
)
def test_known_filters(filters, expected):
    # 0.4 - 1e-3 avoids the tie of "mass above" with top_p itself.
    filters = filters | ({"top_p": 0.399} if filters.get("top_p") == 0.4 else {})
    np.testing.assert_allclose(distribution(np.log([0.4, 0.3, 0.2, 0.1]), **filters), expected, rtol=1e-5, atol=1e-7)


def test_ties_with_the_last_kept_token_stay():
    """Zeros of either sign tie; what is kept does not depend on the order of ids."""
    row = [0.0, -0.0, -1.0, 0.0]
    np.testing.assert_allclose(distribution(row, top_k=1), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(distribution(row, top_p=0.1), [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(distribution(row, temperature=0.0), [1, 0, 0, 0])


def test_temperature_comes_before_min_p():
    """At T = 2 the ratio .25 becomes .5: min-p .4 keeps the token that it would drop at T = 1."""
    row = np.log([0.8, 0.2])
    assert distribution(row, 2.0, min_p=0.4)[1] > 0
    assert distribution(row, 1.0, min_p=0.4)[1] == 0


def test_random_rows_against_sorting():
    rng = np.random.default_rng(0)
    B, V = 200, 23
    rows = (3 * rng.normal(size=(B, 1, V))).astype(np.float32)
    T = rng.choice([0.0, 0.3, 1.0, 1.7], B).astype(np.float32)
    filters = {
        "allowed": rng.random((B, V)) < 0.6,
        "min_p": rng.choice([0.0, 0.05, 0.3], B).astype(np.float32),
        "top_k": rng.integers(-1, V + 3, B).astype(np.int32),
        "top_p": rng.uniform(0.05, 1.1, B).astype(np.float32),
    }
    arrays = TargetFilter(**{name: jnp.asarray(value) for name, value in filters.items()})
    found = jax.jit(lambda x, t, f: TargetDistribution.of(x, t, f).log_row(jnp.zeros(B, jnp.int32)))(rows, T, arrays)
    for b in range(B):
        want = processed(rows[b, 0], T[b], **{name: value[b] for name, value in filters.items()})
        np.testing.assert_allclose(np.exp(found[b]), want, rtol=1e-5, atol=1e-7, err_msg=str(b))


def test_extreme_values_stay_probabilities():
    """+inf, overflow by a small temperature and a row of nothing but -inf: no NaN."""
    np.testing.assert_allclose(distribution([np.inf, 1.0, -np.inf], 0.5, top_k=2), [1, 0, 0])
    np.testing.assert_allclose(distribution([3e38, 1.0, -3e38], 0.1), [1, 0, 0])
    np.testing.assert_array_equal(distribution([-np.inf] * 3, top_p=0.5, top_k=2, min_p=0.1), [0, 0, 0])
