"""The rows of a warp of an attention kernel: whose they are, and which keys they see."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...compute.attention_scores import Place, Scores
from ...estimator.tile_plan import TilePlan
from ...workload import Attention
from .fragments import local
from .layout import LANES, MMA_M, MMA_N
from .tile import int32, int64


class AttentionRows:
    """Rows of one key head: queries, and of each the heads that share the keys, side by side.

    Parameters
    ----------
    work : Attention
        What is computed.
    plan : TilePlan
        ``reg_m`` rows are a warp's.
    rules : Scores
        What becomes of a dot product, and what a query sees.
    thread : tirx.Var
        The int32 index of the thread in its block.
    place : tuple of tirx.Expr
        Batch, key head and row tile of the block, int32.
    """

    def __init__(
        self,
        work: Attention,
        plan: TilePlan,
        rules: Scores,
        thread: tirx.Var,
        place: tuple[tirx.Expr, tirx.Expr, tirx.Expr],
    ) -> None:
        """Allocate the rows' bounds, in the block that is open."""
        self.work, self.plan, self.rules = work, plan, rules
        batch, self.kv_head, tile = place
        self.batch = int64(batch)
        self.group = work.q_heads // work.kv_heads
        self.lane = thread % int32(LANES)
        self.warp_row = thread // int32(LANES) * int32(plan.reg_m)
        self.first_row = tile * int32(plan.block_m)
        self.count = plan.reg_m // MMA_N
        """Rows of a lane: ``lane // 4 + 8 * index`` of its warp's."""
        self.some_are_hidden = work.causal != "none" or work.window is not None
        kv_len = rules.kv_len
        self.keys_fill_blocks = isinstance(kv_len, tirx.IntImm) and int(kv_len) % plan.block_n == 0
        self.has_edges = self.some_are_hidden or not self.keys_fill_blocks
        """Whether there are blocks of keys that a row does not see whole."""
        # Of the warp: the ends and beginnings of its first and last row; then those of the lane's
        self.bounds = local("bounds", 4, "int32")
        self.ends = local("ends", self.count, "int32") if work.causal != "none" else None
        self.begins = local("begins", self.count, "int32") if work.window is not None else None

    def query_of(self, row: tirx.Expr) -> tuple[tirx.Expr, tirx.Expr]:
        """Return query and head of a row of the block, int64."""
        row = self.first_row + row
        head = self.kv_head * int32(self.group) + row % int32(self.group)
        return int64(row // int32(self.group)), int64(head)

    def row(self, index: int) -> tirx.Expr:
        """Return which row of the block one of this lane is."""
        return self.warp_row + self.lane // int32(4) + int32(index * MMA_N)

    def line(self, index: int) -> tirx.Expr:
        """Return the number of a row of this lane among those of all heads and batch entries."""
        rows = self.rules.q_len * int64(self.group)
        place = self.batch * int64(self.work.kv_heads) + int64(self.kv_head)
        return place * rows + int64(self.first_row + self.row(index))

    def exists(self, query: tirx.Expr) -> tirx.Expr:
        """Return whether there is such a query."""
        return query < self.rules.q_len

    def column(self, instruction: int, element: int) -> tirx.Expr:
        """Return the column of a sum of this lane: of the first or second of an instruction's."""
        return self.lane % int32(4) * int32(2) + int32(instruction * MMA_N + element)

    def key_blocks(self) -> tuple[tirx.Expr, tirx.Expr]:
        """Return the first block of keys that some row sees, and how many there are from it on."""
        keys = int64(self.plan.block_n)
        last = self.query_of(int32(self.plan.block_m - 1))[0]
        last = tirx.min(last, self.rules.q_len - int64(1))
        first = self.rules.keys_begin(self.query_of(int32(0))[0]) // keys
        end = (self.rules.keys_end(last) + keys - int64(1)) // keys
        return first.astype("int32"), tirx.max(end - first, int64(0)).astype("int32")

    def begin(self) -> None:
        """Find out what the rows see."""
        rules = self.rules
        if self.has_edges:
            first = self.query_of(self.warp_row)[0]
            last = self.query_of(self.warp_row + int32(self.plan.reg_m - 1))[0]
            seen = [rules.keys_end(first), rules.keys_end(last)]
            seen += [rules.keys_begin(first), rules.keys_begin(last)]
            for i, bound in enumerate(seen):
                T.buffer_store(self.bounds, bound.astype("int32"), [i])
        for index in range(self.count):
            query = self.query_of(self.row(index))[0]
            if self.ends is not None:
                T.buffer_store(self.ends, rules.keys_end(query).astype("int32"), [index])
            if self.begins is not None:
                T.buffer_store(self.begins, rules.keys_begin(query).astype("int32"), [index])

    def some_seen(self, first_key: tirx.Expr) -> tirx.Expr | None:
        """Return whether some row of the warp sees a block of keys; None if every one does."""
        if not self.some_are_hidden:
            return None
        end, begin = self.bounds[1], self.bounds[2]
        return tirx.all(first_key < end, first_key + int32(self.plan.block_n) > begin)

    def some_unseen(self, first_key: tirx.Expr) -> tirx.Expr:
        """Return whether some row of the warp does not see all of a block of keys."""
        end, begin = self.bounds[0], self.bounds[3]
        unseen = first_key + int32(self.plan.block_n) > end
        return unseen if self.begins is None else tirx.any(unseen, first_key < begin)

    def sees(self, index: int, key: tirx.Expr) -> tirx.Expr:
        """Return whether a row of this lane sees a key, the boolean mask apart."""
        end = self.bounds[0] if self.ends is None else self.ends[index]
        seen = key < end
        return seen if self.begins is None else tirx.all(seen, key >= self.begins[index])

    def place(self, index: int, key: tirx.Expr) -> Place:
        """Return which score a row of this lane has with a key."""
        query, head = self.query_of(self.row(index))
        return Place(self.batch, head, query, int64(key))


def row_of(tile: int, half: int) -> int:
    """Return which row of a lane is row ``lane // 4 + 8 * half`` of a row tile."""
    return tile * (MMA_M // MMA_N) + half
