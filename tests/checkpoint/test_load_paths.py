"""Bad values, bad paths, and placement on devices."""

import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from fixture_checkpoints import change_tensors, make, read_file
from helpers import TESTS
from jax.sharding import NamedSharding, PartitionSpec
from load_cases import CONFIDENCE, W1, W2, H, same

from dspark_jax import load_head


@pytest.mark.parametrize("name", ["lm_head.weight", W1, W2, CONFIDENCE, "confidence_head.proj.bias"])
def test_nan_sentinels_are_refused(tmp_path, name):
    def change(tensors):
        array = tensors[name][1].copy()
        array.reshape(-1)[-1] = np.nan
        tensors[name] = ("BF16", array)

    with pytest.raises(ValueError, match=f"{name}: holds NaN"):
        load_head(change_tensors(make("deepspec-vanilla", tmp_path), change))


def test_nan_in_the_backbone_does_not_concern_the_head(tmp_path):
    nan = ("BF16", np.full(H, np.nan, ml_dtypes.bfloat16))
    load_head(change_tensors(make("deepspec-vanilla", tmp_path), lambda t: t.update({"norm.weight": nan})))


def test_wrong_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent: no such checkpoint"):
        load_head(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_head(tmp_path)


def test_configs_of_absurd_kind_or_size_are_not_read(tmp_path):
    path = make("deepspec-vanilla", tmp_path)
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json: not a regular file"):
        load_head(path)
    (path / "config.json").unlink()
    with open(path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"config\.json: 1099511627776 bytes, expected at most"):
        load_head(path)


def test_truncated_files_are_errors(tmp_path):
    path = make("deepspec-vanilla", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors.*truncated"):
        load_head(path.parent)


def test_writers_of_transposed_views_are_case_33(tmp_path):
    # safetensors' numpy writer stores such a view's bytes untransposed; our writer does not.
    from dspark_jax.checkpoint.storage.write import write_safetensors

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(str(tmp_path / "x.safetensors"), {"x": ((3, 2), x.dtype)}, lambda name: [x.T[:2], x.T[2:]])
    np.testing.assert_array_equal(read_file(tmp_path / "x.safetensors")["x"][1], [[0, 3], [1, 4], [2, 5]])


def test_sharding_places_arrays(tmp_path):
    path = make("speculators-reduced", tmp_path)
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    wanted = load_head(path)
    head = load_head(path, sharding=whole)
    assert {leaf.sharding for leaf in jax.tree.leaves(head)} == {whole}
    for sharding in ({"lm_head.weight": rows, W2: rows}, lambda name: rows if name in ("lm_head.weight", W2) else None):
        head = load_head(path, sharding=sharding, dtype="float32")
        assert head.lm_head.sharding == rows
        assert head.markov.markov_w2.sharding == rows
        same(head.lm_head, np.asarray(wanted.lm_head).astype(np.float32))
        same(head.target_ids, wanted.target_ids)
    with pytest.raises(ValueError, match=r"sharding: found \['lm_head'\], expected names of tensors"):
        load_head(path, sharding={"lm_head": rows})


def test_sharding_over_four_devices(tmp_path):
    """Each device holds its rows of the vocabulary, and the draft is that of one device."""
    code = """
import sys, jax, numpy as np, dspark_jax
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
split = ("lm_head.weight", "markov_head.markov_w2.weight")
head = dspark_jax.load_head(sys.argv[1], sharding=lambda name: rows if name in split else whole)
for array in (head.lm_head[...], head.markov.markov_w2[...]):
    assert [shard.data.shape[0] for shard in array.addressable_shards] == [40] * 4
one = dspark_jax.load_head(sys.argv[1])
np.testing.assert_array_equal(np.asarray(head.lm_head), np.asarray(one.lm_head))
hidden = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
drafts = [dspark_jax.draft_block(h, hidden, [3, 5]).tokens for h in (head, one)]
np.testing.assert_array_equal(*map(np.asarray, drafts))
"""
    path = make("deepspec-gated", tmp_path)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(TESTS.parent),
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
