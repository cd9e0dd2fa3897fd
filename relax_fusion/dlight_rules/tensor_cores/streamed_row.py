"""The body of a tensor-core kernel for one row and weights of four bits, which never pauses.

As many thread blocks as a device holds take one tile of 16 columns after the other.  A warp has
chunks of k, the same of every tile, and copies their words and scales into a ring of its own, which
knows no tiles: while a tile is finished, words of the next ones are on their way.

A row needs one column of an instruction, and has four: in each are the elements of one member of
the quads.  So the sums of four groups stay apart, and a scale multiplies a sum in float32, rather
than every weight.

Fields ``q`` are multiplied as they are: as bits of float16 they are ``q / 2^24``.  What their zero
takes from a group is known from the row, and its sum begins with it.  In bfloat16, where products
would be too small for a sum, fields become ``q - zero`` first.

Neither is what infinity asks for.  So a sum that is not finite is added up anew, weight by weight.
"""

from __future__ import annotations

import numpy as np
from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared, cuda_warp_sync

from ...estimator.families.few_rows.packed import PackedPlan
from ...estimator.families.few_rows.streamed import CHUNK, FLUSH, GROUP, Streamed
from ...estimator.families.few_rows.tiles import MEMBERS, MMA_COLUMNS, SUM_BYTES
from ...estimator.prediction import ceil_div
from ...hardware import DeviceSpec
from ...hardware.instructions import PIECE_BYTES
from ...matching.expressions import found_in, ramp
from ...tvm_ir import IRBuilder, T
from ...workload.reference import numpy_dtype
from . import dependent
from .dequantise import HALF_TYPES
from .dequantised import AND_OR, unrolled
from .few_rows_ring import Launch, Place
from .fragments import add_up, clear, ptx, scratch
from .layout import INSTRUCTIONS, LANES, PIECE
from .resident_row import ResidentRow
from .streamed_ring import QUADS, StreamedRing, tile_columns
from .tile import Product, RowNorm, fill_a_tile, int32, int64, tiles_of, uint32, whole

STEPS = CHUNK // (MEMBERS * GROUP)
"""A chunk is so many steps: in one, a member has a group of each of its columns."""

STEP_BYTES = MEMBERS * GROUP * 2
"""Bytes of the row in a step."""

SUBNORMAL = 2.0**-24
"""What a field counts whose bits are taken for a number of float16."""

INFINITY = 0x7F800000
"""The bits of the exponent of a float32, which are all set where it is infinity or NaN."""

ORDER = (0, 4, 2, 6, 1, 5, 3, 7)
"""The elements of a word in pairs: both of a pair are in its halves, the first two pairs in the
lowest bits of bytes, the others above them."""


class GroupedRow(ResidentRow):
    """A row, and behind it what the zero takes from each of its groups."""

    kernel: StreamedRowKernel

    def _order(self) -> list[int]:
        return [first + e for first in range(0, GROUP, len(ORDER)) for e in ORDER]

    def _store(self, turn: tirx.Expr, unit: tirx.Expr) -> None:
        super()._store(turn, unit)
        if not self.kernel.is_shifted:
            return
        total = add_up([tirx.Cast("float32", self.paired[e]) for e in range(GROUP)])
        factor = tirx.const(-self.kernel.zero * SUBNORMAL, "float32")
        T.buffer_store(self.kernel.taken, total * factor, [0])
        at = self.kernel.base[0] + (unit * int32(SUM_BYTES)).astype("uint32")
        word = T.reinterpret("uint32", self.kernel.taken[0])
        T.evaluate(ptx["st.shared.b32"](at + uint32(self.kernel.memory.row), word))


