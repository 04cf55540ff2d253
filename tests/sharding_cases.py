"""Drafts on meshes of eight virtual CPU devices against those of one device, run in a process of its own.

    python tests/sharding_cases.py            one setting for each pair of choices, as CI does
    python tests/sharding_cases.py --all      every setting

Weights and hidden states are small integers, so that sums are exact and ties are many; where a head's latent is not
(gated, rnn), logits are compared in the sense of docs/api.md and tokens must still be equal.
"""

import itertools
import math
import os
import re
import sys

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_llvm_disable_expensive_passes=true"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"

    import type_checks

    type_checks.install()  # as conftest.py does

import jax
import jax.numpy as jnp
import numpy as np
from helpers import KINDS, make_head, make_inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dspark_jax
from dspark_jax.drafting.split import module_specs

ROWS = P("data")
V, B, S, H = 64, 8, 4, 12
CHOICES = {
    "mesh": [(2, 4), (1, 8), (8, 1), (4, 2)],
    "mode": [AxisType.Explicit, AxisType.Auto],
    "call": ["jit", "eager"],
    "dtype": ["float32", "bfloat16"],
    "kind": [*KINDS],
    "topk": [6, None],
    "sampled": [True, False],
    "vocab": ["tensor", "replicated head", None],
    "outputs": ["rows", "tokens"],
}


