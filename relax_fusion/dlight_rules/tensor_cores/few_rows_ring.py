"""The way of operands through shared memory, in a tensor-core kernel for few rows.

Each warp has a ring of `num_stages` steps to itself, so no barrier of the block is in its way.
Neighbouring threads copy neighbouring pieces of 16 bytes (``cp.async``), eight of them a line of
128 bytes along k, or of 64 columns of a weight ``[k, n]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared

from ...estimator.families.few_rows.tiles import CHUNK, FACTOR_LINES, GROUP, STATISTICS, SUM_BYTES
from ...estimator.limits import SYSTEM_SMEM_BYTES
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...hardware import DeviceSpec
from ...hardware.instructions import PIECE_BYTES
from ...tvm_ir import T
from .fragments import copy_async, scratch
from .layout import LANES, PIECE
from .tile import Product, RowNorm, fill_a_tile, int32, int64

PIECES = 8
"""Pieces of a line, which neighbouring threads copy."""

LINES = LANES // PIECES
"""Lines that a warp copies at once."""

HINT = ".L2::128B"
"""A copy tells L2 of the line's other pieces, which saves up to a microsecond of 17."""


@dataclass(frozen=True)
class Place:
    """What a thread works on."""

    thread: tirx.Var
    """Its index in the thread block, int32."""
    first_row: tirx.Expr
    first_column: tirx.Expr
    """Where the tile of the block begins, int64."""
    part: tirx.Expr
    """Which of `split_k` parts of k the block adds up, int32."""

    @property
    def warp(self) -> tirx.Expr:
        """The warp of the block."""
        return self.thread // int32(LANES)

    @property
    def lane(self) -> tirx.Expr:
        """The thread of the warp."""
        return self.thread % int32(LANES)

    @property
    def quad(self) -> tirx.Expr:
        """The group of four threads: it has a row of x, and two columns of an instruction."""
        return self.lane // int32(4)

    @property
    def member(self) -> tirx.Expr:
        """The thread of the group of four."""
        return self.lane % int32(4)


