"""What kernels of ``mma.m16n8`` are made of: buffers, ``cp.async``, ``ldmatrix`` and the products.

Source: PTX ISA, sections "Matrix Fragments for mma.m16n8k16 with floating point type", "Warp-level
matrix load instruction: ldmatrix" and "Data Movement and Conversion Instructions: cp.async".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tvm import tirx
from tvm.script import tirx as script

from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import IRBuilder, T
from .layout import LANES, Instructions
from .tile import int32, int64

ptx = script.ptx


def local(name: str, size: int, dtype: str) -> tirx.Var:
    """Allocate registers, in the block that is open."""
    return scratch(name, size, dtype, "local")


def scratch(name: str, size: int, dtype: str, scope: str) -> tirx.Var:
    """Allocate a flat buffer, in the block that is open.

    In dynamic shared memory its name tells its type: all kernels of a module are one CUDA program,
    which takes such a name for one array.
    """
    if scope == "shared.dyn":
        name = f"{name}_{dtype}"
    buffer = T.sblock_alloc_buffer([int64(size)], dtype, scope=scope)
    IRBuilder.name(name, buffer)
    return buffer


def add_up(terms: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return the sum of a power of two of terms, in pairs: few additions wait for one another."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def add_over_warp(buffer: tirx.Var, *places: int) -> None:
    """Give every lane of a warp the sums of what all of them have in some registers."""
    for distance in (1, 2, 4, 8, 16):
        for place in places:  # side by side, for each shuffle waits for the one before it
            other = T.tvm_warp_shuffle_xor(0xFFFFFFFF, buffer[place], distance, LANES, LANES)
            T.buffer_store(buffer, buffer[place] + other, [place])


def clear(buffer: tirx.Var) -> None:
    """Set registers of float32 to 0."""
    with T.unroll(buffer.ty.shape[0]) as i:
        T.buffer_store(buffer, tirx.const(0.0, "float32"), [i])


def copy_async(
    at: tirx.Expr,
    load: tirx.Expr,
    size: int,
    conditions: Sequence[tirx.Expr | None],
    hint: str = "",
) -> None:
    """Begin to copy `size` bytes; zeros where a condition does not hold, and nothing is read.

    `hint` is what PTX adds to the instruction for L2.
    """
    kind = "cg" if size == PIECE_BYTES else "ca"  # narrower ones go through L1
    args = [at, tirx.address_of(load), size]
    inside = [c for c in conditions if c is not None]
    if inside:
        held = inside[0]
        for condition in inside[1:]:
            held = tirx.all(held, condition)
        args.append(tirx.Select(held, int32(size), int32(0)).astype("uint32"))
    T.evaluate(ptx[f"cp.async.{kind}.shared.global{hint}"](*args))


def load_matrices(registers: tirx.Var, first: int, address: object, transposed: bool) -> None:
    """Load four 8 x 8 matrices into registers from `first` on."""
    targets = [registers[first + i] for i in range(4)]
    how = "trans." if transposed else ""
    T.evaluate(ptx[f"ldmatrix.sync.aligned.m8n8.x4.{how}shared.b16"](*targets, address))


def multiply(
    types: Instructions, sums: Sequence[tirx.Expr], a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]
) -> None:
    """Add the product of 16 rows and 8 columns to four sums."""
    T.evaluate(ptx[types.mma](*sums, *a, *b, *sums))


def round_registers(registers: tirx.Var, which: Iterable[int]) -> None:
    """Round float32 to tf32, ties away from zero: what multiplies it ignores the other bits."""
    for i in which:
        wide = T.reinterpret("float32", registers[i])
        T.evaluate(ptx["cvt.rna.tf32.f32"](registers[i], wide))
