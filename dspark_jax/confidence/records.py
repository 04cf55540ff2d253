"""What decoding records for calibration: confidence logits of blocks and how far the target accepted them."""

from __future__ import annotations

import dataclasses
import os
import zipfile

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike

from ..atomic_files import open_replacing
from ..checks import invalid
from ..json_files import open_regular


@dataclasses.dataclass(frozen=True)
class Records:
    """What decoding recorded of N blocks, the input of a fit.

    Attributes:
        confidence_logits: float64 [N, S], as in DraftBlock (before the sigmoid, uncalibrated).
        num_accepted: int64 [N], accepted steps of each block.
        num_draft: int64 [N], verified steps; what lies beyond them was not observed.
    """

    confidence_logits: Float64[np.ndarray, "N S"]
    num_accepted: Int64[np.ndarray, " N"]
    num_draft: Int64[np.ndarray, " N"]

    @classmethod
    def of(cls, confidence_logits: ArrayLike, accepted: ArrayLike, num_draft: ArrayLike | None = None) -> Records:
        """Check recorded pairs.

        Args:
            confidence_logits: [N, S] finite numbers.
            accepted: int [N], how many steps were accepted, or bool [N, S], which ones (what follows the first False
                counts as not accepted).
            num_draft: int [N], how many steps were verified; None means all S.
        """
        logits = np.asarray(confidence_logits, np.float64)
        if logits.ndim != 2 or 0 in logits.shape:
            raise invalid("confidence_logits.shape", logits.shape, "[N, S]")
        if not np.isfinite(logits).all():
            raise invalid("confidence_logits", "NaN or infinity", "finite numbers")
        (N, S), flags = logits.shape, np.asarray(accepted)
        if flags.shape == (N, S) and flags.dtype == bool:
            flags = np.cumprod(flags, axis=1).sum(axis=1)
        if flags.shape != (N,) or flags.dtype.kind not in "iu":
            raise invalid("accepted", f"{flags.dtype} {flags.shape}", f"integers [{N}] or bools [{N}, {S}]")
        limit = np.full(N, S) if num_draft is None else np.asarray(num_draft)
        if limit.shape != (N,) or limit.dtype.kind not in "iu" or (limit < 0).any() or (limit > S).any():
            raise invalid("num_draft", f"{limit.dtype} {limit.shape}", f"integers [{N}] from 0 to {S}")
        if (flags < 0).any() or (flags > limit).any():
            raise invalid("accepted", int(flags[(flags < 0) | (flags > limit)][0]), "integers from 0 to num_draft")
        return cls(logits, flags.astype(np.int64), limit.astype(np.int64))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .npz file of the three arrays (logits in float32, as they were recorded)."""
        with open_replacing(path, "wb") as file:
            np.savez_compressed(
                file,
                confidence_logits=self.confidence_logits.astype(np.float32),
                num_accepted=self.num_accepted.astype(np.int32),
                num_draft=self.num_draft.astype(np.int32),
            )

    def observed(self, step: int) -> Bool[np.ndarray, " N"]:
        """Say which blocks were verified up to and including `step` (from 0), bool [N]."""
        # A block rejected before its limit says nothing about steps that were never to be verified: counting those
        # would keep only the failures.
        return self.num_draft > step

    def survived(self, step: int) -> Bool[np.ndarray, " N"]:
        """Say which blocks were accepted up to and including `step`, bool [N]."""
        return self.num_accepted > step


def load_records(path: str | os.PathLike[str]) -> Records:
    """Read an .npz file with `confidence_logits`, `num_accepted` (or `accepted`) and, optionally, `num_draft`."""
    try:
        with open_regular(os.fspath(path)) as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(path)}: no such file") from None
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{os.fspath(path)}: not an .npz file of plain arrays ({error})") from None
    accepted = arrays.get("num_accepted", arrays.get("accepted"))
    if "confidence_logits" not in arrays or accepted is None:
        raise ValueError(f"{os.fspath(path)}: found {sorted(arrays)}, expected confidence_logits and num_accepted")
    return Records.of(arrays["confidence_logits"], accepted, arrays.get("num_draft"))
