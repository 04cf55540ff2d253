"""The benchmark's PyTorch port drafts what the library drafts."""

import bench_ports
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_head

from dspark_jax import draft_from_logits

torch = pytest.importorskip("torch", reason="the port under test is PyTorch's")


@pytest.mark.parametrize("k", [None, 9])
def test_the_torch_port_drafts_the_same(k):
    head = make_head("vanilla", V=211, r=8)
    base = (np.random.default_rng(3).standard_normal((4, 3, 211)) * 3).astype(np.float32)
    anchor = np.asarray([5, 6, 7])
    block = draft_from_logits(head, jnp.asarray(base), anchor, topk=k, outputs="logits" if k is None else "candidates")
    w1, w2 = (torch.tensor(np.asarray(w[...])) for w in (head.markov.markov_w1, head.markov.markov_w2))
    args = (torch.tensor(base), w1, w2, torch.tensor(anchor))
    rows, tokens = bench_ports.torch_dense(*args) if k is None else bench_ports.torch_topk(*args, k)
    np.testing.assert_array_equal(torch.stack(tokens, 1).numpy(), block.tokens)
    np.testing.assert_allclose(rows.numpy(), block.logits if k is None else block.candidate_logits, atol=1e-4)
