"""The entry points: bad input refused before compilation, one trace whatever the values' containers, donated memory.

Cases 34 to 36 of docs/pitfalls.md are here. Donation is read from the compiled program, not from intentions.
"""

import dataclasses
import gc
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import KINDS, base_logits, build_head, f32, make_head, make_inputs, make_weights

import dspark_jax
from dspark_jax import DraftBuffer, DraftConfig, DraftSampling
from dspark_jax.drafting import api
from dspark_jax.drafting import factories as serving
from dspark_jax.drafting.head import DSparkHead

V, Vd, H, R, B, S = 37, 23, 12, 6, 3, 4
HEAD = make_head("vanilla", V, None, H, R)
GATED = make_head("gated", V, None, H, R)
PLAIN = make_head(None, V, None, H, confidence=None)
HIDDEN, ANCHORS = make_inputs(B, S, H, V)
ROWS = np.zeros((S, B, V), np.float32)
PARAMS = DraftSampling([1.0] * B, [1] * B, [2] * B)


def with_params(**fields):
    return {"sampling": dataclasses.replace(PARAMS, **fields)}


# ------------------------------------------------------------------------------------------------------- bad input

HIDDEN_CASES = [
    ("head: found 'dict', expected a DSparkHead", {"head": {}}),
    (r"hidden.shape: found \(3, 4\), expected \[B, S, H\]", {"hidden": HIDDEN[..., 0]}),
    (r"hidden.shape: found \(3, 4, 11\), expected \[B, S, H\] = \[any, any, 12\]", {"hidden": HIDDEN[..., 1:]}),
    (r"hidden.shape: found \(0, 4, 12\)", {"hidden": HIDDEN[:0], "anchors": ANCHORS[:0]}),
    (r"hidden.shape: found \(3, 0, 12\)", {"hidden": HIDDEN[:, :0]}),
    ("hidden.dtype: found 'int64', expected a float dtype", {"hidden": HIDDEN.astype(np.int64)}),
    ("hidden.dtype: found 'bool'", {"hidden": HIDDEN > 0}),
    ("hidden.dtype: found 'complex64'", {"hidden": HIDDEN.astype(np.complex64)}),
    ("hidden: found .*, expected an array of numbers", {"hidden": [[[1.0], [1.0, 2.0]]]}),
    ("hidden: found .*, expected an array of numbers", {"hidden": "hidden.safetensors"}),
    ("hidden: found None, expected an array of numbers", {"hidden": None}),
]
ANCHOR_CASES = [
    (r"anchor_ids.shape: found \(2,\), expected \[B\] = \[3\]", {"anchors": ANCHORS[:2]}),
    (r"anchor_ids.shape: found \(3, 1\)", {"anchors": ANCHORS[:, None]}),
    (r"anchor_ids.shape: found \(\)", {"anchors": 5}),
    ("anchor_ids.dtype: found 'float32', expected an integer dtype", {"anchors": ANCHORS.astype(np.float32)}),
    ("anchor_ids.dtype: found 'bool'", {"anchors": ANCHORS > 0}),
    ("anchor_ids: found .*, expected an array of numbers", {"anchors": ["a", "b", "c"]}),
]
OPTION_CASES = [
    ("outputs: found 'row', expected one of tokens, logits, candidates", {"outputs": "row"}),
    ("outputs: found None", {"outputs": None}),
    ("outputs: found 'candidates', expected a topk beside it", {"outputs": "candidates"}),
    ("topk: found 38, expected an integer from 1 to 37", {"topk": 38}),
    ("logits_dtype: found 'int8', expected one of float32, bfloat16, float16", {"logits_dtype": "int8"}),
    ("logits_dtype: found .*float64.*, expected one of", {"logits_dtype": np.float64}),
    ("min_confidence: found 1.5, expected a number from 0 to 1", {"min_confidence": 1.5}),
    ("min_confidence: found 'high'", {"min_confidence": "high"}),
    ("min_confidence: found nan", {"min_confidence": float("nan")}),
    ("min_confidence: found True", {"min_confidence": True}),
    ("sampling: found 'dict', expected a DraftSampling, or None for greedy", {"sampling": {"temperature": 1.0}}),
    (r"sampling.temperature.shape: found \(2,\), expected \[B\] = \[3\]", with_params(temperature=[1.0, 2.0])),
    (r"sampling.temperature: found .*nan.*, expected finite numbers", with_params(temperature=[1.0, np.nan, 1.0])),
    ("sampling.temperature: found .*inf", with_params(temperature=[1.0, 1.0, np.inf])),
    ("sampling.temperature.dtype: found 'complex128'", with_params(temperature=[1j, 1, 1])),
    ("sampling.temperature: found .*, expected an array of numbers", with_params(temperature=["warm"] * 3)),
    ("sampling.temperature.dtype: found 'bool'", with_params(temperature=[True] * 3)),
    (r"sampling.seed.shape: found \(4,\), expected \[B\] = \[3\]", with_params(seed=[1, 2, 3, 4])),
    ("sampling.seed.dtype: found 'float64', expected an integer dtype", with_params(seed=[1.0, 2.0, 3.0])),
    ("sampling.seed: found -1, expected integers from 0 to 4294967295", with_params(seed=[0, -1, 2])),
    ("sampling.seed: found 4294967296", with_params(seed=[0, 2**32, 2])),
    ("sampling.seed: found .*, expected", with_params(seed=[0, 2**64, 2])),
    ("sampling.position: found -1, expected integers from 0 to 2147483647", with_params(position=[-1, 0, 0])),
    ("sampling.position: found 2147483648", with_params(position=np.asarray([0, 2**31, 0]))),
    ("sampling.position.dtype: found 'float32'", with_params(position=np.ones(3, np.float32))),
]


