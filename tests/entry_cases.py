"""What the tests of entry share."""

import numpy as np
from helpers import make_head, make_inputs

from dspark_jax import DraftSampling

V, Vd, H, R, B, S = 37, 23, 12, 6, 3, 4
HEAD = make_head("vanilla", V, None, H, R)
PLAIN = make_head(None, V, None, H, confidence=None)
HIDDEN, ANCHORS = make_inputs(B, S, H, V)
ROWS = np.zeros((S, B, V), np.float32)
PARAMS = DraftSampling([1.0] * B, [1] * B, [2] * B)
