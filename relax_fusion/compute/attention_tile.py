"""Sizes and small parts of an attention tile, shared by `attention` and `attention_blocks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd

from tvm import tirx

from ..estimator.families.attention_tiles import FEW_ROWS
from ..estimator.tile_plan import TilePlan
from ..matching.expressions import int64
from ..tvm_ir import IRBuilder, T
from ..workload import Attention

WARP = 32
"""Threads that a plan counts as one warp."""

FLOAT = "float32"
"""Type of scores, sums and scratch."""


def arrange(layout: str, b: object, s: object, n: object, h: object) -> list[object]:
    """Put batch, sequence, head and feature into the order of `layout`."""
    return [{"b": b, "s": s, "n": n, "h": h}[letter] for letter in layout]


def place_of(work: Attention, name: str, *place: tirx.Expr) -> list[tirx.Expr]:
    """Return where q, k or v has a feature: of a batch entry, a position, and one of its heads."""
    part = work.heads_in(name)
    batch, position, head, feature = place
    head = head if part.step == 1 else head * int64(part.step)
    head = head + int64(part.start) if part.start else head
    layout = work.q_layout if name == "q" else work.kv_layout
    return arrange(layout, batch, position, head, feature)


@dataclass(frozen=True)
class Operands:
    """The buffers of the function; None where there is none."""

    q: tirx.Var
    k: tirx.Var
    v: tirx.Var
    out: tirx.Var
    bias: tirx.Var | None = None
    mask: tirx.Var | None = None
    slopes: tirx.Var | None = None
    sinks: tirx.Var | None = None
    lengths: tirx.Var | None = None
    shared: tirx.Var | None = None


@dataclass(frozen=True)
class TileShape:
    """Sizes of one tile and of its register tiles, made by `tile_shape`."""

    rows: int
    keys: int
    """Rows and key positions held at once.  A row is a query of one of the heads that share the
    keys, the heads of a position side by side."""
    reg_rows: int
    """Rows of a register tile."""
    reg_keys: int
    reg_values: int
    """Columns of a register tile of scores, and of one of outputs."""
    dot_lanes: int
    """Features that are summed side by side in the registers of one score, where rows are too few
    to pay for staging keys (transposed) and values; 0 where a register holds scores of neighbouring
    keys instead."""
    threads: int
    """Threads that share the tile, 1 on a CPU."""
    on_gpu: bool
    """Whether the tile is a thread block."""
    stage_dtype: str
    """Of the staged q, k and v."""

    @property
    def fold_lanes(self) -> int:
        """Partial maxima and sums of a row: a power of two that divides its keys."""
        return self.reg_keys & -self.reg_keys


def tile_shape(work: Attention, plan: TilePlan) -> TileShape:
    """Cut the tiles of `plan` down to `work`.

    A tile is not larger than a static size asks for.  A GPU stages operands in their own type,
    because shared memory is scarce; a CPU stages them as float32, because it converts a value once
    there and otherwise once for every row.
    """
    on_gpu, group = plan.num_warps > 0, work.q_heads // work.kv_heads
    width = plan.reg_n if plan.reg_n % plan.lanes == 0 else plan.lanes
    rows, keys = plan.block_m, plan.block_n
    few = not on_gpu and rows <= FEW_ROWS
    if isinstance(work.q_len, int):
        rows = min(rows, _round_up(work.q_len * group, plan.reg_m))
    if isinstance(work.kv_len, int):
        keys = min(keys, _round_up(work.kv_len, width))
    return TileShape(
        rows=rows,
        keys=keys,
        reg_rows=plan.reg_m,
        reg_keys=gcd(keys, width),
        reg_values=gcd(work.v_dim, width),
        dot_lanes=gcd(work.head_dim, work.shared, plan.lanes) if few else 0,
        threads=max(1, plan.num_warps * WARP),
        on_gpu=on_gpu,
        stage_dtype=work.dtype if on_gpu else FLOAT,
    )


def _round_up(value: int, step: int) -> int:
    return max(1, -(-value // step)) * step


@contextmanager
def block(name: str, **axes: int) -> Iterator[list[tirx.Var]]:
    """Open loops of the given extents with a block in them; an axis in capitals is reduced."""
    with T.grid(*(int64(extent) for extent in axes.values())) as loops:
        # One loop or one axis comes as itself, several as a list.
        loops = list(loops) if len(axes) > 1 else [loops]
        IRBuilder.name_many([axis.lower() for axis in axes], loops)
        with T.sblock(name):
            kinds = "".join("R" if axis.isupper() else "S" for axis in axes)
            bound = T.axis.remap(kinds, loops)
            bound = list(bound) if len(axes) > 1 else [bound]
            IRBuilder.name_many(["v" + axis.lower() for axis in axes], bound)
            yield bound


def scratch(
    name: str, shape: tuple[int, ...], dtype: str = FLOAT, scope: str = "global"
) -> tirx.Var:
    """Allocate a buffer in the block that is open."""
    buffer = T.sblock_alloc_buffer([int64(size) for size in shape], dtype, scope=scope)
    IRBuilder.name(name, buffer)
    return buffer


def minus_infinity() -> tirx.Expr:
    """Return the score of a key that a query does not see."""
    return tirx.const(float("-inf"), FLOAT)


def finite(value: tirx.Expr) -> tirx.Expr:
    """Return `value`, or 0 where it is minus infinity: a row with no key yet has no maximum.

    ``exp(-inf - 0)`` is 0, and ``exp(-inf - (-inf))`` would be NaN.
    """
    return tirx.Select(value == minus_infinity(), tirx.const(0, FLOAT), value)


def zero() -> tirx.Expr:
    """Return 0 in the type of the scores."""
    return tirx.const(0, FLOAT)


def halves(count: int) -> list[int]:
    """Return the widths in which `count` neighbours, a power of two, are folded into one."""
    return [1 << level for level in reversed(range(count.bit_length() - 1))] if count else []


def let(name: str, value: tirx.Expr, body: Callable[[tirx.Var], tirx.Expr]) -> tirx.Expr:
    """Return `body` of `value`, which is computed once and not for every use."""
    var = tirx.Var(name, str(value.ty.dtype))
    return tirx.Let(var, value, body(var))