def every() -> list[dict]:
    """Return all settings."""
    return [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def pairwise() -> list[dict]:
    """Return settings in which every pair of choices occurs: greedily those with the most new pairs."""
    rest = every()

    def pairs(case: dict) -> set:
        return set(itertools.combinations([(name, str(value)) for name, value in case.items()], 2))

    missing, chosen = set().union(*map(pairs, rest)), []
    while missing:
        best = max(rest[:: 1 + len(rest) // 400], key=lambda case: len(pairs(case) & missing))
        if not pairs(best) & missing:
            best = next(case for case in rest if pairs(case) & missing)
        rest.remove(best)
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def round_leaves(tree):
    """Make every float of a pytree a small integer."""
    return jax.tree.map(lambda x: jnp.round(x * 2) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def put(module, mesh, axis):
    """Place a module's weights: rows of the vocabulary over `axis`, the rest on all devices."""
    leaves, structure = jax.tree.flatten(module)
    specs = module_specs(module, axis)
    return jax.tree.unflatten(
        structure, [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)]
    )


def check(case: dict) -> None:
    """Compare one setting."""
    head = round_leaves(make_head(case["kind"], V=V, H=H, dtype=case["dtype"]))
    hidden, anchors = make_inputs(B, S, H, V)
    hidden = jnp.asarray(np.round(hidden * 2), case["dtype"])
    way = {"topk": case["topk"]}
    if case["sampled"]:
        way["sampling"] = dspark_jax.DraftSampling(
            np.linspace(0, 1.4, B, dtype=np.float32), np.arange(B, dtype=np.uint32), np.arange(B, dtype=np.int32) + 3
        )
    if case["outputs"] == "rows":
        way["outputs"] = "logits" if case["topk"] is None or case["mesh"] == (2, 4) else "candidates"
    mesh = jax.make_mesh(case["mesh"], ("data", "tensor"), axis_types=(case["mode"],) * 2)
    axis = None if case["vocab"] is None else "tensor"
    base = head.base_logits(jnp.swapaxes(hidden, 0, 1))
    want = dspark_jax.draft_from_logits(head, base, anchors, hidden=hidden, **way)
    mine = put(head, mesh, axis if case["vocab"] == "tensor" else None)
    x = jax.device_put(hidden, NamedSharding(mesh, P("data")))
    a = jax.device_put(anchors, NamedSharding(mesh, P("data")))
    # "replicated head": what sglang-jax hands over, base logits that arrive split by vocabulary.
    z = jax.device_put(base, NamedSharding(mesh, P(None, "data", axis)))

    def draft(head, base, anchors, hidden, **axes):
        return dspark_jax.draft_from_logits(head, base, anchors, hidden=hidden, **way, **axes)

    if case["call"] == "eager":
        found = draft(mine, z, a, x)
    elif case["mode"] == AxisType.Explicit:  # visible inside a trace, also without set_mesh
        found = jax.jit(draft)(mine, z, a, x)
    else:
        with jax.set_mesh(mesh):
            found = jax.jit(lambda *args: draft(*args, batch_axes=("data",), vocab_axis=axis))(mine, z, a, x)
    exact = case["kind"] == "vanilla"
    loose = 2e-6 if case["dtype"] == "float32" else 2e-2
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.dtype == theirs.dtype
        if ours.dtype.kind in "ib" or exact:
            np.testing.assert_array_equal(ours, theirs, err_msg=str(case))
        else:
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
            top = np.abs(theirs[np.isfinite(theirs)]).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=loose * top, err_msg=str(case))
    if axis is not None and way.get("outputs") == "logits" and mesh.shape["tensor"] > 1:
        assert found.logits.sharding.spec[2] == "tensor", found.logits.sharding


COLLECTIVE = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
WIDTH = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


def collectives(text: str) -> list[tuple[str, int, bool]]:
    """Return (operation, bytes of its result, inside a loop) of every collective in a compiled program."""
    found, loops = [], set(re.findall(r"body=%?([\w.\-]+)", text))
    inside = False
    for line in text.splitlines():
        if line.endswith("{") and (name := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) ", line)):
            inside = name[1] in loops
        if match := re.search(COLLECTIVE, line):
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            if match[2] == "all-gather" and match[3]:
                shapes = shapes[len(shapes) // 2 :]  # operands come before the results of the asynchronous form
            size = sum(WIDTH[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in shapes)
            found.append((match[2], size, inside))
    return found


def lower(topk, sampled, axis, devices, *, rows=V, batch=B, kind="vanilla", shape=(2, 4), dtype="float32"):
    """Lower a draft over a (data, tensor) mesh of `devices`, abstract arrays only; return it and the mesh."""
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(shape), ("data", "tensor"))
    head = jax.eval_shape(lambda: make_head(kind, V=rows, H=H, dtype=dtype))
    leaves, structure = jax.tree.flatten(head)
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(leaves, module_specs(head, axis), strict=True)
    ]

    def at(dtype, *size, spec=ROWS):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

    sampling = [at(t, batch) for t in ("float32", "uint32", "int32")] if sampled else None
    axes = {"batch_axes": ("data",), "vocab_axis": axis}

    def draft(leaves, base, anchors, hidden, sampling):
        draw = None if sampling is None else dspark_jax.DraftSampling(*sampling)
        head = jax.tree.unflatten(structure, leaves)
        return dspark_jax.draft_from_logits(head, base, anchors, hidden=hidden, topk=topk, sampling=draw, **axes).tokens

    base = at(dtype, S, batch, rows, spec=P(None, "data", axis))
    args = (leaves, base, at("int32", batch), at(dtype, batch, S, H), sampling)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(draft).trace(*args).lower()


def check_collectives(text: str, topk, sampled, axis, *, batch=B, shape=(2, 4), unrolled=False) -> None:
    """Hold a compiled program's collectives to what split_rows.py says it exchanges."""
    found, (data, shards) = collectives(text), shape
    if axis is None:
        assert found == [], found
        return
    rows = S * batch // data
    before = sum(size for _, size, inside in found if not inside)
    per_step = [size for _, size, inside in found if inside]
    assert per_step or unrolled, text
    limit = 4 * (batch // data) * (3 * shards + 1)
    assert sum(per_step) <= limit, (per_step, limit)
    pairs = 0 if topk is None else 8 * topk * shards * rows
    assert before <= 2 * pairs + (S * limit if unrolled else 0), (found, pairs)


def main() -> None:
    """Check the settings, then the collectives of CPU programs."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    cases = every() if "--all" in sys.argv else pairwise()
    for case in cases:
        check(case)
    for topk, sampled, axis in itertools.product((6, None), (True, False), ("tensor", None)):
        text = lower(topk, sampled, axis, jax.devices(), rows=4096).compile().as_text()
        check_collectives(text, topk, sampled, axis)
    print(f"equal: {len(cases)} settings")


if __name__ == "__main__":
    main()
