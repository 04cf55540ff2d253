"""Continuations: for every token the draft ids that the Markov bias raises most after it, found once per head.

    bias(prev, .) = latent(start, markov_w1[prev], no hidden states) @ markov_w2.T

Top-k candidates chosen from the base logits alone miss what only the bias knows. A step that also takes the m
strongest continuations of its previous token sees both sorted lists, which gives a proof as well (Fagin's threshold
algorithm): an id in neither list has a base logit of at most the k-th and, where z = e, a bias of at most the m-th.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int32

from ..kernels.select import select_topk
from ..linear import product
from ..markov import MarkovHead
from ..progress import Progress
from ..types import RequestFloats, RequestInts

BLOCK_ELEMENTS = 1 << 26  # biases computed at a time: 256 MiB


class ContinuationTable(nnx.Variable):
    """An array derived from a head's weights; not trained."""


class Continuations(nnx.Module):
    """The strongest continuations of every token: a pytree, part of a DSparkHead.

    Args:
        ids: int32 [V, m] draft ids in descending order of bias, equal ones in ascending order of id.
        largest: float32 [V], the largest bias; last: float32 [V], the m-th (with m = 0 the largest).
        slack: float32 [r]: |z| . slack bounds by how much two orders of summation of z . w can differ, for every row w
            of markov_w2. Zeros where the weights are whole numbers and all sums exact.
    """

    def __init__(
        self,
        ids: Int32[Array, "V m"],
        largest: Float32[Array, " V"],
        last: Float32[Array, " V"],
        slack: Float32[Array, " r"],
    ) -> None:
        self.ids, self.slack = ContinuationTable(ids), ContinuationTable(slack)
        self.largest, self.last = ContinuationTable(largest), ContinuationTable(last)

    @property
    def m(self) -> int:
        """Continuations per token."""
        return self.ids.shape[1]


def table_bytes(vocab_size: int, m: int) -> int:
    """Return the bytes of a table of m continuations."""
    return 4 * vocab_size * (m + 2)


def build_continuations(
    markov: MarkovHead, m: int, draftable: int, hidden_size: int, *, show_progress: bool = True
) -> Continuations:
    """Find the m strongest continuations of every token, in blocks of 256 MiB of biases.

    Args:
        markov: the head; its latent is taken at the first step, from hidden states of zero.
        m: continuations per token, 0 to draftable; 0 keeps the largest bias alone.
        draftable: draft ids below this can be drafted; the others are padding.
        show_progress: a bar on stderr, where that is a terminal and the work takes over a second.
    """
    V = markov.markov_w1.shape[0]
    size = max(1, min(V, BLOCK_ELEMENTS // draftable))
    blocks = []
    with Progress(V, show_progress, unit="tokens", title="continuations") as bar:
        for start in range(0, V, size):
            prev = jnp.arange(start, start + size, dtype=jnp.int32)  # beyond V: rows of zeros, cut off below
            found = _strongest(markov, prev, m=m, draftable=draftable, hidden_size=hidden_size)
            blocks.append(jax.block_until_ready(found))
            bar.add("", min(size, V - start))
    ids, largest, last = (jnp.concatenate(parts)[:V] for parts in zip(*blocks, strict=True))
    return Continuations(ids, largest, last, _slack(markov))


@partial(jax.jit, static_argnames=("m", "draftable", "hidden_size"))
def _strongest(
    markov: MarkovHead, prev: RequestInts, *, m: int, draftable: int, hidden_size: int
) -> tuple[Int32[Array, "B m"], RequestFloats, RequestFloats]:
    """Return ids [B, m], the largest and the m-th bias [B] behind previous tokens [B]."""
    n = prev.shape[0]
    hidden = jnp.zeros((1, n, hidden_size), markov.markov_w2.dtype)
    hoisted = jax.tree.map(lambda x: x[0], markov.hoist(hidden))
    _, latent = markov.step(markov.start(n), markov.embed(prev), hoisted)
    values, ids = select_topk(product(latent, markov.markov_w2[:draftable]), max(m, 1))
    return ids[:, :m], values[:, 0], values[:, -1]


@jax.jit
def _slack(markov: MarkovHead) -> Float32[Array, " r"]:
    """Return the weights of the error bound, float32 [r]; see Continuations.

    A float32 sum of r products differs from the exact one by at most about r * 2**-24 * sum |z| |w| in any order
    (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), so two sums differ by twice that; a few units
    more cover the roundings of the bound itself.
    """
    w1, w2 = markov.markov_w1[...].astype(jnp.float32), markov.markov_w2[...].astype(jnp.float32)
    r = w2.shape[1]
    reach = jnp.max(jnp.abs(w2), axis=0)
    whole = jnp.all(w1 == jnp.round(w1)) & jnp.all(w2 == jnp.round(w2))
    exact = whole & (jnp.sum(jnp.max(jnp.abs(w1), axis=0) * reach) < 2.0**24)
    # The floor covers products that underflow.
    return jnp.where(exact, 0.0, (r + 8) * 2.0**-23 * jnp.maximum(reach, 1e-30))
