"""The body of a tensor-core kernel for few rows: weights stream through shared memory.

Weights are what costs, and each is used once.  So every warp copies (``cp.async``, 16 bytes a
thread, in whole lines of 128 bytes) just what it will multiply itself, into a ring of `num_stages`
steps that is its own: no barrier of the block, and as much in flight as the ring holds.

An instruction takes 16 columns of the weight as the rows of its left operand, and 8 rows of x as
the columns of its right one.  In which order k passes through it does not matter to a sum, if both
operands have the same; so of 32 neighbours along k, a thread multiplies eight, which it loads from
shared memory at once: four in each of two instructions.  Of a weight ``[k, n]`` it loads eight
columns of one k at once, and pairs those of two.

All warps of a block have the same columns and take turns along k; at the end they add their sums.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared, cuda_warp_sync
from tvm.script import tirx as script
from tvm.script.ir_builder import tirx as T

from ...estimator.mma import PIECE_BYTES
from ...estimator.prediction import ceil_div
from ...estimator.skinny import CHUNK, GROUP, MMA_COLUMNS, MMA_ROWS
from ...tile_plan import TilePlan
from .fragments import scratch
from .instructions import INSTRUCTIONS
from .layout import LANES, PIECE
from .normed_rows import HALVES, REGISTERS, NormedRows
from .row_norm import RowNorm
from .tile import Product, int32, int64

ptx = script.ptx

QUADS = LANES // 4
"""Groups of four threads: each has a row of x, and two columns of an instruction."""

PIECES = 8
"""Pieces of a line, which neighbouring threads copy."""

LINES = LANES // PIECES
"""Lines that a warp copies at once."""

COPY = "cp.async.cg.shared.global.L2::128B"
"""A copy past L1.  That L2 is told of the line's other pieces saves up to a microsecond of 17."""


def uint32(value: int) -> tirx.Expr:
    """Return `value` as the type of registers, and of addresses in shared memory."""
    return tirx.const(value, "uint32")