@dataclass(frozen=True)
class Launch:
    """How a kernel begins."""

    early: bool = False
    """Whether it waits for the kernels in front of it, behind its requests for weights."""
    shared_bytes: int = 0
    """Shared memory that a thread block has, at least."""

    @classmethod
    def on(cls, dev: DeviceSpec | None, blocks: int | None) -> Launch:
        """Return how a kernel of so many thread blocks begins on a device; None if that is open.

        One that is launched early finds multiprocessors free one after the other, and would fill
        the first of them.  So that each gets its share of the blocks, one has the memory of that
        share: on an H200, 256 blocks of a matmul of 33 MB took 11.1 instead of 14.5 us
        (`2026-11-23-early_launches.md`).
        """
        if dev is None or not dev.capabilities.dependent_launch:
            return cls()
        if blocks is None:
            return cls(early=True)
        share = dev.smem_per_sm_bytes // ceil_div(blocks, dev.sm_count) - SYSTEM_SMEM_BYTES
        return cls(True, min(share, dev.smem_per_block_bytes) // PIECE_BYTES * PIECE_BYTES)


class Ring:
    """Shared memory of a thread block, at least so many bytes, and the copies into it.

    It is one dynamic allocation, also for what warps tell each other: TVM allows a kernel more than
    48 KB only where the dynamic part alone is more.  Words of 4 bytes; in front is the ring, whose
    place the sums of the warps take in the end, and behind it the statistics of rows.  ``block_k``
    elements of k are a step of all warps together.
    """

    def __init__(
        self,
        plan: TilePlan,
        product: Product,
        norm: RowNorm | None,
        place: Place,
        least_bytes: int = 0,
    ) -> None:
        """Allocate shared memory, in the block that is open."""
        self.plan, self.product, self.norm, self.place = plan, product, norm, place
        self.chunks = plan.block_k // (CHUNK * plan.num_warps)
        self.steps = ceil_div(product.depth, plan.block_k * plan.split_k)  # of each part
        self.exact = product.depth % (plan.block_k * plan.split_k) == 0
        self.weight_lines = product.parts * (
            plan.block_n if product.layout == "nk" else plan.block_n // GROUP * CHUNK
        )
        factors = FACTOR_LINES if norm else 0
        self.lines = self.weight_lines + plan.block_m + factors  # of a chunk
        self.step_bytes = self.chunks * self.lines * PIECES * PIECE_BYTES
        ring = plan.num_stages * plan.num_warps * self.step_bytes
        sums = plan.num_warps * product.parts * plan.block_m * plan.block_n
        self.statistics = max(ring // SUM_BYTES, sums)
        size = STATISTICS * plan.block_m * plan.num_warps if norm else 0
        size = max(self.statistics + size, least_bytes // SUM_BYTES)
        self.shared = scratch("shared", size, "float32", "shared.dyn")
        # Where shared memory begins, and the ring of this warp
        self.base = scratch("base", 2, "uint32", "local")
        # Of all of it: a buffer shrinks to what TVM sees of its use
        T.buffer_store(self.base, cuda_cvta_generic_to_shared(self.shared.access_ptr("rw")), [0])
        own = (place.warp * int32(self.step_bytes)).astype("uint32")
        T.buffer_store(self.base, self.base[0] + own, [1])

    def request_weights(self, step: tirx.Expr) -> None:
        """Begin the copies of the weights of a step."""
        line, piece = self.place.lane // int32(PIECES), self.place.lane % int32(PIECES)
        for chunk in range(self.chunks):
            first_k = self._depth_at(step, chunk)
            for first in range(0, self.weight_lines, LINES):
                load, k = self._weight(first, line, piece, first_k)
                to = self.piece(step, chunk, first, line, piece)
                copy_async(to, load, PIECE_BYTES, self._inside(k), HINT)

    def request_rows(self, step: tirx.Expr) -> None:
        """Begin the copies of the rows of a step, and of what a norm multiplies by and adds."""
        place, first_line = self.place, self.weight_lines
        line, piece = place.lane // int32(PIECES), place.lane % int32(PIECES)
        for chunk in range(self.chunks):
            k = self._depth_at(step, chunk) + int64(piece * int32(PIECE))
            for first in range(0, self.plan.block_m, LINES):
                row = place.first_row + int64(line + int32(first))
                load = self.norm.x[row, k] if self.norm else self.product.x_at(row, k)
                to = self.piece(step, chunk, first_line + first, line, piece)
                inside = [row < self.product.rows, *self._inside(k)]
                copy_async(to, load, PIECE_BYTES, inside, HINT)
            for index, factor in enumerate(self.norm.factors if self.norm else ()):
                with T.If(line == int32(index)), T.Then():
                    first = first_line + self.plan.block_m
                    to = self.piece(step, chunk, first, int32(index), piece)
                    copy_async(to, factor[k], PIECE_BYTES, self._inside(k), HINT)

    def piece(
        self, step: tirx.Expr, chunk: int, first: int, line: tirx.Expr, piece: tirx.Expr
    ) -> tirx.Expr:
        """Return the address of a piece of line ``first + line``.

        Pieces change places such that the eight that are read or written together lie side by side:
        of two lines the halves, and of k and the seven behind it, multiplied by one thread, pairs.
        """
        stage_bytes = self.plan.num_warps * self.step_bytes
        stage = step % int32(self.plan.num_stages) * int32(stage_bytes)
        place = piece ^ (line % int32(2) * int32(PIECES // 2))
        if self.product.layout == "kn" and first < self.weight_lines:
            place = piece ^ ((int32(first) + line) // int32(PIECE) % int32(4) * int32(2))
        at = (int32(chunk * self.lines + first) + line) * int32(PIECES) + place
        return self.base[1] + (stage + at * int32(PIECE_BYTES)).astype("uint32")

    def _depth_at(self, step: tirx.Expr, chunk: int) -> tirx.Expr:
        """Return the first element along k of a chunk of this warp."""
        before = self.place.part * int32(self.steps) if self.plan.split_k > 1 else int32(0)
        first = (before + step) * int32(self.plan.block_k)
        first = first + self.place.warp * int32(self.chunks * CHUNK)
        return int64(first) + int64(chunk * CHUNK)

    def _inside(self, k: tirx.Expr) -> list[tirx.Expr]:
        """Return what must hold for an element along k to be there."""
        return [] if self.exact else [k < int64(self.product.depth)]

    def _weight(
        self, first: int, line: tirx.Expr, piece: tirx.Expr, k: tirx.Expr
    ) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the weight where a thread's piece of four lines begins, and its k.

        Where all columns do not make a tile, it is that of the last ones beyond them.
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
        column = self.place.first_column + int64(column)
        if not fill_a_tile(self.product.columns, self.plan.block_n):
            column = tirx.min(column, int64(self.product.columns - width))
        return self.product.weight_at(part, column, k), k
