"""The body of a kernel of two matmuls on tensor cores, the tensor between them in registers.

A warp multiplies its rows of x with `A`, some columns at a time.  The sums, rounded, are where the
next product wants its left operand, as in attention, and meet every column of `B` that the block
has.  Operands come by ``cp.async`` through one ring of stages: first x and A, then B.

Source of the layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared
from tvm.script.ir_builder import tirx as T

from ...estimator.families.mma_chain import chunk_columns
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...workload import MatmulChain
from .chain_side import Side
from .epilogue import MmaEpilogue
from .fragments import SharedTile, clear, local, multiply, pack_left, ptx, scratch
from .layout import LANES, MMA_M, MMA_N, column_of
from .sums import own_sums
from .tile import MmaTile, int32, int64

SLICE = 2 * MMA_N
"""Columns of two instructions: the depth of one of the next product."""

Copied = tuple[tirx.Expr, list[tirx.Expr | None]]


class ChainKernel:
    """Emits one thread block, into the IR builder that is open.

    Parameters
    ----------
    work, plan : MatmulChain, TilePlan
        What is computed, and the tile.
    sides : tuple of Side
        Both matmuls.
    thread : tirx.Var
        The int32 index of the thread in its block.
    at : tuple of tirx.Expr
        Tile of rows, and part of the columns, int32.
    """

    def __init__(
        self,
        work: MatmulChain,
        plan: TilePlan,
        sides: tuple[Side, Side],
        thread: tirx.Var,
        at: tuple[tirx.Expr, tirx.Expr],
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        self.work, self.plan = work, plan
        self.threads = thread, plan.num_warps * LANES
        self.inner, self.product = sides
        layout = work.layouts[1]
        self.tile = MmaTile(replace(plan, block_n=plan.reg_n), 1, layout, work.dtype)
        types = self.types = self.tile.instructions
        self.chunk = chunk_columns(plan, work)
        self.x = SharedTile(plan.block_m, plan.block_k, types)
        shapes = (self.chunk, plan.block_k), (plan.reg_n, work.r)
        depth = ceil_div(work.r, SLICE) * SLICE
        turned = (plan.block_k, self.chunk), (depth, plan.reg_n)
        self.weights = [
            SharedTile(*(shape if side == "nk" else other), types)
            for shape, other, side in zip(shapes, turned, work.layouts, strict=True)
        ]
        self.stage = max(self.x.elements + self.weights[0].elements, self.weights[1].elements)
        shared = scratch("stages", plan.num_stages * self.stage, work.dtype, "shared.dyn")
        # All of it: TVM keeps no more of a buffer than what it sees to be accessed.
        self.whole = shared.access_ptr("rw")
        self.base = local("base", 1, "uint32")
        self.place = local("place", 2, "int64")
        for i, (index, size) in enumerate(zip(at, (plan.block_m, plan.block_n), strict=True)):
            T.buffer_store(self.place, int64(index) * int64(size), [i])
        self.first_row, self.first_column = self.place[0], self.place[1]
        self.lane = thread % int32(LANES)
        self.warp_row = thread // int32(LANES) * int32(plan.reg_m)
        self.warp_column = int32(0)
        self.tiles_m, self.tiles_n = plan.reg_m // MMA_M, plan.reg_n // MMA_N
        self.slices = depth // SLICE  # of the second product
        self.rows_of_x = local("rows_of_x", self.tiles_m * 4, "uint32")
        self.right = local("right", 4, "uint32")
        self.middle = local("middle", self.tiles_m * self.chunk // MMA_N * 4, "float32")
        self.left = local("left", self.tiles_m * self.slices * 4, "uint32")
        self.sums = local("sums", self.tiles_m * self.tiles_n * 4, "float32")
        self.depth_steps = ceil_div(work.k, plan.block_k)
        self.chunks = ceil_div(work.r, self.chunk)
        self.column_steps = plan.block_n // plan.reg_n

    def emit(self) -> None:
        """Emit both products and the epilogue."""
        T.buffer_store(self.base, cuda_cvta_generic_to_shared(self.whole), [0])
        for step in range(self.plan.num_stages - 1):
            self._copy_step(int32(step))
        for chunk in range(self.chunks):
            self._inner(chunk)
        with T.serial(int32(self.column_steps)) as step:
            self._outer(step)

    def _inner(self, chunk: int) -> None:
        """Multiply x with some columns of A, and round the sums."""
        clear(self.middle)
        with T.serial(int32(self.depth_steps)) as step:
            base = self._next(step + int32(chunk * self.depth_steps))
            weight = base + tirx.const(self._bytes(self.x.elements), "uint32")
            for index in range(self.x.slices):
                for i in range(self.tiles_m):
                    line = self.warp_row + int32(i * MMA_M)
                    self.x.load_left(self.rows_of_x, 4 * i, base, (self.lane, line, index))
                for pair in range(self.chunk // SLICE):
                    self._load_right(0, weight, pair, index)
                    self._multiply(self.middle, (self.rows_of_x, 0), pair, self.chunk // MMA_N)
        for pair in range(self.chunk // SLICE):
            index = chunk * (self.chunk // SLICE) + pair
            for i in range(self.tiles_m if index < self.slices else 0):
                self._round(i, pair, index)

    def _outer(self, step: tirx.Var) -> None:
        """Multiply the intermediate with some columns of B, and store the results."""
        base = self._next(step + int32(self.chunks * self.depth_steps))
        for index in range(self.slices):
            for pair in range(self.tiles_n // 2):
                self._load_right(1, base, pair, index)
                at = (self.left, index * self.tiles_m * 4)
                self._multiply(self.sums, at, pair, self.tiles_n, begin=index == 0)
        self.first_column = self.place[1] + int64(step * int32(self.plan.reg_n))
        MmaEpilogue(self).emit(own_sums(self))

    def sum_at(self, part: int, line: int, position: int) -> tirx.Expr:
        """Return a sum of this lane, as `MmaKernel.sum_at`."""
        return self.sums[
            (line // 2 * self.tiles_n + position // 2) * 4 + line % 2 * 2 + position % 2
        ]

    def _round(self, row_tile: int, pair: int, index: int) -> None:
        """Take sums of sixteen columns through the steps of the intermediate, and pack them."""
        columns = self.chunk // MMA_N

        def value(instruction: int, half: int, e: int) -> tirx.Expr:
            at = (row_tile * columns + 2 * pair + instruction) * 4 + half * 2 + e
            row = self.first_row + int64(
                self.warp_row + self.lane // int32(4) + int32(row_tile * MMA_M + half * 8)
            )
            column = int64(self.lane % int32(4) * int32(2))
            column = column + int64(index * SLICE + instruction * MMA_N + e)
            if self.work.r % SLICE:  # zeros of B meet what is beyond
                column = tirx.min(column, int64(self.work.r - 1))
            ((_, result),) = self.inner.results(row, column, lambda _: self.middle[at])
            return result.value  # pack rounds

        first = (index * self.tiles_m + row_tile) * 4
        pack_left(self.left, first, value, self.types)

    def _multiply(
        self,
        sums: tirx.Var,
        left: tuple[tirx.Var, int],
        pair: int,
        columns: int,
        *,
        begin: bool = False,
    ) -> None:
        """Multiply all row tiles of the warp by the sixteen columns in `right`."""
        registers, first = left
        for i in range(self.tiles_m):
            a = [registers[first + 4 * i + e] for e in range(4)]
            for half in range(2):
                at = (i * columns + 2 * pair + half) * 4
                b = [self.right[2 * half + e] for e in range(2)]
                multiply(self.types, [sums[at + e] for e in range(4)], a, b, begin=begin)

    def _load_right(self, side: int, base: tirx.Expr, pair: int, index: int) -> None:
        """Load sixteen columns of a weight, of one slice along its depth."""
        layout = self.work.layouts[side]
        place = (pair * SLICE, index) if layout == "nk" else (index * SLICE, pair)
        self.weights[side].load_right(self.right, 0, base, (self.lane, *place), layout)

    # --- the ring of stages ------------------------------------------------------------------

    def _next(self, step: tirx.Expr) -> tirx.Expr:
        """Wait for the operands of a step, begin to copy those of a later one; return the address.

        The barrier tells that every warp has seen its copies, and is done with the step before,
        whose stage is filled next.
        """
        T.evaluate(ptx["cp.async.wait_group"](self.plan.num_stages - 2))
        T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))
        self._copy_step(step + int32(self.plan.num_stages - 1))
        return self._stage_address(step)

    def _stage_address(self, step: tirx.Expr) -> tirx.Expr:
        stage = step % int32(self.plan.num_stages)
        return self.base[0] + (stage * int32(self._bytes(self.stage))).astype("uint32")

    def _bytes(self, elements: int) -> int:
        return elements * self.types.element_bytes

    def _copy_step(self, step: tirx.Expr) -> None:
        """Begin to copy the operands of a step, if there is one."""
        first = int32(self.chunks * self.depth_steps)
        with T.If(step < first), T.Then():
            self._copy_inner(step)
        later = tirx.all(step >= first, step < first + int32(self.column_steps))
        with T.If(later), T.Then():
            self._copy_outer(step - first, self._stage_address(step))
        T.evaluate(ptx["cp.async.commit_group"]())

    def _copy_inner(self, step: tirx.Expr) -> None:
        """Begin to copy a tile of x, and one of A."""
        base, side = self._stage_address(step), self.inner
        first_k = int64(step % int32(self.depth_steps) * int32(self.plan.block_k))
        first_column = int64(step // int32(self.depth_steps) * int32(self.chunk))

        def x(line: tirx.Expr, element: tirx.Expr) -> Copied:
            row, k = self.first_row + int64(line), first_k + int64(element)
            return side.left_at(row, k), [row < side.rows, _below(k, side.depth, self.x.width)]

        def weight(line: tirx.Expr, element: tirx.Expr) -> Copied:
            j, k = (line, element) if self.work.layouts[0] == "nk" else (element, line)
            j, k = first_column + int64(j), first_k + int64(k)
            inside = [_below(j, side.columns, self.chunk), _below(k, side.depth, self.x.width)]
            return side.weight_at(j, k), inside

        self.x.copy(base, self.threads, self.plan.lanes, x)
        at = base + tirx.const(self._bytes(self.x.elements), "uint32")
        self.weights[0].copy(at, self.threads, self.plan.lanes, weight)

    def _copy_outer(self, step: tirx.Expr, base: tirx.Expr) -> None:
        """Begin to copy some columns of B, all of its depth."""
        side, plan = self.product, self.plan
        first_column = self.place[1] + int64(step * int32(plan.reg_n))

        def weight(line: tirx.Expr, element: tirx.Expr) -> Copied:
            by_column = self.work.layouts[1] == "nk"
            j, k = (column_of(line, self.tile.run), element) if by_column else (element, line)
            j, k = first_column + int64(j), int64(k)
            exact = None if by_column else _below(k, side.depth, SLICE)
            return side.weight_at(j, k), [_below(j, side.columns, plan.block_n), exact]

        self.weights[1].copy(base, self.threads, plan.lanes, weight)


def _below(index: tirx.Expr, size: int, multiple: int) -> tirx.Expr | None:
    """Return that `index` is inside, None where tiles of `multiple` end where the tensor does."""
    return index < int64(size) if size % multiple else None
