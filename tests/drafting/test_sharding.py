"""Drafts on a mesh of four virtual CPU devices equal those of one device: the body knows of no mesh.

Runs in a process of its own, since the number of devices is fixed when JAX starts.
"""

import os
import subprocess
import sys

import pytest
from helpers import TESTS

PROGRAM = '''
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
sys.path.insert(0, "tests")
from helpers import CHECKPOINTS
import dspark_jax
from safetensors.numpy import load_file

assert len(jax.devices()) == 4
path, recorded = CHECKPOINTS / "dspark-gated", load_file(CHECKPOINTS / "recorded" / "gated.safetensors")
hidden, anchors = recorded["hidden"].astype(np.float32)[:8], recorded["anchor_ids"][:8]
sampling = dspark_jax.DraftSampling(np.linspace(0, 1.4, 8, dtype=np.float32), np.arange(8), recorded["position"][:8])
ways = [{}, {"sampling": sampling}, {"topk": 64}, {"topk": 64, "sampling": sampling}]
one = dspark_jax.load_head(path, dtype="float32")
want = [np.asarray(dspark_jax.draft_block(one, hidden, anchors, **way).tokens) for way in ways]


def place(mesh):
    """Vocabulary rows over `tensor`; the table that is gathered by token id, and the rest, everywhere."""
    split = {"lm_head.weight", "markov_head.markov_w2.weight"}
    return lambda name: NamedSharding(mesh, P("tensor", None) if name in split else P())


for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind, kind))
    head = dspark_jax.load_head(path, dtype="float32", sharding=place(mesh))
    shards = {shard.data.shape for shard in head.lm_head[...].addressable_shards}
    assert shards == {(2048, 192)}, shards
    h = jax.device_put(hidden, NamedSharding(mesh, P("data", None, None)))
    a = jax.device_put(anchors, NamedSharding(mesh, P("data")))
    for way, tokens in zip(ways, want):
        draft = lambda head, h, a: dspark_jax.draft_block(head, h, a, **way).tokens
        with jax.set_mesh(mesh):
            if kind == AxisType.Explicit:  # the caller's wrapper; the package holds no specs
                draft = jax.jit(jax.sharding.auto_axes(draft, out_sharding=P("data", None)))
            found = draft(head, h, a)
        np.testing.assert_array_equal(np.asarray(found), tokens, err_msg=f"{kind} {way}")
        if kind == AxisType.Explicit:
            assert found.sharding.spec == P("data", None), found.sharding
print("equal")
'''


@pytest.mark.slow
def test_sharded_drafts_equal_one_device():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"
