"""The benchmark: its ports draft what the library drafts, and a trace's kernels land in their categories."""

import json

import bench_draft
import bench_ports
import jax.numpy as jnp
import numpy as np
import pytest
from gpu import profile
from helpers import make_head

from dspark_jax import draft_from_logits


@pytest.fixture(scope="module")
def problem():
    head = make_head("vanilla", V=211, r=8)
    base = jnp.asarray(np.random.default_rng(3).standard_normal((4, 3, 211)) * 3, jnp.float32)
    return head, base, jnp.asarray([5, 6, 7], jnp.int32)


def test_the_plain_port_drafts_the_same(problem):
    head, base, anchor = problem
    w1, w2 = head.markov.markov_w1[...], head.markov.markov_w2[...]
    _, tokens = bench_ports.jax_dense(base, w1, w2, anchor)
    np.testing.assert_array_equal(tokens.T, draft_from_logits(head, base, anchor).tokens)
    _, tokens = bench_ports.jax_topk(base, w1, w2, anchor, 9)
    np.testing.assert_array_equal(tokens.T, draft_from_logits(head, base, anchor, topk=9).tokens)


def test_a_run_reports_every_case(tmp_path, capsys):
    path = tmp_path / "bench.json"
    sizes = ["--batch", "2", "--vocab", "300", "--rank", "8", "--steps", "3", "--topk", "9", "--rounds", "3"]
    assert bench_draft.main([*sizes, "--no-torch", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    names = [case["name"] for case in report["cases"]]
    assert names[:3] == [f"dspark_jax xla: {k}" for k in ("dense, logits", "dense, tokens", "top-9, candidates")]
    assert {"plain JAX: dense", "plain JAX: top-9", "lax.top_k alone", "select_topk xla alone"} <= set(names)
    assert all(case["ms"] > 0 and case["rounds"] == 3 for case in report["cases"])
    assert "plain JAX: top-9" in capsys.readouterr().out


def test_a_floor_is_the_arithmetic():
    problem = bench_draft.Problem(2, 3, 40, 4, 5, "float32")
    assert problem.floor(None, "tokens") == 2 * 40 * 4 * 4 + 2 * 3 * 40 * 4
    assert problem.floor(None, "logits") == 2 * 40 * 4 * 4 + 2 * 2 * 3 * 40 * 4
    assert problem.floor(5, "candidates") == 2 * 3 * 40 * 4 + 2 * 3 * 5 * 4 * 4


def test_kernels_are_summed_by_category():
    events = [
        {"name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
        {"name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #13(Compute)"}},
        {"name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
        {"ph": "X", "pid": 1, "tid": 7, "name": "dspark_dense_step", "dur": 100.0},
        {"ph": "X", "pid": 1, "tid": 7, "name": "gemm_fusion_dot_3", "dur": 20.0},
        {"ph": "X", "pid": 1, "tid": 7, "name": "dspark_pick_groups16", "dur": 30.0},
        {"ph": "X", "pid": 1, "tid": 7, "name": "loop_add_fusion", "dur": 50.0},
        {"ph": "X", "pid": 1, "tid": 8, "name": "loop_add_fusion", "dur": 50.0},
        {"ph": "X", "pid": 2, "tid": 7, "name": "dot", "dur": 999.0},
    ]
    table = profile.table(profile.kernels(events), drafts=2)
    assert table == {
        "projection": {"microseconds": 60.0, "launches": 1.0, "share": 0.6},
        "selection": {"microseconds": 15.0, "launches": 0.5, "share": 0.15},
        "elementwise": {"microseconds": 25.0, "launches": 0.5, "share": 0.25},
    }
