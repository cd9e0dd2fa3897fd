"""The rules: a formula, another that is the same, and what is to hold.

`EXACT` rules have the same results bit by bit, but for the sign of zero.  Others name the sentence
of ``docs/numerics.md`` that allows other roundings; those of `INEXACT` run with ``exact=False``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tvm import tirx

from ..matching.effects import free_vars
from ..matching.shapes import dtype_of, is_one, same_shape, shape_of
from .formula import Term, formula
from .matcher import Found

Numbers: TypeAlias = Literal["exact", "A1", "A2", "A3", "A4", "inexact"]
Condition: TypeAlias = Callable[[Found], bool]

EXACT, INEXACT = "exact", "inexact"


@dataclass(frozen=True)
class Rule:
    """What may stand in the place of a formula.

    Parameters
    ----------
    before, after : str
        The formulas.
    numbers : {"exact", "A1", "A2", "A3", "A4", "inexact"}
        What becomes of the roundings.
    when : callable
        Takes what the names stand for; tells whether both formulas are the same then.
    dtypes : tuple of str
        Of which dtypes the result is; any floats by default.
    is_mixed : bool
        Whether tensors of the formula may have other dtypes than its result.
    """

    before: str
    after: str
    numbers: Numbers
    when: Condition = lambda found: True
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16", "float64")
    is_mixed: bool = False

    def __str__(self) -> str:
        return f"{self.before} -> {self.after}"

    @property
    def pattern(self) -> Term:
        """What is looked for."""
        return formula(self.before)

    @property
    def result(self) -> Term:
        """What takes its place."""
        return formula(self.after)


def _is_power_of_two(found: Found) -> bool:
    number = found.number("c")
    return number != 0 and math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _is_positive(found: Found) -> bool:
    return 0 < found.number("c") < math.inf


def _is_negative(found: Found) -> bool:
    return -math.inf < found.number("c") < 0


def _is_no_less_than_one(found: Found) -> bool:
    """Tell whether a sum is no larger in front of a factor than behind it, or may be."""
    return found.dtype != "float16" or 1 <= abs(found.number("c")) < math.inf


def _has_range(found: Found) -> bool:
    """Tell whether sums and products in another order overflow no sooner, in practice."""
    return found.dtype != "float16"


def _shape(found: Found, name: str) -> list[tirx.Expr]:
    return shape_of(found.names[name]) or []


def _are_matrices(found: Found) -> bool:
    return all(len(_shape(found, name)) == 2 for name in found.names if name in "AB")


def _are_alike(found: Found) -> bool:
    return _are_matrices(found) and same_shape(_shape(found, "A"), _shape(found, "B"))


def _is_row(found: Found) -> bool:
    """Tell whether V is one row, of as many features as A makes."""
    return _are_matrices(found) and _is_along(found, _shape(found, "A")[1])


def _is_column(found: Found) -> bool:
    """Tell whether V is one row, of as many features as A takes, and x has them all."""
    last = _shape(found, "A")[0]
    return (
        _are_matrices(found)
        and _is_along(found, last)
        and same_shape(_shape(found, "x")[-1:], [last])
    )


def _is_vector(found: Found) -> bool:
    return _is_along(found, _shape(found, "y")[1], "z")


def _is_along(found: Found, size: tirx.Expr, name: str = "V") -> bool:
    *lead, last = _shape(found, name) or [tirx.IntImm("int64", 1)]
    return all(map(is_one, lead)) and same_shape([last], [size])


def _are_alike_in(one: str, other: str) -> Condition:
    """Return what tells whether two tensors have one shape, of two axes or more."""

    def are_alike(found: Found) -> bool:
        shapes = _shape(found, one), _shape(found, other)
        return len(shapes[0]) > 1 and same_shape(*shapes)

    return are_alike


def _are_of_a_rank(found: Found) -> bool:
    """Tell whether factors are matrices, the first for each of several, or all of them."""
    x, y, z = (_shape(found, name) for name in "xyz")
    is_plain = len(x) > 1 and len(y) == len(z) == 2
    return is_plain or (len(x) > 2 and all(same_shape(x[:-2], v[:-2]) for v in (y, z)))


def _is_row_scale(found: Found) -> bool:
    """Tell whether y is a number for each row of x, and is computed of others."""
    x, y = _shape(found, "x"), _shape(found, "y")
    if len(x) != len(y) or len(x) < 2 or not is_one(y[-1]) or len(_shape(found, "z")) != 2:
        return False
    return not found.view.depends_on(found.names["y"], set(free_vars(found.names["x"])))


def _is_of_rows(found: Found) -> bool:
    """Tell whether all rows are summed up that a matmul by a matrix makes."""
    attrs, rank = found.attributes["r"].attrs, len(_shape(found, "x"))
    axes = [] if attrs.axis is None else [int(a) % rank for a in attrs.axis]
    is_row = axes == [rank - 2] and (bool(attrs.keepdims) or rank > 2)
    return is_row and len(_shape(found, "y")) == 2


def _is_same_along(found: Found) -> bool:
    """Tell whether y is one number along the axes of a reduction, and x has them all."""
    attrs, x, y = found.attributes["r"].attrs, _shape(found, "x"), _shape(found, "y")
    if attrs.axis is None or not attrs.keepdims or len(y) != len(x):
        return False
    return all(is_one(y[int(a)]) and not is_one(x[int(a)]) for a in attrs.axis)


def _is_widened(found: Found) -> bool:
    """Tell whether a dtype has all numbers of that from which it is cast."""
    inner = found.attributes["q"]
    return dtype_of(inner) in _WIDER.get(dtype_of(inner.args[0]), ())


def _is_back(found: Found) -> bool:
    return _is_widened(found) and dtype_of(found.names["x"]) == found.dtype


def _keeps_alike(found: Found) -> bool:
    """Tell whether both of two reductions leave out the axes that they are over, or neither."""
    return len({bool(call.attrs.keepdims) for call in found.attributes.values()}) == 1


def _both(*conditions: Condition) -> Condition:
    return lambda found: all(holds(found) for holds in conditions)


_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "int8": ("int16", "int32", "int64", "float16", "float32", "float64"),
    "int32": ("int64", "float64"),
}
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

RULES: tuple[Rule, ...] = (
    # Signs, and numbers that do nothing
    Rule("-(-x)", "x", "exact"),
    Rule("x * 1", "x", "exact"),
    Rule("x / 1", "x", "exact"),
    Rule("x - 0", "x", "exact"),
    Rule("x + 0", "x", "exact"),
    Rule("x - (-y)", "x + y", "exact"),
    Rule("x + (-y)", "x - y", "exact"),
    Rule("(-x) * c", "x * (-c)", "exact"),
    Rule("(-x) * (-y)", "x * y", "exact"),
    Rule("abs(-x)", "abs(x)", "exact"),
    Rule("abs(abs(x))", "abs(x)", "exact"),
    Rule("square(-x)", "square(x)", "exact"),
    Rule("square(abs(x))", "square(x)", "exact"),
    Rule("nn.relu(nn.relu(x))", "nn.relu(x)", "exact"),
    Rule("nn.relu(abs(x))", "abs(x)", "exact"),
    Rule("abs(square(x))", "square(x)", "exact"),
    Rule("abs(exp(x))", "exp(x)", "exact"),
    Rule("maximum(maximum(x, c), d)", "maximum(x, maximum(c, d))", "exact"),
    Rule("minimum(minimum(x, c), d)", "minimum(x, minimum(c, d))", "exact"),
    Rule("maximum(x, x)", "x", "exact"),
    Rule("minimum(x, x)", "x", "exact"),
    Rule("astype[r](astype[q](x))", "x", "exact", _is_back, is_mixed=True),
    Rule("astype[r](astype[q](x))", "astype[r](x)", "exact", _is_widened, is_mixed=True),
    # Cheaper operators
    Rule("x / c", "x * (1 / c)", "exact", _is_power_of_two),
    Rule("power(x, 1)", "x", "exact"),
    Rule("power(x, 2)", "x * x", "A2"),
    Rule("power(x, 3)", "x * x * x", "A2"),
    Rule("power(x, 4)", "square(square(x))", "A2"),
    Rule("power(x, -1)", "1 / x", "A2"),
    Rule("power(x, 0.5)", "sqrt(x)", "A2"),
    Rule("power(x, -0.5)", "rsqrt(x)", "A2"),
    Rule("sqrt(square(x))", "abs(x)", "A2"),
    # Numbers with one another
    Rule("(x * c) * d", "x * (c * d)", "A1"),
    Rule("(x / c) * d", "x * (d / c)", "A1"),
    Rule("(x * c) / d", "x * (c / d)", "A1"),
    # Constant weights with what surrounds them
    Rule("x * V + x * W", "x * (V + W)", "A1"),
    Rule("x @ A + x @ B", "x @ (A + B)", "A1", _are_alike),
    Rule("x @ A - x @ B", "x @ (A - B)", "A1", _are_alike),
    Rule("(x @ A) @ B", "x @ (A @ B)", "A1", _are_matrices),
    Rule("(x * c) @ A", "x @ (A * c)", "A1", _are_matrices),
    Rule("(x @ A) * c", "x @ (A * c)", "A1", _are_matrices),
    Rule("(x * V) @ A", "x @ (A * column(V))", "A1", _is_column),
    Rule("(x + V) @ A", "x @ A + row(V) @ A", "A1", _is_column),
    Rule("(x @ A) * V", "x @ (A * row(V))", "A1", _is_row),
    Rule("(x @ A + V) * c", "x @ (A * c) + V * c", "A1", _is_row),
    Rule("(x @ A + W) * V", "x @ (A * row(V)) + W * V", "A1", _is_row),
    Rule("(x @ A + V) @ B", "x @ (A @ B) + row(V) @ B", "A1", _is_row),
    Rule("(x @ A + V) / c", "x @ (A / c) + V / c", "A1", _is_row),
    Rule("(x @ A + V) + W", "x @ A + (V + W)", "A1", _is_row),
    Rule("(x @ A) / c", "x @ (A / c)", "A1", _are_matrices),
    Rule("(x / c) @ A", "x @ (A / c)", "A1", _are_matrices),
    Rule("-(x @ A)", "x @ (-A)", "exact", _are_matrices),
    Rule("take[r](A, x) * c", "take[r](A * c, x)", "A1", _are_matrices, is_mixed=True),
    # Common factors
    Rule("x * y + x * z", "x * (y + z)", "A3", _has_range),
    Rule("x * y - x * z", "x * (y - z)", "A3", _has_range),
    Rule("square(x) - x * y", "x * (x - y)", "A3", _has_range),
    Rule("x / z + y / z", "(x + y) / z", "A3", _has_range),
    Rule("x @ z + y @ z", "(x + y) @ z", "A3", _both(_has_range, _are_alike_in("x", "y"))),
    Rule("x @ y + x @ z", "x @ (y + z)", "A3", _both(_has_range, _are_alike_in("y", "z"))),
    Rule("(x @ y) @ z", "x @ (y @ z)", "A3", _both(_has_range, _are_of_a_rank)),
    Rule("x @ (y @ z)", "(x @ y) @ z", "A3", _both(_has_range, _are_of_a_rank)),
    Rule("(x * y) @ z", "(x @ z) * y", "A3", _both(_has_range, _is_row_scale)),
    # Rows added up in front of what multiplies each
    Rule("mean[r](x @ y)", "mean[r](x) @ y", "A4", _is_of_rows),
    Rule("mean[r](x @ y + z)", "mean[r](x) @ y + z", "A4", _both(_is_of_rows, _is_vector)),
    Rule("sum[r](x @ y)", "sum[r](x) @ y", "A4", _both(_has_range, _is_of_rows)),
    # Reductions in front of the rest
    Rule("max[r](x + y)", "max[r](x) + y", "A4", _is_same_along),
    Rule("max[r](x - y)", "max[r](x) - y", "A4", _is_same_along),
    Rule("sum[r](x * y)", "sum[r](x) * y", "A4", _both(_has_range, _is_same_along)),
    Rule("mean[r](x * y)", "mean[r](x) * y", "A4", _is_same_along),
    Rule("max[r](x + c)", "max[r](x) + c", "exact"),
    Rule("min[r](x + c)", "min[r](x) + c", "exact"),
    Rule("max[r](x - c)", "max[r](x) - c", "exact"),
    Rule("max[r](x * c)", "max[r](x) * c", "exact", _is_positive),
    Rule("min[r](x * c)", "min[r](x) * c", "exact", _is_positive),
    Rule("max[r](x * c)", "min[r](x) * c", "exact", _is_negative),
    Rule("min[r](x * c)", "max[r](x) * c", "exact", _is_negative),
    Rule("max[r](nn.relu(x))", "nn.relu(max[r](x))", "exact"),
    Rule("max[r](-x)", "-min[r](x)", "exact"),
    Rule("min[r](-x)", "-max[r](x)", "exact"),
    Rule("max[r](max[q](x))", "max[r + q](x)", "exact", _keeps_alike),
    Rule("sum[r](-x)", "-sum[r](x)", "exact"),
    Rule("mean[r](-x)", "-mean[r](x)", "exact"),
    Rule("sum[r](x * c)", "sum[r](x) * c", "A4", _is_no_less_than_one),
    Rule("sum[r](x / c)", "sum[r](x) / c", "A4", _has_range),
    Rule("mean[r](x * c)", "mean[r](x) * c", "A4"),
    Rule("mean[r](x / c)", "mean[r](x) / c", "A4"),
    Rule("sum[r](sum[q](x))", "sum[r + q](x)", "A4", _keeps_alike),
    Rule("mean[r](mean[q](x))", "mean[r + q](x)", "A4", _keeps_alike),
    Rule("sum[r](left_shift(x, c))", "left_shift(sum[r](x), c)", "exact", dtypes=_INTEGERS),
    # What may overflow, or lose digits, where the other does not
    Rule("x + x * y", "x * (y + 1)", "inexact"),
    Rule("(x + c) + d", "x + (c + d)", "inexact"),
    Rule("x / c", "x * (1 / c)", "inexact"),
    Rule("x / sqrt(y)", "x * rsqrt(y)", "inexact"),
    Rule("x / y", "x * (1 / y)", "inexact"),
    Rule("(x / y) / z", "x / (y * z)", "inexact"),
    Rule("1 / exp(x)", "exp(-x)", "inexact"),
    Rule("exp(x) * exp(y)", "exp(x + y)", "inexact"),
    Rule("exp(x) / exp(y)", "exp(x - y)", "inexact"),
    Rule("log(exp(x))", "x", "inexact"),
    Rule("square(sqrt(x))", "x", "inexact"),
    Rule("sqrt(x) * sqrt(x)", "x", "inexact"),
    Rule("sqrt(x) * sqrt(y)", "sqrt(x * y)", "inexact"),
    Rule("max[r](exp(x))", "exp(max[r](x))", "inexact"),
    Rule("prod[r](exp(x))", "exp(sum[r](x))", "inexact"),
    Rule("(1 / x) * (1 / y)", "1 / (x * y)", "inexact"),
    Rule("abs(x) * abs(y)", "abs(x * y)", "inexact"),
    Rule("x * x", "square(x)", "inexact"),
    Rule("(x * c) @ y", "(x @ y) * c", "inexact"),
    Rule("x @ (y * c)", "(x @ y) * c", "inexact"),
)
"""Where two save as much, the one in front is applied.

Among them, or put together of them, are those that DNNFusion lists (Niu et al., PLDI 2021, Table 4
and Figure 2); where several lead to its result, they may find one of fewer operations."""
