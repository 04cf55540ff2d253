"""Weights are arguments, donated buffers are aliased, and nothing is kept behind."""

import gc
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from entry_cases import ANCHORS, HEAD, HIDDEN, PARAMS, PLAIN, ROWS, B, H, R, S, V, Vd
from helpers import KINDS, base_logits, f32, make_head, make_inputs

import dspark_jax
from dspark_jax import DraftBuffer, DraftConfig, DraftSampling


@pytest.mark.parametrize("kind", KINDS)
def test_case_34_weights_are_arguments_not_constants(kind):
    head = make_head(kind, 5000, None, 64, 32)
    assert head.nbytes > 2_000_000
    hidden, anchors = make_inputs(2, 3, 64, 5000)
    lowered = dspark_jax.make_draft_fn(DraftConfig(3)).lower(head, hidden, anchors, None, None)
    assert len(lowered.as_text()) < 100_000  # a constant of 1.3 MB prints as megabytes
    compiled = lowered.compile()
    assert compiled.memory_analysis().argument_size_in_bytes >= head.nbytes
    constants = re.findall(r"constant\(", compiled.as_text())
    assert len(compiled.as_text()) < 400_000, f"{len(constants)} constants"


def aliased(compiled) -> int:
    """Return the bytes of arguments whose memory an output takes."""
    return compiled.memory_analysis().alias_size_in_bytes


BIG = {"V": 3001, "S": 5, "B": 4, "H": 8}


def big(kind):
    hidden, anchors = make_inputs(BIG["B"], BIG["S"], BIG["H"], BIG["V"])
    head = make_head(kind, BIG["V"], None, BIG["H"], 4)
    params = DraftSampling([1.0] * 4, [1, 2, 3, 4], [0] * 4)
    return head, hidden, anchors, params, base_logits(head, hidden)


@pytest.mark.parametrize(
    ("kind", "method"),
    [("vanilla", "greedy"), ("vanilla", "probabilistic"), ("gated", "probabilistic"), ("rnn", "greedy")],
)
def test_base_logits_are_corrected_in_place(kind, method):
    """The whole logits buffer is aliased, and temporaries stay below two rows of logits [B, V]."""
    head, hidden, anchors, params, base = big(kind)
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(5, None, method, "logits"))
    args = (head, base, anchors, None if method == "greedy" else params, hidden)
    compiled = fn.lower(*args).compile()
    assert aliased(compiled) >= base.nbytes
    assert "input_output_alias" in compiled.as_text()
    row = 4 * BIG["B"] * BIG["V"]
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * row
    pointer = base.unsafe_buffer_pointer()
    expected = dspark_jax.draft_from_logits(head, base, anchors, hidden=hidden, sampling=args[3], outputs="logits")
    block = fn(*args)
    assert base.is_deleted()
    assert block.logits.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(block.tokens, expected.tokens)
    np.testing.assert_array_equal(block.logits, expected.logits)


def test_top_k_rows_reuse_their_buffer():
    """Both arrays of the DraftBuffer are aliased, deleted, and come back in place; nothing of [S, B, V] is copied."""
    head, hidden, anchors, params, base = big("vanilla")
    config = DraftConfig(5, 9, "probabilistic", "logits")
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(head, config, BIG["B"])
    assert buffer.logits.shape == base.shape
    assert np.isneginf(f32(buffer.logits)).all()
    args = (head, hidden, anchors, params, buffer)
    compiled = fn.lower(*args).compile()
    assert aliased(compiled) >= buffer.logits.nbytes
    assert "input_output_alias" in compiled.as_text()
    # The base logits [S, B, V] that it selects from, and at this small V a canonical copy of them.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * base.nbytes + 2 * 4 * BIG["B"] * BIG["V"]
    pointer = buffer.logits.unsafe_buffer_pointer()
    block, new = fn(*args)
    assert buffer.logits.is_deleted()
    assert new.logits.unsafe_buffer_pointer() == pointer
    assert block.logits is new.logits
    again, newest = fn(head, hidden, anchors, params, new)
    assert newest.logits.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(
        again.logits, dspark_jax.draft_block(head, hidden, anchors, sampling=params, topk=9, outputs="logits").logits
    )


def scan_bodies(jaxpr):
    """Yield the jaxpr of every scan inside a jaxpr."""
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    if equation.primitive.name == "scan":
                        yield inner
                    yield from scan_bodies(inner)


