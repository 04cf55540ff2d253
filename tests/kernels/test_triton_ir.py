"""The kernels as lowered for a GPU (the Triton module, not the Python body), interpreted on real buffers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_logits, make_head, make_inputs
from jax.experimental import pallas as pl
from kernel_cases import CASES, make_draw, make_rows

from dspark_jax.config import DraftOptions
from dspark_jax.drafting.steps import in_kernels, in_xla
from dspark_jax.kernels import dense_step, pick, triton, walk
from dspark_jax.ordered_keys import to_keys
from scripts.gpu.triton_ir import find_kernels, run_kernel
from scripts.gpu.triton_memory import Buffer, KernelFault

# Newer JAX announces the end of the Triton backend, which the kernels are written for.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
REAL = triton.pallas_call


def as_lowered(kernel, operands, results, **options):
    """Stand in for pallas_call: lower the kernel for CUDA, and run what was lowered."""
    operands = {key: value for key, value in operands.items() if value is not None}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    # A jitted function gets its dicts sorted.
    (found,) = find_kernels(
        lambda given: REAL(kernel, {key: given[key] for key in operands}, results, **options), shapes
    )
    order = [leaf for value in operands.values() for leaf in jax.tree.leaves(value)]

    def run(*arrays):
        return run_kernel(found, arrays, list(results.values()))

    made = jax.pure_callback(run, list(results.values()), *order)
    return dict(zip(results, made, strict=True))


@pytest.fixture(autouse=True)
def lowered(monkeypatch):
    for module in (dense_step, pick, walk):
        monkeypatch.setattr(module, "pallas_call", as_lowered)


@pytest.mark.parametrize(("kind", "dtype", "kept", "B", "V", "Vd", "k", "sampled"), CASES)
def test_lowered_kernels_equal_the_plain_form(kind, dtype, kept, B, V, Vd, k, sampled):
    S = 3
    head = make_head(kind, V=V, Vd=Vd, dtype=dtype, r=6 if kind != "vanilla" else 20)
    rows, draw = make_rows(head, B, S, k, dtype), make_draw(B) if sampled else None
    hidden, anchor = make_inputs(B, S, head.config.hidden_size, head.config.vocab_size)
    hidden = jnp.swapaxes(jnp.asarray(hidden, head.dtype), 0, 1)
    anchor = jnp.asarray(anchor).at[B - 1].set(head.config.vocab_size)
    options = DraftOptions(logits_dtype=jnp.dtype(kept), outputs="logits")
    want, tokens, valid = jax.jit(lambda *a: in_xla(head, rows, *a, options=options))(anchor, hidden, draw)
    found = jax.jit(lambda *a: in_kernels(head, rows, *a, options=options, interpret=False))(anchor, hidden, draw)
    np.testing.assert_array_equal(found[2], valid)
    np.testing.assert_array_equal(found[1], tokens)
    live = getattr(rows, "live", None) or want.shape[-1]
    assert_logits(found[0][..., :live], want[..., :live], kept)


@pytest.mark.parametrize("k", [1, 7, 32])
def test_picked_elements_equal_a_full_sort(k):
    x = np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32)
    x[1], x[2, ::3], x[3, :60] = 1.0, -np.inf, np.nan
    keys, ids = pick.pick_kernel(jnp.asarray(x), k)
    every = np.asarray(to_keys(jnp.asarray(x))).astype(np.int64)
    want = np.sort(np.argsort(-every, axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(keys, np.take_along_axis(every, want, 1))


def scaled(fault=None):
    """Twice x of 30 elements in blocks of 16, by a kernel with one planted fault."""

    def kernel(x, y):
        i = pl.program_id(0)
        at = i * (8 if fault == "stride" else 16) + jnp.arange(16)
        inside = at < 30
        mask = jnp.ones(16, bool) if fault == "load mask" else inside
        value = 2 * triton.load(x, (at,), mask, None if fault == "undefined" else 0.0)
        if fault == "undefined":
            value = value + jnp.sum(value)
        triton.store(y, (at,), value, None if fault == "store mask" else inside)
        if fault == "one more":
            triton.store(y, ((at + 16) % 32,), value, (at + 16) % 32 < 30)

    def call(x):
        from jax.experimental.pallas import triton as backend

        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct((30,), jnp.float32), grid=(2,), in_specs=[pl.no_block_spec],
            out_specs=pl.no_block_spec, compiler_params=backend.CompilerParams(num_warps=1),
        )(x)  # fmt: skip

    x = np.arange(30, dtype=np.float32)
    (kernel_found,) = find_kernels(call, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return run_kernel(kernel_found, [x], [jax.ShapeDtypeStruct((30,), jnp.float32)])[0]


def test_a_right_kernel_runs():
    np.testing.assert_array_equal(scaled(), 2 * np.arange(30))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("load mask", "load outside"), ("store mask", "store outside"), ("stride", "race"), ("one more", "race"),
        ("undefined", "masked lane's value is stored"),
    ],
)  # fmt: skip
def test_planted_faults_are_found(fault, message):
    with pytest.raises(KernelFault, match=message):
        scaled(fault)


def both(k, B=5, r=20, V=150, breaking=False):
    """Return (rows, tokens, valid) of the plain form and of the lowered kernels."""
    head = make_head("vanilla", V=V, r=r)
    rows = make_rows(head, B, 2, k, "float32")
    if breaking:
        base = (
            rows.base.at[0, 1, 3].set(jnp.nan).at[0, 2].set(-jnp.inf).at[0, 3, 4].set(-jnp.inf).at[0, 0, 0].set(jnp.inf)
        )
        rows = dataclasses.replace(rows, base=base)
    hidden, anchor = make_inputs(B, 2, head.config.hidden_size, V)
    hidden = jnp.swapaxes(jnp.asarray(hidden), 0, 1)
    options = DraftOptions(logits_dtype=jnp.dtype("float32"), outputs="logits")
    forms = (in_xla, {}), (in_kernels, {"interpret": False})
    runs = [jax.jit(lambda *a, f=f, o=o: f(head, rows, *a, options=options, **o)) for f, o in forms]
    return [jax.device_get(run(jnp.asarray(anchor), hidden, None)) for run in runs]


@pytest.mark.parametrize(("k", "B", "r"), [(1, 1, 3), (None, 1, 3), (70, 33, 300), (None, 2, 300)])
def test_lowered_kernels_at_odd_sizes(k, B, r):
    (want, tokens, valid), found = both(k, B, r)
    np.testing.assert_allclose(found[0], want, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(found[1], tokens)
    np.testing.assert_array_equal(found[2], valid)


@pytest.mark.parametrize("k", [None, 9])
def test_lowered_kernels_on_broken_rows(k):
    (want, tokens, valid), found = both(k, breaking=True)
    np.testing.assert_array_equal(found[2], valid)
    np.testing.assert_array_equal(valid[0], [True, False, False, True, True])
    np.testing.assert_array_equal(found[1][:, [0, 3, 4]], tokens[:, [0, 3, 4]])
    np.testing.assert_allclose(found[0][:, [0, 3, 4]], want[:, [0, 3, 4]], rtol=0, atol=1e-4)


@pytest.mark.parametrize("what", ["load", "store"])
@pytest.mark.parametrize("module", [dense_step, pick, walk], ids=["dense_step", "pick", "walk"])
def test_a_mask_dropped_from_a_kernel_is_found(monkeypatch, module, what):
    real = getattr(module, what)
    faulty = {
        "load": lambda ref, index, mask=None, other=None: real(ref, index),
        "store": lambda ref, index, value, mask=None: real(ref, index, value),
    }
    monkeypatch.setattr(module, what, faulty[what])
    calls = {pick: lambda: jax.block_until_ready(pick.pick_kernel(jnp.ones((3, 100)), 7)), walk: lambda: both(9)}
    with pytest.raises(Exception, match=r"KernelFault: (load outside|store outside|race)"):
        calls.get(module, lambda: both(None))()


def test_reads_of_unwritten_memory_are_found():
    buffer = Buffer(np.zeros(4, np.float32), "result 0", written=False)
    buffer.write(np.array([1]), np.float32(3), np.array([0]))
    assert buffer.read(np.array([1]), np.array([0])) == 3
    with pytest.raises(KernelFault, match="nobody wrote"):
        buffer.read(np.array([0]), np.array([0]))