@pytest.fixture
def no_tracing(monkeypatch):
    """Fail if anything of a draft is traced, let alone compiled: bad input is refused before that."""

    def refuse(*args, **kwargs):
        raise AssertionError("traced before the input was checked")

    for module, name in ((api, "draft"), (api, "teacher_forced"), (serving, "empty_buffer")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(DSparkHead, "base_logits", refuse)


@pytest.mark.parametrize(("message", "bad"), HIDDEN_CASES + ANCHOR_CASES + OPTION_CASES)
def test_draft_block_refuses(no_tracing, message, bad):
    options = {k: v for k, v in bad.items() if k not in ("head", "hidden", "anchors")}
    with pytest.raises(ValueError, match=message):
        dspark_jax.draft_block(bad.get("head", HEAD), bad.get("hidden", HIDDEN), bad.get("anchors", ANCHORS), **options)


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        *ANCHOR_CASES,
        *OPTION_CASES,
        (r"base_logits.shape: found \(4, 3, 36\), expected \[S, B, Vd\]", {"rows": ROWS[..., 1:]}),
        (r"base_logits.shape: found \(4, 37\)", {"rows": ROWS[:, 0]}),
        ("base_logits.dtype: found 'int32', expected a float dtype", {"rows": ROWS.astype(np.int32)}),
        (r"anchor_ids.shape: found \(3,\), expected \[B\] = \[4\]", {"rows": np.swapaxes(ROWS, 0, 1)}),
        (r"hidden.shape: found \(4, 3, 12\), expected .*\[3, 4, 12\]", {"hidden": np.swapaxes(HIDDEN, 0, 1)}),
        ("hidden: found None, expected hidden states .* gated", {"head": GATED}),
        ("head: found 'NoneType'", {"head": None}),
        ("min_confidence: found 0.5, expected None .*no hidden states", {"min_confidence": 0.5}),
        ("min_confidence: found 0.5, expected None .*no confidence head", {"head": PLAIN, "min_confidence": 0.5}),
    ],
)
def test_draft_from_logits_refuses(no_tracing, message, bad):
    options = {k: v for k, v in bad.items() if k not in ("head", "rows", "anchors")}
    if "min_confidence" in options and options["min_confidence"] != 0.5:
        options["hidden"] = HIDDEN
    with pytest.raises(ValueError, match=message):
        dspark_jax.draft_from_logits(
            bad.get("head", HEAD), bad.get("rows", ROWS), bad.get("anchors", ANCHORS), **options
        )


