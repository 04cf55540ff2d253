"""Bad input to the drafting entry points is refused before anything is traced, by field, value and expectation."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from entry_cases import ANCHORS, HEAD, HIDDEN, PARAMS, PLAIN, ROWS, B, H, R, S, V
from helpers import make_head

import dspark_jax
from dspark_jax import DraftBuffer, DraftConfig
from dspark_jax.drafting import api
from dspark_jax.drafting import factories as serving
from dspark_jax.drafting.head import DSparkHead

GATED = make_head("gated", V, None, H, R)


def with_params(**fields):
    return {"sampling": dataclasses.replace(PARAMS, **fields)}


HIDDEN_CASES = [
    ("head: found 'dict', expected a DSparkHead", {"head": {}}),
    (r"hidden.shape: found \(3, 4\), expected \[B, S, H\]", {"hidden": HIDDEN[..., 0]}),
    (r"hidden.shape: found \(3, 4, 11\), expected \[B, S, H\] = \[any, any, 12\]", {"hidden": HIDDEN[..., 1:]}),
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
