"""Verification row by row: bad rows, limits, chunks, stop tokens, recorded rounds, bad arguments."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDENS, KINDS, make_head, make_inputs, read
from verify_cases import make_block, random_case

import dspark_jax.verification.api as api_module
from dspark_jax import DraftBlock, DraftSampling, TargetFilter, draft_block, verify_block


def test_bad_draft_rows_end_the_draft():
    """Cases 21 to 23 end to end: NaN hidden states and anchors outside [0, V) shorten the draft, the target goes on."""
    V, S, H, B = 11, 4, 12, 6
    head = make_head("gated", V=V, H=H)
    hidden, anchor = make_inputs(B, S, H, V)
    draw = DraftSampling(np.ones(B), np.arange(B), np.zeros(B, int))
    target = np.random.default_rng(0).normal(size=(B, S + 1, V)).astype(np.float32)
    clean_block = draft_block(head, hidden, anchor, sampling=draw, outputs="logits")
    clean = verify_block(clean_block, target, draw)
    hidden[1, 2] = np.nan
    anchor = anchor.copy()
    anchor[2], anchor[3] = V, -1
    block = draft_block(head, hidden, anchor, sampling=draw, outputs="logits")
    np.testing.assert_array_equal(block.valid, [True, False, False, False, True, True])
    np.testing.assert_array_equal(block.num_draft, [4, 2, 0, 0, 4, 4])
    out = verify_block(block, target, draw)
    assert bool(out.valid.all())
    tokens = np.asarray(out.tokens)
    assert (tokens[:, 0] >= 0).all()
    assert (tokens < V).all()
    assert (tokens[1, 3:] == -1).all()
    assert (tokens[2:4, 1:] == -1).all()
    keep = [0, 4, 5]
    np.testing.assert_array_equal(tokens[keep], np.asarray(clean.tokens)[keep])
    # What the target gives without a draft does not depend on what was wrong with the draft.
    plain = verify_block(clean_block, target, draw, num_draft=0)
    np.testing.assert_array_equal(tokens[2:4], np.asarray(plain.tokens)[2:4])


def test_num_draft_only_lowers():
    rng = np.random.default_rng(5)
    block, draw, target, _, _ = random_case(rng, 8, 3, 9, "logits", "probabilistic", False)
    block = dataclasses.replace(block, num_draft=np.array([0, 1, 2, 3, 0, 1, 2, 3]))
    same = verify_block(block, target, draw, num_draft=3)
    for a, b in zip(jax.tree.leaves(verify_block(block, target, draw)), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(same.num_accepted) <= block.num_draft).all()
    assert (np.asarray(same.accept_prob) > 0).sum(axis=1).max() <= 3
    none = verify_block(block, target, draw, num_draft=np.full(8, -2))
    np.testing.assert_array_equal(none.num_accepted, 0)
    np.testing.assert_array_equal(none.num_committed, 1)


@pytest.mark.parametrize(("form", "sizes"), [("logits", (5,)), ("candidates", (1, 99))])
def test_chunks_rows_and_batches_change_nothing(form, sizes):
    """Every output bit of a request is the same in any chunk, row or batch, and beside any neighbour (case 24)."""
    rng = np.random.default_rng(9)
    B, S, V = 13, 3, 301
    block, draw, target, _, filters = random_case(rng, B, S, V, form, "probabilistic", True)
    filters = filters if form == "candidates" else {"allowed": filters["allowed"]}
    kw = {"target_filter": TargetFilter(**filters), "stop_ids": np.arange(0, V, 5)}
    whole = verify_block(block, target, draw, **kw)
    for size in sizes:
        chunked = verify_block(block, target, draw, chunk_size=size, **kw)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"chunk_size {size}")
    order = rng.permutation(B)[:7]
    wide = ("logits", "candidate_ids", "candidate_logits")
    fields = {f.name: getattr(block, f.name) for f in dataclasses.fields(block) if f.name != "method"}
    part = {n: None if x is None else x[:, order] if n in wide else x[order] for n, x in fields.items()}
    out = verify_block(
        DraftBlock(method="probabilistic", **part), target[order],
        DraftSampling(draw.temperature[order], draw.seed[order], draw.position[order]),
        target_filter=TargetFilter(**{n: x[order] for n, x in filters.items()}), stop_ids=kw["stop_ids"],
    )  # fmt: skip
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(out), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], b)


def test_chunk_of_one_request_reads_no_other():
    """Chunks never cross a request: NaN in request 4 leaves the requests before and after it alone at every size."""
    rng = np.random.default_rng(10)
    block, draw, target, _, _ = random_case(rng, 9, 2, 17, "logits", "probabilistic", False)
    block = dataclasses.replace(block, num_draft=np.full(9, 2))
    clean = verify_block(block, target, draw)
    target[4] = np.nan
    for size in (2, 4):
        out = verify_block(block, target, draw, chunk_size=size)
        keep = np.arange(9) != 4
        np.testing.assert_array_equal(np.asarray(out.tokens)[keep], np.asarray(clean.tokens)[keep])
        np.testing.assert_array_equal(out.valid, keep)


def test_stop_tokens():
    """Nothing after the first stop token; one among the accepted tokens ends the block without a bonus token."""
    p = np.full((4, 4, 5), -np.inf, np.float32)
    for s, token in enumerate([1, 2, 3, 4]):
        p[:, s, token] = 0.0
    block = make_block(np.tile([1, 2, 3], (4, 1)), method="greedy")
    stop = np.array([[-1, -1], [2, -1], [4, 0], [1, 4]])
    out = verify_block(block, p, None, stop_ids=stop)
    np.testing.assert_array_equal(out.tokens, [[1, 2, 3, 4], [1, 2, -1, -1], [1, 2, 3, 4], [1, -1, -1, -1]])
    np.testing.assert_array_equal(out.num_accepted, [3, 2, 3, 1])
    np.testing.assert_array_equal(out.stopped, [False, True, True, True])


def test_allowed_mask_per_row():
    """A mask per row forbids a drafted token; a row beyond the rejection may forbid everything."""
    logits = np.zeros((1, 3, 4), np.float32)
    allowed = np.ones((1, 3, 4), bool)
    allowed[0, 0, 2] = False
    allowed[0, 1:] = False
    block = make_block([[2, 1]], method="greedy")
    draw = DraftSampling([1.0], [5], [0])
    out = verify_block(block, logits, draw, target_filter=TargetFilter(allowed=allowed))
    assert bool(out.valid[0])
    assert int(out.num_accepted[0]) == 0
    assert int(out.tokens[0, 0]) in (0, 1, 3)
    np.testing.assert_allclose(out.logprobs[0, 0], np.log(1 / 3), rtol=1e-6)
    allowed[0, 0] = False
    out = verify_block(block, logits, draw, target_filter=TargetFilter(allowed=allowed))
    assert not bool(out.valid[0])
    np.testing.assert_array_equal(out.tokens, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_rounds_of_the_trained_checkpoints(kind):
    """Case 27: the reference's drafts and greedy output give its acceptance lengths; one slot off they fall apart."""
    recorded = json.loads((GOLDENS / "rounds" / kind / "greedy.json").read_text())
    right, wrong = [], []
    for prompt in (0, 1):
        tensors, output = (
            read(GOLDENS / "rounds" / kind / f"prompt{prompt}.safetensors"),
            recorded[prompt]["output_ids"],
        )
        rounds = sum(name.endswith(".tokens") for name in tensors)
        for r in range(rounds):
            start = int(tensors[f"round{r}.start"])
            drafted = tensors[f"round{r}.tokens"].reshape(1, -1).astype(np.int32)
            want = recorded[prompt]["acceptance_lengths"][r]
            truth = np.array(output[start + 1 : start + 2 + drafted.shape[1]])
            truth = np.pad(truth, (0, drafted.shape[1] + 1 - len(truth)))
            logits = np.eye(4096, dtype=np.float32)[truth][None]
            out = verify_block(make_block(drafted, method="greedy"), logits, None)
            np.testing.assert_array_equal(out.tokens[0, :want], truth[:want])
            right.append((int(out.num_committed[0]), want))
            off = np.eye(4096, dtype=np.float32)[np.roll(truth, -1)][None]
            wrong.append(int(verify_block(make_block(drafted, method="greedy"), off, None).num_committed[0]))
    found, want = np.array(right).T
    np.testing.assert_array_equal(found, want)
    assert np.mean(wrong) < 0.7 * np.mean(want)


