"""dspark_jax: the DSpark speculative-decoding drafter for JAX.

The data's way: config.py -> checkpoint/ -> drafting/ -> verification/, with decoding/ for whole loops. Public names are
imported when they are first asked for, so that a module that needs JAX alone imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import head_kinds
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpoint.load import load_drafter as load_drafter
    from .checkpoint.load import load_head as load_head
    from .checkpoint.load import load_target as load_target
    from .confidence.calibration import Calibration as Calibration
    from .confidence.calibration import fit_calibration as fit_calibration
    from .confidence.calibration import load_calibration as load_calibration
    from .confidence.costs import CostTable as CostTable
    from .confidence.costs import profile_sps as profile_sps
    from .confidence.policies import PrefixScheduler as PrefixScheduler
    from .confidence.policies import ThresholdPolicy as ThresholdPolicy
    from .config import DraftConfig as DraftConfig
    from .config import DSparkConfig as DSparkConfig
    from .decoding.generate import Generated as Generated
    from .decoding.generate import RoundEvent as RoundEvent
    from .decoding.generate import generate as generate
    from .decoding.generate import stream as stream
    from .drafting.api import draft_block as draft_block
    from .drafting.api import draft_from_logits as draft_from_logits
    from .drafting.api import teacher_forced_logits as teacher_forced_logits
    from .drafting.drafter import Drafter as Drafter
    from .drafting.factories import make_buffer as make_buffer
    from .drafting.factories import make_draft_fn as make_draft_fn
    from .drafting.factories import make_draft_from_logits_fn as make_draft_from_logits_fn
    from .drafting.split import head_sharding as head_sharding
    from .drafting.split import pad_vocabulary as pad_vocabulary
    from .integrations.artifact import load_exported as load_exported
    from .integrations.buckets import BatchBuckets as BatchBuckets
    from .integrations.export import export_draft_fn as export_draft_fn
    from .transformer.target import Target as Target
    from .types import DraftBlock as DraftBlock
    from .types import DraftBuffer as DraftBuffer
    from .types import DraftSampling as DraftSampling
    from .verification.api import verify_block as verify_block
    from .verification.filter import TargetFilter as TargetFilter
    from .verification.verify import Verified as Verified

# Where each public name lives; a test holds this table to the imports above.
_HOMES = {
    "BatchBuckets": "integrations.buckets",
    "Calibration": "confidence.calibration",
    "CostTable": "confidence.costs",
    "DSparkConfig": "config",
    "DraftBlock": "types",
    "DraftBuffer": "types",
    "DraftConfig": "config",
    "DraftSampling": "types",
    "Drafter": "drafting.drafter",
    "Generated": "decoding.generate",
    "PrefixScheduler": "confidence.policies",
    "RoundEvent": "decoding.generate",
    "Target": "transformer.target",
    "TargetFilter": "verification.filter",
    "ThresholdPolicy": "confidence.policies",
    "Verified": "verification.verify",
    "draft_block": "drafting.api",
    "draft_from_logits": "drafting.api",
    "export_draft_fn": "integrations.export",
    "fit_calibration": "confidence.calibration",
    "generate": "decoding.generate",
    "head_sharding": "drafting.split",
    "load_calibration": "confidence.calibration",
    "load_drafter": "checkpoint.load",
    "load_exported": "integrations.artifact",
    "load_head": "checkpoint.load",
    "load_target": "checkpoint.load",
    "make_buffer": "drafting.factories",
    "make_draft_fn": "drafting.factories",
    "make_draft_from_logits_fn": "drafting.factories",
    "pad_vocabulary": "drafting.split",
    "profile_sps": "confidence.costs",
    "stream": "decoding.generate",
    "teacher_forced_logits": "drafting.api",
    "verify_block": "verification.api",
}

for _name in ("vanilla", "gated", "rnn"):
    head_kinds.declare(_name, f"{__name__}.drafting.heads")


def __getattr__(name: str) -> Any:
    """Import a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
