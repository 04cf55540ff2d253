"""The other entry points on meshes of eight virtual CPU devices against one device; see test_sharding.py."""

import os

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
from helpers import CHECKPOINTS, make_head, make_inputs
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_cases import put
from tiny import make_drafter, random_features

import dspark_jax

V, B, S = 40, 6, 5
HEAD = make_head("vanilla", V=V, H=12)
HIDDEN, ANCHORS = make_inputs(B, S, 12, V)


def sampling(batch, temperature=0.9):
    return dspark_jax.DraftSampling(
        np.full(batch, temperature, np.float32), np.arange(batch, dtype=np.uint32), np.zeros(batch, np.int32)
    )


def same(found, want):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(ours.dtype, jnp.floating):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def place(mesh, *spec):
    return lambda tree: jax.tree.map(lambda x: jax.device_put(jnp.asarray(x), NamedSharding(mesh, P(*spec))), tree)


def check_verification(mesh):
    block = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=sampling(B), topk=7, outputs="candidates")
    target = np.random.default_rng(0).standard_normal((B, S + 1, V)).astype(np.float32) * 2
    want = dspark_jax.verify_block(block, target, sampling(B), chunk_size=2)
    rows, steps = place(mesh, "data"), place(mesh, None, "data")
    small = {name: rows(getattr(block, name)) for name in ("tokens", "num_draft", "valid", "confidence_logits")}
    wide = {name: steps(getattr(block, name)) for name in ("candidate_ids", "candidate_logits")}
    split = dspark_jax.DraftBlock(method=block.method, **small, **wide)
    found = dspark_jax.verify_block(split, rows(target), sampling(B), chunk_size=2)
    same(found, want)
    assert found.tokens.sharding.spec[0] == "data"
    same(dspark_jax.verify_block(split, place(mesh, "data", None, "tensor")(target), rows(sampling(B))), want)
    verify = jax.jit(lambda block, x: dspark_jax.verify_block(block, x, sampling(B), batch_axes=("data",)))
    same(verify(split, rows(target)), want)


def check_uneven_batches(mode):
    """Six requests on four devices, a reduced and a padded vocabulary on two."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(mode, mode))
    target = np.random.default_rng(1).standard_normal((B, S + 1, V)).astype(np.float32) * 2
    for head in (HEAD, make_head("vanilla", V=V, Vd=22), dspark_jax.pad_vocabulary(make_head("vanilla", V=37), 8)):
        size = head.config.vocab_size
        for outputs, topk in (("logits", None), ("logits", 7), ("candidates", 7)):
            way = {"sampling": sampling(B), "topk": topk, "outputs": outputs}
            want = dspark_jax.draft_block(head, HIDDEN, ANCHORS % size, **way)
            with jax.set_mesh(mesh):
                mine = put(head, mesh, "tensor")
                found = dspark_jax.draft_block(mine, HIDDEN, ANCHORS % size, **way, batch_axes=("data",))
                same(found, want)
                rows = target[:, :, :size]
                verified = dspark_jax.verify_block(want, rows, sampling(B), batch_axes="data")
            same(verified, dspark_jax.verify_block(want, rows, sampling(B)))


def propose(drafter, batch, wrap):
    features = wrap(random_features(drafter, batch, 6))
    cache = drafter.extend(wrap(drafter.make_cache(batch, 24)), features, wrap(jnp.full(batch, 2, jnp.int32)))
    anchors, positions = wrap(jnp.arange(batch)), wrap(jnp.full(batch, 5, jnp.int32))
    block, cache = drafter.propose(
        cache, features, anchors, positions, sampling(batch, 0.7), topk=6, outputs="candidates"
    )
    return block, cache.lengths


def check_factories(mesh):
    config = dspark_jax.DraftConfig(
        S,
        draft_topk=7,
        draft_sample_method="probabilistic",
        outputs="logits",
        batch_axes=("data",),
        vocab_axis="tensor",
    )
    head, rows = put(HEAD, mesh, "tensor"), place(mesh, "data")
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(HEAD, config, B)
    buffer = dspark_jax.DraftBuffer(
        place(mesh, None, "data", "tensor")(buffer.logits), place(mesh, None, "data")(buffer.ids)
    )
    for shift in range(2):
        anchors, old = np.roll(ANCHORS, shift), buffer.logits
        block, buffer = fn(head, rows(HIDDEN), rows(anchors), sampling(B), buffer)
        want = dspark_jax.draft_block(HEAD, HIDDEN, anchors, sampling=sampling(B), topk=7, outputs="logits")
        same(block, want)
        assert old.is_deleted()
        assert block.logits.sharding.spec == P(None, "data", "tensor")
    assert fn.trace_count() == 1
    dense = dspark_jax.make_draft_from_logits_fn(dspark_jax.DraftConfig(S, outputs="logits"))
    base = HEAD.base_logits(jnp.swapaxes(jnp.asarray(HIDDEN), 0, 1))
    want = dspark_jax.draft_from_logits(HEAD, base, ANCHORS, hidden=HIDDEN, outputs="logits")
    given = place(mesh, None, "data", "tensor")(base)
    same(dense(head, given, rows(ANCHORS), None, rows(HIDDEN)), want)
    assert given.is_deleted()


def check_loading(mesh):
    path = CHECKPOINTS / "dspark-gated"
    head = dspark_jax.load_head(path, dtype="float32")
    split = dspark_jax.load_head(path, dtype="float32", sharding=dspark_jax.head_sharding(head, mesh, "tensor"))
    assert {s.data.shape[0] for s in split.lm_head[...].addressable_shards} == {head.config.Vd // 4}
    hidden, anchors = make_inputs(4, 3, head.config.hidden_size, head.config.vocab_size)
    want = dspark_jax.draft_block(head, hidden, anchors, topk=9).tokens
    same(dspark_jax.draft_block(split, place(mesh, "data")(hidden), place(mesh, "data")(anchors), topk=9).tokens, want)


def main():
    teacher = dspark_jax.teacher_forced_logits(HEAD, HIDDEN[:4], np.zeros((4, S), int))
    drafter = make_drafter(vocab_size=V)
    want = propose(drafter, 4, lambda x: x)
    for mode in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(mode, mode))
        check_verification(mesh)
        check_uneven_batches(mode)
        found = dspark_jax.teacher_forced_logits(
            put(HEAD, mesh, "tensor"), place(mesh, "data")(HIDDEN[:4]), np.zeros((4, S), int)
        )
        same(found, teacher)
        same(propose(put(drafter, mesh, "tensor"), 4, place(mesh, "data")), want)
        check_factories(mesh)
        check_loading(mesh)
    print("equal")


if __name__ == "__main__":
    main()
