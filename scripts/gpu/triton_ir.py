"""Run a Pallas-Triton kernel as lowered: the Triton module inside the program, interpreted in NumPy.

Pallas' own interpreter runs the Python body; this runs the operations that a GPU's compiler gets, on real buffers, and
refuses what a GPU would leave undefined (triton_memory.KernelFault). All programs of the grid run side by side: a value
has a leading axis of programs (a constant scalar has none). A value that came from a masked lane without a given
replacement is marked undefined, and so is what is computed from it; storing one is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, scf  # noqa: F401 (registers the dialects)
from jaxlib.triton import dialect

from .compile import lowering
from .triton_memory import Buffer, KernelFault, UnsupportedKernel

TARGET = "__gpu$xla.gpu.triton"
TYPES = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64, "index": np.int64,
}  # fmt: skip


class Value(NamedTuple):
    """`data` [programs, ...] (of pointers: offsets), where it is undefined, and the buffer of a pointer."""

    data: Any
    undefined: Any = np.False_
    buffer: Any = None  # a Buffer


class Kernel(NamedTuple):
    """A kernel found in a lowered program: MLIR bytecode, grid, and operand number -> result number."""

    name: str
    code: bytes
    grid: tuple[int, ...]
    aliases: dict[int, int]


def find_kernels(function: Callable[..., Any], *shapes: Any) -> list[Kernel]:
    """Lower a function for CUDA (no GPU needed) and return its Triton kernels in program order."""
    with lowering():
        module = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found: list[Kernel] = []

    def visit(operation: Any) -> None:
        for block in (block for region in operation.regions for block in region.blocks):
            for op in block.operations:
                given = op.operation.attributes
                if op.operation.name == "stablehlo.custom_call" and given["call_target_name"].value == TARGET:
                    config = ir.DictAttr(given["mhlo.backend_config"])
                    grid = tuple(ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz")
                    alias = str(given["output_operand_aliases"]) if "output_operand_aliases" in given else ""
                    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", alias)
                    aliases = {int(source): int(to or 0) for to, source in pairs}
                    code = ir.StringAttr(config["ir"]).value_bytes
                    found.append(Kernel(ir.StringAttr(config["name"]).value, code, grid, aliases))
                visit(op.operation)

    assert module is not None
    visit(module.operation)
    return found


def run_kernel(kernel: Kernel, operands: Sequence[Any], results: Sequence[Any]) -> list[np.ndarray]:
    """Run every program of the grid; returns the results, of which every element must have been written."""
    inputs = [Buffer(np.asarray(x), f"operand {i}", True) for i, x in enumerate(operands)]
    outputs = [Buffer(np.zeros(x.shape, x.dtype), f"result {i}", False) for i, x in enumerate(results)]
    for source, to in kernel.aliases.items():
        outputs[to] = inputs[source]
    context = ir.Context()
    dialect.register_dialect(context)
    with context, np.errstate(all="ignore"):
        module = ir.Module.parse(kernel.code, context)
        block = module.body.operations[0].operation.regions[0].blocks[0]
        machine = Machine(kernel.grid)
        machine.run(block, [Value(np.int64(0), buffer=b) for b in (*inputs, *outputs)])
    for buffer in outputs:
        if not buffer.written.all():
            raise KernelFault(f"{buffer.name}[{np.flatnonzero(~buffer.written)[0]}] was never written")
    return [buffer.flat.reshape(buffer.shape) for buffer in outputs]


def shape_and_type(kind: Any) -> tuple[tuple[int, ...], str]:
    """Split "tensor<16x32xf32>" into ((16, 32), "f32")."""
    text = str(kind)
    match = re.fullmatch(r"tensor<((?:\d+x)+)(.*)>", text)
    return (tuple(map(int, match[1][:-1].split("x"))), match[2]) if match else ((), text)


def unsigned(x: Any) -> Any:
    """Reinterpret signed integers as unsigned."""
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.view(f"u{x.dtype.itemsize}")


def total(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Apply to unsigned readings and give a signed one back."""

    def apply(a: Any, b: Any) -> Any:
        out = np.asarray(f(unsigned(a), unsigned(b)))
        return out if out.dtype == np.bool_ else out.view(f"i{out.dtype.itemsize}")

    return apply


def truncating(a: Any, b: Any) -> Any:
    """Divide as C does, toward zero."""
    return (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(np.result_type(a, b))


INTEGER = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
INTEGER += [total(f) for f in INTEGER[2:]]
ORDERED = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal, 6: np.not_equal}
BINARY = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.addf": np.add,
    "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide, "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor, "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.maxui": total(np.maximum), "arith.minui": total(np.minimum), "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin, "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "arith.shli": np.left_shift,
    "arith.shrui": total(np.right_shift), "arith.shrsi": np.right_shift, "arith.divsi": truncating,
    "arith.remsi": np.fmod, "arith.divui": total(np.floor_divide), "arith.remui": total(np.remainder),
}  # fmt: skip
UNARY = {"log": np.log, "log1p": np.log1p, "exp": np.exp, "abs": np.abs, "sqrt": np.sqrt, "neg": np.negative}
CASTS = {"arith.extf", "arith.truncf", "arith.extsi", "arith.sitofp", "arith.fptosi", "arith.trunci"}


