"""ALiBi: a bias that is a slope for each head times the distance of a key."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ...tvm_ir import detect_linear_equation
from ..element_values import Choice
from ..pattern import KernelArg, PrimExpr
from ..shapes import same_shape
from .aligned import Aligned


@dataclass(frozen=True)
class Slopes:
    """ALiBi: ``slope[head] * (key + rest)``, where `rest` is the same for all keys of a row."""

    arg: KernelArg
    by_row: PrimExpr
    rest: PrimExpr


def slopes_of(at: Aligned) -> Slopes | None:
    """Read ``slopes[head] * positions``."""
    call = at.grid.view.call(at.at.expr, "relax.multiply")
    if call is None or at.column is None:
        return None
    for first, second in (call.args, call.args[::-1]):
        slopes, positions = at.operand(first), at.operand(second)
        heads = at.heads
        if slopes is None or positions is None or slopes.at.flat != heads or not heads:
            continue
        value = positions.element()
        if value is None or isinstance(value, float | Choice):
            continue
        row = tirx.Var("row", "int64") if positions.row is None else positions.row
        place = positions.elements.analyzer.simplify(value)
        factors = detect_linear_equation(place, [row, positions.column])
        if len(factors) == 3 and same_shape(factors[1:2], (1,)):
            arg = KernelArg(first, (at.grid.sizes[1],))
            return Slopes(arg, factors[0], factors[2])
    return None