def sizes(jaxpr):
    """Yield the shape of every value made inside a jaxpr."""
    for equation in jaxpr.eqns:
        yield from (getattr(out.aval, "shape", ()) for out in equation.outvars)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_hold_nothing_of_the_vocabulary_in_the_scan(kind):
    """outputs="candidates": no value [.., V] is made inside the scan, and the program keeps only the base logits."""
    head, hidden, anchors, params, base = big(kind)

    def call(topk, outputs):
        options = {"hidden": hidden, "sampling": params, "topk": topk, "outputs": outputs}
        return jax.make_jaxpr(lambda head, base: dspark_jax.draft_from_logits(head, base, anchors, **options))(
            head, base
        )

    for topk, outputs, free in ((9, "candidates", True), (9, "tokens", True), (None, "tokens", False)):
        bodies = list(scan_bodies(call(topk, outputs).jaxpr))
        assert bodies
        made = [shape for body in bodies for shape in sizes(body)]
        assert made
        wide = [shape for shape in made if BIG["V"] in shape]
        assert (not wide) == free, wide


def test_candidates_from_logits_need_little_memory():
    head, hidden, anchors, params, base = big("vanilla")
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(5, 9, "probabilistic", "candidates"))
    compiled = fn.lower(head, base, anchors, params, hidden).compile()
    assert compiled.memory_analysis().output_size_in_bytes < 10_000
    # Selection may look at all rows at once (one copy of values); the steps add nothing of that size.
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * base.nbytes


@pytest.mark.parametrize(
    ("fields", "size", "dtype"),
    [
        ({"outputs": "tokens"}, V, "float32"),
        ({"outputs": "logits", "logits_dtype": "bfloat16"}, V, "float32"),
        ({"outputs": "logits"}, Vd, "float32"),
        ({"outputs": "candidates", "draft_topk": 4}, V, "float32"),
    ],
    ids=["tokens", "other-dtype", "reduced", "candidates"],
)
def test_case_36_no_output_fits_so_nothing_is_donated_and_nothing_warns(fields, size, dtype):
    """Donating a buffer that no output can take would only warn (and the tests turn warnings into errors)."""
    head = make_head("vanilla", V, size, H, R)
    base = base_logits(head, HIDDEN).astype(dtype)
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(S, **fields))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = fn(head, base, ANCHORS, None, HIDDEN)
        second = fn(head, base, ANCHORS, None, HIDDEN)
    assert not base.is_deleted()
    np.testing.assert_array_equal(first.tokens, second.tokens)


