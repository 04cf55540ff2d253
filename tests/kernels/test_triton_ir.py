"""The kernels as lowered for a GPU (the Triton module, not the Python body), interpreted on real buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dspark_jax.kernels.keys import to_keys
from helpers import assert_logits, make_head, make_inputs
from jax.experimental import pallas as pl
from kernel_cases import CASES, make_draw, make_rows

from dspark_jax.config import DraftOptions
from dspark_jax.drafting.steps import in_kernels, in_xla
from dspark_jax.kernels import dense_step, pick, triton, walk
from scripts.gpu.triton_ir import find_kernels, run_kernel
from scripts.gpu.triton_memory import KernelFault

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
