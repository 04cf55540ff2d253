"""`convert` replaces and deletes nothing that it did not write, whatever happens; hooks act as others would."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from destination_cases import names, visible
from fixture_checkpoints import make
from helpers import TESTS

import dspark_jax.checkpoint.convert  # noqa: F401, the module, of which `convert` the function hides the name
from dspark_jax.checkpoint import convert, open_checkpoint
from dspark_jax.checkpoint.storage import appear
from dspark_jax.cli import main

MODULE = sys.modules["dspark_jax.checkpoint.convert"]


def meanwhile(monkeypatch, act, before=True):
    """Do something right before (or after) the tensors are written."""
    original = MODULE.write_safetensors

    def write(*args):
        if before:
            act()
        result = original(*args)
        if not before:
            act()
        return result

    monkeypatch.setattr(MODULE, "write_safetensors", write)


@pytest.fixture
def source(tmp_path):
    return make("deepspec-vanilla", tmp_path)


@pytest.mark.parametrize("kind", ["directory", "empty directory", "file", "link"])
@pytest.mark.parametrize("supported", [True, False])
def test_a_destination_that_appears_while_converting_is_not_replaced(tmp_path, source, monkeypatch, kind, supported):
    out = tmp_path / "out"

    def appear_now():
        if kind.endswith("directory"):
            out.mkdir()
            if kind == "directory":
                (out / "thesis.txt").write_text("years of work")
        elif kind == "file":
            out.write_text("years of work")
        else:
            out.symlink_to(tmp_path / "nowhere")

    meanwhile(monkeypatch, appear_now)
    if not supported:
        monkeypatch.setattr(appear, "_renameat2", unsupported)
    with pytest.raises(FileExistsError, match="out: appeared while converting, so it was not replaced"):
        convert(source, out)
    assert out.is_symlink() == (kind == "link")
    if kind == "directory":
        assert (out / "thesis.txt").read_text() == "years of work"
    elif kind == "file":
        assert out.read_text() == "years of work"
    assert names(tmp_path) == ["deepspec-vanilla", "out"]


def unsupported(source, destination, flags):
    raise OSError(errno.EINVAL, "Invalid argument", destination)


def test_force_refuses_foreign_files_and_names_them(tmp_path, source):
    out = tmp_path / "out"
    convert(source, out)
    (out / "notes.txt").write_text("mine")
    (out / "runs").mkdir()
    with pytest.raises(
        FileExistsError, match=r"out: holds notes\.txt, runs/, which no conversion wrote; move them away"
    ):
        convert(source, out, force=True)
    shutil.rmtree(out / "runs")
    os.rename(out / "notes.txt", tmp_path / "notes.txt")
    convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"


def test_what_appears_in_the_old_result_meanwhile_is_kept_and_named(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    convert(source, out)
    original = appear._renameat2

    def late(a, b, flags):
        (out / "late.txt").write_text("mine")  # behind the last look, before the exchange
        original(a, b, flags)

    monkeypatch.setattr(appear, "_renameat2", late)
    manifest = convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"
    (kept,) = [path for path in tmp_path.iterdir() if ".kept-" in path.name]
    assert names(kept) == ["late.txt"]
    assert (kept / "late.txt").read_text() == "mine"
    assert any(str(kept) in note and "late.txt" in note for note in manifest["notes"])


def test_a_result_is_there_at_every_moment(tmp_path, source, monkeypatch):
    """Nothing but the one exchange touches the name, and both sides of it are whole."""
    out, seen = tmp_path / "out", []
    convert(source, out)

    def watch(event, args):
        if seen is not None and event.startswith(("os.", "shutil.")) and str(out) in map(str, args):
            seen.append(event)

    original = appear._renameat2

    def exchange(a, b, flags):
        assert open_checkpoint(b).config.markov_head_type == "vanilla"
        assert open_checkpoint(a).config.markov_head_type == "rnn"
        original(a, b, flags)
        assert open_checkpoint(b).config.markov_head_type == "rnn"
        seen.append(flags)

    monkeypatch.setattr(appear, "_renameat2", exchange)
    sys.addaudithook(watch)
    convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert seen.count(appear._EXCHANGE) == 1
    assert not {"os.rename", "os.remove", "os.rmdir", "shutil.rmtree"} & set(map(str, seen))
    seen = None  # the hook stays for the life of the process


def test_without_an_exchange_force_refuses_unless_a_gap_is_allowed(tmp_path, source, monkeypatch):
    out = tmp_path / "out"
    convert(source, out)
    monkeypatch.setattr(appear, "_renameat2", unsupported)
    rnn = make("deepspec-rnn", tmp_path)
    with pytest.raises(OSError, match="cannot exchange two names; --allow-gap"):
        convert(rnn, out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "vanilla"
    convert(rnn, out, force=True, allow_gap=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"
    assert names(tmp_path) == ["deepspec-rnn", "deepspec-vanilla", "out"]


@pytest.mark.parametrize("late", [False, True])
def test_a_directory_that_takes_the_old_results_place_is_left_alone(tmp_path, source, monkeypatch, late):
    out = tmp_path / "out"
    convert(source, out)

    def swap():
        os.rename(out, tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", out)  # a result as well, but not the one that was looked at

    if late:
        original, done = appear._renameat2, []

        def exchange(a, b, flags):
            if not done:
                done.append(swap())
            original(a, b, flags)

        monkeypatch.setattr(appear, "_renameat2", exchange)
    else:
        meanwhile(monkeypatch, swap)
    with pytest.raises(FileExistsError, match="out: was replaced while converting, so it was left as it is"):
        convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "vanilla"
    assert names(tmp_path) == ["deepspec-rnn", "deepspec-vanilla", "moved", "out"]


def foreign_directory(out):
    """What somebody else puts in the place of a result."""
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")


def test_a_foreign_directory_in_the_gap_is_kept(tmp_path, source, monkeypatch):
    """No exchange, --allow-gap, and a foreign directory takes the name behind the last look."""
    out = tmp_path / "out"
    convert(source, out)

    def no_exchange(a, b, flags):
        if flags == appear._EXCHANGE:
            foreign_directory(out)
        unsupported(a, b, flags)

    monkeypatch.setattr(appear, "_renameat2", no_exchange)
    with pytest.raises(FileExistsError, match="was replaced while converting, so it was left as it is"):
        convert(make("deepspec-rnn", tmp_path), out, force=True, allow_gap=True)
    assert names(out) == ["thesis.txt"]
    assert names(tmp_path) == ["deepspec-rnn", "deepspec-vanilla", "out"]


@pytest.mark.parametrize("what", ["interrupt", "locked file"])
def test_what_appears_in_the_old_result_survives_trouble_behind_the_exchange(tmp_path, source, monkeypatch, what):
    out = tmp_path / "out"
    convert(source, out)
    original, unlink = appear._renameat2, os.unlink

    def late(a, b, flags):
        (out / "thesis.txt").write_text("years of work")
        original(a, b, flags)
        if what == "interrupt":
            raise KeyboardInterrupt

    def locked(path, *args, **options):
        if str(path).endswith("model.safetensors") and what == "locked file":
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, *args, **options)

    monkeypatch.setattr(appear, "_renameat2", late)
    monkeypatch.setattr(os, "unlink", locked)
    rnn = make("deepspec-rnn", tmp_path)
    if what == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            convert(rnn, out, force=True)
    else:
        convert(rnn, out, force=True)
    monkeypatch.undo()
    assert open_checkpoint(out).config.markov_head_type == "rnn"
    assert visible(tmp_path, "thesis.txt") == ["years of work"]
    assert not [name for name in names(tmp_path) if name.startswith(".dspark-")]


def test_nothing_that_is_read_may_lie_in_the_destination(tmp_path, source):
    out = tmp_path / "out"
    convert(source, out)
    # A hub's cache: the checkpoint is a directory of links to files elsewhere, here in the destination.
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(out / "config.json", cache)
    (cache / "model.safetensors").symlink_to(out / "model.safetensors")
    with pytest.raises(ValueError, match=r"destination: .*does not hold the source .*cache/model\.safetensors"):
        convert(cache, out, force=True)
    (tmp_path / "alias").symlink_to(out)
    with pytest.raises(ValueError, match="does not hold the source"):
        convert(tmp_path / "alias", out, force=True)
    with pytest.raises(ValueError, match="does not hold the source"):
        convert(source, out, target=tmp_path / "alias", force=True)
    assert open_checkpoint(out).config.markov_head_type == "vanilla"


@pytest.mark.parametrize("what", ["tensors", "config", "replaced", "same bytes again"])
def test_sources_that_change_while_they_are_read_are_errors(tmp_path, source, monkeypatch, what):
    weights, out = source / "model.safetensors", tmp_path / "out"

    def change():
        if what == "tensors":
            with open(weights, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\7")
            os.utime(weights, ns=(1, 1))
        elif what == "config":
            (source / "config.json").write_text(json.dumps({"block_size": 2}))
        else:
            shutil.copy(weights, tmp_path / "other")
            os.replace(tmp_path / "other", weights)  # the bytes are equal, the file is another

    meanwhile(monkeypatch, change, before=what != "config")
    with pytest.raises(ValueError, match="has changed since it was"):
        convert(source, out)
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("force", [False, True])
def test_signals_clean_up_like_ctrl_c(tmp_path, source, monkeypatch, number, force):
    out = tmp_path / "out"
    if force:
        convert(source, out)
    meanwhile(monkeypatch, lambda: os.kill(os.getpid(), number), before=False)
    before = signal.getsignal(number)
    assert main(["convert", str(source), str(out), *(["--force"] if force else [])]) == 128 + number
    assert signal.getsignal(number) == before
    assert names(tmp_path) == ["deepspec-vanilla", *(["out"] if force else [])]


def test_leftovers_of_running_conversions_stay(tmp_path, source, monkeypatch):
    during = []
    meanwhile(monkeypatch, lambda: during.append((appear.remove_leftovers(str(tmp_path)), names(tmp_path))))
    convert(source, tmp_path / "out")
    ((removed, seen),) = during
    assert removed == []
    assert [name.rsplit(".", 1)[1] for name in seen if name.startswith(".dspark-")] == ["lock", "partial"]
    lock, partial = (tmp_path / f".dspark-convert-0123456789abcdef.{kind}" for kind in ("lock", "partial"))
    (partial / "deep").mkdir(parents=True)
    lock.write_text("{} {} out".format(*appear._identity(str(partial))))
    (tmp_path / ".dspark-convert-of-somebody.partial").mkdir()
    assert appear.remove_leftovers(str(tmp_path)) == [".dspark-convert-0123456789abcdef.lock"]
    assert [name for name in names(tmp_path) if name.startswith(".")] == [".dspark-convert-of-somebody.partial"]


def test_names_of_the_longest_legal_length(tmp_path, source, monkeypatch):
    out = tmp_path / ("n" * 255)
    convert(source, out)
    convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"
    monkeypatch.setattr(appear, "_renameat2", unsupported)
    convert(source, out, force=True, allow_gap=True)
    assert open_checkpoint(out).config.markov_head_type == "vanilla"


def test_room_is_checked_before_and_named_when_writing_fails(tmp_path, source, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OSError, match=r"needs [\d,]+ bytes, and 1,000 are free") as error:
            convert(source, tmp_path / "out")
    assert error.value.filename == str(tmp_path / "out")

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "somewhere/model.safetensors")

    meanwhile(monkeypatch, full)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "out/model.safetensors: No space left on device; the result needs " in said
    assert said.count("\n") == 1
    assert names(tmp_path) == ["deepspec-vanilla"]


FULL_DISK = """
import sys
from dspark_jax.checkpoint.storage import orbax_tree
from dspark_jax.cli import main

