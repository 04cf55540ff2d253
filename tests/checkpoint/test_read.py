"""Reading safetensors: every dtype bit for bit, and nothing believed that a header claims."""

import json
import os
import resource
import time

import ml_dtypes
import numpy as np
import pytest
from fixture_checkpoints import fixtures, header_file, make, read_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_jax.checkpoint.storage.header import DTYPES, MAX_HEADER, read_header
from dspark_jax.checkpoint.storage.tensor_files import TensorFiles

F4 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_is_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    header, data = {}, b""
    for name, dtype in DTYPES.items():
        raw = rng.integers(0, 2 if name == "BOOL" else 256, 6 * dtype.itemsize, np.uint8).tobytes()
        header[name] = entry(name, (2, 3), (len(data), len(data) + len(raw)))
        data += raw
    files = TensorFiles(header_file(tmp_path / "x.safetensors", header, data))
    for name, dtype in DTYPES.items():
        array = files.read(name)
        start, stop = header[name]["data_offsets"]
        assert (array.shape, array.dtype) == ((2, 3), dtype)
        assert array.tobytes() == data[start:stop]
        assert not array.flags.writeable
        assert files.read(name, 1, 2).tobytes() == data[start + (stop - start) // 2 : stop]
    assert files.read("BF16").dtype == ml_dtypes.bfloat16


def test_scalars_empty_tensors_and_odd_alignment(tmp_path):
    header = {"a": entry("I8", (), (0, 1)), "b": entry("F32", (), (1, 5)), "c": entry("F32", (0, 3), (5, 5))}
    files = TensorFiles(header_file(tmp_path / "x.safetensors", header, b"\x07" + np.float32(2.5).tobytes()))
    assert files.read("a") == 7
    assert files.read("b") == 2.5
    assert files.read("c").shape == (0, 3)


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({}, b"", 1 << 62, "header length 4611686018427387904 lies beyond the file"),
        ({"a": F4}, b"\0" * 15, None, "'a'.*do not lie in the file.*truncated"),
        ({"a": F4}, b"\0" * 17, None, "1 bytes after the last tensor"),
        ({"a": entry(shape=(2**40, 2**40))}, b"\0" * 16, None, "'a'.*needs 4835703278458516698824704 bytes"),
        ({"a": entry(shape=(5,))}, b"\0" * 16, None, r"'a': F32 \[5\] needs 20 bytes, data_offsets give 16"),
        ({"a": entry(shape=(-4,))}, b"\0" * 16, None, "'a'.*found shape"),
        ({"a": entry(shape=(4.0,))}, b"\0" * 16, None, "'a'.*found shape"),
        ({"a": entry(shape=(True, 4))}, b"\0" * 16, None, "'a'.*found shape"),
        ({"a": entry(shape=(1,) * 33)}, b"\0" * 4, None, "'a'.*at most 32"),
        ({"a": {**F4, "shape": 4}}, b"\0" * 16, None, "'a'.*found shape"),
        ({"a": F4, "b": entry(offsets=(8, 24))}, b"\0" * 24, None, "'b'.*overlaps 'a'"),
        ({"a": F4, "b": F4}, b"\0" * 16, None, "overlaps"),
        ({"a": F4, "b": entry(offsets=(20, 36))}, b"\0" * 36, None, "'b'.*leaves a hole after 'a'"),
        ({"a": entry(offsets=(16, 0))}, b"\0" * 16, None, "'a'.*do not lie"),
        ({"a": entry(offsets=(-16, 0))}, b"\0" * 16, None, "'a'.*data_offsets"),
        ({"a": entry(offsets=(0, 8, 16))}, b"\0" * 16, None, "'a'.*data_offsets"),
        ({"a": entry(dtype="F4")}, b"\0" * 16, None, "'a'.*found dtype 'F4'"),
        ({"a": entry(dtype=["F32"])}, b"\0" * 16, None, "'a'.*found dtype"),
        ({"a": {**F4, "extra": 1}}, b"\0" * 16, None, "'a'.*exactly dtype, shape and data_offsets"),
        ({"a": [1]}, b"\0" * 16, None, "'a'.*exactly dtype"),
        ({"a\x1b[2J": F4}, b"\0" * 16, None, "printable"),
        ({"": F4}, b"\0" * 16, None, "printable"),
        ({"__metadata__": {"format": 1}, "a": F4}, b"\0" * 16, None, "__metadata__"),
        ({"__metadata__": [], "a": F4}, b"\0" * 16, None, "__metadata__"),
        (b"[]", b"", None, "found list, expected a JSON object"),
        (b"{", b"", None, "not valid JSON"),
        (b'{"a": \xff}', b"", None, "not valid JSON"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", None, "not valid JSON"),
        (b'{"a": {}, "a": {}}', b"", None, "'a' is given twice"),
    ],
)
def test_malformed_files_are_refused(tmp_path, header, data, length, words):
    path = header_file(tmp_path / "x.safetensors", header, data, length)
    start = time.perf_counter()
    with pytest.raises(ValueError, match=words) as caught:
        TensorFiles(path)
    assert time.perf_counter() - start < 1
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7])
def test_files_without_a_header_are_refused(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="expected a safetensors file"):
        read_header(tmp_path / "x.safetensors")


