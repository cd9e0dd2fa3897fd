"""The body of an attention kernel on tensor cores: scores and results in registers.

A warp multiplies its queries with a block of keys, takes the softmax, and multiplies the weights,
which are where the next product wants its left operand, with the block of values.  Meanwhile
``cp.async`` brings later blocks.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
2023, https://arxiv.org/abs/2307.08691, algorithm 1.
"""

from __future__ import annotations

from tvm import tirx
from tvm.backend.cuda.op import cuda_cvta_generic_to_shared
from tvm.script.ir_builder import tirx as T

from ...compute.attention_tile import Operands, place_of
from .attention_products import AttentionProducts
from .attention_results import Partials, store_partials, store_results
from .attention_rows import AttentionRows
from .attention_softmax import RegisterSoftmax
from .fragments import clear, local, ptx, scratch
from .layout import LANES
from .tile import int32, int64


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
        self.rows, self.operands = rows, operands
        self.threads = thread, rows.plan.num_warps * LANES
        self.partials, self.part = partials, part
        work, plan = rows.work, rows.plan
        self.work, self.plan = work, plan
        self.softmax = RegisterSoftmax(rows, plan.block_n)
        self.products = AttentionProducts(rows, self.softmax)
        self.queries, self.tiles = self.products.queries, (self.products.keys, self.products.values)
        self.stage = sum(tile.elements for tile in self.tiles)
        size = self.queries.elements + plan.num_stages * self.stage
        shared = scratch("stages", size, work.dtype, "shared.dyn")
        # All of it: TVM keeps no more of a buffer than what it sees to be accessed.
        self.whole = shared.access_ptr("rw")
        self.base = local("base", 1, "uint32")
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
        if self.products.holds_queries:
            self._wait()
            self.products.load_queries(self.base[0])
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
            store_results(self.products, self.operands.out)
        else:
            self.softmax.share_totals()
            store_partials(self.products, self.partials, self.part)

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
            at = place_of(work, "q", rows.batch, query, head, int64(element))
            return self.operands.q[tuple(at)], [rows.exists(query)]

        self.queries.copy(self.base[0], self.threads, self.plan.lanes, query)
        rows.begin()
        self.softmax.start()
        clear(self.products.sums)

    def _take_part(self) -> None:
        """Keep those of the blocks of keys that are this part's."""
        first, blocks, parts = self.range[0], self.range[1], int32(self.plan.split_k)
        each = (blocks + parts - int32(1)) // parts
        skipped = self.part * each
        T.buffer_store(self.range, first + skipped, [0])
        left = tirx.max(tirx.min(blocks - skipped, each), int32(0))
        T.buffer_store(self.range, left, [1])

    def _wait(self) -> None:
        """Wait for the oldest copy of the pipeline, and for every thread to be done with it."""
        T.evaluate(ptx["cp.async.wait_group"](self.plan.num_stages - 2))
        T.evaluate(tirx.op.tvm_storage_sync("shared.dyn"))

    def _bytes(self, elements: int) -> int:
        return elements * self.products.types.element_bytes

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
        for tile, name in zip(self.tiles, ("k", "v"), strict=True):

            def element(
                line: tirx.Expr, element: tirx.Expr, name: str = name
            ) -> tuple[tirx.Expr, list[tirx.Expr]]:
                key = first + int64(line)
                place = (rows.batch, key, int64(rows.kv_head), int64(element))
                exists = [] if rows.keys_fill_blocks else [key < rows.rules.kv_len]
                source = getattr(self.operands, name)
                return source[tuple(place_of(work, name, *place))], exists

            at = address + tirx.const(skip, "uint32")
            tile.copy(at, self.threads, self.plan.lanes, element)
            skip = self._bytes(tile.elements)

    def _block(self, first_key: tirx.Expr, stage: tirx.Expr) -> None:
        """Take in a block of keys and values."""
        self.products.score(self.base[0], stage)
        self.softmax.modify(first_key)
        if self.rows.has_edges:
            with T.If(self.rows.some_unseen(first_key)), T.Then():
                self.softmax.hide(first_key)
        self.softmax.advance()
        self.products.rescale()
        skip = self._bytes(self.products.keys.elements)
        self.products.weigh(stage + tirx.const(skip, "uint32"))
