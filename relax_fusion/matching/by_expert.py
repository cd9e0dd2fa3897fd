"""Matmuls of rows by looked-up weights: which row, which expert, and what an element is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, tirx

from ..tvm_ir import Analyzer
from ..workload import WeightLayout
from .constants import binary
from .pattern import BlockView, is_call
from .places import IN_ORDER, MOVES, flat_of, origins, place_of
from .shapes import dtype_of, is_one, product, same_shape, shape_of


@dataclass(frozen=True)
class Product:
    """A matmul of each row by the weight of its expert."""

    matmul: relax.Var
    """Its result, ``[pairs, columns]`` but for a dimension of 1."""
    table: relax.Expr
    ids: relax.Expr
    """The weights of all experts, and the expert of each pair."""
    rows: relax.Expr
    """What is multiplied."""
    layout: WeightLayout
    """How a weight lies."""
    bias: relax.Expr | None = None
    """A row for each expert."""

    def is_same(self, other: Product) -> bool:
        """Tell whether another one is the same, with the same bias."""
        mine, theirs = self.bias, other.bias
        same = mine.same_as(theirs) if mine is not None and theirs is not None else mine is theirs
        return bool(same and self.matmul.same_as(other.matmul))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many experts there are, and the two sizes of each one's weight."""
        experts, first, last = map(int, shape_of(self.table) or ())
        return experts, first, last

    @property
    def k(self) -> int:
        """What is summed over."""
        return self.sizes[2 if self.layout == "nk" else 1]

    @property
    def columns(self) -> int:
        """Columns of a weight."""
        return self.sizes[1 if self.layout == "nk" else 2]


def in_order(view: BlockView, expr: relax.Expr) -> relax.Expr:
    """Return what has the elements of a tensor in the same order, in front of casts of floats."""
    while (call := view.call(expr, *IN_ORDER, "relax.astype")) is not None:
        if is_call(call, "relax.astype") and not (_is_float(expr) and _is_float(call.args[0])):
            break
        expr = call.args[0]
    return expr


def _is_float(expr: relax.Expr) -> bool:
    return dtype_of(expr) in ("float32", "float16", "bfloat16")


def product_of(view: BlockView, expr: relax.Expr) -> Product | None:
    """Return the matmul by experts, with its bias, that a tensor has the elements of."""
    expr = in_order(view, expr)
    for data, other in binary(view, expr, "relax.add"):
        found = _matmul(view, in_order(view, data))
        take = view.call(in_order(view, other), "relax.take")
        if found is not None and take is not None and _is_bias(view, found, data, other, take):
            return replace(found, bias=take.args[0])
    return _matmul(view, expr)


def _matmul(view: BlockView, expr: relax.Expr) -> Product | None:
    call = view.call(expr, "relax.matmul")
    if call is None or not isinstance(expr, relax.Var):
        return None
    layouts: tuple[WeightLayout, ...] = ("nk", "kn")
    for layout in layouts:
        weight, rows = call.args if layout == "nk" else reversed(call.args)
        take = view.call(weight, "relax.take")
        if take is None or not _looks_up(take, 3):
            continue
        ids, shape = shape_of(take.args[1]), shape_of(rows)
        if ids is None or shape is None or (len(ids), len(shape)) != (1, 3):
            continue
        one = shape[2 if layout == "nk" else 1]
        alike = dtype_of(rows) == dtype_of(weight) and _is_float(rows)
        if is_one(one) and same_shape(shape[:1], ids) and alike:
            return Product(expr, take.args[0], take.args[1], rows, layout)
    return None


def _looks_up(take: relax.Call, rank: int) -> bool:
    """Tell whether a call takes whole rows of a tensor of known sizes, without wrapping around."""
    table = shape_of(take.args[0])
    known = table is not None and all(isinstance(d, tirx.IntImm) for d in table)
    plain = take.attrs.axis is not None and int(take.attrs.axis) == 0
    plain &= take.attrs.mode in ("fast", "clip")
    return known and plain and table is not None and len(table) == rank and int(table[0]) > 0


def _is_bias(
    view: BlockView, found: Product, data: relax.Expr, added: relax.Expr, take: relax.Call
) -> bool:
    """Tell whether a lookup has, for each row of a product, what its expert's columns add."""
    sizes = [found.sizes[0], found.columns]
    same = same_shape(shape_of(take.args[0]), sizes) and same_shape(shape_of(added), shape_of(data))
    ids = [in_order(view, e) for e in (take.args[1], found.ids)]
    whole = same_shape((shape_of(data) or [])[-1:], [found.columns])
    return _looks_up(take, 2) and same and whole and ids[0].same_as(ids[1])


class Pairs:
    """The pairs of a row and an expert, pair ``row * chosen + e``: where operands have their part.

    `rows`: rows that are given to experts.
    `chosen`: experts of each.
    """

    def __init__(self, view: BlockView, rows: Any, chosen: int):
        self.view, self.rows, self.chosen = view, rows, chosen
        self.row, self.expert, self.k = (tirx.Var(n, "int64") for n in ("row", "expert", "k"))
        self.pair = self.row * chosen + self.expert

    def operand(
        self, expr: relax.Expr, last: int, among: Sequence[str] = ("pair",)
    ) -> tuple[relax.Expr, str] | None:
        """Return what movements made a tensor of, and what each of its `last` elements belongs to.

        `expr` has them for each pair, among dimensions of 1.  They may belong to the "pair" or,
        where all experts of a row have the same, to the "row".
        """
        shape = shape_of(expr)
        if shape is None or not same_shape([product(shape)], [self.rows * self.chosen * last]):
            return None
        flat = {"pair": self.pair * last + self.k, "row": self.row * last + self.k}
        counts = {"pair": self.rows * self.chosen * last, "row": self.rows * last}
        analyzer, found = self._analyzer(last), None
        place = place_of(flat["pair"], shape)
        for source, at in origins(self.view, expr, place, MOVES, analyzer.simplify):
            sizes = shape_of(source) or []
            for name in among:
                same = same_shape([product(sizes)], [counts[name]])
                if same and analyzer.can_prove_equal(flat_of(at, sizes), flat[name]):
                    found = source, name
        return found

    def _analyzer(self, last: int) -> Analyzer:
        analyzer = Analyzer()
        for var, size in ((self.row, self.rows), (self.expert, self.chosen), (self.k, last)):
            analyzer.bind(var, ir.Range(0, size))
        return analyzer


def moved_on(view: BlockView, var: relax.Var) -> relax.Var:
    """Return the last of the casts that are, with movements, all that reads a result; or itself.

    Movements behind it stay: other kernels read what they are made of.
    """
    last = var
    while (user := view.only_user(var)) is not None and _is_float(user):
        is_cast = is_call(view.defs[user], "relax.astype")
        if not (is_cast or is_call(view.defs[user], *IN_ORDER)):
            break
        var, last = user, user if is_cast else last
    return last
