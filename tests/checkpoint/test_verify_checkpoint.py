"""`verify` against PyTorch: right conversions pass for every kind of head, and each way of being wrong fails."""

import contextlib
import io
import json
import sys

import numpy as np
import pytest
from fixture_checkpoints import change_config, change_tensors, fixtures, make, read_file
from helpers import HEAD_GOLDENS, f32, margin, read

from dspark_jax.checkpoint import convert, verify
from dspark_jax.checkpoint.torch_reference import TorchHead, TorchSource
from dspark_jax.cli import main

torch = pytest.importorskip("torch", reason="verify compares with PyTorch, which is installed for Python 3.11 only")

W2 = "markov_head.markov_w2.weight"


def fixture_and_result(tmp_path, fixture, target=None, **options):
    source = make(fixture, tmp_path)
    convert(source, tmp_path / "out", target=target, **options)
    return source, tmp_path / "out"


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["verify", *map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


# ---- the reference is the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in HEAD_GOLDENS if name.endswith(("f32", "softcap"))])
def test_the_pytorch_head_equals_the_released_code(goldens, name):
    path = goldens / "heads" / name
    golden = read(path / "golden.safetensors")
    head = TorchHead(TorchSource(str(path)), None, lambda tensor: tensor)
    tensors = [torch.from_numpy(np.array(golden[key])) for key in ("in.hidden", "in.anchor_ids")]
    tokens, logits, confidence = head.draft(tensors[0], tensors[1].long())
    wanted = f32(golden["out.corrected_logits"])
    clear = np.logical_and.accumulate(margin(wanted) > 1e-4, axis=1)
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(np.where(clear, tokens, 0), np.where(clear, golden["out.greedy_tokens"], 0))
    np.testing.assert_allclose(logits.numpy()[clear], wanted[clear], atol=2e-6 * np.abs(wanted).max())
    np.testing.assert_allclose(confidence.numpy()[clear], f32(golden["out.confidence_logits"])[clear], atol=1e-5)


# ---- right conversions pass ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fixture", ["deepspec-rnn", "deepspec-gemma4", "speculators-reduced", "deepseek-v4.1", "torchspec"]
)
def test_right_conversions_pass(tmp_path, fixture):
    target = make("target", tmp_path) if fixture in ("torchspec", "speculators-reduced") else None
    source, out = fixture_and_result(tmp_path, fixture, target)
    report = verify(source, out, target=target)
    assert report.passed, report
    assert report.with_lm_head
    assert report.tensors == len(read_file(out / "model.safetensors"))
    assert report.token_agreement == 1
    assert 0 < report.logit_error <= report.tolerance  # two implementations differ in the last bits
    assert report.confidence_error is not None


def test_pytorch_reads_the_result(tmp_path):
    from safetensors.torch import load_file

    source, out = fixture_and_result(tmp_path, "deepspec-gated")
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("options", [{"format": "orbax"}, {"dtype": "f32"}, {"dtype": "bf16"}, {"head_only": True}])
def test_every_kind_of_result_passes(tmp_path, options):
    if options.get("format") == "orbax":
        pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    source = make("deepspec-gated", tmp_path)
    change_tensors(source, lambda t: t.update({W2: fixtures.f32(fixtures.V, fixtures.R)}))  # bf16 then rounds it
    convert(source, tmp_path / "out", **options)
    report = verify(source, tmp_path / "out")
    assert report.passed, report


def test_without_any_lm_head_the_markov_walk_is_compared(tmp_path):
    source, out = fixture_and_result(tmp_path, "specforge-early")
    report = verify(source, out)
    assert report.passed, report
    assert not report.with_lm_head
    assert verify(source, out, target=make("target-tied", tmp_path)).with_lm_head


def test_a_tied_target(tmp_path):
    target = make("target-tied", tmp_path)
    source, out = fixture_and_result(tmp_path, "specforge", target)
    report = verify(source, out, target=target)
    assert report.passed, report


# ---- wrong ones fail -------------------------------------------------------------------------------------------------


def swap_thirds(tensors):
    weight = tensors["markov_head.joint_proj.weight"][1]
    tensors["markov_head.joint_proj.weight"] = ("BF16", np.roll(weight, fixtures.R, axis=0))


def transpose_bytes(tensors):
    # What safetensors' numpy writer does to a transposed view: the bytes untransposed under the shape.
    weight = tensors[W2][1]
    tensors[W2] = ("BF16", np.ascontiguousarray(weight.T).reshape(weight.shape))


def other_head(tensors):
    tensors["lm_head.weight"] = ("BF16", np.roll(tensors["lm_head.weight"][1], 1, axis=0))


def zero_bias(tensors):
    tensors["confidence_head.proj.bias"] = ("BF16", 0 * tensors["confidence_head.proj.bias"][1])


@pytest.mark.parametrize(
    ("damage", "name", "tokens"),
    [(swap_thirds, "joint_proj", True), (transpose_bytes, "markov_w2", True), (other_head, "lm_head", True),
     (zero_bias, "confidence_head", False)],
)  # fmt: skip
def test_damaged_results_fail(tmp_path, damage, name, tokens):
    source, out = fixture_and_result(tmp_path, "deepspec-rnn")
    change_tensors(out, damage)
    report = verify(source, out)
    assert not report.passed
    assert any("checksum" in problem and name in problem for problem in report.problems)
    assert any("differs from" in problem and name in problem for problem in report.problems)
    if tokens:
        assert report.unexplained > 0
        assert report.logit_error > report.tolerance
    else:
        assert report.confidence_error > report.tolerance


