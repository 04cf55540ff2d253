"""The shape annotations are checked where they should be: a swapped axis in a core function is an error in a test."""

import ast
import importlib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from helpers import make_head, make_inputs
from type_checks import HOOKED

import dspark_jax
from dspark_jax import noise
from dspark_jax.confidence import schedule
from dspark_jax.config import DraftOptions
from dspark_jax.drafting.draft import draft, teacher_forced
from dspark_jax.linear import product
from dspark_jax.verification.verify import verify

S, B, H, V = 3, 5, 8, 11


def sources(names: list[str]) -> list[pathlib.Path]:
    """Return the files of modules, and of all modules of packages."""
    files = []
    for name in names:
        file = pathlib.Path(importlib.import_module(name).__file__)
        files += file.parent.glob("*.py") if file.name == "__init__.py" else [file]
    return files


@pytest.fixture(scope="module")
def case():
    """A gated head, hidden states [B, S, H] and anchors [B]."""
    head = make_head("gated", V=V, H=H)
    hidden, anchor = make_inputs(B, S, H, V)
    return head, jnp.asarray(hidden), jnp.asarray(anchor)


def test_swapped_steps_and_requests_are_refused_by_the_draft(case):
    head, hidden, anchor = case
    steps = jnp.swapaxes(hidden, 0, 1)
    base, options = head.base_logits(steps), DraftOptions(logits_dtype=jnp.dtype(jnp.float32))
    block, _ = draft(head, base, anchor, steps, None, options=options)
    assert block.tokens.shape == (B, S)
    with pytest.raises(jaxtyping.TypeCheckError, match="anchor"):
        draft(head, jnp.swapaxes(base, 0, 1), anchor, steps, None, options=options)
    with pytest.raises(jaxtyping.TypeCheckError, match="hidden"):
        draft(head, base, anchor, hidden, None, options=options)


def test_swapped_axes_are_refused_by_other_core_functions(case):
    head, hidden, _ = case
    steps, prev = jnp.swapaxes(hidden, 0, 1), jnp.zeros((S, B), jnp.int32)
    assert teacher_forced(head, steps, prev).shape == (S, B, V)
    with pytest.raises(jaxtyping.TypeCheckError, match="prev"):
        teacher_forced(head, steps, prev.T)
    with pytest.raises(jaxtyping.TypeCheckError, match="weight"):
        product(jnp.zeros((B, H)), jnp.zeros((H, V)))
    with pytest.raises(jaxtyping.TypeCheckError, match="limit"):
        schedule.admit(jnp.ones((S, B)), jnp.ones(B, jnp.int32), jnp.ones(B, bool), None)
    with pytest.raises(jaxtyping.TypeCheckError, match="temperature"):
        noise.scores(jnp.zeros((B, V)), jnp.ones(V), jnp.zeros((B, V), jnp.uint32))


def test_a_wrong_dtype_is_refused_by_a_core_function():
    with pytest.raises(jaxtyping.TypeCheckError, match="seed"):
        noise.noise_bits(jnp.int32(1), jnp.int32(2), 0, noise.DRAFT, jnp.int32(3))


def test_entry_points_stay_outside(case):
    """They take lists and NumPy arrays, and their own errors name field, value and what was expected."""
    head, hidden, anchor = case
    found = dspark_jax.draft_block(head, np.asarray(hidden, np.float64).tolist(), anchor.tolist())
    np.testing.assert_array_equal(found.tokens, dspark_jax.draft_block(head, hidden, anchor).tokens)
    with pytest.raises(ValueError, match=r"anchor_ids\.shape: found \(3,\), expected \[B\] = \[5\]"):
        dspark_jax.draft_block(head, hidden, anchor[:3])
    with pytest.raises(ValueError, match=r"target_logits\.shape"):
        dspark_jax.verify_block(found, np.zeros((S + 1, B, V), np.float32), None)


def test_results_are_mapped_over_with_any_leaves(case):
    """Registered dataclasses hold objects, None or axes while JAX works on them: their constructors check nothing."""
    head, hidden, anchor = case
    block = dspark_jax.draft_block(head, hidden, anchor)
    logits = jnp.zeros((B, S + 1, V))
    sampling = dspark_jax.DraftSampling(jnp.zeros(B), jnp.zeros(B, jnp.uint32), jnp.zeros(B, jnp.int32))
    out = verify(block, logits, sampling, block.num_draft, None, None, rule="token")
    assert jax.tree.map(lambda _: None, out).tokens is None
    assert {str(leaf) for leaf in jax.tree.leaves(jax.tree.map(lambda _: "leaf", block))} == {"leaf"}
    mapped = jax.vmap(lambda result: result.num_committed)(jax.tree.map(lambda x: x[None], out))
    np.testing.assert_array_equal(mapped[0], out.num_committed)


def test_hooked_modules_name_the_shapes_of_their_arrays():
    """No function there takes or returns a plain jax.Array."""
    plain = []
    for path in sources(HOOKED):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = [a.annotation for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                texts = [ast.unparse(annotation) for annotation in (*given, node.returns) if annotation is not None]
                plain += [f"{path.name}: {node.name}: {text}" for text in texts if "jax.Array" in text]
    assert plain == []


def test_users_pay_nothing():
    """Nothing of the package imports a run-time checker."""
    code = "import sys, dspark_jax.drafting.api, dspark_jax.decoding.generate; print('beartype' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
