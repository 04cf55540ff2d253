"""Checkpoints named by a Hugging Face id."""

import os
import shutil
import subprocess
import sys
import types

import pytest
from convert_cases import same_heads
from fixture_checkpoints import fixtures
from helpers import TESTS

from dspark_jax import load_head
from dspark_jax.checkpoint import convert, hub, inspect


def fake_hub(root, log):
    """A huggingface_hub that serves local directories and, as the real one, caches only what was fetched."""

    class EntryNotFoundError(Exception):
        pass

    def hf_hub_download(repository, name, revision=None):
        log.append((name, revision))
        path = root / repository.replace("/", "--") / name
        if not path.exists():
            raise EntryNotFoundError(f"404: {name}")
        cached = root / "cache" / repository.replace("/", "--") / name
        cached.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(path, cached)

    modules = {
        "huggingface_hub": types.SimpleNamespace(hf_hub_download=hf_hub_download),
        "huggingface_hub.errors": types.SimpleNamespace(
            EntryNotFoundError=EntryNotFoundError, HFValidationError=EntryNotFoundError
        ),
    }
    return lambda module, *_: modules[module]


def test_a_repository_id_fetches_what_is_needed(tmp_path, monkeypatch):
    log = []
    monkeypatch.setattr(hub, "require", fake_hub(tmp_path, log))
    fixtures.deepseek_v4(tmp_path / "org--v4")
    manifest = convert("org/v4@main", tmp_path / "out", head_only=True)
    assert manifest["source"] == "org/v4@main"
    assert log == [
        ("config.json", "main"), ("model.safetensors.index.json", "main"),
        ("model-00002-of-00005.safetensors", "main"), ("model-00005-of-00005.safetensors", "main"),
    ]  # fmt: skip
    same_heads(load_head(tmp_path / "out"), load_head(tmp_path / "org--v4"))
    fixtures.deepspec(tmp_path / "org--small")
    log.clear()
    assert inspect("org/small")["family"].startswith("deepspec")
    assert [name for name, _ in log] == ["config.json", "model.safetensors.index.json", "model.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"org/none: no such directory, and no such repository \(404"):
        inspect("org/none")


def test_the_real_hub_client_without_a_network(tmp_path):
    pytest.importorskip("huggingface_hub", reason="repository ids need the hub extra")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    code = f"import sys; sys.path.insert(0, {str(TESTS.parent)!r}); from dspark_jax.cli import main; sys.exit(main())"
    for source in ("nobody/nothing@v1", "no--body/x..y"):
        command = [sys.executable, "-c", code, "inspect", source]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith(f"dspark-jax inspect: error: {source}: no such")


def test_without_huggingface_hub_the_message_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"org/name: no such directory.*pip install 'dspark-jax\[hub\]'"):
        hub.local_path("org/name")


@pytest.mark.parametrize("source", ["/org/name", "a/b/c", "./org", "../x/y", "org/na me", "-x"])
def test_paths_are_not_repository_ids(source):
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        hub.local_path(source)