class SkinnyKernel:
    """Emits one thread block, into the IR builder that is open.

    Parameters
    ----------
    plan : TilePlan
        ``block_k`` elements of k are a step of all warps together.
    product : Product
        What is computed.
    norm : RowNorm, optional
        What is done to the rows first.
    place : tuple of tirx.Var
        Indices of the thread in its block, and of its row and column tile, int32.
    """

    def __init__(
        self,
        plan: TilePlan,
        product: Product,
        norm: RowNorm | None,
        place: tuple[tirx.Var, tirx.Var, tirx.Var],
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        thread, *tile = place
        self.plan, self.product, self.norm, self.thread = plan, product, norm, thread
        self.first_row, self.first_column = (
            int64(index) * int64(size)
            for index, size in zip(tile, (plan.block_m, plan.block_n), strict=True)
        )
        self.warp = thread // int32(LANES)
        self.lane = thread % int32(LANES)
        self.quad, self.member = self.lane // int32(4), self.lane % int32(4)
        self.threads = plan.num_warps * LANES
        self.chunks = plan.block_k // (CHUNK * plan.num_warps)
        self.steps = ceil_div(product.depth, plan.block_k)
        self.tiles_m, self.tiles_n = plan.block_m // MMA_ROWS, plan.block_n // MMA_COLUMNS
        self.weight_lines = product.parts * (
            plan.block_n if product.layout == "nk" else plan.block_n // GROUP * CHUNK
        )
        factors = LINES if norm else 0  # gamma and beta
        self.lines = self.weight_lines + plan.block_m + factors  # of a chunk
        elements = self.chunks * self.lines * PIECES * PIECE
        size = plan.num_stages * plan.num_warps * elements
        self.ring = scratch("ring", size, product.dtype, "shared.dyn")
        self.step_bytes = elements * PIECE_BYTES // PIECE
        self.base = scratch("base", 1, "uint32", "local")
        # Of a chunk: weights, then x, then the factors of its norm
        self.weights = 2 * HALVES * product.parts * self.tiles_n
        self.loads = self.weights + HALVES * (self.tiles_m + (len(norm.factors) if norm else 0))
        self.operands = scratch("operands", self.loads * REGISTERS, "uint32", "local")
        sums = product.parts * self.tiles_n * self.tiles_m * 4
        self.sums = scratch("sums", sums, "float32", "local")

    # --- the sums of a warp ------------------------------------------------------------------

    def accumulate(self) -> None:
        """Emit the whole reduction."""
        # Of the whole ring: a buffer shrinks to what TVM sees of its use
        first = cuda_cvta_generic_to_shared(self.ring.access_ptr("rw"))
        own = (self.warp * int32(self.step_bytes)).astype("uint32")
        T.buffer_store(self.base, first + own, [0])
        with T.unroll(self.sums.ty.shape[0]) as e:
            T.buffer_store(self.sums, tirx.const(0.0, "float32"), [e])
        ahead = self.plan.num_stages - 1
        for step in range(ahead):
            if step < self.steps:
                self._request(int32(step))
            T.evaluate(ptx["cp.async.commit_group"]())
        rows = NormedRows(self) if self.norm else None
        with T.serial(int32(self.steps)) as step:
            T.evaluate(ptx["cp.async.wait_group"](ahead - 1))
            T.evaluate(cuda_warp_sync())
            # Into the place of the step before this one, which has been multiplied
            with T.If(step + int32(ahead) < int32(self.steps)), T.Then():
                self._request(step + int32(ahead))
            T.evaluate(ptx["cp.async.commit_group"]())
            for chunk in range(self.chunks):
                self._receive(step, chunk)
                if rows:
                    rows.normalise()
                self._multiply()

    # --- copies: neighbouring threads, neighbouring pieces ------------------------------------

    def _request(self, step: tirx.Expr) -> None:
        """Begin all copies of a step."""
        line, piece = self.lane // int32(PIECES), self.lane % int32(PIECES)
        for chunk in range(self.chunks):
            first_k = self.depth_at(step, chunk)
            for first in range(0, self.lines, LINES):
                k = first_k + int64(piece * int32(PIECE))
                if first < self.weight_lines:
                    load, conditions, k = self._weight(first, line, piece, first_k)
                elif first < self.weight_lines + self.plan.block_m:
                    row = self.first_row + int64(line + int32(first - self.weight_lines))
                    load, conditions = self._x(row, k), [row < self.product.rows]
                else:
                    self._request_factors(step, chunk, first, k)
                    continue
                if self.product.depth % self.plan.block_k:
                    conditions = [*conditions, k < int64(self.product.depth)]
                self._copy(self._piece(step, chunk, first, line, piece), load, conditions)

    def _request_factors(self, step: tirx.Expr, chunk: int, first: int, k: tirx.Expr) -> None:
        """Begin the copies of what a norm multiplies by and adds."""
        assert self.norm is not None
        for index, factor in enumerate(self.norm.factors):
            with T.If(self.lane // int32(PIECES) == int32(index)), T.Then():
                line, piece = int32(index), self.lane % int32(PIECES)
                exact = self.product.depth % self.plan.block_k == 0
                conditions = [] if exact else [k < int64(self.product.depth)]
                self._copy(self._piece(step, chunk, first, line, piece), factor[k], conditions)

    def _copy(self, to: tirx.Expr, load: tirx.Expr, conditions: list[tirx.Expr]) -> None:
        """Begin a copy; of zeros where a condition does not hold, and then nothing is read."""
        args = [to, tirx.address_of(load), PIECE_BYTES]
        if conditions:
            inside = tirx.all(*conditions) if len(conditions) > 1 else conditions[0]
            size = tirx.Select(inside, int32(PIECE_BYTES), int32(0))
            args.append(size.astype("uint32"))
        T.evaluate(ptx[COPY](*args))

    def _weight(
        self, first: int, line: tirx.Expr, piece: tirx.Expr, k: tirx.Expr
    ) -> tuple[tirx.Expr, list[tirx.Expr], tirx.Expr]:
        """Return the weight where a thread's piece of four lines begins, and its k.

        Beyond the last column, it is that of the last ones.
        """
        if self.product.layout == "nk":
            part, first_line = divmod(first, self.plan.block_n)
            column, width = int32(first_line) + line, 1
            k = k + int64(piece * int32(PIECE))
        else:
            part, rest = divmod(first, self.plan.block_n // GROUP * CHUNK)
            group, first_line = divmod(rest, CHUNK)
            column, width = int32(group * GROUP) + piece * int32(PIECE), PIECE
            k = k + int64(int32(first_line) + line)
        column = self.first_column + int64(column)
        if self.product.columns % self.plan.block_n:
            column = tirx.min(column, int64(self.product.columns - width))
        return self.product.weight_at(part, column, k), [], k

    def _x(self, row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        return self.norm.x[row, k] if self.norm else self.product.x_at(row, k)

    def depth_at(self, step: tirx.Expr, chunk: int) -> tirx.Expr:
        """Return the first element along k of a chunk of this warp."""
        first = step * int32(self.plan.block_k) + self.warp * int32(self.chunks * CHUNK)
        return int64(first) + int64(chunk * CHUNK)

    def row_at(self, tile: int) -> tirx.Expr:
        """Return the row of x that this thread multiplies."""
        return self.first_row + int64(int32(tile * MMA_ROWS) + self.quad)

    def _piece(
        self, step: tirx.Expr, chunk: int, first: int, line: tirx.Expr, piece: tirx.Expr
    ) -> tirx.Expr:
        """Return the address of a piece of line ``first + line``.

        Pieces change places such that the eight that are read or written together lie side by side:
        of two lines the halves, and of k and the seven behind it, multiplied by one thread, pairs.
        """
        stage = step % int32(self.plan.num_stages) * int32(self.plan.num_warps * self.step_bytes)
        place = piece ^ (line % int32(2) * int32(PIECES // 2))
        if self.product.layout == "kn" and first < self.weight_lines:
            place = piece ^ ((int32(first) + line) // int32(PIECE) % int32(4) * int32(2))
        at = (int32(chunk * self.lines + first) + line) * int32(PIECES) + place
        return self.base[0] + (stage + at * int32(PIECE_BYTES)).astype("uint32")

    # --- what a thread multiplies --------------------------------------------------------------

    def _receive(self, step: tirx.Expr, chunk: int) -> None:
        """Load the operands of a chunk into registers."""
        for tile in range(self.weights // (2 * HALVES)):
            for half in range(2 * HALVES):
                self._load(2 * HALVES * tile + half, self._weight_piece(step, chunk, tile, half))
        place = self.weights
        first = self.weight_lines
        for tile in range(self.tiles_m):
            for half in range(HALVES):
                piece = self.member + int32(4 * half)
                address = self._piece(step, chunk, first + tile * MMA_ROWS, self.quad, piece)
                self._load(place + tile * HALVES + half, address)
        place, first = place + self.tiles_m * HALVES, first + self.plan.block_m
        for index in range(len(self.norm.factors) if self.norm else 0):
            for half in range(HALVES):
                piece = self.member + int32(4 * half)
                address = self._piece(step, chunk, first, int32(index), piece)
                self._load(place + index * HALVES + half, address)

    def _weight_piece(self, step: tirx.Expr, chunk: int, tile: int, index: int) -> tirx.Expr:
        """Return the address of one of the pieces of a tile of weights that this thread loads."""
        if self.product.layout == "nk":
            column, half = divmod(index, HALVES)
            first = tile * MMA_COLUMNS + column * QUADS
            return self._piece(step, chunk, first, self.quad, self.member + int32(4 * half))
        # Four tiles are a group: sixteen pieces of 64 columns, of each eight along k
        group, load = divmod(tile * 2 * HALVES + index, PIECE * HALVES)
        half, k = divmod(load, PIECE)
        line = int32(half * 32 + k) + self.member * int32(PIECE)
        return self._piece(step, chunk, group * CHUNK, line, self.quad)

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

    def _column(self, tile: int, half: int) -> tirx.Expr:
        """Return which column of the block one of both columns of a quad is."""
        if self.product.layout == "nk":
            return int32(tile * MMA_COLUMNS + half * QUADS) + self.quad
        group, inside = divmod(tile, PIECE // 2)
        return int32(group * GROUP + 2 * inside + half) + self.quad * int32(PIECE)

    # --- the sums of all, and what becomes of them -------------------------------------------

    def finish(self) -> None:
        """Add the sums of the warps, and apply the epilogue."""
        plan, parts = self.plan, self.product.parts
        tile = plan.block_m * plan.block_n
        shared = scratch("warp_sums", plan.num_warps * parts * tile, "float32", "shared")
        if self.norm:  # TVM may put these sums where the statistics were
            T.evaluate(tirx.op.tvm_storage_sync("shared"))
        self._share(shared)
        T.evaluate(tirx.op.tvm_storage_sync("shared"))
        totals = scratch("totals", parts, "float32", "local")
        for first in range(0, tile, self.threads):
            element = self.thread + int32(first)
            if first + self.threads <= tile:
                self._finish_element(shared, totals, element)
            else:  # there are more threads than elements
                with T.If(element < int32(tile)), T.Then():
                    self._finish_element(shared, totals, element)

    def _finish_element(self, shared: tirx.Var, totals: tirx.Var, element: tirx.Expr) -> None:
        """Add the sums of the warps for an element of the tile, and store what becomes of it."""
        plan, parts = self.plan, self.product.parts
        tile = plan.block_m * plan.block_n
        for part in range(parts):
            places = [int32((w * parts + part) * tile) for w in range(plan.num_warps)]
            total = shared[places[0] + element]
            for place in places[1:]:
                total = total + shared[place + element]
            T.buffer_store(totals, total, [part])
        row = self.first_row + int64(element // int32(plan.block_n))
        column = self.first_column + int64(element % int32(plan.block_n))
        inside = tirx.all(row < self.product.rows, column < int64(self.product.columns))
        with T.If(inside), T.Then():
            results = self.product.results(row, column, lambda part: totals[part])
            for (buffer, where), value in results:
                T.buffer_store(buffer, value, where)

    def _share(self, shared: tirx.Var) -> None:
        """Put the sums of this thread where all can read them."""
        plan, parts = self.plan, self.product.parts
        for part in range(parts):
            for n in range(self.tiles_n):
                for m in range(self.tiles_m):
                    for e in range(4):
                        row = int32(m * MMA_ROWS + e % 2) + self.member * int32(2)
                        line = (self.warp * int32(parts) + int32(part)) * int32(plan.block_m) + row
                        place = line * int32(plan.block_n) + self._column(n, e // 2)
                        own = ((part * self.tiles_n + n) * self.tiles_m + m) * 4 + e
                        T.buffer_store(shared, self.sums[own], [place])
