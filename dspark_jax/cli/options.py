"""Options that several commands share."""

from __future__ import annotations

import argparse

from ..config import IMPLEMENTATIONS


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """Add --implementation: plain XLA operations, or the Pallas kernels."""
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="xla: plain operations; pallas: the kernels, compiled on NVIDIA GPUs and interpreted (slowly) elsewhere "
        "(default: what is known to be right and fast on this device)",
    )
