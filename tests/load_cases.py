"""What the tests of load share."""

import numpy as np
from fixture_checkpoints import fixtures

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
V, VD, H, R = fixtures.V, fixtures.VD, fixtures.H, fixtures.R


def same(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def drop(*names):
    return lambda tensors: [tensors.pop(name) for name in names]
