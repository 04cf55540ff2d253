"""Checkpoints: reading them safely, loading the head, converting between formats, verifying a conversion."""

from .convert import convert as convert
from .inspect import inspect as inspect
from .load import load_head as load_head
from .open import Checkpoint as Checkpoint
from .open import open_checkpoint as open_checkpoint
from .verify import Verification as Verification
from .verify import verify as verify