def test_one_trace_for_all_values():
    """Lists, NumPy of any width and JAX arrays, temperatures, seeds, lengths and thresholds share one trace."""
    rng = np.random.default_rng(1)
    B, S, V = 3, 2, 29
    block, draw, target, _, _ = random_case(rng, B, S, V, "logits", "probabilistic", False)
    before = api_module.VERIFY.traces
    verify_block(block, target, draw, num_draft=2, stop_ids=[1])
    lists = DraftSampling([0.5, 1, 0], [1, 2, 3], [4, 5, 6])
    verify_block(block, target.tolist(), lists, num_draft=[1, 2, 0], stop_ids=np.array([5], np.int64))
    weak = DraftSampling(jnp.full(B, 0.7), jnp.arange(B, dtype=jnp.uint32), jnp.zeros(B, jnp.int32))
    verify_block(jax.tree.map(jnp.asarray, block), jnp.asarray(target), weak, num_draft=jnp.ones(B, int), stop_ids=(2,))
    assert api_module.VERIFY.traces == before + 1
    jitted = jax.jit(lambda block, target, draw: verify_block(block, target, draw, num_draft=2, stop_ids=[1]))
    got, want = jitted(block, target, draw), verify_block(block, target, draw, num_draft=2, stop_ids=[1])
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def test_candidates_are_never_expanded_but_for_one_row():
    """The compiled program for candidates holds no [S, B, V] array; only the target's [B, S+1, V] and rows [B, V]."""
    B, S, V, k = 5, 3, 1009, 4
    ids = np.broadcast_to(np.arange(k), (S, B, k))
    block = make_block(np.zeros((B, S), int), ids=ids, values=np.zeros((S, B, k), np.float32))
    draw = DraftSampling(np.ones(B), np.arange(B), np.zeros(B, int))
    trace = jax.make_jaxpr(lambda block, logits: verify_block(block, logits, draw))(
        block, np.zeros((B, S + 1, V), np.float32)
    )
    shapes = {v.aval.shape for eqn in equations(trace.jaxpr) for v in eqn.outvars}
    assert (B, V) in shapes
    assert (S, B, V) not in shapes
    assert (B, S, V) in shapes or (B, S + 1, V) in shapes


