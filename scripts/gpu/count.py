"""Count what a compiled GPU program moves and launches, from its optimized HLO text; no GPU is needed.

Rules (docs/gpu_report.md explains them): every scheduled instruction that does work is one kernel; a kernel moves the
operands it reads plus the outputs it writes; an operand touched only through slices or gathers counts what those touch,
in 32-byte sectors; an in-place update counts the update; a loop body counts times its known trip count; a conditional
counts its most expensive branch. Pallas kernels, which HLO shows as opaque calls, count what the caller's rules say of
them (kernel_rules.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

from .hlo import BYTES, Computation, Instruction, Module, Shape, parameters, parse_module, root_of

SECTOR = 32
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"} | {
    "opt-barrier", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PallasCall:
    """An opaque Pallas (Triton) call: its kernel's name, operand shapes and result shapes."""

    kernel: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]


@dataclasses.dataclass
class Work:
    """What a piece of a program costs. `items` lists (bytes, launches, description) per instruction."""

    nbytes: int = 0
    kernels: int = 0
    items: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    branches: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def add(self, other: Work, times: int = 1) -> None:
        """Add another piece, executed `times` times."""
        self.nbytes += other.nbytes * times
        self.kernels += other.kernels * times
        self.items += [(size * times, count * times, text) for size, count, text in other.items]
        self.branches += other.branches


