"""`dspark-jax draft` on the bundled checkpoints: its JSON against the reference's tokens, its table, its errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import CHECKPOINTS, GOLDENS
from safetensors.numpy import load_file, save_file

import dspark_jax
from dspark_jax.cli import main

RECORDED = CHECKPOINTS / "recorded" / "vanilla.safetensors"
COMMAND = ["draft", str(CHECKPOINTS / "dspark-vanilla"), "--hidden", str(RECORDED)]


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr("dspark_jax.cli.draft.CALLS", 2)


def run_json(capsys, *options):
    assert main([*COMMAND, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_the_references_first_round(capsys):
    report = run_json(capsys)
    reference = load_file(GOLDENS / "rounds" / "vanilla" / "prompt0.safetensors")
    first = report["blocks"][0]
    assert first["tokens"] == reference["round0.tokens"].tolist()
    assert first["position"] == int(reference["round0.start"]) + 1
    assert first["anchor_id"] == int(reference["round0.draft_input_ids"][0])
    # The recording is bf16, the reference f32: the confidence agrees to what bf16 hidden states allow.
    want = 1 / (1 + np.exp(-reference["round0.confidence_logits"]))
    np.testing.assert_allclose(first["confidence"], want, atol=0.02)
    assert first["valid"] is True
    assert first["num_draft"] == 7
    assert first["equals_dense"] is None
    assert len(report["blocks"]) == 24
    assert report["milliseconds_per_call"] > 0
    assert report["temporary_bytes"] > 0


def test_text_is_what_the_tokenizer_says(capsys):
    tokenizers = pytest.importorskip("tokenizers", reason="the text needs the tokenizers package")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    for block in run_json(capsys)["blocks"]:
        assert block["text"] == tokenizer.decode(block["tokens"], skip_special_tokens=False)


def test_topk_of_the_whole_vocabulary_equals_dense_and_a_small_one_does_not(capsys):
    assert all(block["equals_dense"] for block in run_json(capsys, "--draft-topk", "4096")["blocks"])
    assert not all(block["equals_dense"] for block in run_json(capsys, "--draft-topk", "8")["blocks"])


def test_seeds_are_per_block_and_reproducible(capsys):
    options = ["--temperature", "1", "--outputs", "candidates", "--draft-topk", "512"]
    one, again, other = (run_json(capsys, *options, "--seed", seed) for seed in ("1", "1", "2"))

    def tokens(report):
        return [block["tokens"] for block in report["blocks"]]

    assert tokens(one) == tokens(again)
    assert tokens(one) != tokens(other)


def test_block_i_takes_seed_n_plus_i(capsys):
    """The last block of one run equals that of a run over it alone whose seed is 23 higher."""
    head = dspark_jax.load_head(CHECKPOINTS / "dspark-vanilla")
    recorded = load_file(RECORDED)
    report = run_json(capsys, "--temperature", "1", "--seed", "5")
    sampling = dspark_jax.DraftSampling([1.0], [5 + 23], recorded["position"][23:])
    alone = dspark_jax.draft_block(head, recorded["hidden"][23:], recorded["anchor_ids"][23:], sampling=sampling)
    assert report["blocks"][23]["tokens"] == alone.tokens[0].tolist()


def test_threshold_prunes_at_the_first_step_below(capsys):
    for block in run_json(capsys, "--min-confidence", "0.6")["blocks"]:
        below = [c < 0.6 for c in block["confidence"]]
        assert block["num_draft"] == (below.index(True) if True in below else 7)


def test_fewer_steps_are_a_prefix(capsys):
    full, short = run_json(capsys), run_json(capsys, "--num-speculative-tokens", "3")
    for a, b in zip(full["blocks"], short["blocks"], strict=True):
        assert b["tokens"] == a["tokens"][:3]


def test_table_shows_text_confidence_time_and_memory(capsys):
    assert main([*COMMAND, "--draft-topk", "256", "--outputs", "logits"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "drafted text",
        "confidence",
        "= dense",
        "ms per call",
        "bytes of temporaries",
        "top-256 equals dense",
    ):
        assert word in shown
    assert '" self"' in shown


@pytest.fixture
def broken(tmp_path):
    """Write the recording with some tensors replaced or dropped."""

    def write(**changes):
        tensors = {**load_file(RECORDED), **changes}
        path = tmp_path / "broken.safetensors"
        save_file({name: array for name, array in tensors.items() if array is not None}, path)
        return str(path)

    return write


BAD = {
    "no checkpoint": (lambda b: ["draft", "nowhere", "--hidden", str(RECORDED)], "nowhere"),
    "no file": (lambda b: ["draft", COMMAND[1], "--hidden", "nothing.safetensors"], "nothing.safetensors"),
    "a directory": (lambda b: ["draft", COMMAND[1], "--hidden", str(CHECKPOINTS)], "directory"),
    "not safetensors": (lambda b: ["draft", COMMAND[1], "--hidden", __file__], "test_cli_draft.py"),
    "k too large": (lambda b: [*COMMAND, "--draft-topk", "4097"], "found 4097, expected an integer from 1 to 4096"),
    "k zero": (lambda b: [*COMMAND, "--draft-topk", "0"], "draft_topk: found 0"),
    "outputs": (lambda b: [*COMMAND, "--outputs", "words"], "outputs: found 'words'"),
    "candidates without k": (lambda b: [*COMMAND, "--outputs", "candidates"], "draft_topk"),
    "seed range": (lambda b: [*COMMAND, "--temperature", "1", "--seed", str(2**32)], "sampling.seed"),
    "seed without temperature": (lambda b: [*COMMAND, "--seed", "1"], "--temperature"),
    "temperature": (lambda b: [*COMMAND, "--temperature", "nan"], "--temperature: found nan"),
    "negative temperature": (lambda b: [*COMMAND, "--temperature", "-1"], "--temperature: found -1.0"),
    "steps": (lambda b: [*COMMAND, "--num-speculative-tokens", "8"], "found 8, expected 1 to 7"),
    "tokenizer": (lambda b: [*COMMAND, "--tokenizer", "gone.json"], "gone.json"),
    "missing tensor": (lambda b: [*COMMAND[:3], b(anchor_ids=None)], "'anchor_ids' is missing"),
    "wrong rank": (lambda b: [*COMMAND[:3], b(hidden=np.zeros((7, 192), np.float32))], "expected 3 dimensions"),
    "wrong width": (lambda b: [*COMMAND[:3], b(hidden=np.zeros((24, 7, 191), np.float32))], "hidden.shape"),
    "wrong rows": (lambda b: [*COMMAND[:3], b(position=np.zeros(23, np.int32))], "found 23 rows, expected 24"),
    "float anchors": (
        lambda b: [*COMMAND[:3], b(anchor_ids=np.zeros(24, np.float32))],
        "'anchor_ids': found dtype float32",
    ),
    "float position": (
        lambda b: [*COMMAND[:3], b(position=np.zeros(24, np.float32))],
        "'position': found dtype float32",
    ),
    "negative position": (lambda b: [*COMMAND[:3], b(position=np.full(24, -1, np.int32))], "'position': found -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, broken, capsys):
    arguments, words = BAD[case]
    assert main(arguments(broken)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("dspark-jax draft: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_module_runs_as_a_program_without_a_traceback():
    code = "import sys; from dspark_jax.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "draft"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "CHECKPOINT" in done.stderr


def test_bad_rows_are_null_in_valid_json(broken, capsys):
    """A NaN row and an anchor beyond 64 bits of sign: JSON stays JSON, the other blocks stay as they are."""
    recorded = load_file(RECORDED)
    hidden, anchors = recorded["hidden"].copy(), recorded["anchor_ids"].astype(np.uint64)
    hidden[0, 0] = np.nan
    anchors[1] = 2**64 - 1
    good = run_json(capsys)["blocks"]
    assert main([*COMMAND[:3], broken(hidden=hidden, anchor_ids=anchors), "--json"]) == 0

    def refuse(word):
        raise AssertionError(f"not JSON: {word}")

    bad = json.loads(capsys.readouterr().out, parse_constant=refuse)["blocks"]
    assert [b["valid"] for b in bad] == [False, False, *[True] * 22]
    assert bad[0]["confidence"][0] is None
    assert bad[1]["anchor_text"] is None
    for a, b in zip(good[2:], bad[2:], strict=True):
        assert (a["tokens"], a["text"]) == (b["tokens"], b["text"])
