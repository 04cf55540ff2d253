"""Reading JSON of any kind quickly and within bounds; writing files that appear whole."""

import errno
import json
import os
import stat

import pytest

from dspark_jax import atomic_files
from dspark_jax.atomic_files import open_replacing, replacing, write_json
from dspark_jax.json_files import MAX_DEPTH, parse_json, parse_json_object, read_bytes, read_json, read_json_lines


def test_json_is_read_as_it_is(tmp_path):
    value = {"a": [1, -2.5, True, None, "\u00e9"], "b": {"c": 2**64 - 1}}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "x.json") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "key 'a' is given twice"),
        (b'{"a": {"b": 1, "b": 1}}', "key 'b' is given twice"),
        (b'{"a": NaN}', "NaN is no finite number"),
        (b'{"a": -Infinity}', "-Infinity is no finite number"),
        (b'{"a": 1e999}', "1e999 is beyond the numbers that a float holds"),
        (b'{"a": 18446744073709551616}', "the integer 18446744073709551616 is beyond 64 bits"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "is beyond 64 bits"),
        (b'{"a": "\xff"}', "can't decode"),
        (b'{"a": 1', "delimiter"),
        (b"", "Expecting value"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", f"nested more than {MAX_DEPTH} levels deep"),
        (b"[" * 100_000, "recursion|nested|Expecting"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(text, reason):
    with pytest.raises(ValueError, match=rf"^here: not valid JSON \(.*({reason})") as error:
        parse_json("here", text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_depth_up_to_the_limit_is_accepted():
    parse_json("here", b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_another_value_than_an_object_is_named():
    with pytest.raises(ValueError, match="here: found list, expected a JSON object"):
        parse_json_object("here", b"[1]")


def test_pipes_devices_directories_and_large_files_are_refused_without_reading(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)  # sparse
    for path, reason in (
        (tmp_path / "pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "large", f"{1 << 40} bytes, expected at most"),
    ):
        for read in (read_json, lambda path: list(read_json_lines(path))):
            with pytest.raises(ValueError, match=reason):
                read(path)
    with pytest.raises(FileNotFoundError, match="none: no such file"):
        read_bytes(tmp_path / "none", 10)


def test_lines_are_numbered_and_empty_ones_skipped(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n[2]\n{"a": 1, "a": 2}\n')
    lines = read_json_lines(tmp_path / "x.jsonl")
    assert next(lines) == (1, {"a": 1})
    assert next(lines) == (3, [2])
    with pytest.raises(ValueError, match=r"x\.jsonl, line 4: not valid JSON"):
        next(lines)


def test_a_file_appears_whole_and_keeps_its_mode(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"b": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~atomic_files._umask()
    path.chmod(0o640)
    write_json(path, {"b": 2})
    assert (json.loads(path.read_text()), stat.S_IMODE(path.stat().st_mode)) == ({"b": 2}, 0o640)
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_a_failed_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "x.json"
    path.write_text("old")

    def fail():
        with open_replacing(path) as file:
            file.write("new")
            raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]
    if isinstance(error, OSError):
        assert raised.value.filename == str(path)  # the name that the user gave, not that of the file beside it


def test_names_of_the_longest_legal_length_and_links(tmp_path):
    path = tmp_path / ("n" * 250 + ".json")
    write_json(path, 1)
    assert path.read_text() == "1\n"
    (tmp_path / "link").symlink_to(path)
    write_json(tmp_path / "link", 2)
    assert (tmp_path / "link").is_symlink()
    assert path.read_text() == "2\n"
    with pytest.raises(FileNotFoundError) as error, replacing(tmp_path / "none" / "x"):
        pass
    assert error.value.filename == str(tmp_path / "none" / "x")
