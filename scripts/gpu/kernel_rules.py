"""Bytes that the Pallas kernels move, from the shapes of their operands: HLO shows them as opaque calls.

Each array counts once however many programs read it, since what is shared stays in the L2 cache; rows gathered by id
count per id; a kernel that works in place on a whole [S, B, n] buffer counts its slab. A test
(tests/kernels/test_kernel_traffic.py) runs the kernels' own code element by element and holds these formulas to the
loads and stores that it makes.
"""

from __future__ import annotations

import math

from .count import SECTOR, PallasCall, Rule
from .hlo import BYTES, Shape


def _small(shapes: tuple[Shape, ...], big: int = 2) -> int:
    """Bytes of the per-request and per-column arrays (fewer than `big` axes)."""
    return sum(shape.nbytes for shape in shapes if len(shape.dims) < big)


def dense_step(call: PallasCall) -> int:
    """Read w2, one slab of the base and a latent per request; write the slab (where kept) and the summaries."""
    step, prev, latents, w2, base, *others = call.operands
    summaries = [result for result in call.results if len(result.dims) == 2]
    written = [result for result in call.results if len(result.dims) == 3]
    S, B, _ = base.dims
    latent = B * w2.dims[1] * BYTES[latents.dtype]
    slabs = base.nbytes // S + sum(buffer.nbytes // S for buffer in written)
    small = _small(tuple(others)) + sum(summary.nbytes for summary in summaries)
    return step.nbytes + prev.nbytes + latent + w2.nbytes + slabs + small


def walk(call: PallasCall) -> int:
    """Per step and request: a latent, k rows of w2, k values and ids; write the corrected values and one code."""
    first, prev, latents, w2, base, ids, *others = call.operands
    *written, code = call.results
    S, B, k = ids.dims
    steps, r = code.dims[0], w2.dims[1]
    row = r * BYTES[w2.dtype]
    # Target ids are the only other integers with three axes; rows to write to are floats and are not read.
    targets = sum(o.nbytes for o in others if len(o.dims) == 3 and o.dtype == "s32")
    slabs = (base.nbytes + ids.nbytes + targets + sum(w.nbytes for w in written)) * steps // S
    gathered = steps * B * (k * row + r * BYTES[latents.dtype])
    return first.nbytes + prev.nbytes + gathered + slabs + _small(tuple(others)) + code.nbytes


def pick(call: PallasCall) -> int:
    """Read rows of keys once; write the picked keys and ids."""
    return call.operands[0].nbytes + sum(result.nbytes for result in call.results)


def pick_groups(call: PallasCall) -> int:
    """Read the ids of k groups and their columns, in whole sectors; write the picked keys and ids."""
    x, groups = call.operands
    width = int(call.kernel.removeprefix("dspark_pick_groups")) * BYTES[x.dtype]
    read = groups.nbytes + math.prod(groups.dims) * -(-width // SECTOR) * SECTOR
    return read + sum(result.nbytes for result in call.results)


RULES: dict[str, Rule] = {
    "dspark_dense_step": dense_step,
    "dspark_walk": walk,
    "dspark_pick": pick,
    "dspark_pick_groups16": pick_groups,
    "dspark_pick_groups8": pick_groups,
}
