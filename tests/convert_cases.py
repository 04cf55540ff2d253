"""What the tests of convert share."""

import jax
import numpy as np
from fixture_checkpoints import fixtures

V, VD, H, R, TAPS = (getattr(fixtures, name) for name in ("V", "VD", "H", "R", "TAPS"))


def same_heads(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