def compare_floats(predicate: int, a: Any, b: Any) -> Any:
    """Apply arith.cmpf: 1 to 7 are false where a value is NaN, 8 to 14 true."""
    nan = np.isnan(a) | np.isnan(b)
    if predicate in (7, 14):
        return ~nan if predicate == 7 else nan
    return (ORDERED[predicate](a, b) & ~nan) if predicate < 7 else (ORDERED[predicate - 7](a, b) | nan)


class Machine:
    """Runs blocks of operations; values are found by the operation result or block argument that made them."""

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid, self.programs = grid, int(np.prod(grid))
        self.values: dict[Any, Value] = {}

    def run(self, block: Any, arguments: Sequence[Value]) -> list[Value]:
        """Run a block and return the operands of its terminator."""
        self.values.update(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operands = [self.values[x] for x in op.operation.operands]
            if op.operation.name in ("scf.yield", "tt.return", "tt.reduce.return", "tt.scan.return"):
                return operands
            made = self.step(op.operation, operands)
            self.values.update(zip(op.operation.results, made, strict=True))
        return []

    def full(self, x: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Give a value its program axis and its shape."""
        x = np.asarray(x)
        lead = x.reshape(x.shape + (1,) * (len(shape) + 1 - x.ndim)) if x.ndim <= 1 else x
        return np.broadcast_to(lead, (self.programs, *shape))

    def step(self, op: Any, xs: list[Value]) -> list[Value]:
        """Run one operation."""
        name = op.name
        if name == "scf.for":
            low, high, by = (np.unique(x.data) for x in xs[:3])
            if low.size * high.size * by.size != 1:
                raise UnsupportedKernel("scf.for whose bounds differ between programs")
            carried = xs[3:]
            for i in range(int(low[0]), int(high[0]), int(by[0])):
                carried = self.run(op.regions[0].blocks[0], [Value(low.dtype.type(i)), *carried])
            return carried
        if name in ("tt.reduce", "tt.scan"):
            return self.combine(op, xs, scan=name == "tt.scan")
        if name == "tt.store":
            return self.store(xs)
        shape, kind = shape_and_type(op.results[0].type)
        if name == "tt.load":
            if next(iter(op.results[0].uses), None) is None:
                return [Value(np.False_)]  # Pallas lowers a store as a swap; the compiler drops the unused load
            return [self.load(xs, shape, TYPES[kind])]
        moved = self.move(op, xs, shape)
        if moved is not None:
            return [moved]
        undefined = xs[0].undefined if xs else np.False_
        for x in xs[1:]:
            undefined = undefined | x.undefined
        return [Value(self.compute(op, [x.data for x in xs], shape, kind), undefined)]

    def move(self, op: Any, xs: list[Value], shape: tuple[int, ...]) -> Value | None:
        """Run what only moves values, or chooses among them."""
        name = op.name
        if name == "tt.addptr":
            offset = np.asarray(xs[0].data) + np.asarray(xs[1].data).astype(np.int64)
            return Value(offset, xs[0].undefined | xs[1].undefined, xs[0].buffer)
        if name == "arith.select":
            which = np.asarray(xs[0].data)
            chosen = np.where(which, xs[1].undefined, xs[2].undefined) | xs[0].undefined
            return Value(np.where(which, xs[1].data, xs[2].data), chosen)
        if name in ("tt.splat", "tt.broadcast"):
            return Value(self.full(xs[0].data, shape), self.full(xs[0].undefined, shape), xs[0].buffer)
        if name in ("tt.expand_dims", "tt.reshape"):
            parts = [np.asarray(x) for x in (xs[0].data, xs[0].undefined)]
            data, marks = (x.reshape(x.shape[:1] + shape) if x.ndim else x for x in parts)
            return Value(data, marks, xs[0].buffer)
        if name == "tt.trans":
            order = (0, *(1 + int(i) for i in ir.DenseI32ArrayAttr(op.attributes["order"])))
            marks = np.asarray(xs[0].undefined)
            return Value(np.transpose(xs[0].data, order), np.transpose(marks, order) if marks.ndim else marks)
        if name == "tt.dot":
            a, b, c = (np.asarray(x.data) for x in xs)
            left, right, sums = (np.broadcast_to(np.asarray(x.undefined), np.shape(x.data)) for x in xs)
            dirty = np.any(left, axis=-1, keepdims=True) | np.any(right, axis=-2, keepdims=True) | sums
            return Value(np.matmul(a.astype(c.dtype), b.astype(c.dtype)) + c, dirty)
        return None

    def compute(self, op: Any, xs: list[Any], shape: tuple[int, ...], kind: str) -> Any:
        """Run an elementwise operation, or make a constant."""
        name, given, dtype = op.name, op.attributes, TYPES[kind]
        if name == "arith.constant":
            value = given["value"]
            if shape:
                dense = ir.DenseElementsAttr(value)
                splat: Any = dense.get_splat_value() if dense.is_splat else None
                made = splat.value if dense.is_splat else np.asarray(dense)
                return np.broadcast_to(made, (self.programs, *shape)).astype(dtype)
            return np.asarray(value.value).astype(dtype)
        if name == "tt.get_program_id":
            axis = ir.IntegerAttr(given["axis"]).value
            return (np.arange(self.programs) // int(np.prod(self.grid[:axis])) % self.grid[axis]).astype(dtype)
        if name == "tt.make_range":
            start, end = (ir.IntegerAttr(given[end]).value for end in ("start", "end"))
            return self.full(np.arange(start, end, dtype=dtype)[None], shape)
        if name in BINARY:
            return np.asarray(BINARY[name](*xs)).astype(dtype)
        if name == "arith.cmpi":
            return INTEGER[ir.IntegerAttr(given["predicate"]).value](*xs)
        if name == "arith.cmpf":
            return compare_floats(ir.IntegerAttr(given["predicate"]).value, *xs)
        if name in CASTS:
            return np.asarray(xs[0]).astype(dtype)
        if name in ("arith.extui", "arith.uitofp"):
            return unsigned(xs[0]).astype(dtype)
        if name in ("arith.bitcast", "tt.bitcast"):
            return np.ascontiguousarray(xs[0]).view(dtype)
        symbol = ir.StringAttr(given["symbol"]).value if name == "tt.extern_elementwise" else name
        plain = re.fullmatch(r"(?:__nv_(?:fast_)?f?|math\.f?|arith\.)(abs|log1p|log|exp|sqrt|neg)f?", symbol)
        if not plain:
            raise UnsupportedKernel(f"operation {symbol}")
        return UNARY[plain[1]](np.asarray(xs[0])).astype(dtype)

    def load(self, xs: list[Value], shape: tuple[int, ...], dtype: Any) -> Value:
        """Load the lanes that are not masked; others take the given replacement, or are undefined."""
        at, mask, program = self.lanes(xs[0], xs[1] if len(xs) > 1 else None, shape)
        data = np.zeros(at.shape, dtype) if len(xs) < 3 else np.array(self.full(xs[2].data, shape))
        marks = ~mask if len(xs) < 3 else ~mask & self.full(xs[2].undefined, shape)
        data[mask] = xs[0].buffer.read(at[mask], program[mask])
        return Value(data, marks)

    def store(self, xs: list[Value]) -> list[Value]:
        """Store the lanes that are not masked."""
        shape = np.shape(xs[0].data)[1:]
        at, mask, program = self.lanes(xs[0], xs[2] if len(xs) > 2 else None, shape)
        if (self.full(xs[1].undefined, shape) & mask).any():
            raise KernelFault(f"a masked lane's value is stored to {xs[0].buffer.name}")
        xs[0].buffer.write(at[mask], self.full(xs[1].data, shape)[mask], program[mask])
        return []

    def lanes(self, pointer: Value, mask: Value | None, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Return offsets, mask and program of every lane; neither address nor mask may be undefined."""
        inside = self.full(True if mask is None else mask.data, shape)
        if (self.full(pointer.undefined, shape) & inside).any() or (mask is not None and np.any(mask.undefined)):
            raise KernelFault(f"a masked lane's value decides an address of {pointer.buffer.name}")
        return self.full(pointer.data, shape), inside, self.full(np.arange(self.programs), shape)

    def combine(self, op: Any, xs: list[Value], *, scan: bool) -> list[Value]:
        """Reduce or scan along an axis with the operation's region."""
        axis = 1 + ir.IntegerAttr(op.attributes["axis"]).value
        if scan and "reverse" in op.attributes and ir.BoolAttr(op.attributes["reverse"]).value:
            raise UnsupportedKernel("tt.scan in reverse")
        parts = [np.moveaxis(np.asarray(x.data), axis, 0) for x in xs]
        marks = [np.moveaxis(np.broadcast_to(x.undefined, np.shape(x.data)), axis, 0) for x in xs]
        n, d = len(parts[0]), 1 if scan else len(parts[0]) // 2
        while d < n if scan else d:
            end = -d if scan else d
            first = [Value(x[:end], m[:end]) for x, m in zip(parts, marks, strict=True)]
            second = [Value(x[d:], m[d:]) for x, m in zip(parts, marks, strict=True)]
            found = self.run(op.regions[0].blocks[0], [*first, *second])
            made = [np.asarray(v.data) for v in found]
            dirty = [np.broadcast_to(v.undefined, np.shape(v.data)) for v in found]
            parts = [np.concatenate([x[:d], y]) for x, y in zip(parts, made, strict=True)] if scan else made
            marks = [np.concatenate([x[:d], y]) for x, y in zip(marks, dirty, strict=True)] if scan else dirty
            d = 2 * d if scan else d // 2
        if scan:
            return [Value(np.moveaxis(x, 0, axis), np.moveaxis(m, 0, axis)) for x, m in zip(parts, marks, strict=True)]
        return [Value(x[0], m[0]) for x, m in zip(parts, marks, strict=True)]
