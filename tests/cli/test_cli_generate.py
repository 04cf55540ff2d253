"""`dspark-jax generate`: streamed text, marks, figures and errors."""

import json
import re

import pytest
from helpers import CHECKPOINTS

from dspark_jax.cli import main
from dspark_jax.cli.text import TextStream, read_prompts, read_stop_ids

tokenizers = pytest.importorskip("tokenizers", reason="reads text")

COMMAND = ["generate", str(CHECKPOINTS / "dspark-vanilla"), "--target", str(CHECKPOINTS / "target")]


def first_prompt():
    return json.loads((CHECKPOINTS / "prompts.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_text_is_the_targets_with_accepted_drafts_marked(capsys):
    entry = first_prompt()
    recorded = json.loads((CHECKPOINTS.parent / "tests/goldens/rounds/vanilla/greedy.json").read_text())[0]
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    code = main([*COMMAND, "--prompt", entry["text"], "--max-new-tokens", "24", "--dtype", "float32"])
    out = capsys.readouterr().out
    assert code == 0
    text, figures = out.rsplit("\n\n", 1)
    expected = tokenizer.decode(recorded["output_ids"][:120], skip_special_tokens=False)
    assert text.replace("⟦", "").replace("⟧", "") == expected
    # The reference's first rounds accepted 1, 0, 3, 0, 0, 5 drafts; its round lengths are one more.
    lengths = recorded["acceptance_lengths"]
    rounds = next(n for n in range(1, 99) if 1 + sum(lengths[:n]) >= 24)
    assert f"24 tokens, {rounds} rounds: acceptance length {sum(lengths[:rounds]) / rounds:.2f} of at most 8" in figures
    marked = re.findall("⟦(.*?)⟧", text, re.DOTALL)
    assert len(marked) == sum(length > 1 for length in lengths[:rounds])
    assert re.search(r"plain decoding: [\d.]+ tokens/s; speed-up [\d.]+x, same text\n", figures)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--prompt", ""], "--prompt: found '', expected text of at least one token"),
        (["--prompt", "x", "--max-new-tokens", "5000"], "at most 2048 positions"),
        (["--prompt", "x", "--draft-topk", "0"], "topk: found 0"),
        (["--prompt", "x", "--min-confidence", "2"], "min_confidence: found 2.0"),
        (["--prompt", "x", "--target", str(CHECKPOINTS / "dspark-rnn")], "tokenizer.json: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(change, message, capsys):
    assert main([*COMMAND, *change]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_text_stream_holds_back_half_characters():
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    text = "π = 3; naïve → 日本"
    ids = tokenizer.encode(text).ids
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.push([], last=True) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len([piece for piece in pieces if piece])


def test_prompt_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["def f():", "more"]}\n\n{"prompt_ids": [5, 6]}\n{"prompt_ids": [7]}\n')
    found = read_prompts(str(path), str(CHECKPOINTS / "target"), limit=2)
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINTS / "target" / "tokenizer.json"))
    assert found == [[tokenizer.encode("def f():").ids, tokenizer.encode("more").ids], [[5, 6]]]
    assert read_stop_ids(str(CHECKPOINTS / "target")) == [0]
