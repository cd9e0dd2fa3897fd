"""The way of words and scales through shared memory, in a kernel that streams one row's weights.

A warp has a ring of chunks to itself, and asks for one after the other, from tile to tile.
"""

from __future__ import annotations

from tvm import tirx

from ...estimator.families.few_rows import streamed
from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.tiles import MEMBERS, MMA_COLUMNS
from ...hardware.instructions import PIECE_BYTES
from ...matching.expressions import substitute
from ...tvm_ir import T, TensorLoad
from .dequantise import Neighbours
from .few_rows_ring import Place
from .fragments import copy_async, ptx, scratch
from .layout import LANES
from .tile import Product, fill_a_tile, int32, int64, last_tile, tiles_of, uint32

HINT = ".L2::256B"
"""A copy tells L2 of the 256 bytes around it, as in `dequantised_rows`."""

PIECES = streamed.LINE_BYTES // PIECE_BYTES
"""A column has so many pieces of words in a chunk."""

QUADS = LANES // MEMBERS
"""Groups of four threads, each of which has two columns."""


class StreamedRing:
    """The ring of a warp, and what comes out of it.

    `words`, `scales`: of both columns of a quad, what a step multiplies.
    """

    def __init__(
        self,
        plan: PackedPlan,
        product: Product,
        place: Place,
        grid: tuple[tirx.Expr, tirx.Expr],
        base: tirx.Expr,
    ) -> None:
        """Allocate registers; shared memory begins at an address `base`."""
        self.plan, self.product, self.place = plan, product, place
        block, self.blocks = grid
        self.tile = tile_columns(product)
        memory = streamed.Streamed(product.depth, plan.num_warps, plan.num_stages)
        self.units = memory.units
        self.neighbours = [
            product.neighbours(part, streamed.GROUP) for part in range(product.parts)
        ]
        self.words = scratch("words", 2 * MEMBERS, "uint32", "local")
        self.scales = scratch("scale_words", 2, "uint32", "local")
        # Where the ring begins, and the slot that is next
        self.at = scratch("ring", 2, "uint32", "local")
        own = place.warp * int32(plan.num_stages * streamed.STAGE_BYTES) + int32(memory.ring)
        T.buffer_store(self.at, base + own.astype("uint32"), [0])
        T.buffer_store(self.at, self.at[0], [1])
        # Of the next copies the tile, and the chunk of it
        self.asked = scratch("asked", 2, "int32", "local")
        T.buffer_store(self.asked, block, [0])
        T.buffer_store(self.asked, int32(0), [1])

    def request(self) -> None:
        """Begin to copy a chunk of this warp, and turn to the next one."""
        asked, slot, ring = self.asked, self.at[1], self.at[0]
        with T.If(asked[0] < self.tiles()), T.Then():
            self._copy_words()
            self._copy_scales()
        T.evaluate(ptx["cp.async.commit_group"]())
        following = slot + uint32(streamed.STAGE_BYTES)
        end = ring + uint32(self.plan.num_stages * streamed.STAGE_BYTES)
        T.buffer_store(self.at, tirx.Select(following == end, ring, following), [1])
        T.buffer_store(asked, asked[1] + int32(1), [1])
        with T.If(asked[1] == int32(self.units)), T.Then():
            T.buffer_store(asked, int32(0), [1])
            T.buffer_store(asked, asked[0] + self.blocks, [0])

    def _copy_words(self) -> None:
        """Copy words: neighbouring lanes copy neighbouring pieces of two columns."""
        lines = LANES // PIECES
        line, piece = self.place.lane // int32(PIECES), self.place.lane % int32(PIECES)
        to = line * int32(streamed.LINE_BYTES) + _moved(piece, line) * int32(PIECE_BYTES)
        for first in range(0, MMA_COLUMNS, lines):
            at = self.at[1] + (to + int32(first * streamed.LINE_BYTES)).astype("uint32")
            part, column = divmod(first, self.tile)
            self._copy(part, "uint32", at, int32(column) + line, piece)

    def _copy_scales(self) -> None:
        """Copy scales: a lane has a piece, of half of a column's."""
        each = streamed.SCALE_BYTES // PIECE_BYTES
        line, piece = self.place.lane // int32(each), self.place.lane % int32(each)
        at = line * int32(streamed.SCALE_BYTES) + _moved_scales(piece, line) * int32(PIECE_BYTES)
        at = self.at[1] + (at + int32(MMA_COLUMNS * streamed.LINE_BYTES)).astype("uint32")
        piece = piece * int32(PIECES // each)
        if self.product.parts == 1:
            self._copy(0, self.product.dtype, at, line, piece)
            return
        for part in range(self.product.parts):
            own = line - int32(part * self.tile)
            with T.If(line // int32(self.tile) == int32(part)), T.Then():
                self._copy(part, self.product.dtype, at, own, piece)

    def _copy(
        self, part: int, dtype: str, at: tirx.Expr, line: tirx.Expr, piece: tirx.Expr
    ) -> None:
        """Begin to copy 16 bytes of a column of the tile, of those that begin with a group."""
        column = self.first_column(self.asked[0]) + int64(line)
        if not fill_a_tile(self.product.columns, self.tile):
            column = tirx.min(column, int64(self.product.columns - 1))
        chunk = self.place.warp * int32(self.units) + self.asked[1]
        group = chunk * int32(PIECES) + piece
        inside = []
        if self.product.depth % (streamed.CHUNK * self.plan.num_warps):
            inside = [group < int32(self.product.depth // streamed.GROUP)]
        source = _source(self.neighbours[part], dtype, column, int64(group))
        copy_async(at, source, PIECE_BYTES, inside, HINT)

    def read(self, pair: tirx.Expr, half: int) -> None:
        """Load what the weights of a step are made of, the first or the second of two."""
        place, slot = self.place, self.at[1]
        step = pair * int32(2) + int32(half)
        at = _moved(step * int32(MEMBERS) + place.member, place.quad) * int32(PIECE_BYTES)
        at = slot + (place.quad * int32(streamed.LINE_BYTES) + at).astype("uint32")
        for second in range(2):
            words = [self.words[second * MEMBERS + i] for i in range(MEMBERS)]
            there = ptx.addr(at, second * QUADS * streamed.LINE_BYTES)
            T.evaluate(ptx["ld.shared.v4.b32"](*words, there))
        at = _moved_scales(pair, place.quad) * int32(PIECE_BYTES) + self.columns() * int32(4)
        at = at + int32(MMA_COLUMNS * streamed.LINE_BYTES + half * PIECE_BYTES // 2)
        at = at + place.quad * int32(streamed.SCALE_BYTES)
        for second in range(2):
            there = ptx.addr(slot + at.astype("uint32"), second * QUADS * streamed.SCALE_BYTES)
            T.evaluate(ptx["ld.shared.b32"](self.scales[second], there))

    def columns(self) -> tirx.Expr:
        """Return which two columns of sums a thread has; those of members 2 and 3 are none."""
        return self.place.member % int32(2)

    def tiles(self) -> tirx.Expr:
        """Return how many tiles there are, int32."""
        return tiles_of(self.product.columns, self.tile)

    def first_column(self, tile: tirx.Expr) -> tirx.Expr:
        """Return where a tile begins: the last one ends with the last column."""
        last = last_tile(self.product.columns, self.tile)
        return int64(tirx.min(tile * int32(self.tile), last))


def tile_columns(product: Product) -> int:
    """Return the columns of a tile, of each part."""
    return MMA_COLUMNS // product.parts


def _moved(piece: tirx.Expr, line: tirx.Expr) -> tirx.Expr:
    """Return where a piece of a column lies, such that eight threads meet no bank twice."""
    return piece ^ (line % int32(2) * int32(MEMBERS))


def _moved_scales(piece: tirx.Expr, line: tirx.Expr) -> tirx.Expr:
    """Return where a piece of a column's scales lies, such that eight quads meet no bank twice."""
    return piece ^ (line // int32(4) % int32(2))


def _source(neighbours: Neighbours, dtype: str, line: tirx.Expr, piece: tirx.Expr) -> TensorLoad:
    """Return the load of the first of a group's words, or of its scale."""
    load = next(each for each in neighbours.loads if str(each.source.ty.dtype) == dtype)
    where = {neighbours.line: line, neighbours.piece: piece}
    return load.source[tuple(substitute(index, where) for index in load.indices)]