def test_case_36_inside_an_outer_jit_donation_is_dropped_and_the_result_is_right():
    config = DraftConfig(S, None, "greedy", "logits")
    fn = dspark_jax.make_draft_from_logits_fn(config)
    base = base_logits(HEAD, HIDDEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = jax.jit(lambda head, base: fn(head, base, ANCHORS, None, HIDDEN))(HEAD, base)
    assert not base.is_deleted()
    direct = fn(HEAD, base, ANCHORS, None, HIDDEN)
    assert base.is_deleted()
    np.testing.assert_array_equal(block.tokens, direct.tokens)
    np.testing.assert_allclose(block.logits, direct.logits, atol=1e-5)
    topk = DraftConfig(S, 5, "greedy", "logits")
    draft, buffer = dspark_jax.make_draft_fn(topk), dspark_jax.make_buffer(HEAD, topk, B)
    inner, _ = jax.jit(lambda head, buffer: draft(head, HIDDEN, ANCHORS, None, buffer))(HEAD, buffer)
    assert not buffer.logits.is_deleted()
    outer, _ = draft(HEAD, HIDDEN, ANCHORS, None, buffer)
    np.testing.assert_array_equal(inner.tokens, outer.tokens)


def test_calling_twice_leaves_nothing_behind():
    """The caller's arrays are untouched, and no device array is left over from a call whose block was dropped."""
    hidden, anchors = jnp.asarray(HIDDEN), jnp.asarray(ANCHORS)
    rows = jnp.asarray(base_logits(HEAD, HIDDEN))

    def call(seed):
        params = DraftSampling(jnp.ones(B, jnp.float32), jnp.full((B,), seed, jnp.uint32), jnp.zeros(B, jnp.int32))
        a = dspark_jax.draft_block(HEAD, hidden, anchors, sampling=params, topk=5, outputs="logits")
        b = dspark_jax.draft_from_logits(HEAD, rows, anchors, hidden=hidden, sampling=params, outputs="logits")
        return np.array(a.tokens), np.array(b.logits)  # copies: a view would keep the block alive

    first = call(1)
    call(2)
    gc.collect()
    alive = len(jax.live_arrays())
    for seed in range(3, 8):
        call(seed)
    again = call(1)
    gc.collect()
    assert len(jax.live_arrays()) <= alive
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    np.testing.assert_array_equal(hidden, HIDDEN)
    np.testing.assert_array_equal(anchors, ANCHORS)


def test_made_functions_lower_from_shapes():
    """`lower` takes arrays, or jax.ShapeDtypeStruct in their place; neither runs anything."""
    config = DraftConfig(S, 5, "probabilistic", "logits")
    fn = dspark_jax.make_draft_fn(config)
    buffer = dspark_jax.make_buffer(HEAD, config, B)
    params = DraftSampling(jnp.ones(B, jnp.float32), jnp.ones(B, jnp.uint32), jnp.zeros(B, jnp.int32))
    args = (HEAD, jnp.asarray(HIDDEN), jnp.asarray(ANCHORS), params, buffer)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    for given in (args, shapes):
        assert isinstance(fn.lower(*given), jax.stages.Lowered)
    assert not buffer.logits.is_deleted()
    assert fn.lower(*args).as_text() == fn.lower(*shapes).as_text()
    assert fn.trace_count() == 1


def test_results_are_pytrees():
    """A block crosses jit and tree maps; the method is static."""
    block = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=PARAMS, topk=5, outputs="candidates")
    same = jax.jit(lambda block: block)(block)
    assert same.method == "probabilistic"
    assert same.logits is None
    np.testing.assert_array_equal(same.candidate_ids, block.candidate_ids)
    assert block.tokens.shape == (B, S)
    assert block.tokens.dtype == jnp.int32
    assert block.num_draft.shape == block.valid.shape == (B,)
    assert block.num_draft.dtype == jnp.int32
    assert block.valid.dtype == jnp.bool_
    assert block.candidate_ids.shape == block.candidate_logits.shape == (S, B, 5)
    assert block.candidate_ids.dtype == jnp.int32
    assert block.confidence.shape == (B, S)
    plain = dspark_jax.draft_from_logits(PLAIN, ROWS, ANCHORS)
    assert plain.confidence is None


def test_overwritten_arrays_are_refused_by_name():
    """A donated buffer or logits handed in again: an error that says which, not one of the runtime."""
    head, hidden, anchors, _, base = big("vanilla")
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(5, None, "greedy", "logits"))
    fn(head, base, anchors, None)
    with pytest.raises(ValueError, match="base_logits: found 'a donated array'"):
        fn(head, base, anchors, None)
    config = DraftConfig(5, 9, "greedy", "logits")
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(head, config, BIG["B"])
    fn(head, hidden, anchors, None, buffer)
    with pytest.raises(ValueError, match=r"buffer.logits: found 'a donated array'"):
        fn(head, hidden, anchors, None, buffer)
    fresh = dspark_jax.make_buffer(head, config, BIG["B"])
    for bad, message in (
        (DraftBuffer(None, None), "buffer.logits: found 'NoneType'"),
        (
            DraftBuffer(fresh.logits, fresh.ids.astype(jnp.float32)),
            "buffer.ids.dtype: found 'float32', expected int32",
        ),
        (DraftBuffer(fresh.logits[:, :1], fresh.ids), "buffer.logits.shape"),
        (DraftBuffer(fresh.logits.astype(jnp.bfloat16), fresh.ids), "buffer.logits.dtype: found 'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=message):
            fn(head, hidden, anchors, None, bad)


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), [1.0, float("nan"), 1.0], 1e300])
def test_temperatures_that_float32_does_not_hold_are_refused(temperature):
    head, (hidden, anchors) = make_head("vanilla"), make_inputs(3, 4, 12, 37)
    with pytest.raises(ValueError, match=r"sampling.temperature: found"):
        dspark_jax.draft_block(head, hidden, anchors, sampling=DraftSampling(temperature, [1, 2, 3], [0, 0, 0]))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "timedelta64[s]", "complex64"])
def test_dtypes_without_a_meaning_are_refused(dtype):
    head = make_head(None, V=4, H=2, confidence=None)
    with pytest.raises(ValueError, match=r"base_logits"):
        dspark_jax.draft_from_logits(head, np.zeros((1, 1, 4)).astype(np.dtype(dtype)), [0])
