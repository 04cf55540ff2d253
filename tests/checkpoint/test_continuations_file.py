"""The stored table of continuations: built by convert, read by the commands, refused where it does not fit."""

import json

import numpy as np
import pytest
from helpers import CHECKPOINTS, make_head

from dspark_jax import load_head
from dspark_jax.checkpoint.continuations import FILE_NAME, load_continuations, save_continuations
from dspark_jax.cli import main


def test_a_table_comes_back(tmp_path):
    head = make_head("gated").with_continuations(5)
    path = save_continuations(head, tmp_path)
    assert path.suffix != ".safetensors"
    again = load_continuations(make_head("gated"), tmp_path)
    for name in ("ids", "largest", "last", "slack"):
        a, b = (np.asarray(getattr(x.continuations, name)[...]) for x in (head, again))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_is_refused(tmp_path):
    head = make_head("vanilla").with_continuations(5)
    with pytest.raises(ValueError, match=r"continuations: found .*expected a file"):
        load_continuations(head, tmp_path)
    path = save_continuations(head, tmp_path)
    for other in (make_head("vanilla", seed=1), make_head("vanilla", dtype="bfloat16"), make_head("gated")):
        with pytest.raises(ValueError, match="a table of this head's weights"):
            load_continuations(other, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:-9])
    with pytest.raises(ValueError, match="a whole table"):
        load_continuations(head, tmp_path)
    path.write_bytes(data.replace(b"continuations-1", b"continuations-9"))
    with pytest.raises(ValueError, match="continuations format: found 'dspark-continuations-9'"):
        load_continuations(head, tmp_path)
    ids = np.asarray(head.continuations.ids[...])
    at = data.index(ids.tobytes())
    path.write_bytes(data[:at] + np.int32(37).tobytes() + data[at + 4 :])
    with pytest.raises(ValueError, match="draft ids below 37"):
        load_continuations(head, tmp_path)
    with pytest.raises(ValueError, match=r"head.continuations: found None"):
        save_continuations(make_head("vanilla"), tmp_path)


def test_convert_stores_and_draft_reads(tmp_path, capsys):
    """The command's drafts with both lists are those of the library."""
    destination = tmp_path / "converted"
    source = str(CHECKPOINTS / "dspark-vanilla")
    target = ["--target", str(CHECKPOINTS / "target")]
    assert main(["convert", source, str(destination), *target, "--continuations", "8"]) == 0
    assert "building a table of 8 continuations per token, 0.2 MiB" in capsys.readouterr().err
    assert load_continuations(load_head(destination), destination).continuations.m == 8
    recorded = next((CHECKPOINTS / "recorded").rglob("*.safetensors"))
    options = ["--hidden", str(recorded), "--draft-topk", "8", "--draft-markov-topk", "8", "--json", *target]
    assert main(["draft", str(destination), *options]) == 0
    out = capsys.readouterr()
    assert "building" not in out.err
    stored = json.loads(out.out)
    (destination / FILE_NAME).unlink()
    assert main(["draft", str(destination), *options]) == 0
    out = capsys.readouterr()
    assert "building a table of 8 continuations per token" in out.err
    assert [b["tokens"] for b in json.loads(out.out)["blocks"]] == [b["tokens"] for b in stored["blocks"]]
