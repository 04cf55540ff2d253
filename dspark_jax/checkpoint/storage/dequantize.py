"""Block-scaled FP8 and packed FP4 weights as bfloat16, a few rows at a time.

    FP8:  w[i, j] = e4m3(q[i, j]) * 2**(scale[i // b, j // b] - 127)            b = 128 (32 in some tensors of V4.1)
    FP4:  w[i, 2j], w[i, 2j + 1] = e2m1(low, high nibble of q[i, j]) * 2**(scale[i, 2j // 32] - 127)

e2m1 is sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6. Both formats have fewer significant bits than bfloat16, so the result
is exact wherever its exponent is in range.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16, Float32, Shaped

BF16 = np.dtype(ml_dtypes.bfloat16)
GROUP = 32  # columns of one FP4 scale
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Shape = tuple[int, ...]


def block_size(name: str, shape: Shape, scale: Shape, stated: int | None = None) -> int:
    """Return b such that scale has one entry per b x b block of shape; the stated size is tried first.

    Raises:
        ValueError: no known block size fits; the message names both shapes.
    """
    for b in filter(None, (stated, 128, 32)):
        if len(shape) == 2 and scale == tuple(-(-n // b) for n in shape):
            return b
    raise ValueError(f"{name}: found scale shape {list(scale)}, expected one scale per block of weight {list(shape)}")


def scales(name: str, exponents: Shaped[np.ndarray, "rows groups"]) -> Float32[np.ndarray, "rows groups"]:
    """Decode E8M0 exponents (as float8_e8m0fnu or their bytes) to float32 powers of two; 255 is NaN and refused."""
    bits = exponents.view(np.uint8)
    if (bits == 255).any():
        raise ValueError(f"{name}: holds NaN scales (E8M0 code 255)")
    return np.ldexp(np.float32(1), bits.astype(np.int32) - 127)


def fp8_rows(
    name: str,
    weight: Shaped[np.ndarray, "n columns"],
    scale: Shaped[np.ndarray, "blocks groups"],
    block: int,
    first: int = 0,
) -> BFloat16[np.ndarray, "n columns"]:
    """Decode rows of an FP8 weight.

    Args:
        name: for errors.
        weight: float8_e4m3fn [n, columns], rows first .. first + n of the tensor.
        scale: float8_e8m0fnu, all blocks of the tensor.
        block: b.
        first: the first row's number.

    Returns:
        bfloat16 [n, columns].
    """
    rows = (first + np.arange(weight.shape[0])) // block
    used = scales(name, scale[rows[0] : rows[-1] + 1]) if len(rows) else np.zeros((0, scale.shape[1]), np.float32)
    wide = np.repeat(used, block, axis=1)[:, : weight.shape[1]]
    return (weight.astype(np.float32) * wide[rows - rows[0] if len(rows) else rows]).astype(BF16)


def fp4_rows(
    name: str, packed: Shaped[np.ndarray, "n columns/2"], scale: Shaped[np.ndarray, "n columns/32"]
) -> BFloat16[np.ndarray, "n columns"]:
    """Decode rows of a packed FP4 weight.

    Args:
        name: for errors.
        packed: int8 or uint8 [n, columns / 2], low nibble = even column.
        scale: float8_e8m0fnu [n, columns / 32], the same rows.

    Returns:
        bfloat16 [n, columns].
    """
    bits = packed.view(np.uint8)
    nibbles = np.stack([bits & 15, bits >> 4], axis=-1).reshape(bits.shape[0], -1)
    return (E2M1[nibbles] * np.repeat(scales(name, scale), GROUP, axis=1)).astype(BF16)
