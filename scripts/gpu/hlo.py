"""Read optimized HLO in text form (`compiled.as_text()`): computations, instructions, shapes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4} | {
    "s64": 8, "u64": 8, "f64": 8, "c64": 8, "token": 0, "opaque": 0, "s4": 1, "u4": 1, "f8e4m3fn": 1, "f8e5m2": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.elements * BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction; `shapes` has one entry, or one per element of a tuple."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    inside: str  # the text between the operand parentheses (a parameter's number)
    attributes: str
    root: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all results."""
        return sum(shape.nbytes for shape in self.shapes)

    def called(self, key: str) -> str | None:
        """Name of the computation in attribute `key` (calls, body, to_apply, ...)."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed HLO module."""

    computations: Mapping[str, Computation]
    entry: str


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Read `f32[2,3]{1,0}` or a tuple of such."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", text)
    return tuple(Shape(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found if dtype in BYTES)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses: {text[start : start + 80]!r}")


def parse_instruction(line: str) -> Instruction | None:
    """Read one line of a computation; None where it holds no instruction."""
    found = re.match(r"\s*(ROOT\s+)?%?([\w.\-]+) = ", line)
    if not found:
        return None
    rest = re.sub(r"/\*.*?\*/", "", line[found.end() :])
    cut = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes, rest = parse_shapes(rest[:cut]), rest[cut:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    operands = () if rest[:opening] == "constant" else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(
        found[2], rest[:opening], shapes, operands, inside, rest[closing + 1 :], found[1] is not None
    )  # fmt: skip


def parse_module(text: str) -> Module:
    """Read an HLO module in text form (`compiled.as_text()`)."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.split("\n"):
        header = re.match(r"(ENTRY\s+)?%?([\w.\-]+) \(.*\{\s*$", line)
        if header and not line.startswith(" "):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (instruction := parse_instruction(line)) is not None:
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation in the HLO text")
    return Module(computations, entry)


def parameters(computation: Computation) -> list[Instruction]:
    """Parameters of a computation in order."""
    return sorted((i for i in computation.values() if i.opcode == "parameter"), key=lambda i: int(i.inside))


def root_of(computation: Computation) -> Instruction:
    """Root instruction of a computation."""
    return next(i for i in computation.values() if i.root)
