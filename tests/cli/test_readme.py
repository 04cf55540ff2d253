"""Python examples of the README and the decoding guide run as written, from the root, and print what they say."""

import re
import runpy

import pytest
from helpers import TESTS

ROOT = TESTS.parent
PAGES = ("README.md", "docs/decoding.md")  # pages whose Python examples are whole programs
EXAMPLES = [
    example
    for page in PAGES
    for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number], encoding="utf-8")
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    for line in re.findall(r"^print\(.*\)  # (.+)$", EXAMPLES[number], re.MULTILINE):
        assert line in printed


def test_there_is_an_example_of_about_twenty_lines():
    assert len(EXAMPLES) >= 3
    assert 10 <= len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 25


def test_commands_named_exist():
    for script in re.findall(r"scripts/[\w.]+", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / script).is_file(), script