def test_the_draft_alone_finds_wrong_facts(tmp_path):
    """A config that loses the softcap, or ids off by one: the tensors are equal, the draft is not."""
    source, out = fixture_and_result(tmp_path, "deepspec-gemma4")
    change_config(out, final_logit_softcapping=None)
    report = verify(source, out)
    assert not report.passed
    assert report.logit_error > report.tolerance
    source = make("speculators-reduced", tmp_path)
    convert(source, tmp_path / "reduced")
    manifest = json.loads((tmp_path / "reduced" / "dspark_manifest.json").read_text())

    def shift(tensors):
        ids = np.arange(fixtures.VD) + tensors["d2t"][1]
        free = np.setdiff1d(np.arange(ids[-1] + 1), ids)[-1]
        ids = np.sort(np.append(ids[ids != ids[ids > free][0]], free))
        tensors["d2t"] = ("I64", ids - np.arange(fixtures.VD))

    change_tensors(tmp_path / "reduced", shift)
    assert manifest["tensors"]["d2t"]["dtype"] == "I64"
    report = verify(source, tmp_path / "reduced")
    assert any(problem.startswith("d2t: differs") for problem in report.problems)
    assert not report.passed


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"target_layer_ids": [1, 3, 5]}, "config.json: target_layer_ids: [1, 3, 5], the source says [0, 2, 4]"),
        ({"block_size": 6}, "config.json: block_size: 6, the source says 5"),
        ({"mask_token_id": 8}, "config.json: mask_token_id: 8, the source says 7"),
    ],
)
def test_wrong_facts_about_the_block_fail(tmp_path, keys, words):
    source, out = fixture_and_result(tmp_path, "speculators-full")
    assert verify(source, out).passed
    change_config(out, **keys)
    report = verify(source, out)
    assert words in report.problems
    assert not report.passed


def test_unaccounted_tensors_fail(tmp_path):
    source, out = fixture_and_result(tmp_path, "deepspec-vanilla")
    change_tensors(source, lambda t: t.update({"verifier_norm.weight": fixtures.f32(4)}))
    report = verify(source, out)
    assert report.problems == ["verifier_norm.weight: in the source, but not in the manifest"]
    assert not report.passed


def test_a_wrong_dequantisation_fails(tmp_path):
    source, out = fixture_and_result(tmp_path, "deepseek-v4")

    def swap_nibbles(tensors):
        name = "layers.1.ffn.experts.2.w3.weight"
        weight = tensors[name][1]
        tensors[name] = ("BF16", np.stack([weight[:, 1::2], weight[:, 0::2]], -1).reshape(weight.shape))

    change_tensors(out, swap_nibbles)
    report = verify(source, out)
    assert not report.passed
    wanted = "mtp.1.ffn.experts.2.w3.weight with mtp.1.ffn.experts.2.w3.scale"
    assert any(wanted in problem for problem in report.problems)


def test_results_without_a_manifest_are_refused(tmp_path):
    source = make("deepspec-vanilla", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no dspark_manifest\.json"):
        verify(source, source)
    (source / "dspark_manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="found list, expected a JSON object"):
        verify(source, source)
    (source / "dspark_manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="expected an object with tensors and sources"):
        verify(source, source)
    for entry in (3, {}, {"sha256": "x", "transform": "copy", "sources": []}, {"sha256": "x", "sources": ["a"]}):
        (source / "dspark_manifest.json").write_text(json.dumps({"tensors": {"a": entry}, "sources": {}}))
        with pytest.raises(ValueError, match="tensor 'a': expected sources, transform and sha256"):
            verify(source, source)


def test_sources_that_cannot_be_read_are_refused(tmp_path):
    source, out = fixture_and_result(tmp_path, "deepspec-vanilla")
    pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    convert(source, tmp_path / "tree", format="orbax")
    with pytest.raises(ValueError, match="an Orbax tree, expected the safetensors checkpoint"):
        verify(tmp_path / "tree", out)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-5])
    code, _, err = run(source, out)
    assert (code, "truncated" in err) == (2, True)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_exit_codes(tmp_path):
    source, out = fixture_and_result(tmp_path, "deepspec-vanilla")
    code, text, err = run(source, out, "--blocks", 3)
    assert (code, err) == (0, "")
    assert text.splitlines()[-1] == "PASS"
    assert "3 random blocks of 5 steps" in text
    code, text, _ = run(source, out, "--json")
    assert (code, json.loads(text)["passed"]) == (0, True)
    change_tensors(out, other_head)
    code, text, _ = run(source, out)
    assert (code, text.splitlines()[-1]) == (1, "FAIL")
    assert "lm_head.weight: differs from lm_head.weight of the source" in text


def test_without_pytorch_the_message_says_so(tmp_path, monkeypatch):
    source, out = fixture_and_result(tmp_path, "deepspec-vanilla")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, text, err = run(source, out)
    assert (code, text) == (2, "")
    assert "needs torch, which is not installed: pip install torch" in err
