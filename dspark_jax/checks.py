"""Checks of single values, and the one form of error for bad input: field, value found, what was expected."""

from __future__ import annotations

import numbers

import ml_dtypes
import numpy as np

# The float dtypes of weights and logits, and what they hold without subnormal numbers.
DTYPES = ("float32", "bfloat16", "float16")
LARGEST = {name: float(ml_dtypes.finfo(np.dtype(name)).max) for name in DTYPES}
SMALLEST = {name: float(ml_dtypes.finfo(np.dtype(name)).smallest_normal) for name in DTYPES}


def invalid(field: str, found: object, expected: str) -> ValueError:
    """Build the one form of error for bad input: the field, the value found and what was expected."""
    return ValueError(f"{field}: found {found!r}, expected {expected}")


def check_int(field: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` as an int in [low, high]; bools and floats are refused."""
    bound = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise invalid(field, value, bound)
    try:
        number = int(value.__index__())  # type: ignore[attr-defined]  # looked for above
    except TypeError:  # an array of several numbers, or a traced one
        raise invalid(field, value, bound) from None
    if number < low or (high is not None and number > high):
        raise invalid(field, number, bound)
    return number


def check_bool(field: str, value: object) -> bool:
    """Return `value`, which must be true or false (JSON has both; 0 and "false" are refused)."""
    if not isinstance(value, bool):
        raise invalid(field, value, "true or false")
    return value


def check_float(field: str, value: object, *, above: float, expected: str) -> float:
    """Return `value` as a float greater than `above`, of a size that float32 holds at full precision."""
    number = _real(value)
    if abs(number) > LARGEST["float32"] or number <= above or 0 < abs(number) < SMALLEST["float32"] or number != number:
        raise invalid(field, value, expected)
    return number


def _real(value: object) -> float:
    """Return a real number as a float; NaN for anything else, and for integers beyond a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """Return `value`, which must be one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(field, value, "one of " + ", ".join(choices))
    return value


def dtype_name(field: str, value: object) -> str:
    """Name one of the float dtypes a head may have, given its name ("torch." allowed), type or dtype."""
    name = value if isinstance(value, str) else getattr(value, "name", None) or getattr(value, "__name__", None)
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "f32": "float32", "fp32": "float32"}
    text = str(name).removeprefix("torch.")
    text = short.get(text, text)
    if text not in DTYPES:
        raise invalid(field, value, "one of " + ", ".join(DTYPES))
    return text


def check_topk(topk: object, columns: int) -> int | None:
    """Return k as an int from 1 to the number of draftable columns, or None for dense."""
    return None if topk is None else check_int("topk", topk, 1, columns)


def check_min_confidence(value: object) -> float | None:
    """Return the confidence threshold in [0, 1], or None."""
    if value is None:
        return None
    number = _real(value)
    if not 0 <= number <= 1:
        raise invalid("min_confidence", value, "a number from 0 to 1")
    return number
