"""What the tests of pitfalls share."""

import numpy as np
from helpers import (
    make_head,
)

import dspark_jax

NAN, INF = np.float32(np.nan), np.float32(np.inf)
NEGATIVE_NAN = np.asarray([0xFFC00000], np.uint32).view(np.float32)[0]


def plain(V, **fields):
    """A head without a Markov bias or a confidence head: what goes in is what is drawn from."""
    return make_head(None, V=V, H=2, confidence=None, **fields)


def draft(head, base, anchors=None, **options):
    """draft_from_logits for batch-major rows [B, S, Vd]."""
    base = np.asarray(base, np.float32)
    anchors = np.zeros(len(base), int) if anchors is None else anchors
    return dspark_jax.draft_from_logits(head, np.swapaxes(base, 0, 1), anchors, **options)


def tokens(block):
    return np.asarray(block.tokens).tolist()
