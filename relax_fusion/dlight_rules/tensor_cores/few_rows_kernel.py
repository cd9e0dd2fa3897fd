"""The body of a tensor-core kernel for few rows: weights stream through shared memory.

Weights are what costs, and each is used once.  So every warp copies just what it will multiply
itself, into a ring that is its own (`few_rows_ring`), and as much is in flight as the ring holds.

An instruction takes 16 columns of the weight as the rows of its left operand, and 8 rows of x as
the columns of its right one.  In which order k passes through it does not matter to a sum, if both
operands have the same; so of 32 neighbours along k, a thread multiplies eight, which it loads from
shared memory at once: four in each of two instructions.  Of a weight ``[k, n]`` it loads eight
columns of one k at once, and pairs those of two.

All warps of a block have the same columns and take turns along k; at the end they add their sums
(`few_rows_sums`), and those of the other blocks of a cluster, if k is split.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_warp_sync

from ...estimator.families.few_rows.tiles import CHUNK, GROUP, MMA_COLUMNS, MMA_ROWS
from ...estimator.tile_plan import TilePlan
from ...tvm_ir import T
from . import dependent
from .few_rows_ring import Launch, Place, Ring
from .few_rows_sums import WarpSums
from .fragments import clear, ptx, scratch
from .instructions import INSTRUCTIONS
from .layout import LANES, PIECE
from .normed_rows import HALVES, REGISTERS, NormedRows
from .row_norm import RowNorm
from .tile import Product, int32, uint32

QUADS = LANES // 4
"""Groups of four threads: each has a row of x, and two columns of an instruction."""


class FewRowsKernel:
    """Emits one thread block, into the IR builder that is open.

    Parameters
    ----------
    plan : TilePlan
        Sizes.
    product : Product
        What is computed.
    norm : RowNorm, optional
        What is done to the rows first.
    place : Place
        What the thread works on.
    launch : Launch
        How it begins.
    """

    def __init__(
        self,
        plan: TilePlan,
        product: Product,
        norm: RowNorm | None,
        place: Place,
        launch: Launch,
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        self.plan, self.product, self.norm = plan, product, norm
        self.place, self.launch = place, launch
        self.ring = Ring(plan, product, norm, place, launch.shared_bytes)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        # Of a chunk: weights, then x, then the factors of its norm
        self.weights = 2 * HALVES * product.parts * self.tiles_n
        loads = self.weights + HALVES * (self.tiles_m + (len(norm.factors) if norm else 0))
        self.operands = scratch("operands", loads * REGISTERS, "uint32", "local")
        sums = product.parts * self.tiles_n * self.tiles_m * 4
        self.sums = scratch("sums", sums, "float32", "local")

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        clear(self.sums)
        ahead = self.plan.num_stages - 1
        self._request_first(ahead)
        rows = NormedRows(self) if self.norm else None
        steps = int32(self.ring.steps)
        with T.serial(steps) as step:
            T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            T.evaluate(cuda_warp_sync())
            # Into the place of the step before this one, which has been multiplied
            with T.If(step + int32(ahead) < steps), T.Then():
                self.ring.request_weights(step + int32(ahead))
                self.ring.request_rows(step + int32(ahead))
            T.evaluate(ptx["cp.async.commit_group"]())
            for chunk in range(self.ring.chunks):
                self._receive(step, chunk)
                if rows:
                    rows.normalise()
                self._multiply()

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        WarpSums(self, self.ring.shared, self.ring.base[0]).finish()

    def _request_first(self, ahead: int) -> None:
        """Begin the first copies: weights are there before the rows may be."""
        first = range(min(ahead, self.ring.steps))
        if self.launch.early:
            for step in first:
                self.ring.request_weights(int32(step))
            dependent.hand_over()
        for step in range(ahead):
            if step in first:
                if not self.launch.early:
                    self.ring.request_weights(int32(step))
                self.ring.request_rows(int32(step))
            T.evaluate(ptx["cp.async.commit_group"]())

    def _receive(self, step: tirx.Expr, chunk: int) -> None:
        """Load the operands of a chunk into registers."""
        quad, member = self.place.quad, self.place.member
        for tile in range(self.weights // (2 * HALVES)):
            for half in range(2 * HALVES):
                self._load(2 * HALVES * tile + half, self._weight_piece(step, chunk, tile, half))
        place, first = self.weights, self.ring.weight_lines
        lines = [(first + tile * MMA_ROWS, quad) for tile in range(self.tiles_m)]
        if self.norm:
            first += self.plan.block_m
            lines += [(first, int32(index)) for index in range(len(self.norm.factors))]
        for index, (first_line, line) in enumerate(lines):
            for half in range(HALVES):
                address = self.ring.piece(step, chunk, first_line, line, member + int32(4 * half))
                self._load(place + index * HALVES + half, address)

    def _weight_piece(self, step: tirx.Expr, chunk: int, tile: int, index: int) -> tirx.Expr:
        """Return the address of one of the pieces of a tile of weights that this thread loads."""
        quad, member = self.place.quad, self.place.member
        if self.product.layout == "nk":
            column, half = divmod(index, HALVES)
            first = tile * MMA_COLUMNS + column * QUADS
            return self.ring.piece(step, chunk, first, quad, member + int32(4 * half))
        # Four tiles are a group: sixteen pieces of 64 columns, of each eight along k
        group, load = divmod(tile * 2 * HALVES + index, PIECE * HALVES)
        half, k = divmod(load, PIECE)
        line = int32(half * 32 + k) + member * int32(PIECE)
        return self.ring.piece(step, chunk, group * CHUNK, line, quad)

    def _load(self, load: int, address: tirx.Expr) -> None:
        targets = [self.operands[load * REGISTERS + i] for i in range(REGISTERS)]
        T.evaluate(ptx["ld.shared.v4.b32"](*targets, address))

    def _multiply(self) -> None:
        """Multiply what is in the registers: four instructions for each tile."""
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        for half in range(HALVES):
            for turn in range(2):
                for tile in range(self.weights // (2 * HALVES)):
                    left = [
                        self._pair(tile, half, 2 * turn + r // 2, r % 2) for r in range(REGISTERS)
                    ]
                    for m in range(self.tiles_m):
                        first = (self.weights + m * HALVES + half) * REGISTERS + 2 * turn
                        right = [self.operands[first + r] for r in range(2)]
                        sums = [self.sums[(tile * self.tiles_m + m) * 4 + e] for e in range(4)]
                        T.evaluate(multiply(*sums, *left, *right, *sums))

    def _pair(self, tile: int, half: int, pair: int, second: int) -> tirx.Expr:
        """Return two neighbours along k of one of both columns of a quad, as one register."""
        if self.product.layout == "nk":
            return self.operands[((2 * tile + second) * HALVES + half) * REGISTERS + pair]
        group, inside = divmod(tile, PIECE // 2)
        first = (group * HALVES + half) * PIECE + 2 * pair
        low, high = (self.operands[(first + e) * REGISTERS + inside] for e in range(2))
        if second:
            return (low >> uint32(16)) | (high & uint32(0xFFFF0000))
        return (low & uint32(0xFFFF)) | (high << uint32(16))

    def column(self, tile: int, half: int) -> tirx.Expr:
        """Return which column of the block one of both columns of a quad is."""
        quad = self.place.quad
        if self.product.layout == "nk":
            return int32(tile * MMA_COLUMNS + half * QUADS) + quad
        group, inside = divmod(tile, PIECE // 2)
        return int32(group * GROUP + 2 * inside + half) + quad * int32(PIECE)