def _sectors(contiguous: int) -> int:
    return -(-contiguous // SECTOR) * SECTOR


def _run(shape: Shape, part: tuple[int, ...]) -> int:
    """Bytes of the longest contiguous piece when `part` elements per axis of `shape` (row-major) are touched."""
    size = BYTES[shape.dtype]
    for whole, some in zip(reversed(shape.dims), reversed(part), strict=True):
        size *= some
        if some != whole:
            break
    return size


def _pieces(shape: Shape, part: tuple[int, ...]) -> int:
    """Bytes in whole sectors of touching `part` elements per axis of an array, never more than all of it."""
    run = _run(shape, part)
    total = math.prod(part) * BYTES[shape.dtype]
    return min(shape.nbytes, total // run * _sectors(run) if run else 0)


def slice_bytes(shape: Shape, instruction: Instruction) -> int:
    """Bytes that a slice, dynamic-slice or gather touches in its operand of `shape`."""
    out = instruction.shapes[0]
    if instruction.opcode == "slice":
        bounds = [[int(n) for n in part.split(":")] for part in re.findall(r"\[([\d:]+)\]", instruction.attributes)]
        # A stride leaves gaps, but what is fetched is sectors: axes strided within a sector count as if contiguous.
        size = BYTES[shape.dtype]
        part, step = [], bounds[-1][2] if bounds and len(bounds[-1]) > 2 else 1
        for low, high, *stride in bounds:
            part.append(-(-(high - low) // (stride[0] if stride else 1)))
        if step > 1:
            whole = math.prod(part[:-1]) * (bounds[-1][1] - bounds[-1][0]) * size
            return min(whole, math.prod(part) * SECTOR)
        return _pieces(shape, tuple(part))
    if instruction.opcode == "gather":
        sizes = re.search(r"slice_sizes=\{([\d,]*)\}", instruction.attributes)
        part = tuple(int(n) for n in sizes[1].split(",") if n) if sizes else ()
        return out.elements // max(math.prod(part), 1) * _pieces(shape, part)
    return _pieces(shape, out.dims)


def _users(computation: Computation, name: str) -> list[Instruction]:
    return [i for i in computation.values() if name in i.operands]


def read_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes of fused parameter `instruction` that its computation reads."""
    shape = instruction.shapes[0]
    return min(shape.nbytes, round(_touched(module, computation, instruction, BYTES[shape.dtype], {})))


def _touched(module: Module, computation: Computation, node: Instruction, size: int, seen: dict[str, float]) -> float:
    """Bytes of `node` (elements of `size` bytes) that its users read: all of it, or the parts that slices pick."""
    if node.name in seen:
        return seen[node.name]
    shape = node.shapes[0]
    whole, total = shape.elements * size, 0.0
    for user in _users(computation, node.name):
        first = user.operands[0] == node.name and user.operands.count(node.name) == 1
        if user.opcode in ("slice", "dynamic-slice", "gather") and first:
            part = slice_bytes(dataclasses.replace(shape, dtype=_unsigned(size)), user)
            # A slice of a slice is read in part only.
            total += part * (1.0 if user.root else _share(module, computation, user, seen))
        elif user.opcode in ("dynamic-update-slice", "scatter") and first:
            pass  # updated in place: what is kept is not read
        elif user.opcode == "tuple":
            total += 0 if node.opcode == "parameter" else whole  # a parameter is handed on, a result is written
        elif user.opcode == "fusion" and (name := user.called("calls")):
            inner = parameters(module.computations[name])
            places = [i for i, operand in enumerate(user.operands) if operand == node.name]
            total += sum(read_bytes(module, module.computations[name], inner[i]) for i in places)
        elif user.root or not _maps(user, shape):
            total += whole
        else:
            total += whole * _share(module, computation, user, seen)
    seen[node.name] = min(total, whole)
    return seen[node.name]


def _share(module: Module, computation: Computation, node: Instruction, seen: dict[str, float]) -> float:
    """The part of a fused value that is computed at all, from 0 to 1."""
    elements = max(node.shapes[0].elements, 1)
    return _touched(module, computation, node, 1, seen) / elements if not node.root else 1.0


def _maps(user: Instruction, shape: Shape) -> bool:
    """Whether a part of the user's result needs no more than the same part of this operand."""
    if user.opcode in ("reduce", "transpose", "reshape", "bitcast"):
        return True
    return len(user.shapes) == 1 and user.shapes[0].dims == shape.dims and user.opcode not in ("sort", "scan", "dot")


def _unsigned(size: int) -> str:
    return {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[size]


def update_bytes(computation: Computation, update: Instruction) -> int:
    """Bytes an in-place dynamic-update-slice or scatter writes."""
    shape = update.shapes[0]
    if update.opcode == "dynamic-update-slice":
        return _pieces(shape, computation[update.operands[1]].shapes[0].dims)
    written = [computation[name].shapes[0] for name in update.operands[len(update.shapes) + 1 :]]
    window = re.search(r"update_window_dims=\{([\d,]*)\}", update.attributes)
    axes = [int(n) for n in window[1].split(",") if n] if window else []
    sizes = [math.prod(s.dims[a] for a in axes) for s in written]
    touched = [s.elements // max(w, 1) * _sectors(w * BYTES[s.dtype]) for s, w in zip(written, sizes, strict=True)]
    return sum(min(n, s.nbytes) for n, s in zip(touched, update.shapes, strict=True))  # never more than the array


def write_bytes(module: Module, computation: Computation, node: Instruction) -> int:
    """Bytes written by root `node` of a fused computation."""
    while node.opcode in ("bitcast", "reshape"):
        node = computation[node.operands[0]]
    if node.opcode == "tuple":
        return sum(write_bytes(module, computation, computation[name]) for name in dict.fromkeys(node.operands))
    if node.opcode in ("dynamic-update-slice", "scatter"):
        return update_bytes(computation, node)
    if node.opcode == "parameter":
        return 0
    if node.opcode == "fusion" and (name := node.called("calls")):
        inner = module.computations[name]
        return write_bytes(module, inner, root_of(inner))
    return node.nbytes


def pallas_call(instruction: Instruction, operands: tuple[Shape, ...]) -> PallasCall | None:
    """Recognise an opaque Pallas (Triton) call."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    if not target or "triton" not in target[1]:
        return None
    # The backend configuration is a dictionary whose entry `name` is the kernel function's name.
    name = re.search(r'\bname\s*[=:]\s*\\?"([\w.\-]+)\\?"', instruction.attributes)
    return PallasCall(name[1] if name else "?", operands, instruction.shapes)


Rule = Callable[[PallasCall], int]


def instruction_work(module: Module, computation: Computation, node: Instruction, rules: Mapping[str, Rule]) -> Work:
    """Cost of one scheduled instruction."""
    if node.opcode in FREE:
        return Work()
    if node.opcode == "while":
        trips = re.search(r"known_trip_count\W+n\W+(\d+)", node.attributes)
        if trips is None:
            raise ValueError(f"while loop {node.name} has no known trip count")
        work = Work()
        work.add(computation_work(module, node.called("body") or "", rules), int(trips[1]))
        return work
    if node.opcode == "conditional":
        names = re.search(r"branch_computations=\{([^}]*)\}", node.attributes)
        listed = (
            names[1] if names else " ".join(filter(None, map(node.called, ("true_computation", "false_computation"))))
        )
        branches = [computation_work(module, n, rules) for n in re.findall(r"[\w.\-]+", listed)]
        worst = max(branches, key=lambda w: w.nbytes)
        worst.branches.append(tuple(w.nbytes for w in branches))
        return worst
    if node.opcode in ("call", "async-start") and (name := node.called("to_apply") or node.called("calls")):
        return computation_work(module, name, rules)
    operands = tuple(s for name in node.operands for s in computation[name].shapes)
    if (call := pallas_call(node, operands)) is not None:
        if call.kernel not in rules:
            raise ValueError(f"no byte rule for the Pallas kernel {call.kernel!r}")
        size = rules[call.kernel](call)
    elif node.opcode == "fusion":
        inner = module.computations[node.called("calls") or ""]
        size = sum(read_bytes(module, inner, p) for p in parameters(inner)) + write_bytes(module, inner, root_of(inner))
    elif node.opcode in ("slice", "dynamic-slice", "gather"):
        indices = sum(computation[n].nbytes for n in node.operands[1:])
        size = slice_bytes(operands[0], node) + node.nbytes + indices
    elif node.opcode in ("dynamic-update-slice", "scatter"):
        size = update_bytes(computation, node) + sum(computation[n].nbytes for n in node.operands[1:])
    elif node.opcode == "custom-call":
        # cuBLAS lists its scratch space as an s8 result; it is no traffic of the mathematics.
        size = sum(computation[n].nbytes for n in node.operands) + sum(s.nbytes for s in node.shapes if s.dtype != "s8")
    elif node.opcode == "copy-start":
        size = 2 * node.shapes[0].nbytes
    elif node.opcode in ("broadcast", "iota"):
        size = node.nbytes
    else:
        size = sum(computation[n].nbytes for n in node.operands) + node.nbytes
    label = call.kernel if call else (node.called("calls") or node.opcode)
    return Work(size, 1, [(size, 1, f"{node.name} ({label})")])


def computation_work(module: Module, name: str, rules: Mapping[str, Rule]) -> Work:
    """Cost of all instructions of a scheduled computation."""
    work = Work()
    computation = module.computations[name]
    for node in computation.values():
        work.add(instruction_work(module, computation, node, rules))
    return work


def sorted_lengths(module: Module) -> list[int]:
    """Length of the sorted axis of every sort in the program (comparison or radix sorts; TopK kernels are none)."""
    lengths = []
    for computation in module.computations.values():
        for node in computation.values():
            if node.opcode == "sort":
                axis = re.search(r"dimensions=\{(\d+)\}", node.attributes)
                lengths.append(node.shapes[0].dims[int(axis[1]) if axis else -1])
            elif node.opcode == "custom-call" and re.search(
                r'custom_call_target="[^"]*sort[^"]*"', node.attributes, re.I
            ):
                lengths.append(max((s.dims[-1] for s in node.shapes if s.dims), default=0))
    return lengths


@dataclasses.dataclass(frozen=True)
class Report:
    """What a program costs: bytes, kernel launches, sort lengths and the per-instruction list."""

    nbytes: int
    kernels: int
    sorts: list[int]
    items: list[tuple[int, int, str]]
    branches: list[tuple[int, ...]]


def report(text: str, rules: Mapping[str, Rule] | None = None) -> Report:
    """Count an optimized, scheduled HLO module."""
    module = parse_module(text)
    work = computation_work(module, module.entry, rules or {})
    return Report(work.nbytes, work.kernels, sorted_lengths(module), sorted(work.items, reverse=True), work.branches)
