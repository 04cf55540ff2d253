"""Options that several commands share."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from ..config import IMPLEMENTATIONS

if TYPE_CHECKING:
    from ..drafting.head import DSparkHead


def add_implementation(parser: argparse.ArgumentParser) -> None:
    """Add --implementation: plain XLA operations, or the Pallas kernels."""
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="xla: plain operations; pallas: the kernels, compiled on NVIDIA GPUs and interpreted (slowly) elsewhere "
        "(default: what is known to be right and fast on this device)",
    )


def add_markov_topk(parser: argparse.ArgumentParser) -> None:
    """Add --draft-markov-topk: continuations of the previous token as further candidates."""
    parser.add_argument(
        "--draft-markov-topk", type=int, default=0, metavar="M",
        help="further candidates per step: the previous token's M strongest continuations (default: 0); their table is "
        "read from the checkpoint (convert --continuations M) or built first",
    )  # fmt: skip


def with_continuations(head: DSparkHead, directory: str, m: int) -> DSparkHead:
    """Return the head with a table of at least m continuations, the stored one where it is large enough."""
    from ..checkpoint.continuations import FILE_NAME, load_continuations
    from ..drafting.continuations import table_bytes

    if m == 0:
        return head
    if (pathlib.Path(directory) / FILE_NAME).is_file():
        stored = load_continuations(head, directory)
        if stored.continuations is not None and stored.continuations.m >= m:
            return stored
    size = table_bytes(head.config.vocab_size, m) / 2**20
    print(f"building a table of {m} continuations per token, {size:.1f} MiB", file=sys.stderr)
    return head.with_continuations(m)
