"""A row that a thread block keeps in shared memory, normalised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from ...estimator.families.few_rows.tiles import MEMBERS
from ...estimator.prediction import ceil_div
from ...hardware.instructions import PIECE_BYTES
from ...matching.expressions import ramp
from ...tvm_ir import T
from .dequantised import unrolled
from .fragments import add_over_warp, add_up, ptx, scratch
from .layout import LANES, PIECE
from .tile import RowNorm, int32, int64

if TYPE_CHECKING:
    from .dequantised_rows import DequantisedRowsKernel
    from .streamed_row import StreamedRowKernel

BANKS = 8
"""Shared memory is read and written in this many banks of 16 bytes."""


def swizzled(row: tirx.Expr, piece: tirx.Expr, width: int) -> tirx.Expr:
    """Return where a piece of 16 bytes of a row lies, such that eight threads meet no bank twice.

    Together they load the same piece of four members and two rows, or store that of eight members.
    """
    pieces = width // PIECE  # of a member
    if pieces == 1:
        return piece ^ (row % int32(2) * int32(BANKS // 2))
    moved = (row + piece // int32(BANKS * pieces // 2)) % int32(2)
    if pieces == MEMBERS:
        moved = moved * int32(2) + piece // int32(BANKS) % int32(2)
    return piece ^ moved


class ResidentRow:
    """The row of a thread block, from memory to the beginning of its shared memory, normalised.

    A thread takes `width` neighbours along k at a time, and stores them in the pairs in which
    weights come out of their words.
    """

    def __init__(
        self, kernel: DequantisedRowsKernel | StreamedRowKernel, norm: RowNorm | None
    ) -> None:
        """Allocate registers, in the block that is open."""
        self.kernel, self.norm, self.width = kernel, norm, kernel.width
        self.units = kernel.product.depth // self.width
        self.stored = kernel.steps * kernel.plan.block_k // self.width  # zeros at the end
        self.threads = kernel.plan.num_warps * LANES
        self.turns = ceil_div(self.stored, self.threads)
        size, dtype = self.turns * self.width, kernel.product.dtype
        self.loaded = scratch("row", size, dtype, "local")
        self.factors = [
            scratch(f"factor{i}", size, dtype, "local")
            for i in range(len(norm.factors) if norm else 0)
        ]
        self.paired = scratch("row_pairs", self.width, dtype, "local")
        self.totals = scratch("row_sums", 1 + len(norm.sums if norm else ()), "float32", "local")

    def address(self, piece: tirx.Expr) -> tirx.Expr:
        """Return the address of a piece of 16 bytes of the row."""
        at = swizzled(int32(0), piece, self.width) * int32(PIECE_BYTES)
        return self.kernel.base[0] + at.astype("uint32")

    def load(self) -> None:
        """Emit the loads, of the row and of what it is multiplied by."""
        with unrolled(self.turns) as turn:
            unit = tirx.min(self._unit(turn), int32(self.units - 1))
            for first in range(0, self.width, PIECE):
                with T.vectorized(int64(PIECE)) as e:
                    k = int64(unit) * int64(self.width) + int64(first) + e
                    place = int64(turn) * int64(self.width) + int64(first) + e
                    T.buffer_store(self.loaded, self._x(k), [place])
                    for factor, buffer in zip(
                        self.factors, self.norm.factors if self.norm else (), strict=True
                    ):
                        T.buffer_store(factor, buffer[k], [place])

    def store(self) -> None:
        """Emit the norm, and the stores."""
        # Else a compiler puts all of this in front of the first copies, and memory waits meanwhile
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        for index in range(len(self.norm.sums) if self.norm else 0):
            self._add_up(index)
        with unrolled(self.turns) as turn:
            unit = self._unit(turn)
            if self.stored % self.threads:
                with T.If(unit < int32(self.stored)), T.Then():
                    self._store(turn, unit)
            else:
                self._store(turn, unit)
        T.evaluate(tirx.op.tvm_storage_sync("shared"))

    def _unit(self, turn: tirx.Expr) -> tirx.Expr:
        return turn * int32(self.threads) + self.kernel.place.thread

    def _x(self, k: tirx.Expr) -> tirx.Expr:
        row = self.kernel.place.first_row
        return self.norm.x[row, k] if self.norm else self.kernel.product.x_at(row, k)

    def _add_up(self, index: int) -> None:
        """Add up a statistic of the row."""
        assert self.norm is not None
        totals, zero = self.totals, tirx.const(0.0, "float32")
        known = [totals[before] for before in range(index)]
        T.buffer_store(totals, zero, [index])
        with unrolled(self.turns) as turn:
            terms = [
                self.norm.summand(
                    index, tirx.Cast("float32", self._at(self.loaded, turn, e)), known
                )
                for e in range(self.width)
            ]
            term = tirx.Select(self._unit(turn) < int32(self.units), add_up(terms), zero)
            T.buffer_store(totals, totals[index] + term, [index])
        add_over_warp(totals, index)
        # What the warps have lies where the row will
        kernel, warps = self.kernel, self.kernel.plan.num_warps
        place = index * warps
        with T.If(kernel.place.lane == int32(0)), T.Then():
            T.buffer_store(kernel.shared, totals[index], [int32(place) + kernel.place.warp])
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        first, *rest = [kernel.shared[int32(place + w)] for w in range(warps)]
        T.buffer_store(totals, sum(rest, first), [index])
        if index == len(self.norm.sums) - 1:
            T.evaluate(tirx.op.tvm_storage_sync("shared"))

    def _store(self, turn: tirx.Expr, unit: tirx.Expr) -> None:
        """Normalise neighbours, and store them in pairs; zeros where there are none."""
        zero = tirx.const(0.0, self.kernel.product.dtype)
        for place, element in enumerate(self._order()):
            value = self._value(turn, element)
            if self.stored > self.units:
                value = tirx.Select(unit < int32(self.units), value, zero)
            T.buffer_store(self.paired, value, [place])
        for first in range(0, self.width, PIECE):
            pairs = [self.paired[ramp(int32(first + 2 * n), 2)] for n in range(PIECE // 2)]
            at = self.address(unit * int32(self.width // PIECE) + int32(first // PIECE))
            words = [T.reinterpret("uint32", pair) for pair in pairs]
            T.evaluate(ptx["st.shared.v4.b32"](at, *words))

    def _order(self) -> list[int]:
        """Return neighbours in the order in which weights come out of their words."""
        pairs = self.kernel.neighbours[0].pairs()
        return [element for pair in pairs for element in pair]

    def _value(self, turn: tirx.Expr, element: int) -> tirx.Expr:
        """Return an element of those that are loaded, normalised."""
        value = self._at(self.loaded, turn, element)
        if self.norm is None:
            return value
        others = (self._at(factor, turn, element) for factor in self.factors)
        values = [tirx.Cast("float32", v) for v in (value, *others)]
        totals = [self.totals[index] for index in range(len(self.norm.sums))]
        return self.norm.normalised(values, totals).astype(self.kernel.product.dtype)

    def _at(self, buffer: tirx.Var, turn: tirx.Expr, element: int) -> tirx.Expr:
        return buffer[turn * int32(self.width) + int32(element)]
