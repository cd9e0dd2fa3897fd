"""What kernels of ``mma.m16n8k16`` are made of: tiles in shared memory, and fragments in registers.

A tile comes by ``cp.async`` into swizzled lines, from which ``ldmatrix`` loads fragments without
bank conflicts.  The sums of one product become the left operand of the next without leaving their
registers: a lane holds of both the same rows, and of sixteen neighbouring columns the same four
pairs.

Source: PTX ISA, sections "Matrix Fragments for mma.m16n8k16 with floating point type", "Warp-level
matrix load instruction: ldmatrix" and "Data Movement and Conversion Instructions: cp.async".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as script
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...hardware.instructions import PIECE_BYTES, SLICE_BYTES
from ...workload import WeightLayout
from .instructions import Instructions
from .layout import a_lane, b_lane, swizzled
from .tile import int32, int64

ptx = script.ptx

SLICE_PIECES = SLICE_BYTES // PIECE_BYTES

Source = Callable[[tirx.Expr, tirx.Expr], tuple[tirx.Expr, Sequence[tirx.Expr | None]]]
"""From a line and an element to what is copied from there on, and what must hold for that."""


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
    types: Instructions,
    sums: Sequence[tirx.Expr],
    a: Sequence[tirx.Expr],
    b: Sequence[tirx.Expr],
    *,
    begin: bool = False,
) -> None:
    """Add the product of 16 rows and 8 columns to four sums, or put it in their place."""
    before = [tirx.const(0, types.registers)] * 4 if begin else sums
    T.evaluate(ptx[types.mma](*sums, *a, *b, *before))


def round_registers(registers: tirx.Var, which: Iterable[int]) -> None:
    """Round float32 to tf32, ties away from zero: what multiplies it ignores the other bits."""
    for i in which:
        wide = T.reinterpret("float32", registers[i])
        T.evaluate(ptx["cvt.rna.tf32.f32"](registers[i], wide))


def pack(register: tirx.Expr, low: tirx.Expr, high: tirx.Expr, types: Instructions) -> None:
    """Round two float32 numbers into the halves of a register."""
    T.evaluate(ptx[f"cvt.rn.{types.name}x2.f32"](register, high, low))


def pack_left(
    registers: tirx.Var,
    first: int,
    sums: Callable[[int, int, int], tirx.Expr],
    types: Instructions,
) -> None:
    """Make a left operand of two-byte elements out of the sums of sixteen neighbouring columns.

    Parameters
    ----------
    sums : callable
        The sum of one of the two instructions that computed them, of rows ``lane // 4 + 8 * half``,
        and of the first or second of the lane's columns.
    """
    for register in range(4):
        instruction, half = divmod(register, 2)
        low, high = (sums(instruction, half, e) for e in range(2))
        pack(registers[first + register], low, high, types)


@dataclass(frozen=True)
class SharedTile:
    """Lines of a matrix in shared memory.

    Parameters
    ----------
    lines : int
        A multiple of 16.
    width : int
        Elements of a line, even.  In memory they fill slices, the last ones with zeros.
    types : Instructions
        What the elements are multiplied by.
    """

    lines: int
    width: int
    types: Instructions

    @property
    def slices(self) -> int:
        """Groups of two pieces in a line, each the depth of an instruction."""
        return -(-self.width // self.types.k)

    @property
    def pieces(self) -> int:
        """Pieces of a line."""
        return self.slices * SLICE_PIECES

    @property
    def elements(self) -> int:
        """Elements of the whole tile."""
        return self.lines * self.pieces * self.types.piece

    def copy(
        self, base: tirx.Expr, threads: tuple[tirx.Expr, int], lanes: int, source: Source
    ) -> None:
        """Begin to copy the tile to address `base`, `lanes` elements at a time.

        Parameters
        ----------
        threads : tuple of tirx.Expr and int
            Index of this thread, and how many share the work.
        """
        thread, count = threads
        unit, size = self.types.piece, lanes * self.types.element_bytes
        row = self.pieces * unit // lanes  # copies of a line
        for first in range(0, self.lines * row, count):
            place = thread + int32(first)
            line, element = place // int32(row), place % int32(row) * int32(lanes)
            load, conditions = source(line, element)
            if self.width % self.types.k:
                conditions = [*conditions, element < int32(self.width)]
            at = self._address(base, line, swizzled(line, element // int32(unit), self.pieces))
            at = at + (element % int32(unit) * int32(self.types.element_bytes)).astype("uint32")
            if first + count <= self.lines * row:
                copy_async(at, load, size, conditions)
            else:  # there are more threads than copies
                with T.If(place < int32(self.lines * row)), T.Then():
                    copy_async(at, load, size, conditions)

    def load_left(
        self, registers: tirx.Var, first: int, base: tirx.Expr, at: tuple[tirx.Expr, tirx.Expr, int]
    ) -> None:
        """Load 16 x 16 elements as a left operand: four registers from `first` on.

        Parameters
        ----------
        at : tuple of tirx.Expr, tirx.Expr, int
            Lane; first line, a multiple of 16; slice of the lines.
        """
        lane, line, index = at
        row, piece = a_lane(lane)
        load_matrices(registers, first, self._place(base, line + row, piece, index), False)

    def load_right(
        self,
        registers: tirx.Var,
        first: int,
        base: tirx.Expr,
        at: tuple[tirx.Expr, int, int],
        layout: WeightLayout,
    ) -> None:
        """Load the right operands of two instructions.

        Parameters
        ----------
        at : tuple of tirx.Expr, int, int
            Lane; first line, a multiple of 16; slice of the lines.
        layout : {"nk", "kn"}
            Whether lines are columns and lie along k, or lie along sixteen columns.
        """
        lane, line, index = at
        row, piece = b_lane(lane, layout)
        address = self._place(base, row, piece, index)
        skip = line * self.pieces * PIECE_BYTES  # the swizzle repeats after sixteen lines
        load_matrices(registers, first, ptx.addr(address, skip), layout == "kn")

    def _place(self, base: tirx.Expr, line: tirx.Expr, piece: tirx.Expr, index: int) -> tirx.Expr:
        """Return the address of piece 0 or 1 of a slice."""
        # The slices differ in other bits than the pieces of one, so this is a sum
        place = swizzled(line, piece, self.pieces) ^ int32(index * SLICE_PIECES)
        return self._address(base, line, place)

    def _address(self, base: tirx.Expr, line: tirx.Expr, piece: tirx.Expr) -> tirx.Expr:
        start = base + (line * int32(self.pieces * PIECE_BYTES)).astype("uint32")
        return start + (piece * int32(PIECE_BYTES)).astype("uint32")
