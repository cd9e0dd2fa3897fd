"""An online softmax in the registers of a warp, where ``mma`` leaves its sums.

Four neighbouring lanes share a row.  Exponentials are to the base of 2, and what scores are
multiplied by on the way there is part of the same fused multiply-add that takes the maximum off.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018,
https://arxiv.org/abs/1805.02867, algorithm 3; Dao, "FlashAttention-2", 2023,
https://arxiv.org/abs/2307.08691, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...compute.attention_tile import finite, minus_infinity, zero
from .attention_rows import AttentionRows
from .fragments import local
from .layout import LANES, MMA_M, MMA_N
from .tile import int32

LOG2_E = math.log2(math.e)

EVERY_LANE = 0xFFFFFFFF


class RegisterSoftmax:
    """Emits what turns scores into weights and keeps each row's maximum and sum.

    Parameters
    ----------
    rows : AttentionRows
        The rows of the warp.
    keys : int
        Keys of a block.

    Attributes
    ----------
    scores : tirx.Var
        Products going in, weights coming out; `score_at` finds them.
    ratio : tirx.Var
        What a row's results so far have to be multiplied by, after `advance` and after `finish`.
    """

    def __init__(self, rows: AttentionRows, keys: int) -> None:
        """Allocate registers, in the block that is open."""
        self.rows = rows
        work = rows.work
        self.tiles, self.instructions = rows.plan.reg_m // MMA_M, keys // MMA_N
        self.scores = local("scores", self.tiles * self.instructions * 4, "float32")
        self.top = local("top", rows.count, "float32")
        self.new_top = local("new_top", rows.count, "float32")
        self.total = local("total", rows.count, "float32")
        self.ratio = local("ratio", rows.count, "float32")
        changed = (work.softcap, work.bias_dims, work.alibi)
        self.is_scaled_first = work.scale <= 0 or any(given is not None for given in changed)
        factor = LOG2_E if self.is_scaled_first else work.scale * LOG2_E
        self.factor = tirx.const(factor, "float32")

    def score_at(self, tile: int, instruction: int, half: int, element: int) -> tirx.Expr:
        """Return a score of this lane, of one of its rows and one of its two columns."""
        return self.scores[self._index(tile, instruction, half, element)]

    def sums_at(self, tile: int, instruction: int) -> list[tirx.Expr]:
        """Return the four scores that one instruction leaves."""
        return [self.score_at(tile, instruction, *divmod(i, 2)) for i in range(4)]

    def _index(self, tile: int, instruction: int, half: int, element: int) -> int:
        return (tile * self.instructions + instruction) * 4 + half * 2 + element

    def _own(self, row: int) -> list[tuple[int, int, int]]:
        """Return the instruction, element and index of each score of a row."""
        tile, half = divmod(row, MMA_M // MMA_N)
        pairs = [(i, e) for i in range(self.instructions) for e in range(2)]
        return [(i, e, self._index(tile, i, half, e)) for i, e in pairs]

    def start(self) -> None:
        """Begin with no key seen."""
        for row in range(self.rows.count):
            T.buffer_store(self.top, minus_infinity(), [row])
            T.buffer_store(self.total, zero(), [row])

    # --- from products to scores ---------------------------------------------------------------

    def modify(self, first_key: tirx.Expr) -> None:
        """Emit what the workload does to its scores, step by step, and its boolean mask."""
        rules, work = self.rows.rules, self.rows.work
        if not self.is_scaled_first and work.mask_dims is None:
            return
        whole = self.rows.keys_fill_blocks
        for row in range(self.rows.count):
            for instruction, element, index in self._own(row):
                key = first_key + self.rows.column(instruction, element)
                place = self.rows.place(row, key)
                if self.is_scaled_first:
                    scaled = self.scores[index] * tirx.const(work.scale, "float32")
                    T.buffer_store(self.scores, scaled, [index])
                    for step in rules.steps(place, whole=whole):
                        T.buffer_store(self.scores, step(self.scores[index]), [index])
                seen = rules.unmasked(place, whole=whole)
                if seen is not None:
                    self._hide_unless(seen, index)

    def hide(self, first_key: tirx.Expr) -> None:
        """Emit the mask of a block of keys that some rows see in part."""
        for row in range(self.rows.count):
            for instruction, element, index in self._own(row):
                key = first_key + self.rows.column(instruction, element)
                self._hide_unless(self.rows.sees(row, key), index)

    def _hide_unless(self, seen: tirx.Expr, index: int) -> None:
        T.buffer_store(
            self.scores, tirx.Select(seen, self.scores[index], minus_infinity()), [index]
        )

    # --- from scores to weights ----------------------------------------------------------------

    def advance(self) -> None:
        """Take in a block of keys."""
        rows = range(self.rows.count)
        for row in rows:
            scores = [self.scores[index] for _, _, index in self._own(row)]
            T.buffer_store(self.new_top, _folded(scores, tirx.max), [row])
        self._share(self.new_top, tirx.max)
        for row in rows:
            T.buffer_store(self.new_top, tirx.max(self.top[row], self.new_top[row]), [row])
            # With minus infinity, before the first visible key, the ratio has to be 0, not NaN; the
            # least float32 becomes that only by the factor
            shift = finite(self.new_top[row] * self.factor)
            T.buffer_store(self.ratio, tirx.exp2(self.top[row] * self.factor - shift), [row])
            T.buffer_store(self.top, self.new_top[row], [row])
            T.buffer_store(self.new_top, shift, [row])
        for row in rows:
            for _, _, index in self._own(row):
                power = self.scores[index] * self.factor - self.new_top[row]
                T.buffer_store(self.scores, tirx.exp2(power), [index])
            weights = [self.scores[index] for _, _, index in self._own(row)]
            total = self.total[row] * self.ratio[row]
            T.buffer_store(self.total, total + _folded(weights, lambda a, b: a + b), [row])

    def _share(self, values: tirx.Var, fold: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> None:
        """Fold the values of the four lanes of each row."""
        for distance in (1, 2):
            for row in range(self.rows.count):
                other = T.tvm_warp_shuffle_xor(EVERY_LANE, values[row], distance, LANES, LANES)
                T.buffer_store(values, fold(values[row], other), [row])

    def share_totals(self) -> None:
        """Add up the sums of the four lanes of each row."""
        self._share(self.total, lambda a, b: a + b)

    def finish(self) -> None:
        """Find what the results are multiplied by; a sum of 0 means that a row saw no key."""
        self.share_totals()
        for row in range(self.rows.count):
            one = tirx.const(1.0, "float32")
            if self.rows.work.sinks is None:
                T.buffer_store(self.ratio, one, [row])
            else:
                self._add_sink(row)
            empty = self.total[row] == zero()
            divisor = tirx.Select(empty, one, self.total[row])
            T.buffer_store(self.ratio, self.ratio[row] / divisor, [row])

    def _add_sink(self, row: int) -> None:
        """Add the score that the softmax of a row has besides those of its keys."""
        sinks = self.rows.rules.operands.sinks
        assert sinks is not None
        sink = sinks[self.rows.place(row, int32(0)).head].astype("float32")
        sink = sink * tirx.const(LOG2_E, "float32")
        top = self.top[row] * self.factor
        shift = finite(tirx.max(top, sink))
        T.buffer_store(self.ratio, tirx.exp2(top - shift), [row])
        total = self.total[row] * self.ratio[row] + tirx.exp2(sink - shift)
        T.buffer_store(self.total, total, [row])


def _folded(
    values: Sequence[tirx.Expr], fold: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
) -> tirx.Expr:
    """Fold neighbours, so that few steps wait for one another."""
    values = list(values)
    while len(values) > 1:
        rest = values[len(values) // 2 * 2 :]
        pairs = zip(values[::2], values[1::2], strict=False)
        values = [*(fold(a, b) for a, b in pairs), *rest]
    return values[0]
