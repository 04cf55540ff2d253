"""The manifest of a conversion: what it says, and how a change of any byte of JSON beside it, or in it, is found."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from ..confidence.calibration import FILE_NAME as CALIBRATION
from ..json_files import MAX_LISTING, read_bytes, read_json
from .storage.appear import MANIFEST

JSON_FILES = ("config.json", CALIBRATION)


def has(directory: str, name: str) -> bool:
    """Say whether a directory has an entry of this name."""
    return os.path.lexists(os.path.join(directory, name))


def file_digest(directory: str, name: str) -> str:
    """Return the SHA-256 of a JSON file's bytes."""
    return hashlib.sha256(read_bytes(os.path.join(directory, name), MAX_LISTING)).hexdigest()


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own digest, in one spelling of JSON."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: str) -> dict[str, Any]:
    """Read a result's manifest.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it lacks what a verification needs.
    """
    try:
        manifest = read_json(os.path.join(path, MANIFEST), MAX_LISTING)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no {MANIFEST}, so not the result of a conversion") from None
    if not all(isinstance(manifest.get(key), dict) for key in ("tensors", "sources")):
        raise ValueError(f"{path}: {MANIFEST}: expected an object with tensors and sources")
    for name, entry in manifest["tensors"].items():
        good = isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("sha256", "transform"))
        names = entry.get("sources") if good else None
        if not isinstance(names, list) or not names or not all(isinstance(source, str) for source in names):
            raise ValueError(f"{path}: {MANIFEST}: tensor {name!r}: expected sources, transform and sha256")
    return manifest


def _object(value: Any) -> dict[str, Any]:
    """Return a JSON object, or an empty one where there is something else."""
    return value if isinstance(value, dict) else {}


def changed_json(path: str, manifest: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Return one sentence per JSON file of a result that is not what the conversion wrote.

    Args:
        config: config.json as it is now.
    """
    problems = []
    if manifest.get("digest") != manifest_digest(manifest):
        problems.append(f"{MANIFEST}: is not what the conversion wrote (digest)")
    written = _object(manifest.get("json"))
    for name in JSON_FILES:
        if has(path, name) != (name in written):
            problems.append(f"{name}: {'not written by the conversion' if has(path, name) else 'missing'}")
        elif has(path, name) and file_digest(path, name) != written[name]:
            problems.append(f"{name}: is not what the conversion wrote (digest)")
    stated = _object(manifest.get("config"))
    for key in sorted({*config, *stated}):
        if key not in config or key not in stated or config[key] != stated[key]:
            found, wanted = (str(place.get(key, "nothing"))[:80] for place in (config, stated))
            problems.append(f"config.json: {key}: {found}, the manifest says {wanted}")
    return problems
