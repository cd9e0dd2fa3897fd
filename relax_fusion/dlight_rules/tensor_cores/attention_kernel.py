"""The body of an attention kernel on tensor cores: scores and results in registers.

A warp multiplies its queries with a block of keys, takes the softmax, and multiplies the weights,
which are where the next product wants its left operand, with the block of values.  Meanwhile
``cp.async`` brings later blocks.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
2023, https://arxiv.org/abs/2307.08691, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared
from tvm.script.ir_builder import tirx as T

from ...compute.attention_tile import Operands, arrange
from ...estimator.mma_attention import holds_queries
from .attention_results import Partials, store_partials, store_results
from .attention_rows import AttentionRows, row_of
from .attention_softmax import RegisterSoftmax
from .fragments import SharedTile, local, multiply, pack_left, ptx, scratch
from .instructions import INSTRUCTIONS
from .layout import MMA_M, MMA_N
from .tile import int32, int64

AHEAD = 2
"""Pairs of instructions whose right operands are loaded before they are needed."""

Load = Callable[[int, int, int], None]


class AttentionKernel:
    """Emits one thread block, into the IR builder that is open.

    Parameters
    ----------
    rows : AttentionRows
        The rows of the block, with workload and plan.
    operands : Operands
        The buffers of the function.
    thread : tirx.Var
        The int32 index of the thread in its block.
    partials : Partials, optional
        Where results go if the block has a part of the keys only.
    part : tirx.Expr
        Which part it has, int32.
    """

    def __init__(
        self,
        rows: AttentionRows,
        operands: Operands,
        thread: tirx.Var,
        partials: Partials | None,
        part: tirx.Expr,
    ) -> None:
        """Allocate shared memory and registers, in the block that is open."""
        self.rows, self.operands, self.thread = rows, operands, thread
        self.partials, self.part = partials, part
        work, plan = rows.work, rows.plan
        self.work, self.plan, self.lane = work, plan, rows.lane
        self.types = INSTRUCTIONS[work.dtype]
        self.queries = SharedTile(plan.block_m, work.head_dim, self.types)
        self.keys = SharedTile(plan.block_n, work.head_dim, self.types)
        self.values = SharedTile(plan.block_n, work.v_dim, self.types)
        self.stage = self.keys.elements + self.values.elements
        size = self.queries.elements + plan.num_stages * self.stage
        shared = scratch("stages", size, work.dtype, "shared.dyn")
        # All of it: TVM keeps no more of a buffer than what it sees to be accessed.
        self.whole = shared.access_ptr("rw")
        self.base = local("base", 1, "uint32")
        self.tiles = plan.reg_m // MMA_M
        self.holds_queries = holds_queries(plan, work)
        slices = self.keys.slices if self.holds_queries else 2
        self.left = local("left", self.tiles * slices * 4, "uint32")
        self.weights = local("weights", self.tiles * 4, "uint32")
        self.right = local("right", (AHEAD + 1) * 4, "uint32")
        self.softmax = RegisterSoftmax(rows, plan.block_n)
        self.columns = self.values.slices * 2  # instructions along the values
        self.sums = local("sums", self.tiles * self.columns * 4, "float32")
        self.range = local("range", 2, "int32")

    def emit(self) -> None:
        """Emit everything."""
        ahead = self.plan.num_stages - 1
        self._begin()
        first, blocks = self.range[0], self.range[1]
        for stage in range(ahead):
            with T.If(int32(stage) < blocks), T.Then():
                self._copy(first + int32(stage), int32(stage))
            T.evaluate(ptx["cp.async.commit_group"]())
        if self.holds_queries:
            self._wait()
            for index in range(self.keys.slices):
                self._load_queries(index, index)
        with T.serial(blocks) as step:
            self._wait()
            later = step + int32(ahead)
            with T.If(later < blocks), T.Then():
                self._copy(first + later, later % int32(self.plan.num_stages))
            T.evaluate(ptx["cp.async.commit_group"]())
            first_key = (first + step) * int32(self.plan.block_n)
            stage = self._stage(step % int32(self.plan.num_stages))
            seen = self.rows.some_seen(first_key)
            if seen is None:
                self._block(first_key, stage)
            else:
                with T.If(seen), T.Then():
                    self._block(first_key, stage)
        if self.partials is None:
            self.softmax.finish()
            store_results(self)
        else:
            self.softmax.share_totals()
            store_partials(self, self.partials, self.part)

    def _begin(self) -> None:
        """Find out where everything is, begin to copy the queries, and clear the sums."""
        T.buffer_store(self.base, cuda_cvta_generic_to_shared(self.whole), [0])
        for i, value in enumerate(self.rows.key_blocks()):
            T.buffer_store(self.range, value, [i])
        if self.partials is not None:
            self._take_part()
        work, rows = self.work, self.rows

        def query(line: tirx.Expr, element: tirx.Expr) -> tuple[tirx.Expr, list[tirx.Expr]]:
            query, head = rows.query_of(line)
            at = arrange(work.q_layout, rows.batch, query, head, int64(element))
            return self.operands.q[tuple(at)], [rows.exists(query)]

        self.queries.copy(self.base[0], self._threads, self.plan.lanes, query)
        rows.begin()
        self.softmax.start()
        with T.unroll(self.sums.ty.shape[0]) as i:
            T.buffer_store(self.sums, tirx.const(0.0, "float32"), [i])

    def _take_part(self) -> None:
        """Keep those of the blocks of keys that are this part's."""
        first, blocks, parts = self.range[0], self.range[1], int32(self.plan.split_k)
        each = (blocks + parts - int32(1)) // parts
        skipped = self.part * each
        T.buffer_store(self.range, first + skipped, [0])
        left = tirx.max(tirx.min(blocks - skipped, each), int32(0))
        T.buffer_store(self.range, left, [1])

    @property
    def _threads(self) -> tuple[tirx.Expr, int]:
        return self.thread, self.plan.num_warps * 32

    def _wait(self) -> None:
        """Wait for the oldest copy of the pipeline, and for every thread to be done with it."""
        T.evaluate(ptx["cp.async.wait_group"](self.plan.num_stages - 2))
        T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))

    def _bytes(self, elements: int) -> int:
        return elements * self.types.element_bytes

    def _stage(self, stage: tirx.Expr) -> tirx.Expr:
        """Return the address of the keys of a stage; values follow them."""
        skip = stage * int32(self._bytes(self.stage)) + int32(self._bytes(self.queries.elements))
        return self.base[0] + skip.astype("uint32")

    def _copy(self, block: tirx.Expr, stage: tirx.Expr) -> None:
        """Begin to copy a block of keys and values into a stage."""
        work, rows = self.work, self.rows
        first = int64(block * int32(self.plan.block_n))
        address = self._stage(stage)
        skip = 0
        for tile, source in ((self.keys, self.operands.k), (self.values, self.operands.v)):

            def element(
                line: tirx.Expr, element: tirx.Expr, source: tirx.Var = source
            ) -> tuple[tirx.Expr, list[tirx.Expr]]:
                key = first + int64(line)
                place = (rows.batch, key, int64(rows.kv_head), int64(element))
                exists = [] if self._fills_blocks else [key < rows.rules.kv_len]
                return source[tuple(arrange(work.kv_layout, *place))], exists

            at = address + tirx.const(skip, "uint32")
            tile.copy(at, self._threads, self.plan.lanes, element)
            skip = self._bytes(tile.elements)

    @property
    def _fills_blocks(self) -> bool:
        kv_len = self.rows.rules.kv_len
        return isinstance(kv_len, tirx.IntImm) and int(kv_len) % self.plan.block_n == 0

    # --- a block of keys -----------------------------------------------------------------------

    def _block(self, first_key: tirx.Expr, stage: tirx.Expr) -> None:
        """Take in a block of keys and values."""
        self._scores(stage)
        self.softmax.modify(first_key)
        if self.rows.has_edges:
            with T.If(self.rows.some_unseen(first_key)), T.Then():
                self.softmax.hide(first_key)
        self.softmax.advance()
        for tile in range(self.tiles):
            for half in range(2):
                ratio = self.softmax.ratio[row_of(tile, half)]
                for index in self._row_sums(tile, half):
                    T.buffer_store(self.sums, self.sums[index] * ratio, [index])
        self._weigh(stage + tirx.const(self._bytes(self.keys.elements), "uint32"))

    def result_pairs(self, index: int) -> list[list[tirx.Expr]]:
        """Return the sums of a row of this lane, two neighbouring columns at a time."""
        sums = self._row_sums(*divmod(index, 2))
        return [[self.sums[i] for i in sums[first : first + 2]] for first in range(0, len(sums), 2)]

    def _row_sums(self, tile: int, half: int) -> list[int]:
        """Return the indices of the sums of a row of this lane."""
        first = tile * self.columns * 4 + half * 2
        return [first + column * 4 + e for column in range(self.columns) for e in range(2)]

    def _load_queries(self, index: int, place: int) -> None:
        """Load a slice of the queries into registers."""
        for tile in range(self.tiles):
            line = self.rows.warp_row + int32(tile * MMA_M)
            first = (place * self.tiles + tile) * 4
            self.queries.load_left(self.left, first, self.base[0], (self.lane, line, index))

    def _scores(self, keys: tirx.Expr) -> None:
        """Multiply queries and keys."""
        pairs = self.plan.block_n // (2 * MMA_N)
        slices = self.keys.slices
        if not self.holds_queries:
            self._load_queries(0, 0)

        def load(place: int, slice_: int, pair: int) -> None:
            line = pair * 2 * MMA_N
            self.keys.load_right(self.right, place * 4, keys, (self.lane, line, slice_))

        def use(place: int, slice_: int, pair: int) -> None:
            left = slice_
            if not self.holds_queries:
                left = slice_ % 2
                if pair == 0 and slice_ + 1 < slices:
                    self._load_queries(slice_ + 1, (slice_ + 1) % 2)
            for tile in range(self.tiles):
                a = [self.left[(left * self.tiles + tile) * 4 + i] for i in range(4)]
                for e in range(2):
                    sums = self.softmax.sums_at(tile, 2 * pair + e)
                    b = [self.right[place * 4 + 2 * e + i] for i in range(2)]
                    multiply(self.types, sums, a, b, begin=slice_ == 0)

        _pipelined(slices, pairs, load, use)

    def _weigh(self, values: tirx.Expr) -> None:
        """Add the values, each times its weight, to the results."""

        def load(place: int, slice_: int, pair: int) -> None:
            at = (self.lane, slice_ * self.types.k, pair)
            self.values.load_right_transposed(self.right, place * 4, values, at)

        def use(place: int, slice_: int, pair: int) -> None:
            for tile in range(self.tiles):
                if pair == 0:
                    self._pack_weights(tile, slice_)
                a = [self.weights[tile * 4 + i] for i in range(4)]
                for e in range(2):
                    first = (tile * self.columns + 2 * pair + e) * 4
                    sums = [self.sums[first + i] for i in range(4)]
                    b = [self.right[place * 4 + 2 * e + i] for i in range(2)]
                    multiply(self.types, sums, a, b)

        _pipelined(self.plan.block_n // self.types.k, self.values.slices, load, use)

    def _pack_weights(self, tile: int, slice_: int) -> None:
        """Make the left operand of a slice of keys."""

        def weight(instruction: int, half: int, element: int) -> tirx.Expr:
            return self.softmax.score_at(tile, 2 * slice_ + instruction, half, element)

        pack_left(self.weights, tile * 4, weight, self.types)


def _pipelined(slices: int, pairs: int, load: Load, use: Load) -> None:
    """Emit the loads and products of every pair of each slice, loads `AHEAD` of products.

    Both are given where the operand is kept, the slice and the pair.
    """
    order = [(slice_, pair) for slice_ in range(slices) for pair in range(pairs)]
    for step in range(-AHEAD, len(order)):
        if step + AHEAD < len(order):
            load((step + AHEAD) % (AHEAD + 1), *order[step + AHEAD])
        if step >= 0:
            use(step % (AHEAD + 1), *order[step])