def fail(self, index):
    raise ValueError("RESOURCE_EXHAUSTED: Error writing\\nNo space left on device\\n[source locations='...']")

orbax_tree.Lazy.block = fail
sys.exit(main(["convert", *sys.argv[1:], "--format", "orbax"]))
"""


def test_orbax_failures_are_one_line(tmp_path, source):
    """In a process of its own: the threads of an Orbax that has failed go on complaining."""
    pytest.importorskip("orbax.checkpoint", reason="Orbax trees need the orbax extra")
    command = [sys.executable, "-W", "ignore", "-c", FULL_DISK, str(source), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("dspark-jax convert: error:")]
    assert "Orbax could not write the tree" in said
    assert "the result needs" in said
    assert names(tmp_path) == ["deepspec-vanilla"]


def test_a_manifest_cannot_name_files_outside(tmp_path, source):
    out, mine = tmp_path / "out", tmp_path / "thesis.txt"
    convert(source, out)
    mine.write_text("years of work")
    manifest = json.loads((out / appear.MANIFEST).read_text())
    manifest["files_written"].append("../thesis.txt")
    (out / appear.MANIFEST).write_text(json.dumps(manifest))
    convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert mine.read_text() == "years of work"


def test_results_of_the_first_release_are_replaced(tmp_path, source):
    """Their manifests list no files; what such a result holds is known."""
    out = tmp_path / "out"
    convert(source, out)
    manifest = json.loads((out / appear.MANIFEST).read_text())
    del manifest["files_written"]
    (out / appear.MANIFEST).write_text(json.dumps(manifest))
    convert(make("deepspec-rnn", tmp_path), out, force=True)
    assert open_checkpoint(out).config.markov_head_type == "rnn"
