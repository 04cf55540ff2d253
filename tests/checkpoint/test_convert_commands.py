"""The commands convert and inspect, progress, and what importing needs."""

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest
from convert_cases import H, same_heads
from fixture_checkpoints import make
from helpers import TESTS

import dspark_jax
from dspark_jax import load_head
from dspark_jax.checkpoint import convert, open_checkpoint
from dspark_jax.cli import main


def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def test_convert_and_inspect_as_commands(tmp_path):
    source = make("specforge", tmp_path)
    code, out, err = run("convert", source, tmp_path / "out")
    assert (code, "specforge checkpoint as safetensors, 29 tensors" in out) == (0, True)
    assert "lm_head.weight: not in the checkpoint: convert with --target DIR" in err
    code, out, err = run(
        "convert", source, tmp_path / "out", "--target", make("target", tmp_path), "--force", "--dtype", "f32"
    )
    assert (code, err) == (0, "")
    code, out, err = run("inspect", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "deepspec (full)" in out
    assert "F32" in out
    code, out, err = run("inspect", tmp_path / "out", "--json")
    assert json.loads(out)["config"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "{absent}", "{out}"), ("convert", "{source}", "{source}"), ("convert", "{broken}", "{out}"),
        ("convert", "{source}", "{out}", "--format", "x"), ("convert", "{source}", "{out}", "--dtype", "x"),
        ("convert", "{source}", "{out}", "--target", "{absent}"), ("convert", "{refused}", "{out}"),
        ("inspect", "{broken}"), ("inspect", "{absent}"), ("verify", "{source}", "{absent}"),
        ("verify", "{source}", "{source}", "--blocks", "0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments):
    broken = make("deepspec-gated", tmp_path)
    (broken / "model.safetensors").write_bytes(b"\xff" * 100)
    places = {
        "source": make("deepspec-vanilla", tmp_path), "out": tmp_path / "out", "absent": tmp_path / "absent",
        "broken": broken, "refused": make("nvfp4", tmp_path),
    }  # fmt: skip
    code, out, err = run(*(str(argument).format(**places) for argument in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"dspark-jax {arguments[0]}: error: ")
    assert not (tmp_path / "out").exists()


def test_the_script_is_the_command(tmp_path):
    source = make("deepspec-vanilla", tmp_path)
    script = TESTS.parent / "scripts" / "convert_checkpoint.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, script, source, tmp_path / "out", "--head-only"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert "5 tensors" in result.stdout
    same_heads(load_head(tmp_path / "out"), load_head(source))


def test_the_fixture_script_writes_what_is_asked(tmp_path):
    script = TESTS.parent / "scripts" / "make_fixtures.py"
    result = subprocess.run([sys.executable, script, tmp_path, "lfm2"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, str(tmp_path / "lfm2"))
    assert open_checkpoint(tmp_path / "lfm2").config.hidden_size == H
    assert subprocess.run([sys.executable, script, tmp_path, "x"], capture_output=True, check=False).returncode == 2


def test_missing_orbax_is_said_clearly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"Orbax trees needs orbax.*pip install 'dspark-jax\[orbax\]'"):
        convert(make("deepspec-vanilla", tmp_path), tmp_path / "out", format="orbax")
    assert not (tmp_path / "out").exists()


def test_the_progress_bar_appears_after_a_second(monkeypatch):
    from dspark_jax import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "rich.console", None)
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        now[0] = 0.0
        with progress.Progress(100, True) as bar:
            bar.add("a", 10)
            assert terminal.getvalue() == ""
            now[0] = 2.0
            bar.add("b", 40)
            assert bar.done == 50
        assert terminal.getvalue() != ""
        if not installed:
            assert "50%" in terminal.getvalue()


def test_importing_needs_no_optional_package():
    # Neither torch nor orbax nor huggingface_hub is imported by the library or by reading a checkpoint.
    code = (
        "import sys, dspark_jax.checkpoint, dspark_jax.cli.convert\n"
        f"dspark_jax.load_head({str(TESTS.parent / 'checkpoints' / 'dspark-rnn')!r})\n"
        "print([m for m in ('torch', 'orbax', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(pathlib.Path(dspark_jax.__file__).parent.parent),
    }
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "[]"
