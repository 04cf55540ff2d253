"""Selection: every form picks the same set in the same order, held to a stable NumPy sort."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, f32, read
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.kernels import pick, select
from dspark_jax.ordered_keys import to_keys, to_values

DTYPES = ("float32", "bfloat16", "float16")
FORMS = {
    "top_k": select.top_k,
    "partial_sorts": select.by_partial_sorts,
    "xla": partial(select._select, small=select.pick_xla),
    "pallas": partial(select._select, small=partial(pick.pick_kernel, interpret=True)),
}


def reference(x, k):
    """Order float64 values, descending and stable: NaN first, zeros of either sign equal."""
    value = np.asarray(x).astype(np.float64)
    rank = np.where(np.isnan(value), 2.0, np.where(value == np.inf, 1.0, 0.0))
    finite = np.where(np.isfinite(value), value, np.where(value == -np.inf, -1e300, 0.0))
    ids = np.stack([np.lexsort((np.arange(r.size), -v, -r)) for v, r in zip(finite, rank, strict=True)])[:, :k]
    return np.take_along_axis(value, ids, axis=1), ids


def check(form, x, k):
    values, ids = jax.jit(FORMS[form], static_argnames="k")(x, k=k)
    want_values, want_ids = reference(x, k)
    assert values.dtype == x.dtype
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64), want_values)
    assert not np.signbit(np.asarray(values).astype(np.float64)[want_values == 0]).any()


def hard_rows(V, dtype):
    """Return rows with ties, zeros of both signs, infinities, NaN of both signs, and nothing finite at all."""
    rng = np.random.default_rng(V)
    x = (3 * rng.standard_normal((8, V))).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = -np.inf
    x[2, ::7], x[2, 3::9] = 0.0, -0.0
    x[3] = -np.inf
    x[4, V // 2], x[4, V - 1], x[4, 0] = -np.nan, np.nan, np.inf
    x[5] = 1.0
    x[6] = np.sort(x[6])
    x[7, : V // 3] += 50.0  # likely tokens cluster
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("V", "k"), [(37, 9), (1003, 31), (1003, 250)])
def test_forms_agree_with_a_stable_sort(form, dtype, V, k):
    check(form, hard_rows(V, dtype), k)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("V", "k"), [(1, 1), (37, 37), (1003, 1), (1003, 62)])
def test_edges_of_k(form, V, k):
    check(form, hard_rows(V, "bfloat16"), k)


def test_sizes_of_groups():
    assert pick.group_size(151936, 512) == 16
    assert pick.group_size(151936, 4096) == 8
    assert pick.group_size(151936, 151936 // 4) is None
    assert all(pick.fits(151936, k) for k in (1, 64, 512, 2048, 4096))
    assert not pick.fits(151936, 151936 // 4)  # the XLA form takes over there


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_values_select_like_a_stable_sort(data):
    """A few distinct values, so that ties straddle groups and the k-th place."""
    values = st.sampled_from([-np.inf, -2.0, -1e-40, -0.0, 0.0, 1.0, 1.0078125, 3.0, np.inf, np.nan, -np.nan])
    row = data.draw(st.lists(values, min_size=97, max_size=97))
    for form in FORMS:
        check(form, jnp.asarray([row], "bfloat16"), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_order_like_floats_and_invert(dtype):
    word = np.uint16 if dtype != "float32" else np.uint32
    info = np.iinfo(word)
    step = 1 if word is np.uint16 else 65521
    bits = np.arange(0, info.max, step, dtype=np.uint64).astype(word)
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype))
    keys = np.asarray(to_keys(x)).astype(np.int64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = np.asarray(x).astype(np.float64)
    real = ~np.isnan(value)
    order = np.argsort(value[real], kind="stable")
    assert (np.diff(keys[real][order]) >= 0).all()
    assert ((np.diff(keys[real][order]) == 0) == (np.diff(value[real][order]) == 0)).all()
    assert keys.min() > 0
    assert (keys[~real] == info.max).all()
    assert keys[real].max() < info.max
    back = np.asarray(to_values(to_keys(x), dtype)).astype(np.float64)
    np.testing.assert_array_equal(back, value)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_logits_of_trained_drafters(goldens, kind):
    """Likely tokens cluster and repeat there; nothing depends on that, since no form guesses a threshold."""
    recorded = [read(path) for path in sorted((goldens / "rounds" / kind).glob("*.safetensors"))]
    rows = np.concatenate([f32(v) for file in recorded for name, v in file.items() if name.endswith("base_logits")])
    assert len(rows) >= 14
    for form in ("partial_sorts", "xla"):
        check(form, jnp.asarray(rows[:14], "bfloat16"), 128)


@pytest.mark.parametrize("implementation", [None, "xla", "pallas"])
def test_public_selection_on_this_platform(implementation):
    x = hard_rows(1003, "bfloat16")
    values, ids = jax.jit(partial(select.select_topk, k=31, implementation=implementation))(x)
    want_values, want_ids = reference(x, 31)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64), want_values)


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation: found 'cuda'"):
        select.select_topk(jnp.zeros((1, 40)), 2, implementation="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("k", [512, 151936 // 4])
def test_a_real_vocabulary(form, k):
    if form == "pallas" and not pick.fits(151936, k):
        form = "xla"
    check(form, hard_rows(151936, "float32")[:, :151936], k)
