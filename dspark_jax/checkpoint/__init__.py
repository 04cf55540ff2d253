"""Checkpoints: reading them safely, loading the head, converting between formats."""

from .load import load_head as load_head
from .opened import Checkpoint as Checkpoint
from .opened import open_checkpoint as open_checkpoint
