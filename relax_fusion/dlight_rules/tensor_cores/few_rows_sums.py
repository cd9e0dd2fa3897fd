"""The end of a tensor-core kernel for few rows: the sums of all warps, and the epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.tiles import MMA_ROWS, SUM_BYTES
from ...tvm_ir import T
from .fragments import ptx, scratch
from .layout import LANES
from .tile import fill_a_tile, int32, int64

if TYPE_CHECKING:
    from .dequantised_rows import DequantisedRowsKernel
    from .few_rows_kernel import FewRowsKernel


class WarpSums:
    """Adds up what the warps of a thread block have, or those of a cluster of thread blocks.

    A kernel has the sums of its warps in registers, four of each instruction; shared memory is not
    used for operands any more, and other blocks know its address.  Where k is split, the blocks of
    a cluster have the parts.  Each reads the shared memory of all (PTX ISA, "Data Movement and
    Conversion Instructions: mapa"), and finishes its share of the results.
    """

    def __init__(
        self, kernel: FewRowsKernel | DequantisedRowsKernel, shared: tirx.Var, base: tirx.Expr
    ) -> None:
        """Allocate registers, in the block that is open."""
        self.kernel, self.shared, self.base = kernel, shared, base
        self.plan, self.product, self.place = kernel.plan, kernel.product, kernel.place
        self.tile = self.plan.block_m * self.plan.block_n
        self.totals = scratch("totals", self.product.parts, "float32", "local")
        self.others = self.plan.split_k > 1
        if self.others:
            self.blocks = scratch("blocks", self.plan.split_k, "uint32", "local")
            self.read = scratch("read", 1, "float32", "local")

    def finish(self) -> None:
        """Add up the sums, and apply the epilogue."""
        # Another warp may still read operands where this one puts its sums
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        self._share()
        if self.others:
            self._meet("release")
            for rank in range(self.plan.split_k):
                other = tirx.const(rank, "uint32")
                T.evaluate(ptx["mapa.shared::cluster.u32"](self.blocks[rank], self.base, other))
        else:
            T.evaluate(tirx.op.tvm_storage_sync("shared"))
        threads = self.plan.num_warps * LANES * self.plan.split_k
        part = self.place.part if self.others else int32(0)
        thread = self.place.thread + part * int32(self.plan.num_warps * LANES)
        for first in range(0, self.tile, threads):
            element = thread + int32(first)
            if first + threads <= self.tile:
                self._finish_element(element)
            else:  # there are more threads than elements
                with T.If(element < int32(self.tile)), T.Then():
                    self._finish_element(element)
        if self.others:  # a block that is gone has no shared memory
            self._meet("relaxed")

    def _meet(self, order: str) -> None:
        """Wait for all threads of the cluster; released, they see what was written before."""
        T.evaluate(ptx[f"barrier.cluster.arrive.{order}.aligned"]())
        T.evaluate(ptx["barrier.cluster.wait.acquire.aligned"]())

    def _share(self) -> None:
        """Put the sums of this thread where all can read them."""
        plan, parts, place = self.plan, self.product.parts, self.place
        tiles_m, instructions = plan.block_m // MMA_ROWS, self.kernel.sums.ty.shape[0] // 4
        for index in range(int(instructions)):
            part_and_n, m = divmod(index, tiles_m)
            part, n = divmod(part_and_n, int(instructions) // (parts * tiles_m))
            for e in range(4):
                row = int32(m * MMA_ROWS + e % 2) + place.member * int32(2)
                line = (place.warp * int32(parts) + int32(part)) * int32(plan.block_m) + row
                where = line * int32(plan.block_n) + self.kernel.column(n, e // 2)
                T.buffer_store(self.shared, self.kernel.sums[index * 4 + e], [where])

    def _finish_element(self, element: tirx.Expr) -> None:
        """Add up the sums of one element of the tile, and store what becomes of it.

        Only of rows that there are: to the barrier at the end, which orders nothing, a read counts
        as done because a store has waited for it.
        """
        line = element // int32(self.plan.block_n)
        row = self.place.first_row + int64(line)
        column = self.place.first_column + int64(element % int32(self.plan.block_n))
        inside = row < self.product.rows
        if isinstance(self.plan, PackedPlan) and self.plan.height < self.plan.block_m:
            inside = tirx.all(inside, line < int32(self.plan.height))
        if not fill_a_tile(self.product.columns, self.plan.block_n):
            inside = tirx.all(inside, column < int64(self.product.columns))
        with T.If(inside), T.Then():
            for part in range(self.product.parts):
                self._add_up(part, element)
            results = self.product.results(row, column, lambda part: self.totals[part])
            for (buffer, where), value in results:
                T.buffer_store(buffer, value, where)

    def _add_up(self, part: int, element: tirx.Expr) -> None:
        """Add up the sums of all warps for an element of a part."""
        warps = range(self.plan.num_warps)
        places = [int32((w * self.product.parts + part) * self.tile) + element for w in warps]
        if not self.others:
            first, *rest = [self.shared[place] for place in places]
            T.buffer_store(self.totals, sum(rest, first), [part])
            return
        T.buffer_store(self.totals, tirx.const(0.0, "float32"), [part])
        for rank in range(self.plan.split_k):
            for place in places:
                address = self.blocks[rank] + (place * int32(SUM_BYTES)).astype("uint32")
                T.evaluate(ptx["ld.shared::cluster.f32"](self.read[0], address))
                T.buffer_store(self.totals, self.totals[part] + self.read[0], [part])
