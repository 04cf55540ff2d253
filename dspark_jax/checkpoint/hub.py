"""Checkpoints named by a Hugging Face repository id: only the files that a drafter needs are fetched."""

from __future__ import annotations

import os
import re
from typing import Any

from ..json_files import MAX_LISTING, read_json
from ..optional import require
from .family.mapping import map_names
from .family.names import is_head
from .family.table import detect
from .storage.tensor_files import INDEX_FILE, SINGLE_FILE

# "owner/name" or "owner/name@revision"; anything with other separators is a path.
REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?")


def local_path(source: str | os.PathLike[str], *, head_only: bool = False) -> str:
    """Return a local path: the source itself where it exists, else the fetched files of a repository id.

    Raises:
        FileNotFoundError: neither a path nor a repository id, or the repository has no checkpoint.
        ImportError: a repository id without huggingface_hub.
    """
    source = os.fspath(source)
    if os.path.exists(source):
        return source
    match = REPOSITORY.fullmatch(source)
    if match is None:
        raise FileNotFoundError(f"{source}: no such file or directory")
    purpose = f"{source}: no such directory; fetching it as a Hugging Face repository"
    hub, errors = require("huggingface_hub", "hub", purpose), require("huggingface_hub.errors", "hub", purpose)
    try:
        return _fetch(hub, errors.EntryNotFoundError, match[1], match[2], head_only)
    except (errors.HFValidationError, errors.EntryNotFoundError) as error:
        raise FileNotFoundError(f"{source}: no such directory, and no such repository ({error})") from None
    except ValueError:  # of the index that was fetched
        raise
    except Exception as error:  # network and server errors come from whichever client the hub uses
        raise OSError(f"{source}: no such directory, and fetching the repository failed ({error})") from None


def _fetch(hub: Any, missing: type[Exception], repository: str, revision: str | None, head_only: bool) -> str:
    """Fetch config, index and the needed shards into the hub's cache; return the directory."""

    def get(name: str) -> str:
        return hub.hf_hub_download(repository, name, revision=revision)

    config = get("config.json")
    try:
        index = get(INDEX_FILE)
    except missing:
        get(SINGLE_FILE)
        return os.path.dirname(config)
    weight_map = read_json(index, MAX_LISTING).get("weight_map")
    for shard in needed_shards(weight_map, head_only):
        get(shard)
    return os.path.dirname(config)


def needed_shards(weight_map: Any, head_only: bool = False) -> list[str]:
    """Return the shards that hold a drafter's tensors, by the index alone."""
    if not isinstance(weight_map, dict):
        raise ValueError("weight_map: expected an object")
    family = detect(weight_map, {})
    mapped = map_names(family, weight_map)
    sources = [*mapped.sources.items(), *mapped.scales.items()]
    wanted = {weight_map[source] for name, source in sources if not head_only or is_head(name)}
    # Names that no row knows are fetched too: opening the checkpoint then reports them.
    wanted |= set() if mapped.sources else set(weight_map.values())
    return sorted(map(str, wanted))
