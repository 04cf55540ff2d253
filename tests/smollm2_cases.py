"""What the tests on SmolLM2 share: the model from the cache of scripts/fetch_smollm2.py, prompts, recorded answers."""

import functools
import json

import pytest
from fetch_smollm2 import default_cache
from helpers import CHECKPOINTS

from dspark_jax.checkpoint.load import load_drafter, load_target

MODEL = default_cache() / "smollm2"
DRAFTER = CHECKPOINTS / "smollm2" / "drafter"
PROMPTS = [json.loads(line) for line in (CHECKPOINTS / "smollm2" / "prompts.jsonl").read_text().splitlines()]
STOP = [2]
needs_model = pytest.mark.skipif(
    not (MODEL / "config.json").is_file(), reason=f"{MODEL} is not there: python scripts/fetch_smollm2.py"
)


@functools.cache
def load(dtype="float32"):
    """Return target and drafter."""
    return load_target(MODEL, dtype=dtype), load_drafter(DRAFTER, dtype=dtype, target=MODEL)
