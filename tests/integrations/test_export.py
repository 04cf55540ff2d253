"""Exported drafts: in a process that has JAX, flatbuffers, NumPy and safetensors alone, at several batch sizes."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import TESTS, make_head, make_inputs

import dspark_jax

pytest.importorskip("flatbuffers", reason="the export extra is not installed")

S = 3
READER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "jaxtyping", "optax", "orbax", "torch"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import numpy as np
from dspark_jax.integrations.artifact import load_exported
draft = load_exported(sys.argv[1])
given = np.load(sys.argv[2])
for B in (1, 8, 24):
    names = [name for name in ("hidden", "anchor_ids", "temperature", "seed", "position") if name in given]
    out = draft(*[given[name][:B] for name in names])
    np.save(f"{sys.argv[3]}/{B}.npy", np.asarray(out["tokens"]))
print("flax" in sys.modules)
"""


@pytest.mark.parametrize(("kind", "topk"), [("vanilla", None), ("rnn", 5)])
def test_an_export_drafts_the_same_without_flax(tmp_path, kind, topk):
    head, (hidden, anchors) = make_head(kind), make_inputs(24, S, 12, 37)
    sampled = topk is not None
    config = dspark_jax.DraftConfig(
        S, draft_topk=topk, draft_sample_method="probabilistic" if sampled else "greedy", outputs="tokens"
    )
    signature = dspark_jax.export_draft_fn(head, config, tmp_path / "out", batch=(1, 64))
    assert signature["batch"] == [1, 64]
    assert signature["inputs"]["hidden"] == {"shape": ["B", S, 12], "dtype": "float32"}
    given = {"hidden": hidden, "anchor_ids": anchors}
    if sampled:
        given |= {
            "temperature": np.linspace(0, 1.5, 24, dtype=np.float32),
            "seed": np.arange(24, dtype=np.uint32),
            "position": np.arange(24, dtype=np.int32),
        }
    np.savez(tmp_path / "given.npz", **given)
    arguments = [str(tmp_path / name) for name in ("out", "given.npz", ".")]
    done = subprocess.run(
        [sys.executable, "-c", READER, *arguments], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
    for B in (1, 8, 24):
        draw = (
            dspark_jax.DraftSampling(*(given[n][:B] for n in ("temperature", "seed", "position"))) if sampled else None
        )
        want = dspark_jax.draft_block(head, hidden[:B], anchors[:B], sampling=draw, topk=topk).tokens
        np.testing.assert_array_equal(np.load(tmp_path / f"{B}.npy"), want)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    head = make_head()
    dspark_jax.export_draft_fn(head, dspark_jax.DraftConfig(S), path, batch=(2, 8), platforms=("cpu",))
    return path, head


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": np.zeros((9, S, 12), np.float32), "anchor_ids": np.zeros(9, np.int32)}, "a batch from 2 to 8"),
        ({"hidden": np.zeros((1, S, 12), np.float32), "anchor_ids": np.zeros(1, np.int32)}, "a batch from 2 to 8"),
        ({"hidden": np.zeros((2, S, 12), np.float64)}, "hidden.dtype: found 'float64', expected float32"),
        ({"hidden": np.zeros((2, S, 11), np.float32)}, "hidden.shape"),
        ({"anchor_ids": np.zeros(3, np.int32)}, "anchor_ids.shape"),
        ({"anchor_ids": None}, "anchor_ids"),
        ({"seed": np.zeros(2, np.uint32)}, "greedy"),
    ],
)
def test_wrong_operands_are_named(exported, change, words):
    draft = dspark_jax.load_exported(exported[0])
    good = {"hidden": np.zeros((2, S, 12), np.float32), "anchor_ids": np.zeros(2, np.int32)}
    assert draft(**good)["tokens"].shape == (2, S)
    with pytest.raises(ValueError, match=words):
        draft(**(good | change))


def test_weights_of_the_caller(exported):
    path, head = exported
    names = [entry["name"] for entry in json.loads((path / "signature.json").read_text())["weights"]]
    import jax

    other = make_head(seed=5)
    weights = dict(zip(names, jax.tree.leaves(other), strict=True))
    hidden, anchors = make_inputs(4, S, 12, 37)
    found = dspark_jax.load_exported(path, weights)(hidden, anchors)["tokens"]
    np.testing.assert_array_equal(found, dspark_jax.draft_block(other, hidden, anchors).tokens)
    assert not np.array_equal(found, dspark_jax.draft_block(head, hidden, anchors).tokens)
    with pytest.raises(ValueError, match="an array"):
        dspark_jax.load_exported(path, {})
    with pytest.raises(ValueError, match="float32"):
        dspark_jax.load_exported(path, {name: np.zeros(3, np.float32) for name in names})


def test_exports_that_cannot_be_are_refused(tmp_path):
    head, config = make_head(), dspark_jax.DraftConfig(S)
    with pytest.raises(ValueError, match="platforms"):
        dspark_jax.export_draft_fn(head, config, tmp_path, platforms=("metal",))
    with pytest.raises(ValueError, match="32-bit"):
        dspark_jax.export_draft_fn(head, config, tmp_path, batch=(1, 2**30))
    with pytest.raises(ValueError, match="one device"):
        dspark_jax.export_draft_fn(head, dspark_jax.DraftConfig(S, vocab_axis="x"), tmp_path)
    (tmp_path / "signature.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format"):
        dspark_jax.load_exported(tmp_path)
