"""Drafts on meshes equal those of one device, and exchange no more than they must (sharding_cases.py).

Virtual devices need a process of their own, since their number is fixed when JAX starts; so does a TPU's compiler.
"""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import compile
from helpers import TESTS, make_head, make_inputs
from jax.experimental import topologies
from sharding_cases import V, check_collectives, collectives, lower

import dspark_jax
from dspark_jax.sharding.axes import find_axes


def run(*arguments):
    path = os.pathsep.join([*(str(TESTS.parent / name) for name in ("", "tests")), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )


def test_sharded_drafts_equal_one_device():
    done = run("tests/sharding_cases.py")
    assert done.returncode == 0, done.stderr
    assert "equal: " in done.stdout


@pytest.mark.slow
def test_verification_buffers_and_drafters_on_meshes():
    done = run("tests/sharding_entries.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("equal")


PROGRAMS = [(8, True, "tensor"), (None, True, "tensor"), (8, False, "tensor"), (8, True, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("topk", "sampled", "axis"), PROGRAMS)
def test_eight_gpus_exchange_pairs(topk, sampled, axis):
    if compile.missing() is not None:
        pytest.skip(str(compile.missing()))
    text = compile.H200.read_text()
    devices = topologies.get_topology_desc("target", "cuda", target_config=text, topology="1x1x8").devices
    program = lower(topk, sampled, axis, devices, rows=151936, batch=16, dtype="bfloat16").compile().as_text()
    check_collectives(program, topk, sampled, axis, batch=16)


TPU = """
import os, sys
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
from jax.experimental import topologies
from sharding_cases import check_collectives, lower
devices = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu").devices
for case in eval(sys.argv[1]):
    program = lower(*case, devices, rows=8192, batch=16, dtype="bfloat16").compile().as_text()
    check_collectives(program, *case, batch=16)
print("checked")
"""


@pytest.mark.slow
def test_eight_tpus_exchange_pairs():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install libtpu)")
    done = run("-c", TPU, repr(PROGRAMS))
    assert done.stdout.strip() == "checked", done.stderr


def test_collectives_are_found():
    text = """
%body.1 (x: f32[4]) -> f32[4] {
  %a = f32[2,3]{1,0} all-reduce(%x), replica_groups={}
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %w = (f32[4]) while(%t), condition=%c, body=%body.1
  %g = ((bf16[2,2]{1,0}, s32[2,2]{1,0}), (bf16[2,8]{1,0}, s32[2,8]{1,0})) all-gather-start(%p, %q), dimensions={1}
}
"""
    assert collectives(text) == [("all-reduce", 24, True), ("all-gather", 96, False)]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"batch_axes": ("data",)}, "a visible mesh"),
        ({"vocab_axis": "tensor"}, "a visible mesh"),
    ],
)
def test_axes_without_a_mesh_are_refused(axes, words):
    head, (hidden, anchors) = make_head(), make_inputs(2, 3, 12, 37)
    for draft in (dspark_jax.draft_block, jax.jit(lambda *args, **named: dspark_jax.draft_block(*args, **axes))):
        with pytest.raises(ValueError, match=words):
            draft(head, hidden, anchors, **axes) if draft is dspark_jax.draft_block else draft(head, hidden, anchors)


def test_axes_of_the_mesh_and_the_config():
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="axes of the mesh"):
            find_axes([], batch_axes=("rows",))
        with pytest.raises(ValueError, match="not one of batch_axes"):
            find_axes([], batch_axes=("data",), vocab_axis="data")
        assert not find_axes([], batch_axes=("data",), vocab_axis="tensor")  # one device: nothing is split
    with pytest.raises(ValueError, match="batch_axes"):
        dspark_jax.DraftConfig(3, batch_axes=(1,))  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="vocab_axis"):
        dspark_jax.DraftConfig(3, vocab_axis=1)  # type: ignore[arg-type]  # what is refused
    with pytest.raises(ValueError, match="an axis of the mesh"):
        dspark_jax.head_sharding(make_head(), mesh, "model")


@pytest.mark.parametrize("topk", [None, 5])
def test_a_padded_vocabulary_drafts_the_same(topk):
    """Columns of padding would win: their base logits are the largest of all."""
    head, (hidden, anchors) = make_head("gated"), make_inputs(4, 3, 12, 37)
    wide = dspark_jax.pad_vocabulary(head, 8)
    assert (wide.config.Vd, wide.config.vocab_size) == (40, 37)
    base = head.base_logits(jnp.swapaxes(jnp.asarray(hidden), 0, 1))
    padded = jnp.pad(base, ((0, 0), (0, 0), (0, 3)), constant_values=1e4)
    draw = dspark_jax.DraftSampling(np.full(4, 0.8, np.float32), np.arange(4), np.zeros(4, int))
    for sampling in (None, draw):
        way = {"hidden": hidden, "topk": topk, "sampling": sampling, "outputs": "logits"}
        found = dspark_jax.draft_from_logits(wide, padded, anchors, **way)
        want = dspark_jax.draft_from_logits(head, base, anchors, **way)
        np.testing.assert_array_equal(found.tokens, want.tokens)
        assert found.logits.shape == want.logits.shape == (3, 4, 37)
    with pytest.raises(ValueError, match="reduced vocabulary is not padded"):
        dspark_jax.pad_vocabulary(make_head(Vd=20), 8)


def test_v_is_what_the_cases_say():
    assert V % 8 == 0  # eight devices share it
