"""The byte formulas of the GPU report against the kernels' own code, run element by element on counted arrays.

Each program of a kernel's grid runs in Python with its loads and stores replaced: they record which elements were
really touched (masked lanes touch none), and what is stored is checked too, without JAX's interpreter in between.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.count import PallasCall
from gpu.hlo import Shape
from gpu.kernel_rules import RULES
from jax.experimental import pallas as pl

from dspark_jax.kernels import dense_step as step
from dspark_jax.kernels import pick, walk
from dspark_jax.kernels.summary import Score
from dspark_jax.ordered_keys import to_keys

NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int32": "s32",
    "uint32": "u32",
    "uint16": "u16",
    "int8": "s8",
}


class Counted:
    """An array that counts how often each element is read and written."""

    def __init__(self, array):
        self.array = np.array(array)
        self.reads = np.zeros(self.array.shape, int)
        self.writes = np.zeros(self.array.shape, int)

    def __getitem__(self, index):
        return load(self, index if isinstance(index, tuple) else (index,))

    @property
    def read(self):
        return int((self.reads > 0).sum()) * self.array.itemsize

    @property
    def read_each_time(self):
        return int(self.reads.sum()) * self.array.itemsize

    @property
    def written(self):
        return int((self.writes > 0).sum()) * self.array.itemsize

    @property
    def shape(self):
        return Shape(NAMES[self.array.dtype.name], self.array.shape)


def places(index, mask):
    arrays = np.broadcast_arrays(*(np.asarray(i) for i in index), np.asarray(True if mask is None else mask))
    return tuple(arrays[:-1]), arrays[-1]


def load(ref, index, mask=None, other=None):
    where, live = places(index, mask)
    safe = tuple(np.where(live, i, 0) for i in where)
    np.add.at(ref.reads, tuple(i[live] for i in safe), 1)
    return jnp.where(live, jnp.asarray(ref.array[safe]), jnp.asarray(0 if other is None else other, ref.array.dtype))


def store(ref, index, value, mask=None):
    where, live = places(index, mask)
    at = tuple(i[live] for i in where)
    np.add.at(ref.writes, at, 1)
    ref.array[at] = np.broadcast_to(np.asarray(value), live.shape)[live]


@pytest.fixture
def counted(monkeypatch):
    """Replace the pieces that kernels are made of; return the list of calls made."""
    calls, index = [], []

    def pallas_call(kernel, operands, results, *, name, grid, aliases=None, **_):
        refs = {key: jax.tree.map(Counted, value) for key, value in operands.items() if value is not None}
        outputs = {key: Counted(np.zeros(shape.shape, shape.dtype)) for key, shape in results.items()}
        outputs |= {to: refs[source] for source, to in (aliases or {}).items()}
        for place in product(*(range(n) for n in grid)):
            index[:] = place
            with jax.disable_jit():
                kernel(refs, outputs)
        calls.append((name, jax.tree.leaves(list(refs.values())), list(outputs.values())))
        return {key: jnp.asarray(ref.array) for key, ref in outputs.items()}

    for module in (step, walk, pick):
        monkeypatch.setattr(module, "pallas_call", pallas_call)
        monkeypatch.setattr(module, "load", load)
        monkeypatch.setattr(module, "store", store)
    monkeypatch.setattr(pl, "program_id", lambda axis: index[axis])
    return calls


def formula(call):
    name, inputs, outputs = call
    return RULES[name](PallasCall(name, tuple(i.shape for i in inputs), tuple(o.shape for o in outputs)))


def arrays(S, B, n, r, dtype, V=200, seed=0):
    rng = np.random.default_rng(seed)
    base, w1, w2 = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((S, B, n), (V, r), (n, r)))
    return base, w1, w2, jnp.asarray(rng.permutation(V)[:B], jnp.int32)


@pytest.mark.parametrize(("B", "n", "dtype", "keep"), [(3, 300, "bfloat16", True), (70, 130, "float32", False)])
@pytest.mark.parametrize("reduced", [False, True])
def test_dense_step_reads_w2_once_and_one_slab(counted, B, n, dtype, keep, reduced):
    base, w1, w2, prev = arrays(3, B, n, 20, dtype)
    targets = jnp.arange(n, dtype=jnp.int32) * 2 if reduced else None
    score = Score(lambda x, ids, s, draw, top: x - top, lambda draw: draw["scale"])
    out, token, valid = step.dense_step(
        base=base, out=None, step=jnp.int32(1), prev=prev, latents=w1, w2=w2, keep=keep, dtype=base.dtype,
        target_ids=targets, sampling={"scale": jnp.ones(B)}, score=score,
    )  # fmt: skip
    (call,) = counted
    _, inputs, outputs = call
    slab, weights = inputs[4], inputs[3]
    assert weights.read == weights.array.nbytes
    assert slab.reads[1].all()
    assert not slab.reads[[0, 2]].any()
    assert sum(i.read for i in inputs) + sum(o.written for o in outputs) == formula(call)
    want = f32(base[1]) + f32(w1[prev]) @ f32(w2).T
    rounded = np.asarray(jnp.asarray(want).astype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(np.argmax(rounded, axis=1) * (2 if reduced else 1), token)
    assert valid.all()
    if keep:
        np.testing.assert_allclose(f32(out[1]), want, atol=0.05)
        np.testing.assert_array_equal(f32(out[jnp.array([0, 2])]), f32(base[jnp.array([0, 2])]))


def f32(x):
    return np.asarray(x).astype(np.float32)


@pytest.mark.parametrize("one_step", [False, True])
def test_walk_reads_a_row_per_candidate(counted, one_step):
    S, B, k, n, r = 3, 2, 11, 90, 20
    base, w1, w2, prev = arrays(S, B, n, r, "bfloat16")
    ids = jnp.asarray(np.random.default_rng(1).permuted(np.tile(np.arange(n), (S, B, 1)), axis=2)[..., :k], jnp.int32)
    values = jnp.take_along_axis(base, ids, axis=2)
    rows = jnp.zeros((S, B, k), jnp.bfloat16) if one_step else None
    out, token, _ = walk.walk(
        base=values, out=rows, ids=ids, prev=prev, latents=w1, w2=w2, keep=True, dtype=jnp.bfloat16,
        target_ids=ids + 1, step=jnp.int32(2) if one_step else None,
    )  # fmt: skip
    (call,) = counted
    _, inputs, outputs = call
    by_id, others = (inputs[2], inputs[3]), [*inputs[:2], *inputs[4:]]
    measured = sum(i.read_each_time for i in by_id) + sum(i.read for i in others) + sum(o.written for o in outputs)
    assert measured == formula(call)
    before = prev
    for i, s in enumerate([2] if one_step else range(S)):
        want = f32(values[s]) + np.einsum("bkr,br->bk", f32(w2[ids[s]]), f32(w1[before]))
        np.testing.assert_allclose(f32(out[s]), want, atol=0.1)
        before = jnp.asarray(np.asarray(ids[s] + 1)[np.arange(B), np.argmax(f32(out[s]), axis=1)])
        np.testing.assert_array_equal(token[i], before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pick_reads_rows_once_then_only_the_picked_groups(counted, dtype):
    R, V, k = 2, 16 * 40, 5
    x = jnp.asarray(np.random.default_rng(2).standard_normal((R, V)), dtype)
    maxima = to_keys(x).reshape(R, 40, 16).max(axis=2)
    _, groups = pick.pick_kernel(maxima, k)
    keys, ids = pick.pick_kernel(x, k, groups, 16)
    for call in counted:
        _, inputs, outputs = call
        assert sum(i.read for i in inputs) + sum(o.written for o in outputs) == formula(call)
    want = np.sort(np.argsort(-f32(x), axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(keys, np.take_along_axis(np.asarray(to_keys(x)), want, axis=1))


def test_every_kernel_has_a_rule():
    assert set(RULES) == {
        "dspark_dense_step",
        "dspark_walk",
        "dspark_pick",
        "dspark_pick_groups16",
        "dspark_pick_groups8",
    }
