"""The TIR of a chain of two matmuls: what is computed, stage by stage.

Stages, by the names of their blocks; B is the size of the batch, 1 without one:

``x_wide``     x in float32 (panels, where x is not)       [B, rows', k], float32
``w_panels0``  A in panels, if it needs to be               [B * panels, k, width], float32
``w_panels1``  B in panels of columns (panels)             [B * panels, r, reg_n], float32
``acc0``       x @ A                                       [B, rows', r'], float32
``out0``       its steps: the intermediate                 [B, rows', r'], rounded to dtype
``acc1``       the intermediate @ B                        [B, rows', n'], float32
``out1``       its steps: the result                       [(B,) rows, n], out_dtype

Plans of the family "panels" hold ``block_m`` rows of the intermediate at a time, so ``rows'`` is
rows rounded up to those; the last row is repeated.  Other plans, for few rows, are two contractions
in a row (see :mod:`relax_fusion.compute.contraction`), whose operands stay as they lie.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from ..estimator.families.cpu_chain import PANELS, is_packed, panel_columns
from ..estimator.tile_plan import TilePlan
from ..workload import MatmulChain, WeightLayout
from .accumulation import accumulate
from .activations import ACCUMULATE
from .stages import (
    Element,
    Padding,
    Size,
    Stages,
    as_stored,
    clamped,
    int64,
    round_up,
    stepped,
    weight_at,
)


def matmul_chain_prim_func(work: MatmulChain, plan: TilePlan) -> tirx.PrimFunc:
    """Build the unscheduled PrimFunc of a `MatmulChain`, to be scheduled by `plan`.

    Its parameters are the operands of ``work.graph``.
    """
    stages = Stages(work.graph)
    (_in_blocks if plan.family == PANELS else _in_a_row)(stages, work, plan)
    return stages.func()


def _in_a_row(stages: Stages, work: MatmulChain, plan: TilePlan) -> None:
    """Add both matmuls as contractions, one after the other."""
    data = stages["x"]
    rows = data.shape[0]
    sides = ((work.r, work.inner, work.dtype), (work.n, work.outer, work.out_dtype))
    for which, (n, steps, dtype) in enumerate(sides):
        layout, w = work.layouts[which], stages[f"w{which}"]
        padding = Padding(plan.block_m, plan.block_n if layout == "nk" else 1)
        acc = accumulate(data, _reader(layout, w), (1, n), f"acc{which}", padding)
        value = stepped(stages, which, steps, _at(acc, tirx.IntImm("int64", 0)), n)
        data = te.compute(int64((rows, n)), _rounded(value, dtype), f"out{which}")
    stages.give("out1", data)


def _rounded(value: Element, dtype: str) -> Element:
    return lambda i, j: as_stored(value(i, j), dtype).astype(dtype)


def _reader(layout: WeightLayout, w: te.Tensor) -> Callable[..., tirx.Expr]:
    return lambda p, j, r: weight_at(layout, w, j, r)


def _outside(x: te.Tensor) -> tuple[tuple[Size, ...], tuple[Size, Size]]:
    """Return the batch, if there is one, and (matrices, rows)."""
    *lead, rows, _ = x.shape
    return tuple(lead), ((*lead, 1)[0], rows)


def _result(
    stages: Stages, work: MatmulChain, size: tuple[tuple[Size, ...], Size], sums: Element
) -> None:
    """Add the steps after the second matmul, and the output."""
    lead, rows = size
    value = stepped(stages, 1, work.outer, sums, work.n)
    first = () if lead else (tirx.IntImm("int64", 0),)
    out = te.compute(
        int64((*lead, rows, work.n)),
        lambda *at: value(*first, *at).astype(work.out_dtype),
        "out1",
    )
    stages.give("out1", out)


def _in_blocks(stages: Stages, work: MatmulChain, plan: TilePlan) -> None:
    """Add both matmuls over panels of their weights, the intermediate between them."""
    x = stages["x"]
    lead, (batch, rows) = _outside(x)
    padded = round_up(rows, plan.block_m)

    def x_at(b: tirx.Expr, i: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        return _at(x, b)(clamped(i, rows, plan.block_m), r).astype(ACCUMULATE)

    data: Element = x_at
    if work.dtype != ACCUMULATE:
        data = te.compute(int64((batch, padded, work.k)), x_at, "x_wide")
    inner = _over_panels(stages, (work, plan, 0), (batch, padded), data)
    width = panel_columns(plan, work, 0)
    value = stepped(stages, 0, work.inner, inner, work.r, width)
    middle = te.compute(
        int64((batch, padded, round_up(work.r, width))),
        lambda *at: as_stored(value(*at), work.dtype),
        "out0",
    )
    outer = _over_panels(stages, (work, plan, 1), (batch, padded), middle)
    _result(stages, work, (lead, rows), outer)


def _at(tensor: te.Tensor, b: tirx.Expr) -> Element:
    """Return a reader of one matrix of a batch, or of the only one."""
    return (lambda i, j: tensor(b, i, j)) if len(tensor.shape) == 3 else tensor


def _over_panels(
    stages: Stages,
    which: tuple[MatmulChain, TilePlan, int],
    outside: tuple[Size, Size],
    data: Element,
) -> Element:
    """Add a weight, its panels and the reduction over them; return the sums by (b, i, j).

    `outside` are the matrices and their rows.
    """
    (work, plan, index), (batch, rows) = which, outside
    k, n = ((work.k, work.r), (work.r, work.n))[index]
    layout, width = work.layouts[index], panel_columns(plan, work, index)
    count, w = -(-n // width), stages[f"w{index}"]

    def packed(p: tirx.Expr, r: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        column = clamped(p % count * width + j, n, width)
        return weight_at(layout, _at(w, p // count), column, r).astype(ACCUMULATE)

    panels = None
    if is_packed(work, plan, index):
        panels = te.compute(int64((batch * count, k, width)), packed, f"w_panels{index}")

    def read(b: tirx.Expr, j: tirx.Expr, r: tirx.Expr) -> tirx.Expr:
        if panels is None:
            return weight_at(layout, _at(w, b), j, r)
        return panels(b * count + j // width, r, j % width)

    r = te.reduce_axis((0, tirx.IntImm("int64", k)), "k")
    return te.compute(
        int64((batch, rows, count * width)),
        lambda b, i, j: te.sum(data(b, i, r) * read(b, j, r), axis=r),
        f"acc{index}",
    )
