"""Budgets of the GPU programs, compiled for an H200 and run nowhere: bytes, launches, temporaries, aliasing, sorts."""

import dataclasses

import pytest
from gpu import compile

if compile.missing() is not None:
    pytest.skip(str(compile.missing()), allow_module_level=True)

from gpu import cases
from gpu.cases import Case

pytestmark = pytest.mark.slow

DENSE, TOPK = Case(), Case(topk=512, outputs="candidates")


@pytest.fixture(scope="module")
def rows():
    """Return a function that compiles a case once and gives its row of the report."""
    target, known = compile.Target(), {}

    def row(case):
        if case not in known:
            known[case] = cases.measure(case, target)
        return known[case]

    return row


def change(case, **fields):
    return dataclasses.replace(case, **fields)


def test_floors_are_those_of_the_arithmetic():
    floors = [DENSE, change(DENSE, batch=1), change(DENSE, outputs="tokens"), TOPK, change(TOPK, batch=1)]
    assert [round(case.floor / 1e6) for case in floors] == [817, 549, 681, 254, 4]


def test_dense_rows_are_corrected_in_place_near_the_floor(rows):
    row = rows(DENSE)
    assert row["megabytes"] <= 1.05 * row["floor_megabytes"]
    assert row["aliased_megabytes"] >= 7 * 64 * 151936 * 2 / 1e6
    assert row["temp_megabytes"] <= 8
    assert row["kernels"] <= 4 * 7
    assert row["sort_lengths"] == []


def test_dense_tokens_alone_write_nothing(rows):
    row = rows(change(DENSE, outputs="tokens"))
    assert row["megabytes"] <= 1.05 * row["floor_megabytes"]
    assert row["temp_megabytes"] <= 8


@pytest.mark.parametrize(("batch", "factor"), [(1, 1.02), (256, 1.05)])
def test_dense_at_other_batches(rows, batch, factor):
    row = rows(change(DENSE, batch=batch))
    assert row["megabytes"] <= factor * row["floor_megabytes"]
    assert row["kernels"] <= 4 * 7


def test_the_lm_head_adds_its_own_product_alone(rows):
    inside, outside = rows(change(DENSE, lm_head=True)), rows(DENSE)
    weights, logits = 151936 * 2560 * 2 / 1e6, 7 * 64 * 151936 * 2 / 1e6
    added = inside["megabytes"] - outside["megabytes"]
    assert weights + logits <= added <= 1.02 * (weights + logits)
    assert inside["temp_megabytes"] <= 8  # no float32 copy of the logits


def test_candidates_near_the_floor_without_a_vocabulary_sort(rows):
    row = rows(TOPK)
    assert row["megabytes"] <= 1.4 * row["floor_megabytes"]
    assert row["vocabulary_sorts"] == 0
    assert max(row["sort_lengths"]) == 512
    assert row["conditionals"] == 0  # no fall-back: nothing can overflow
    assert row["temp_megabytes"] <= 24
    assert row["kernels"] <= 16


def test_candidates_of_one_request(rows):
    row = rows(change(TOPK, batch=1))
    assert row["kernels"] <= 16
    assert row["megabytes"] <= 8


def test_candidates_move_a_fraction_of_the_dense_bytes(rows):
    assert rows(TOPK)["megabytes"] <= 0.4 * rows(DENSE)["megabytes"]
    assert rows(change(TOPK, batch=1))["megabytes"] <= 0.011 * rows(change(DENSE, batch=1))["megabytes"]


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_heads_cost_little_more(rows, head):
    assert rows(change(TOPK, head=head))["megabytes"] <= 1.2 * rows(TOPK)["megabytes"]


def test_a_reused_buffer_costs_little_more_than_candidates(rows):
    row = rows(change(TOPK, outputs="logits"))
    assert row["megabytes"] <= 1.15 * rows(TOPK)["megabytes"]
    assert row["aliased_megabytes"] >= 7 * 64 * 151936 * 2 / 1e6


@pytest.mark.parametrize("case", [DENSE, TOPK, change(TOPK, head="rnn")], ids=lambda case: case.name)
def test_sampling_costs_little_more_than_greedy(rows, case):
    sampled, greedy = rows(change(case, method="probabilistic")), rows(case)
    assert sampled["megabytes"] <= 1.15 * greedy["megabytes"]
    assert sampled["kernels"] <= greedy["kernels"] + 7


def test_many_candidates_compile_without_a_vocabulary_sort(rows):
    row = rows(change(TOPK, topk=4096))
    assert row["vocabulary_sorts"] == 0
    assert row["megabytes"] <= 1.4 * row["floor_megabytes"]


def test_budget_of_the_plain_dense_form(rows):
    row = rows(change(DENSE, implementation="xla"))
    assert row["megabytes"] <= 2.2 * row["floor_megabytes"]
    assert row["aliased_megabytes"] >= 7 * 64 * 151936 * 2 / 1e6


@pytest.mark.parametrize("topk", [512, 151936 // 4])
def test_budget_of_the_plain_candidates(rows, topk):
    row = rows(change(TOPK, topk=topk, implementation="xla", batch=64 if topk == 512 else 8))
    assert row["vocabulary_sorts"] == 0
    if topk == 512:
        assert row["megabytes"] <= 4 * row["floor_megabytes"]


def test_the_default_is_the_plain_form_until_a_card_has_passed(rows):
    """Compiled for a GPU with implementation=None: no kernel of ours while the table is empty."""
    from dspark_jax.kernels.dispatch import VERIFIED

    default = rows(change(TOPK, batch=1, implementation=None))
    assert (default["kernels"] == rows(change(TOPK, batch=1, implementation="xla"))["kernels"]) == (not VERIFIED)


@pytest.mark.parametrize("batch", [33, 8])
def test_odd_batches_heads_and_sizes_lower_for_triton(rows, batch):
    """Nothing wants powers of two: B = 33, k = 100, a gated head, sampled."""
    row = rows(Case(batch=batch, topk=100, head="gated", method="probabilistic", outputs="candidates"))
    assert row["vocabulary_sorts"] == 0
    row = rows(Case(batch=batch, head="rnn", method="probabilistic", outputs="tokens"))
    assert row["megabytes"] <= 1.1 * row["floor_megabytes"]