@pytest.mark.parametrize(
    ("message", "head", "hidden", "prev"),
    [
        ("head: found 'str'", "head", HIDDEN, np.zeros((B, S), int)),
        (r"hidden.shape: found \(3, 4\)", HEAD, HIDDEN[..., 0], np.zeros((B, S), int)),
        (r"prev_ids.shape: found \(3,\), expected \[B, S\] = \[3, 4\]", HEAD, HIDDEN, ANCHORS),
        ("prev_ids.dtype: found 'float64'", HEAD, HIDDEN, np.zeros((B, S))),
    ],
)
def test_teacher_forced_logits_refuses(no_tracing, message, head, hidden, prev):
    with pytest.raises(ValueError, match=message):
        dspark_jax.teacher_forced_logits(head, hidden, prev)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("num_speculative_tokens: found 0, expected an integer >= 1", {"num_speculative_tokens": 0}),
        ("num_speculative_tokens: found 2.5", {"num_speculative_tokens": 2.5}),
        ("num_speculative_tokens: found True", {"num_speculative_tokens": True}),
        ("draft_topk: found 0", {"draft_topk": 0}),
        (
            "draft_sample_method: found 'gumbel', expected one of greedy, probabilistic",
            {"draft_sample_method": "gumbel"},
        ),
        ("outputs: found 'probs'", {"outputs": "probs"}),
        ("outputs: found 'candidates', expected a draft_topk", {"outputs": "candidates"}),
        ("logits_dtype: found 'float8'", {"logits_dtype": "float8"}),
        ("min_confidence: found -0.1", {"min_confidence": -0.1}),
    ],
)
def test_draft_config_refuses(message, fields):
    with pytest.raises(ValueError, match=message):
        DraftConfig(**({"num_speculative_tokens": S} | fields))


def test_draft_config_is_frozen_and_normalised():
    config = DraftConfig(np.int64(4), np.int32(5), "probabilistic", "logits", jnp.bfloat16, 0)
    assert config == DraftConfig(4, 5, "probabilistic", "logits", "bfloat16", 0.0)
    assert hash(config) == hash(DraftConfig(4, 5, "probabilistic", "logits", "bfloat16", 0.0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.draft_topk = 3


CONFIG = DraftConfig(S, 5, "probabilistic", "logits")


def buffer_of(**fields):
    """Return a fitting DraftBuffer with fields changed, made without compiling anything."""
    ids = np.broadcast_to(np.arange(5, dtype=np.int32), (S, B, 5))
    parts = {"logits": jnp.asarray(np.full((S, B, V), -np.inf, np.float32)), "ids": jnp.asarray(ids)}
    return DraftBuffer(**(parts | fields))


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("head: found 'NoneType'", {"head": None}),
        (r"hidden.shape\[1\]: found 3, expected 4 \(num_speculative_tokens\)", {"hidden": HIDDEN[:, :3]}),
        ("sampling: found 'NoneType', expected a DraftSampling, since", {"sampling": None}),
        ("buffer: found 'NoneType', expected the DraftBuffer of make_buffer", {"buffer": None}),
        (r"buffer.logits.shape: found \(4, 2, 37\)", {"buffer": lambda: buffer_of(logits=jnp.asarray(ROWS[:, :2]))}),
        (
            r"buffer.ids.shape: found \(4, 3, 4\)",
            {"buffer": lambda: buffer_of(ids=jnp.asarray(np.zeros((S, B, 4), int)))},
        ),
        (
            "buffer.logits.dtype: found 'float16', expected float32",
            {"buffer": lambda: buffer_of(logits=jnp.asarray(ROWS.astype(np.float16)))},
        ),
    ],
)
def test_made_draft_fn_refuses(no_tracing, message, args):
    fn = dspark_jax.make_draft_fn(CONFIG)
    buffer = args.get("buffer", buffer_of)
    buffer = buffer() if callable(buffer) else buffer
    with pytest.raises(ValueError, match=message):
        fn(args.get("head", HEAD), args.get("hidden", HIDDEN), ANCHORS, args.get("sampling", PARAMS), buffer)
    assert fn.trace_count() == 0


def test_made_functions_refuse_what_their_config_excludes(no_tracing):
    greedy = DraftConfig(S)
    with pytest.raises(ValueError, match="sampling: found 'DraftSampling', expected None, since draft_sample_method"):
        dspark_jax.make_draft_fn(greedy)(HEAD, HIDDEN, ANCHORS, PARAMS, None)
    with pytest.raises(ValueError, match="buffer: found 'DraftBuffer', expected None"):
        dspark_jax.make_draft_fn(greedy)(HEAD, HIDDEN, ANCHORS, None, buffer_of())
    with pytest.raises(ValueError, match=r"base_logits.shape\[0\]: found 3, expected 4"):
        dspark_jax.make_draft_from_logits_fn(greedy)(HEAD, ROWS[:3], ANCHORS)
    with pytest.raises(ValueError, match="hidden: found None, expected hidden states"):
        dspark_jax.make_draft_from_logits_fn(greedy)(GATED, ROWS, ANCHORS)
    for make in (dspark_jax.make_draft_fn, dspark_jax.make_draft_from_logits_fn):
        with pytest.raises(ValueError, match="config: found 'dict', expected a DraftConfig"):
            make({"num_speculative_tokens": 4})


