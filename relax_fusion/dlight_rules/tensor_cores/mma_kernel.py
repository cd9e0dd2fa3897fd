"""The body of a tensor-core kernel: a pipeline of copies, ``ldmatrix`` and ``mma.sync``.

A block walks along k.  ``num_stages`` tiles of x and of the weight are in shared memory or on their
way there (``cp.async``, zeros beyond the edges); a warp loads the operands of one step of k into
registers while it multiplies those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared

from ...estimator.prediction import ceil_div
from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import T
from .fragments import copy_async, load_matrices, local, multiply, ptx, round_registers, scratch
from .layout import LANES, MMA_M, MMA_N, a_lane, column_of, swizzled
from .tile import MmaTile, Product, int32, int64, is_multiple, uint32
from .weights import weights_of

READ, WRITTEN = range(2)
"""The stages that a kernel keeps in view."""


class MmaKernel:
    """Emits the accumulation of one output tile, into the IR builder that is open.

    `at` is the row and the column of the tile among all tiles, `rank` which of the plan's
    ``split_k`` parts of the reduction is this block's; these and the index of the thread are int32.
    """

    padding_bytes = 0
    """Shared memory beside the stages."""

    def __init__(
        self,
        tile: MmaTile,
        product: Product,
        thread: tirx.Var,
        at: tuple[tirx.Expr, tirx.Expr],
        rank: tirx.Expr,
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        plan = tile.plan
        self.tile, self.product, self.thread, self.rank = tile, product, thread, rank
        self.types = tile.instructions
        # Of each part; zeros fill the last
        self.steps = ceil_div(product.depth, plan.block_k * plan.split_k)
        first = local("first", 3, "int64")
        sizes = plan.block_m, plan.block_n, self.steps * plan.block_k
        for i, (index, size) in enumerate(zip((*at, rank), sizes, strict=True)):
            T.buffer_store(first, int64(index) * int64(size), [i])
        self.first_row, self.first_column, self.first_k = first[0], first[1], first[2]
        self.lane = thread % int32(LANES)
        warp = thread // int32(LANES)
        self.warp_row = warp % int32(tile.warps_m) * int32(plan.reg_m)
        self.warp_column = warp // int32(tile.warps_m) * int32(plan.reg_n)
        self.tiles_m, self.tiles_n = plan.reg_m // MMA_M, plan.reg_n // MMA_N
        self.slices = plan.block_k // self.types.k
        padding = self.padding_bytes // self.types.element_bytes
        shared = scratch("stages", tile.shared_elements + padding, tile.dtype, "shared.dyn")
        # All of it: TVM keeps no more of a buffer than what it sees to be accessed.
        self.whole = shared.access_ptr("rw")
        self.base = local("base", 1, "uint32")
        self.stages = local("stage", 2, "uint32")  # that are read and written next
        self.sums = tile.parts * self.tiles_m * self.tiles_n * 4
        self.acc = local("acc", self.sums, self.types.registers)
        # Two sets: one is multiplied while the other is loaded.
        self.a = local("a", 2 * self.tiles_m * 4, "uint32")
        self.b = local("b", 2 * tile.parts * self.tiles_n * 2, "uint32")
        self.weights = weights_of(self)

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        self._clear()
        self._copy_first(self.tile.plan.num_stages - 1)
        self._wait()
        self._load(0, self.stages[READ], 0)
        with T.serial(int32(self.steps)) as step:
            for index in range(self.slices):
                self._slice(step, index)

    def _clear(self) -> None:
        """Set the sums to 0, and find out where the stages are."""
        T.buffer_store(self.base, self._first_address(), [0])
        for stage in (READ, WRITTEN):
            T.buffer_store(self.stages, self.base[0], [stage])
        with T.unroll(int32(self.sums)) as i:
            T.buffer_store(self.acc, tirx.const(0, self.types.registers), [i])

    def _first_address(self) -> tirx.Expr:
        return cuda_cvta_generic_to_shared(self.whole)

    def sum_at(self, part: int, line: int, position: int) -> tirx.Expr:
        """Return a sum of this lane.

        `line`: which of its rows: number ``lane // 4 + 8 * line`` of its warp.
        `position`: column, of the ``2 * tiles_n`` that it has of each row.
        """
        column_tile, element = self.weights.sum_of(position)
        total = self.acc[self._sum(part, line // 2, column_tile) + line % 2 * 2 + element]
        return total.astype(self.types.total)

    def _sum(self, part: int, row_tile: int, column_tile: int) -> int:
        """Return the first of the four sums that an instruction leaves in a lane."""
        return ((part * self.tiles_m + row_tile) * self.tiles_n + column_tile) * 4

    def _slice(self, step: tirx.Var, index: int) -> None:
        """Multiply one slice of a step, load the next one, and begin a copy for a later step."""
        if index == 0:
            self._copy_ahead(step, self.tile.plan.num_stages - 1)
        following = (index + 1) % self.slices
        if following == 0:
            self._wait()
            self._next_stage(READ)
        self._load((index + 1) % 2, self.stages[READ], following)
        self._multiply(index % 2)

    def _copy_first(self, count: int) -> None:
        """Begin to copy what so many steps need."""
        for index in range(count):
            if index < self.steps:
                self._copy(int32(index))
            T.evaluate(ptx["cp.async.commit_group"]())

    def _copy_ahead(self, step: tirx.Var, distance: int) -> None:
        """Begin to copy what a later step needs, if there is one."""
        later = step + int32(distance)
        with T.If(later < int32(self.steps)), T.Then():
            self._copy(later)
        T.evaluate(ptx["cp.async.commit_group"]())

    def _next_stage(self, which: int) -> None:
        """Go on to the next stage, behind the last to the first."""
        stage_bytes = self.tile.stage_elements * self.types.element_bytes
        last = self.base[0] + uint32(stage_bytes * (self.tile.plan.num_stages - 1))
        here = self.stages[which]
        following = tirx.Select(here == last, self.base[0], here + uint32(stage_bytes))
        T.buffer_store(self.stages, following, [which])

    def _wait(self) -> None:
        """Wait for the oldest copy of the pipeline, and for every thread to be done with it."""
        T.evaluate(ptx["cp.async.wait_group"](self.tile.plan.num_stages - 2))
        T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))

    @property
    def written(self) -> tirx.Expr:
        """The address of the stage that is written next."""
        return self.stages[WRITTEN]

    def part_offset(self, part: int) -> int:
        """Return the bytes in front of a part of the weight in a stage."""
        return (self.tile.x_elements + part * self.tile.part_elements) * self.types.element_bytes

    # --- global to shared --------------------------------------------------------------------

    def _copy(self, step: tirx.Expr) -> None:
        """Begin to copy the operands of a step into the stage that is written next."""
        tile, product, plan = self.tile, self.product, self.tile.plan
        first_k = self.first_k + int64(step * int32(plan.block_k))
        base = self.written

        def x(row: tirx.Expr, element: tirx.Expr) -> tuple[tirx.Expr, list[tirx.Expr]]:
            row, k = self.first_row + int64(row), first_k + int64(element)
            return product.x_at(row, k), [row < product.rows, self._in_depth(k)]

        pieces = plan.block_k // self.types.piece
        self._copy_lines(
            base,
            (plan.block_m, plan.block_k),
            lambda line, piece: line * int32(pieces) + swizzled(line, piece, pieces),
            x,
        )
        for part in range(tile.parts):

            def weight(
                line: tirx.Expr, element: tirx.Expr, part: int = part
            ) -> tuple[tirx.Expr, list[tirx.Expr]]:
                if tile.layout == "nk":
                    j, k = column_of(line, tile.run), element
                else:
                    j, k = element, line
                j, k = self.first_column + int64(j), first_k + int64(k)
                return product.weight_at(part, j, k), [self._in_columns(j), self._in_depth(k)]

            offset = self.part_offset(part)
            lines = (plan.block_n, plan.block_k)
            at = base + uint32(offset)
            shape = lines if tile.layout == "nk" else lines[::-1]
            self._copy_lines(at, shape, self.weights.place, weight)
        self._next_stage(WRITTEN)

    @property
    def is_exact(self) -> bool:
        """Whether all steps together are as deep as the reduction."""
        plan = self.tile.plan
        return self.product.depth == self.steps * plan.block_k * plan.split_k

    def _in_depth(self, k: tirx.Expr) -> tirx.Expr | None:
        return None if self.is_exact else k < int64(self.product.depth)

    def _in_columns(self, j: tirx.Expr) -> tirx.Expr | None:
        exact = is_multiple(self.product.columns, self.tile.plan.block_n)
        return None if exact else j < int64(self.product.columns)

    def _copy_lines(
        self,
        base: tirx.Expr,
        shape: tuple[int, int],
        place_of: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
        source: Callable[[tirx.Expr, tirx.Expr], tuple[tirx.Expr, list[tirx.Expr | None]]],
    ) -> None:
        """Spread the lines of a tile over the threads, `lanes` elements at a time."""
        size = self.tile.plan.lanes * self.types.element_bytes
        for line, element, at in self.own_copies(base, shape, place_of):
            load, conditions = source(line, element)
            copy_async(at, load, size, conditions)

    def own_copies(
        self,
        base: tirx.Expr,
        shape: tuple[int, int],
        place_of: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
    ) -> Iterator[tuple[tirx.Expr, tirx.Expr, tirx.Expr]]:
        """Yield line, element and address of what this thread copies of a tile."""
        lines, width = shape
        lanes, threads, in_piece = self.tile.plan.lanes, self.tile.threads, self.types.piece
        for turn in range(lines * width // lanes // threads):
            place = self.thread + int32(turn * threads)
            line = place // int32(width // lanes)
            element = place % int32(width // lanes) * int32(lanes)
            piece = place_of(line, element // int32(in_piece))
            target = piece * int32(in_piece) + element % int32(in_piece)
            yield line, element, base + (target * int32(self.types.element_bytes)).astype("uint32")

    # --- shared to registers, and the product ------------------------------------------------

    def _load(self, buffer: int, stage: tirx.Expr, index: int) -> None:
        """Load the operands of slice `index` of a stage into one of the two sets of registers."""
        tile, plan = self.tile, self.tile.plan
        pieces = plan.block_k // self.types.piece
        row, piece = a_lane(self.lane)
        row = self.warp_row + row
        place = swizzled(row, piece + int32(index * 2), pieces)
        skipped = (row * int32(pieces) + place) * int32(PIECE_BYTES)
        address = stage + skipped.astype("uint32")
        for i in range(self.tiles_m):
            first = (buffer * self.tiles_m + i) * 4
            skip = i * MMA_M * plan.block_k * self.types.element_bytes
            load_matrices(self.a, first, ptx.addr(address, skip), False)
        for part in range(tile.parts):
            offset = self.part_offset(part)
            self.weights.load(buffer, part, stage + uint32(offset), index)

    def _multiply(self, buffer: int) -> None:
        """Multiply the operands of one set of registers."""
        if self.types.rounds:
            for operands in (self.a, self.b):
                size = int(operands.ty.shape[0]) // 2
                round_registers(operands, range(buffer * size, (buffer + 1) * size))
        for part in range(self.tile.parts):
            for i in range(self.tiles_m):
                for j in range(self.tiles_n):
                    sums = [self.acc[self._sum(part, i, j) + e] for e in range(4)]
                    a = [self.a[(buffer * self.tiles_m + i) * 4 + e] for e in range(4)]
                    first_b = ((buffer * self.tile.parts + part) * self.tiles_n + j) * 2
                    b = [self.b[first_b + e] for e in range(2)]
                    multiply(self.types, sums, a, b)