class StreamedRowKernel:
    """Emits one thread block, of a row that a norm may change first, into the open IR builder."""

    width = GROUP

    def __init__(
        self,
        plan: PackedPlan,
        product: Product,
        norm: RowNorm | None,
        place: Place,
        launch: Launch,
        grid: tuple[tirx.Expr, tirx.Expr],
    ) -> None:
        """Allocate registers and shared memory, in the block that is open.

        `grid` is which of the thread blocks of a row this is, and how many they are, int32.
        """
        self.plan, self.product, self.place, self.launch = plan, product, place, launch
        self.block, self.blocks = grid
        self.memory = Streamed(product.depth, plan.num_warps, plan.num_stages)
        self.steps = self.memory.units
        self.is_shifted = product.dtype == "float16"
        size = max(self.memory.size, launch.shared_bytes)
        self.shared = scratch("shared", size // SUM_BYTES, "float32", "shared.dyn")
        self.base = scratch("base", 1, "uint32", "local")
        start = cuda_cvta_generic_to_shared(self.shared.access_ptr("rw"))
        T.buffer_store(self.base, start, [0])
        self.ring = StreamedRing(plan, product, place, grid, self.base[0])
        self.neighbours = self.ring.neighbours
        numbers = found_in(self.neighbours[0].values[0], tirx.FloatImm)
        self.zero = float(numbers[0].value) if numbers else 0.0
        # Of even and odd pieces of the row, and of what the zero takes from groups
        self.next = scratch("next", 3, "uint32", "local")
        self.x = scratch("x_words", GROUP // 2, "uint32", "local")
        self.factors = scratch("factors", 4, "float32", "local")
        self.taken = scratch("zeros", 2, "float32", "local")
        self.group_sums = scratch("group_sums", 8, "float32", "local")
        self.sums = scratch("sums", 4, "float32", "local")
        self.totals = scratch("totals", product.parts, "float32", "local")
        self.kept = GroupedRow(self, norm)
        with T.unroll(int64(GROUP // 2)) as i:
            T.buffer_store(self.x, uint32(0), [i])

    def _begin_tile(self) -> None:
        """Set the addresses of the row to the first chunk, and sums to 0."""
        clear(self.sums)
        place, base = self.place, self.base[0]
        chunk = place.warp * int32(self.steps)
        group = chunk * int32(CHUNK // GROUP) + place.member
        for odd in range(2):  # see `swizzled` of `resident_row`
            moved = (place.member // int32(2)) ^ int32(odd)
            at = (group * int32(MEMBERS) + moved) * int32(PIECE_BYTES)
            T.buffer_store(self.next, base + at.astype("uint32"), [odd])
        at = chunk * int32(CHUNK // GROUP) + self.ring.columns() * int32(2)
        at = at * int32(SUM_BYTES) + int32(self.memory.row)
        T.buffer_store(self.next, base + at.astype("uint32"), [2])

    def emit(self) -> None:
        """Emit all of it."""
        if not self.launch.early:
            self.kept.load()
        with unrolled(self.plan.num_stages):
            self.ring.request()
        if self.launch.early:
            dependent.hand_over()
            self.kept.load()
        self.kept.store()
        mine = (self.ring.tiles() - self.block + self.blocks - int32(1)) // self.blocks
        with T.serial((mine + int32(FLUSH - 1)) // int32(FLUSH)) as turn:
            first = turn * int32(FLUSH)
            count = tirx.min(mine - first, int32(FLUSH))
            with T.serial(count) as tile:
                IRBuilder.name_many(["turn", "tile"], [turn, tile])
                self._tile(tile)
            T.evaluate(tirx.op.tvm_storage_sync("shared"))
            self._finish(first, count)
            T.evaluate(tirx.op.tvm_storage_sync("shared"))

    def _tile(self, tile: tirx.Expr) -> None:
        """Multiply a tile; it is number `tile` of those whose sums are kept."""
        self._begin_tile()
        with T.serial(int32(self.steps), annotations={"disable_unroll": True}) as unit:
            IRBuilder.name("unit", unit)
            T.evaluate(ptx["cp.async.wait_group"](self.plan.num_stages - 1))
            T.evaluate(cuda_warp_sync())
            self._multiply()
            T.evaluate(cuda_warp_sync())
            self.ring.request()
        self._share(tile)

    # --- products ----------------------------------------------------------------------------

    def _multiply(self) -> None:
        """Multiply a chunk."""
        with T.serial(int32(STEPS // 2), annotations={"disable_unroll": True}) as pair:
            IRBuilder.name("pair", pair)
            for half in range(2):
                self.ring.read(pair, half)
                self._read_row(half)
                self._step()
            for index, step in enumerate((STEP_BYTES, STEP_BYTES, MEMBERS * SUM_BYTES)):
                T.buffer_store(self.next, self.next[index] + uint32(2 * step), [index])

    def _read_row(self, half: int) -> None:
        """Load the row's part of a step, the first or the second of two."""
        if self.is_shifted:
            there = ptx.addr(self.next[2], half * MEMBERS * SUM_BYTES)
            T.evaluate(ptx["ld.shared.v2.f32"](self.taken[0], self.taken[1], there))
        with T.If(self.place.quad == self.place.member), T.Then():  # else it is zero
            for i in range(MEMBERS):
                words = [self.x[4 * i + n] for n in range(4)]
                skip = half * STEP_BYTES + (i // 2 ^ half) * 2 * PIECE_BYTES
                T.evaluate(ptx["ld.shared.v4.b32"](*words, ptx.addr(self.next[i % 2], skip)))

    def _step(self) -> None:
        """Multiply a step, and add up the groups."""
        zero = tirx.const(0.0, "float32")
        for e in range(4):
            T.buffer_store(self.group_sums, self.taken[e % 2] if self.is_shifted else zero, [e])
            T.buffer_store(self.group_sums, zero, [4 + e])
        multiply = ptx[INSTRUCTIONS[self.product.dtype].mma]
        for word in range(MEMBERS):
            both = [self.ring.words[word], self.ring.words[MEMBERS + word]]
            for high in range(2):
                fields = [self._fields(w, i + high) for i in (0, 2) for w in both]
                x = [self.x[4 * word + 2 * high + n] for n in range(2)]
                sums = [self.group_sums[4 * high + e] for e in range(4)]
                T.evaluate(multiply(*sums, *fields, *x, *sums))
        for second in range(2):
            self._widen(self.ring.scales[second], 2 * second)
        for e in range(4):
            low, high = self.group_sums[e], self.group_sums[4 + e]
            if self.is_shifted:
                high = high * tirx.const(1 / 16, "float32")
            T.buffer_store(self.sums, self.sums[e] + self.factors[e] * (high + low), [e])

    def _widen(self, word: tirx.Expr, first: int) -> None:
        """Make both halves of a register factors."""
        pair = T.reinterpret(f"{self.product.dtype}x2", word)
        T.buffer_store(self.factors, tirx.Cast("float32x2", pair), [ramp(int32(first), 2)])

    def _fields(self, word: tirx.Expr, index: int) -> tirx.Expr:
        """Return fields `index` and ``index + 4`` of a word, as they are or less their zero."""
        above = index % 2 == 1 and self.is_shifted  # they stay where they are
        shift, mask = 4 * index - 4 * above, 0xF000F << 4 * above
        fields = word >> uint32(shift) if shift else word
        if self.is_shifted:
            return fields & uint32(mask)
        kind = HALF_TYPES[self.product.dtype]
        target = scratch("field", 1, "uint32", "local")
        constants = uint32(mask), uint32(kind.base_bits * 0x10001)
        T.evaluate(ptx["lop3.b32"](target[0], fields, *constants, AND_OR))
        one = uint32(kind.one * 0x10001)
        offset = uint32(self._bits(-kind.base - self.zero) * 0x10001)
        T.evaluate(ptx[f"fma.rn.{kind.pair}"](target[0], target[0], one, offset))
        return target[0]

    def _bits(self, value: float) -> int:
        return int(np.array(value, numpy_dtype(self.product.dtype)).view("uint16"))

    # --- the end of tiles --------------------------------------------------------------------

    def _share(self, tile: tirx.Expr) -> None:
        """Put the sums of both columns of a quad where all can read them."""
        first = tile * int32(self.plan.num_warps) + self.place.warp
        first = first * int32(MMA_COLUMNS) + int32(self.memory.sums // SUM_BYTES) + self.place.quad
        for second in range(2):
            T.buffer_store(self.sums, self.sums[2 * second] + self.sums[2 * second + 1], [second])
            other = T.tvm_warp_shuffle_xor(0xFFFFFFFF, self.sums[second], 1, LANES, LANES)
            T.buffer_store(self.sums, self.sums[second] + other, [second])
        with T.If(self.place.member == int32(0)), T.Then():
            for second in range(2):
                T.buffer_store(self.shared, self.sums[second], [first + int32(second * QUADS)])

    def _finish(self, first: tirx.Expr, count: tirx.Expr) -> None:
        """Add up the sums of `count` tiles from `first` on, and apply the epilogue."""
        plan, product = self.plan, self.product
        index = self.place.thread // int32(self.ring.tile)
        own = self.place.thread % int32(self.ring.tile)
        tile = self.block + (first + index) * self.blocks
        column = self.ring.first_column(tile) + int64(own)
        inside = index < count
        if not fill_a_tile(product.columns, self.ring.tile):
            inside = tirx.all(inside, column < int64(product.columns))
        place = index * int32(plan.num_warps * MMA_COLUMNS) + own
        with T.If(inside), T.Then():
            for part in range(product.parts):
                at = place + int32(self.memory.sums // SUM_BYTES + part * self.ring.tile)
                found = [self.shared[at + int32(w * MMA_COLUMNS)] for w in range(plan.num_warps)]
                unit = tirx.const(1 / SUBNORMAL if self.is_shifted else 1.0, "float32")
                T.buffer_store(self.totals, sum(found[1:], found[0]) * unit, [part])
                # By its bits: TVM takes "not less" for "at least", which NaN is not
                exponent = T.reinterpret("uint32", self.totals[part]) & uint32(INFINITY)
                with T.If(exponent == uint32(INFINITY)), T.Then():
                    self._add_up_anew(part, column)
            row = self.place.first_row
            results = product.results(row, column, lambda part: self.totals[part])
            for (buffer, where), value in results:
                T.buffer_store(buffer, value, where)

    def _add_up_anew(self, part: int, column: tirx.Expr) -> None:
        """Add up a column as it is written."""
        T.buffer_store(self.totals, tirx.const(0.0, "float32"), [part])
        with T.serial(int32(self.product.depth // PIECE)) as piece:
            IRBuilder.name("piece", piece)
            words = [self.ring.words[n] for n in range(PIECE // 2)]
            T.evaluate(ptx["ld.shared.v4.b32"](*words, self.kept.address(piece)))
            for n in range(0, PIECE, 2):
                self._widen(words[n // 2], 0)
                for e in range(2):
                    k = int64(piece * int32(PIECE) + int32(ORDER[n + e]))
                    weight = tirx.Cast("float32", self.product.weight_at(part, column, k))
                    total = self.totals[part] + self.factors[e] * weight
                    T.buffer_store(self.totals, total, [part])


def streamed_row_kernel(
    product: Product, plan: PackedPlan, norm: RowNorm | None, dev: DeviceSpec
) -> tirx.Stmt:
    """Return the kernel of one product, and of the norm in front of it if one is given."""
    columns, width = product.columns, tile_columns(product)
    most = plan.residents * dev.sm_count
    if isinstance(columns, int):
        grid = int32(min(ceil_div(columns, width), most))
    else:
        grid = tirx.min(tiles_of(columns, width), int32(most))
    # Without the memory of its share (`Launch.on`): so the study had it that was timed
    launch = Launch(early=dev.capabilities.dependent_launch)
    read = product.operands()
    if norm:
        normed = norm.result.body.buffer
        read = [norm.x, *norm.factors, *(b for b in read if not b.same_as(normed))]
    with (
        IRBuilder() as builder,
        T.prim_func(s_tir=True),
        T.thread_binding(product.rows.astype("int32") * grid, thread="blockIdx.x") as block,
        T.thread_binding(int32(plan.num_warps * LANES), thread="threadIdx.x") as thread,
        T.sblock(product.out.name_hint.replace("out", "mma")),
    ):
        IRBuilder.name_many(["block", "thread"], [block, thread])
        T.reads(*(whole(buffer) for buffer in read))
        T.writes(whole(product.out.body.buffer))
        place = Place(thread, int64(block // grid), int64(0), int32(0))
        with T.attr(int32(0), "tirx.launch_bounds_min_blocks_per_sm", int32(plan.residents)):
            own = block % grid, grid
            StreamedRowKernel(plan, product, norm, place, launch, own).emit()
    return builder.get().body.block.body
