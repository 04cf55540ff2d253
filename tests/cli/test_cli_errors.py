"""Whatever a command meets, it ends with one line and an exit code; a written result is not called a failure."""

import json
import os
import subprocess
import sys

import pytest
from fixture_checkpoints import make
from helpers import CHECKPOINTS, TESTS

import dspark_jax.cli
from dspark_jax.cli import main, one_line

VANILLA, TARGET = str(CHECKPOINTS / "dspark-vanilla"), str(CHECKPOINTS / "target")
GENERATE = ["generate", TARGET, "--draft", VANILLA, "--prompt", "a"]


def run(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), **options.pop("env", {})}
    command = [sys.executable, "-m", "dspark_jax.cli", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, check=False, **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["calibrate", "RECORDS", "OUT", "--bins", "99999999"],
            "bins: found 99999999, expected an integer from 1 to 1048576",
        ),
        (["calibrate", "/dev/zero", "OUT"], "not a regular file"),
        (["calibrate", "PIPE", "OUT"], "not a regular file"),
        (["profile-sps", "no.such.module:f", "OUT"], "importing it failed"),
        (["profile-sps", "json:nothing", "OUT"], "expected a function nothing in json"),
        (["profile-sps", "..:f", "OUT"], "importing it failed"),
        (["inspect", "/dev/null"], "/dev/config.json: no such file"),
        (["inspect", "NESTED"], "levels deep"),
        (["draft", VANILLA, "--hidden", "PIPE"], "not a regular file"),
    ],
)
def test_absurd_input_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, words):
    os.mkfifo(tmp_path / "pipe")
    nested = make("deepspec-vanilla", tmp_path)
    (nested / "config.json").write_text('{"a": ' + "[" * 500 + "]" * 500 + "}")
    stand_ins = {
        "RECORDS": str(TESTS / "records" / "vanilla-heldout.npz"), "PIPE": str(tmp_path / "pipe"),
        "OUT": str(tmp_path / "out.json"), "NESTED": str(nested),
    }  # fmt: skip
    assert main([stand_ins.get(word, word) for word in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("a\nb"), KeyError("x"), AssertionError(), RecursionError("deep"), MemoryError()]
)
@pytest.mark.parametrize("debug", [False, True])
def test_what_nobody_foresaw_is_one_line_as_well(monkeypatch, capsys, error, debug):
    def fail(args):
        raise error

    monkeypatch.setattr("dspark_jax.cli.inspect.run", fail, raising=False)
    import dspark_jax.cli.inspect as command

    monkeypatch.setattr(command, "run", fail)
    assert main([*(["--debug"] if debug else []), "inspect", "x"]) == 2
    said = capsys.readouterr().err
    last = said.splitlines()[-1]
    assert last.startswith(f"dspark-jax inspect: error: {type(error).__name__}")
    assert ("Traceback" in said) == debug
    assert debug or said.count("\n") == 1


def test_messages_stay_one_screen():
    text = one_line(ValueError("name, " * 70_000))
    assert len(text) < dspark_jax.cli.MOST + 60
    assert "more characters" in text
    assert one_line(OSError(28, "No space left on device", "x.json")) == "x.json: No space left on device"
    assert one_line(ValueError("\ud800")) == "\\ud800"


def test_ascii_terminals_closed_outputs_and_names_that_are_not_utf8(tmp_path):
    """What was written stays a success where it cannot be printed."""
    source = make("deepspec-vanilla", tmp_path)
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    result = run("convert", str(source), str(tmp_path / "caf\u00e9"), env=ascii_only)
    assert (result.returncode, (tmp_path / "caf\u00e9" / "config.json").exists()) == (0, True)
    assert b"caf\\" in result.stdout  # escapes, of whatever the locale made of the name
    odd = os.path.join(os.fsencode(tmp_path), b"out-\xff")
    result = run("convert", str(source), odd)
    assert (result.returncode, os.path.isdir(odd)) == (0, True)
    closed = f'"{sys.executable}" -m dspark_jax.cli convert "{source}" "{tmp_path / "closed"}" >&-'
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(["bash", "-c", closed], env=environment, capture_output=True, check=False)
    assert (result.returncode, result.stderr, (tmp_path / "closed").is_dir()) == (0, b"", True)
    result = run("inspect", b"no-such-\xff")
    assert result.returncode == 2
    assert result.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token_id": "x"}, "eos_token_id: found x, expected token ids"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": 2**31}, "expected token ids"),
        ({"eos_token_id": True}, "expected token ids"),
    ],
)
def test_stop_ids_of_the_wrong_type_are_refused(tmp_path, config, words):
    from dspark_jax.cli.text import read_stop_ids

    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        read_stop_ids(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1' + "0" * 400 + "}")
    with pytest.raises(ValueError, match="beyond 64 bits"):
        read_stop_ids(str(tmp_path))