def test_pipes_and_missing_files_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        TensorFiles(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        read_header("a\0b")


def test_a_sparse_file_with_a_huge_header_allocates_nothing(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write((1 << 34).to_bytes(8, "little"))
        file.truncate((1 << 34) + 8)  # 16 GiB that the disk never holds
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(ValueError, match=f"expected at most {MAX_HEADER}"):
        read_header(path)
    assert time.perf_counter() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_boolean_bytes_are_checked(tmp_path):
    files = TensorFiles(header_file(tmp_path / "x.safetensors", {"t": entry("BOOL", (2,), (0, 2))}, b"\1\2"))
    with pytest.raises(ValueError, match="'t': BOOL bytes"):
        files.read("t")


def test_a_file_that_shrinks_after_opening_is_an_error_and_no_crash(tmp_path):
    path = header_file(tmp_path / "x.safetensors", {"a": entry(shape=(4096,), offsets=(0, 16384))}, b"\0" * 16384)
    files = TensorFiles(path)
    os.truncate(path, 200)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        files.read("a")


def test_reading_rows_maps_only_them(tmp_path):
    files = TensorFiles(make("deepspec-vanilla", tmp_path))
    whole = read_file(tmp_path / "deepspec-vanilla" / "model.safetensors")["lm_head.weight"][1]
    np.testing.assert_array_equal(files.read("lm_head.weight", 5, 9), whole[5:9])
    assert files.read("lm_head.weight", 150, 900).shape == (10, fixtures.H)


# ---- sharded directories ------------------------------------------------------------------------------------------


def sharded(tmp_path):
    return make("target", tmp_path)


def index_of(path):
    return json.loads((path / "model.safetensors.index.json").read_text())


def write_index(path, index):
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_only_the_needed_shard_is_opened(tmp_path):
    path = sharded(tmp_path)
    (path / "model-00001-of-00002.safetensors").unlink()
    (path / "stray.safetensors").write_bytes(b"not a safetensors file")
    files = TensorFiles(path)
    assert set(files) == set(index_of(path)["weight_map"])
    assert files.read("lm_head.weight").shape == (fixtures.V, fixtures.H)
    assert files.opened == ["model-00002-of-00002.safetensors"]
    assert files.available("lm_head.weight")
    assert not files.available("model.embed_tokens.weight")
    with pytest.raises(FileNotFoundError, match=r"missing shard.*model\.embed_tokens\.weight"):
        files.read("model.embed_tokens.weight")


def test_index_and_shards_must_agree(tmp_path):
    path = sharded(tmp_path)
    index = index_of(path)
    index["weight_map"]["ghost.weight"] = "model-00002-of-00002.safetensors"
    write_index(path, index)
    with pytest.raises(ValueError, match=r"lacks tensors that the index places in it: ghost\.weight"):
        TensorFiles(path).read("lm_head.weight")
    del index["weight_map"]["ghost.weight"], index["weight_map"]["model.norm.weight"]
    write_index(path, index)
    with pytest.raises(ValueError, match=r"holds tensors that the index does not place in it: model\.norm\.weight"):
        TensorFiles(path).read("lm_head.weight")


@pytest.mark.parametrize(
    "shard",
    ["../target/model-00001-of-00002.safetensors", "/etc/passwd.safetensors", "a\\b.safetensors", "a/b.safetensors",
     "/dev/zero", "..", "", "x.bin", "a\0.safetensors", 3, None, ["x.safetensors"]],
)  # fmt: skip
def test_path_tricks_in_an_index_are_refused(tmp_path, shard):
    path = sharded(tmp_path)
    write_index(path, {"weight_map": {"lm_head.weight": shard}})
    with pytest.raises(ValueError, match=r"weight_map\['lm_head.weight'\].*plain \.safetensors file name"):
        TensorFiles(path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, [], 3])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    path = sharded(tmp_path)
    write_index(path, index)
    with pytest.raises(ValueError, match="index"):
        TensorFiles(path)


def test_a_shard_that_is_a_link_to_a_device_is_refused(tmp_path):
    path = sharded(tmp_path)
    (path / "model-00002-of-00002.safetensors").unlink()
    (path / "model-00002-of-00002.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a regular file"):
        TensorFiles(path).read("lm_head.weight")


def test_directories_without_an_index(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        TensorFiles(tmp_path)
    fixtures.write_file(tmp_path / "a.safetensors", {"x": fixtures.f32(2)})
    assert list(TensorFiles(tmp_path)) == ["x"]
    fixtures.write_file(tmp_path / "b.safetensors", {"y": fixtures.f32(2)})
    with pytest.raises(FileNotFoundError, match="2 safetensors files without an index"):
        TensorFiles(tmp_path)
    fixtures.write_file(tmp_path / "model.safetensors", {"z": fixtures.f32(2)})
    assert list(TensorFiles(tmp_path)) == ["z"]


# ---- properties ----------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4"]) | json_values,
        "shape": st.lists(st.integers(-2, 9) | st.integers(), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-4, 70) | st.integers(), min_size=1, max_size=3) | json_values,
    }
)
headers = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), near_entries | json_values, max_size=5)
quick = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_whatever_was_accepted(path, size):
    """A file that is accepted covers its bytes exactly, and every tensor in it can be read."""
    try:
        files = TensorFiles(path)
    except ValueError:
        return
    assert sum(files[name].nbytes for name in files) == size
    for name in files:
        array = files.read(name) if files[name].dtype != "BOOL" else np.zeros(files[name].shape, bool)
        assert (array.shape, array.nbytes) == (files[name].shape, files[name].nbytes)


