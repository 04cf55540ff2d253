"""Batch buckets and counters: compilations are counted, results are those of unpadded calls."""

import jax
import numpy as np
import pytest
from helpers import make_head, make_inputs

import dspark_jax
from dspark_jax.integrations.buckets import BatchBuckets
from dspark_jax.integrations.counters import DraftCounters, PrometheusCollector

S, H, V = 3, 12, 37


def test_random_batches_compile_nothing_after_the_buckets():
    head = make_head()
    fn = dspark_jax.make_draft_fn(dspark_jax.DraftConfig(S, draft_sample_method="probabilistic"))
    buckets = BatchBuckets(fn, (64, 4, 16), data_axis_size=2)
    seconds = buckets.compile(head)
    assert sorted(seconds) == [4, 16, 64]
    assert fn.trace_count() == 3
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **facts: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    rng, (hidden, anchors) = np.random.default_rng(0), make_inputs(64, S, H, V)
    draw = (np.linspace(0, 1.5, 64, dtype=np.float32), np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.int32))
    want = np.asarray(fn(head, hidden, anchors, dspark_jax.DraftSampling(*draw))[0].tokens)
    compiled.clear()
    for B in rng.integers(1, 65, 200):
        first = int(rng.integers(0, 65 - B))
        part = slice(first, first + B)
        sampling = dspark_jax.DraftSampling(*(x[part] for x in draw))
        block = buckets(head, hidden[part], anchors[part], sampling)
        assert block.tokens.shape[0] == buckets.bucket(B)
        np.testing.assert_array_equal(np.asarray(block.tokens)[:B], want[part])  # noise knows no row, so rows are equal
        assert not np.asarray(block.valid)[B:].any()
        assert not np.asarray(block.num_draft)[B:].any()
    assert fn.trace_count() == 3
    assert compiled == []


def test_what_does_not_fit_a_bucket_is_refused():
    head, (hidden, anchors) = make_head(), make_inputs(8, S, H, V)
    fn = dspark_jax.make_draft_fn(dspark_jax.DraftConfig(S))
    with pytest.raises(ValueError, match="multiples of data_axis_size 4"):
        BatchBuckets(fn, (6,), data_axis_size=4)
    with pytest.raises(ValueError, match="at least one"):
        BatchBuckets(fn, ())
    buckets = BatchBuckets(fn, (4,))
    with pytest.raises(ValueError, match="compile"):
        buckets(head, hidden[:2], anchors[:2])
    buckets.compile(head)
    with pytest.raises(ValueError, match="1 to 4 requests"):
        buckets(head, hidden, anchors)
    with pytest.raises(ValueError, match="a host array"):
        buckets(head, jax.numpy.asarray(hidden[:2]), anchors[:2])
    with pytest.raises(ValueError, match="those that compile"):
        buckets(make_head("gated"), hidden[:2], anchors[:2])
    lazy = BatchBuckets(fn, (4,), allow_compile=True)
    assert lazy(head, hidden[:2], anchors[:2]).tokens.shape == (4, S)
    rows = dspark_jax.DraftConfig(S, draft_topk=4, outputs="logits")
    with pytest.raises(ValueError, match="DraftBuffer"):
        BatchBuckets(dspark_jax.make_draft_fn(rows), (4,))


def block_of(num_draft, valid):
    B = len(num_draft)
    return dspark_jax.DraftBlock(
        tokens=np.zeros((B, S), np.int32), num_draft=np.array(num_draft, np.int32), valid=np.array(valid),
        method="greedy",
    )  # fmt: skip


def test_counters_add_up():
    """Three requests that propose 3, 1 and 0 tokens, of which 2, 1 and 0 are accepted; a fourth is padding."""
    counters = DraftCounters(S, {"draft": lambda: 7})
    block = jax.tree.map(jax.numpy.asarray, block_of([3, 1, 0, 3], [True, True, False, True]))
    zeros = jax.numpy.zeros((4, S + 1))
    out = dspark_jax.Verified(
        num_accepted=jax.numpy.array([2, 1, 0, 3], "int32"), tokens=zeros.astype("int32"), accept_prob=zeros[:, :S],
        logprobs=zeros, valid=block.valid, stopped=block.valid,
    )  # fmt: skip
    counters.add(block, out, [True, True, True, False])
    first = counters.read()
    assert first == {
        "rounds": 1, "requests": 3, "invalid": 1, "drafted": [2, 1, 1], "accepted": [2, 1, 0], "certified": [0, 0, 0],
        "traces": {"draft": 7},
    }  # fmt: skip
    counters.add(block)
    assert counters.read()["drafted"] == [5 - 0, 3, 3]
    assert counters.read()["accepted"] == [2, 1, 0]  # reading again adds nothing


def test_prometheus_reads_the_counters():
    prometheus = pytest.importorskip("prometheus_client", reason="the prometheus extra is not installed")
    counters = DraftCounters(S, {"draft": lambda: 2})
    counters.add(jax.tree.map(jax.numpy.asarray, block_of([3, 1], [True, False])))
    registry = prometheus.CollectorRegistry()
    registry.register(PrometheusCollector(counters))
    assert registry.get_sample_value("dspark_drafted_total", {"position": "0"}) == 2
    assert registry.get_sample_value("dspark_drafted_total", {"position": "2"}) == 1
    assert registry.get_sample_value("dspark_invalid_total") == 1
    assert registry.get_sample_value("dspark_traces_total", {"program": "draft"}) == 2