@pytest.mark.parametrize(
    ("message", "head", "config", "batch"),
    [
        ("head: found 'NoneType'", None, CONFIG, 1),
        ("config: found 'dict', expected a DraftConfig", HEAD, {}, 1),
        ("batch: found 0, expected an integer >= 1", HEAD, CONFIG, 0),
        ("batch: found 2.0", HEAD, CONFIG, 2.0),
        ("topk: found 38", HEAD, DraftConfig(S, 38, outputs="logits"), 1),
    ],
)
def test_make_buffer_refuses(no_tracing, message, head, config, batch):
    with pytest.raises(ValueError, match=message):
        dspark_jax.make_buffer(head, config, batch)


def test_load_head_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        dspark_jax.load_head(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="dtype: found 'int8', expected one of float32, bfloat16, float16"):
        dspark_jax.load_head(tmp_path, dtype="int8")


def test_a_head_without_lm_head_needs_base_logits():
    head = make_head("vanilla", V, None, H, R)
    head.lm_head = None
    with pytest.raises(ValueError, match="lm_head: found None"):
        dspark_jax.draft_block(head, HIDDEN, ANCHORS)
    assert dspark_jax.draft_from_logits(head, ROWS, ANCHORS, hidden=HIDDEN).tokens.shape == (B, S)


# ---------------------------------------------------------------------------------------- coercion and trace counts


def spellings(number):
    """Return (hidden, anchors, sampling) number `number`: other values, and another container or dtype each time."""
    rng = np.random.default_rng(number)
    temperature, seed = rng.uniform(0, 2, B), rng.integers(0, 2**32, B)
    position, anchors = rng.integers(0, 2**31, B), rng.integers(0, V, B)
    hidden = rng.standard_normal((B, S, H))
    weak = jnp.full((B,), float(temperature[0]))  # weakly typed, as jnp.full of a Python number is
    floats = [
        temperature.tolist(),
        temperature,
        temperature.astype(np.float32),
        temperature.astype(np.float16),
        weak,
        jnp.asarray(temperature, jnp.float32),
        jnp.asarray(temperature, jnp.bfloat16),
        float(temperature[0]),
        jnp.float32(0.5),
        rng.integers(0, 3, B),
    ][number % 10]
    small = number % 100
    seeds = [
        seed.tolist(),
        seed.astype(np.int64),
        seed.astype(np.uint64),
        seed.astype(np.uint32),
        jnp.full((B,), small),
        jnp.asarray(seed.astype(np.uint32)),
        tuple(seed.tolist()),
    ][number % 7]
    positions = [
        position.tolist(),
        position.astype(np.int64),
        position.astype(np.int32),
        position.astype(np.uint32),
        jnp.full((B,), small),
        jnp.asarray(position.astype(np.int32)),
    ][number % 6]
    ids = [anchors.tolist(), anchors, anchors.astype(np.uint8), jnp.asarray(anchors, jnp.int32), jnp.full((B,), 3)][
        number % 5
    ]
    states = [hidden.tolist(), hidden, hidden.astype(np.float32), jnp.asarray(hidden, jnp.float32)][number % 4]
    return states, ids, DraftSampling(floats, seeds, positions)


@pytest.fixture(scope="module")
def weakly_typed():
    """Check that the spellings do hold weakly typed arrays, without which the next tests would prove less."""
    assert jnp.full((B,), 1.0).weak_type
    assert jnp.full((B,), 3).weak_type


@pytest.mark.parametrize(("topk", "outputs"), [(None, "tokens"), (5, "logits")])
def test_case_35_one_trace_over_100_calls(weakly_typed, topk, outputs):
    """Changing temperatures, seeds, positions as lists, NumPy, int64, weakly typed and JAX arrays: one trace."""
    config = DraftConfig(S, topk, "probabilistic", outputs)
    fn, buffer = dspark_jax.make_draft_fn(config), dspark_jax.make_buffer(HEAD, config, B)
    assert fn.trace_count() == 0
    for number in range(100):
        hidden, anchors, params = spellings(number)
        _, buffer = fn(HEAD, hidden, anchors, params, buffer)
    assert fn.trace_count() == 1


def test_case_35_one_trace_of_the_logits_function(weakly_typed):
    fn = dspark_jax.make_draft_from_logits_fn(DraftConfig(S, None, "probabilistic", "logits"))
    for number in range(100):
        hidden, anchors, params = spellings(number)
        rows = [np.zeros((S, B, V)), ROWS, ROWS.tolist(), jnp.asarray(ROWS)][number % 4]
        fn(HEAD, rows, anchors, params, hidden)
    assert fn.trace_count() == 1


