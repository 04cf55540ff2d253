"""The code of docs/servers.md, run as one program from top to bottom."""

import re

import numpy as np
import pytest
from helpers import TESTS

from dspark_jax.cli import main


def test_the_page_runs(monkeypatch):
    pytest.importorskip("flatbuffers", reason="the export extra is not installed")
    monkeypatch.chdir(TESTS.parent)
    text = (TESTS.parent / "docs" / "servers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 7
    names: dict = {}
    exec(compile("\n".join(blocks), "docs/servers.md", "exec"), names)
    assert names["totals"]["requests"] == 3
    assert np.asarray(names["tokens"]).shape == (4, 3)
    assert names["seconds"].keys() == {2, 4}


def test_the_command_writes_an_export(tmp_path, capsys):
    pytest.importorskip("flatbuffers", reason="the export extra is not installed")
    source = str(TESTS.parent / "checkpoints" / "dspark-vanilla")
    steps = ["--num-speculative-tokens", "2", "--draft-topk", "4"]
    assert main(["export", source, str(tmp_path), *steps, "--batch", "1", "16", "--platforms", "cpu"]) == 0
    assert "batches 1 to 16, platforms cpu" in capsys.readouterr().out
    assert main(["export", source, str(tmp_path), "--platforms", "metal"]) == 2
    assert "platforms: found 'metal'" in capsys.readouterr().err
