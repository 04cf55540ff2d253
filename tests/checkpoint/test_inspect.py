"""`inspect`: what a checkpoint is, on one screen."""

import pytest
from fixture_checkpoints import change_tensors, fixtures, make

from dspark_jax.checkpoint import inspect
from dspark_jax.checkpoint.inspect import to_text


@pytest.mark.parametrize("fixture", [*fixtures.FAMILIES])
def test_inspect_fits_on_a_screen(tmp_path, fixture):
    text = to_text(inspect(make(fixture, tmp_path)))
    assert len(text.splitlines()) <= 24
    for word in ("family", "geometry", "head", "vocabulary", "anchor", "lm head", "left out"):
        assert word in text


def test_inspect_says_what_it_is(tmp_path):
    text = to_text(inspect(make("speculators-reduced", tmp_path)))
    for words in (
        "speculators (full)", "hidden 64, layers 2, heads 4, key heads 2, head size 16, MLP 96, block 5, mask token 7",
        "vanilla Markov head of rank 8, confidence head on hidden states and previous token",
        "draft 48 of target 160 (d2t)", "slot 0 drafts: 5 drafts from a block of 5 (sample_from_anchor, stated)",
        "after target layers 0, 2, 4", "missing: give --target",
    ):  # fmt: skip
        assert words in text, words
    text = to_text(inspect(make("speculators-old-full", tmp_path)))
    assert "slot 0 (the anchor) does not draft: 4 drafts from a block of 5 (sample_from_anchor, by" in text
    text = to_text(inspect(make("deepseek-v4", tmp_path)))
    assert "tensor of the target, not of the drafter (layers.0.attn.wq_a.scale, ...)" in text
    path = change_tensors(make("deepspec-vanilla", tmp_path), lambda t: t.pop("norm.weight"))
    assert "norm.weight: missing" in to_text(inspect(path))