@pytest.mark.parametrize("outputs", ["tokens", "logits", "candidates"])
def test_case_35_draft_block_traces_once_per_shapes_and_options(outputs, weakly_typed, monkeypatch):
    """The plain functions too, counted at the core that is traced; thresholds and new heads of a shape are values."""
    traces = []
    core = api.draft
    monkeypatch.setattr(api, "draft", lambda *args, **options: (traces.append(1), core(*args, **options))[1])
    size = {"tokens": 31, "logits": 32, "candidates": 33}[outputs]  # shapes that no other test has compiled
    heads = [make_head("vanilla", size, None, H, R, seed=seed) for seed in (0, 1)]
    topk = 7 if outputs == "candidates" else None
    for number in range(100):
        hidden, anchors, params = spellings(number)
        dspark_jax.draft_block(
            heads[number % 2], hidden, anchors, sampling=params, topk=topk, outputs=outputs, min_confidence=number / 100
        )
    assert len(traces) == 1
    dspark_jax.draft_block(heads[0], HIDDEN, ANCHORS, topk=topk, outputs=outputs)  # greedy: another method
    dspark_jax.draft_block(heads[0], HIDDEN, ANCHORS, sampling=PARAMS, topk=8, outputs=outputs)
    assert len(traces) == 3


def test_coercion_keeps_the_values():
    """The same numbers in any container draw the same tokens."""
    reference = dspark_jax.draft_block(
        HEAD,
        HIDDEN,
        ANCHORS,
        sampling=DraftSampling(np.float32([0.7, 1.5, 0]), np.uint32([1, 2**32 - 1, 3]), np.int32([4, 5, 6])),
    )
    for params in (
        DraftSampling([0.7, 1.5, 0], [1, 2**32 - 1, 3], [4, 5, 6]),
        DraftSampling(np.asarray([0.7, 1.5, 0]), np.asarray([1, 2**32 - 1, 3]), np.asarray([4, 5, 6], np.uint8)),
        DraftSampling(jnp.asarray([0.7, 1.5, 0]), jnp.asarray([1, 2**32 - 1, 3], jnp.uint32), jnp.asarray([4, 5, 6])),
    ):
        for hidden in (HIDDEN.tolist(), HIDDEN.astype(np.float64), jnp.asarray(HIDDEN)):
            block = dspark_jax.draft_block(HEAD, hidden, ANCHORS.tolist(), sampling=params)
            np.testing.assert_array_equal(block.tokens, reference.tokens)
    one = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=DraftSampling(0.7, [1] * B, [4] * B))
    all_ = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, sampling=DraftSampling([0.7] * B, [1] * B, [4] * B))
    np.testing.assert_array_equal(one.tokens, all_.tokens)


def test_min_confidence_prunes_at_the_first_step_below_it():
    full = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS)
    confidence = np.asarray(full.confidence)
    np.testing.assert_allclose(confidence, 1 / (1 + np.exp(-np.asarray(full.confidence_logits))), atol=1e-6)
    assert (np.asarray(full.num_draft) == S).all()
    seen = set()
    for threshold in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        block = dspark_jax.draft_block(HEAD, HIDDEN, ANCHORS, min_confidence=threshold)
        expected = [next((s for s in range(S) if row[s] < threshold), S) for row in confidence]
        assert np.asarray(block.num_draft).tolist() == expected
        np.testing.assert_array_equal(block.tokens, full.tokens)
        assert np.asarray(block.valid).all()
        seen.update(expected)
    assert len(seen) > 2


def test_a_confidence_equal_to_the_threshold_is_kept():
    """Only steps below the threshold are pruned: logit 0 is confidence 0.5 exactly."""
    weights = make_weights("vanilla", V=V, H=H, r=R)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        weights[name][:] = 0
    head = build_head(weights)
    for threshold, steps in ((0.5, S), (np.nextafter(np.float32(0.5), np.float32(1)).item(), 0)):
        block = dspark_jax.draft_block(head, HIDDEN, ANCHORS, min_confidence=threshold)
        assert np.asarray(block.num_draft).tolist() == [steps] * B


def test_no_threshold_keeps_nan_confidence():
    """A pruned length is never longer than the steps whose confidence is a number."""
    hidden = HIDDEN.copy()
    hidden[1, 2] = np.nan
    block = dspark_jax.draft_block(HEAD, hidden, ANCHORS, min_confidence=0.0)
    assert np.asarray(block.num_draft).tolist() == [S, 2, S]


# --------------------------------------------------------------------------------------------- weights and donation


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