def equations(jaxpr):
    """All equations of a jaxpr and of what it calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def good():
    block, draw, target, _, _ = random_case(np.random.default_rng(0), 2, 3, 7, "logits", "probabilistic", False)
    return {"block": block, "target_logits": target, "sampling": draw}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"block": dataclasses.replace(a["block"], logits=None)}, r'block.logits.*outputs="logits" or "cand'),
        (lambda a: {"block": "tokens"}, "block: found 'str'"),
        (lambda a: {"block": dataclasses.replace(a["block"], logits=np.zeros((3, 2, 6), "f"))}, "block.logits.shape"),
        (lambda a: {"target_logits": a["target_logits"][:, :3]}, r"target_logits.shape.*\[2, 4, any\]"),
        (lambda a: {"target_logits": a["target_logits"].astype(int)}, "target_logits.dtype.*float"),
        (lambda a: {"sampling": None}, "sampling: found None"),
        (lambda a: {"sampling": dataclasses.replace(a["sampling"], seed=np.array([-1, 2]))}, "sampling.seed.*-1"),
        (lambda a: {"sampling": dataclasses.replace(a["sampling"], seed=np.array([2**40, 2]))}, "sampling.seed"),
        (lambda a: {"num_draft": [1, 2, 3]}, r"num_draft.shape.*\[2\]"),
        (lambda a: {"num_draft": 1.5}, "num_draft.dtype.*integer"),
        (lambda a: {"rule": "fast"}, "rule: found 'fast', expected one of token, target_only"),
        (lambda a: {"chunk_size": 0}, "chunk_size: found 0"),
        (lambda a: {"stop_ids": [[1], [2], [3]]}, "stop_ids.shape"),
        (lambda a: {"stop_ids": [0.5]}, "stop_ids.dtype"),
        (lambda a: {"target_filter": 0.9}, "target_filter: found 'float'"),
        (lambda a: {"target_filter": TargetFilter(allowed=np.ones((2, 6), bool))}, "target_filter.allowed.shape"),
        (lambda a: {"target_filter": TargetFilter(allowed=np.ones((2, 7)))}, "target_filter.allowed.dtype.*bool"),
        (lambda a: {"target_filter": TargetFilter(top_k=0.5)}, "target_filter.top_k.dtype"),
        (lambda a: {"target_filter": TargetFilter(top_p=[0.5])}, "target_filter.top_p.shape"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = good()
    arguments |= change(arguments)
    with pytest.raises(ValueError, match=message):
        verify_block(**arguments)


def test_tokens_only_block_is_an_error_whatever_the_temperature():
    a = good()
    block = dataclasses.replace(a["block"], logits=None)
    greedy = dataclasses.replace(a["sampling"], temperature=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="outputs="):
        verify_block(block, a["target_logits"], greedy)
    verify_block(block, a["target_logits"], greedy, rule="target_only")