@quick
@given(headers, st.binary(max_size=64), st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 80))
def test_any_header_gives_a_value_error_or_readable_tensors(tmp_path, header, data, length):
    path = header_file(tmp_path / "x.safetensors", header, data, length)
    true_length = int.from_bytes(path.read_bytes()[:8], "little")
    check_whatever_was_accepted(path, path.stat().st_size - 8 - true_length)


@quick
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_error_or_readable_tensors(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    check_whatever_was_accepted(path, max(0, len(content) - 8 - int.from_bytes(content[:8], "little")))


@quick
@given(st.data())
def test_one_damaged_byte_never_crashes(tmp_path, data):
    tensors = {"a": ("F32", np.ones((2, 3), np.float32)), "b": ("I8", np.ones(5, np.int8))}
    path = tmp_path / "x.safetensors"
    fixtures.write_file(path, tensors)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    check_whatever_was_accepted(path, 29)


@quick
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4) | json_values)
def test_any_index_gives_an_error_or_a_map(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    try:
        files = TensorFiles(tmp_path)
    except ValueError:
        return
    for name in files:
        with pytest.raises((ValueError, FileNotFoundError)):
            files.read(name)


def test_a_large_index_is_scanned_once_however_many_shards_are_opened(tmp_path):
    """70,000 names over 40 shards: gathering a shard's names must not read the whole index again for each."""

    class Counted(dict):
        scans = 0

        def items(self):
            self.scans += 1
            return super().items()

    shards = [f"model-{n:05d}.safetensors" for n in range(40)]
    weight_map = {f"layer.{n}.weight": shards[n % 40] for n in range(70_000)}
    for number, shard in enumerate(shards):
        names = [f"layer.{n}.weight" for n in range(number, 70_000, 40)]
        header = {name: entry(shape=(1,), offsets=(4 * i, 4 * i + 4)) for i, name in enumerate(names)}
        header_file(tmp_path / shard, header, b"\0" * 4 * len(names))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = TensorFiles(tmp_path)
    files._shard_of = Counted(files._shard_of)
    assert [files[f"layer.{n}.weight"].shape for n in range(40)] == [(1,)] * 40
    assert len(files.opened) == 40
    assert files._shard_of.scans == 1
