"""The operations that transformers are made of, wherever they stand and however they are written.

What is recognised here is more than what any pass fuses: a report asks what was left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from tvm import relax

from ..report.coverage import Kind
from .activations import activation
from .constants import binary, scalar
from .linear import linear
from .movements import cut_of
from .norm_rotation import norm_rotation_of
from .norms import normalisation
from .operators import OPERATORS, named
from .pattern import BlockView, Refused, is_call
from .rotation import rotation_at
from .shapes import dtype_of, same_shape, shape_of

KINDS: dict[str, Kind] = {
    f"relax.{name}": found.counts_as for name, found in OPERATORS.items() if found.counts_as
}
"""Operators that are such an operation by themselves."""

MOVES = {
    *named("view", "permutation", "slice", "broadcast", "split", "join", "cast"),
    "relax.memory.view",
}
"""Operators that only move or cast elements."""

LOOKUPS = named("lookup", "gather")
"""Operators that move elements of what they look up in, unless that is a table that was given."""

_STATISTICS = tuple(f"relax.{name}" for name in ("mean", "variance", "std", "sum"))
_BOUNDS = tuple(f"relax.{name}" for name in ("add", "maximum", "clip", "multiply", "divide"))
_ROOTS = ("relax.sqrt", "relax.rsqrt", "relax.power")
_JOINS = ("relax.concat", "relax.stack")
_MOST_STEPS = 16
"""The moves of a rotation are followed over so many bindings."""


@dataclass(frozen=True)
class Operation:
    """An operation: what it is, the bindings that it takes, the last of them its result."""

    kind: Kind
    covers: tuple[relax.Var, ...]
    written_out: bool = False

    @property
    def var(self) -> relax.Var:
        """Its result."""
        return self.covers[-1]


def operations(view: BlockView, is_kernel: Callable[[relax.Expr], bool]) -> Iterator[Operation]:
    """Return the operations of a block, in the order of their results.

    `is_kernel`: whether a value is the call of a fused kernel, which is not looked into.
    """
    found: list[Operation] = []
    inside: set[relax.Var] = set()
    for binding in reversed(view.bindings):
        var, value = binding.var, binding.value
        if var in inside or isinstance(value, relax.Var) or is_kernel(value):
            continue
        operation = _operation(view, var)
        if operation is not None:
            found.append(operation)
            inside.update(operation.covers)
    yield from reversed(found)


def _operation(view: BlockView, var: relax.Var) -> Operation | None:
    """Return the operation whose result `var` is."""
    value = view.defs[var]
    if is_call(value, *KINDS):
        kind = KINDS[value.op.name]
        return Operation(kind, (var,)) if kind != "activation" or "float" in dtype_of(var) else None
    if is_call(value, "relax.call_tir"):
        if norm_rotation_of(view.mod, value) is not None:
            return Operation("norm and rope", (var,))
        return Operation("matmul", (var,)) if _is_projection(view, var) else None
    for kind, read, written_out in _READ:
        covers = read(view, var)
        if covers is not None:
            return Operation(kind, (*(v for v in covers if v is not var), var), written_out)
    return None


def _is_projection(view: BlockView, var: relax.Var) -> bool:
    try:
        return linear(view, var) is not None
    except Refused:
        return True


def _norm(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read a norm that passes know."""
    try:
        norm = normalisation(view, var)
    except Refused:
        return (var,)
    return norm.covers if norm is not None else None


def _other_norm(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read ``x / sqrt(mean(..) + eps)`` over whatever axes, and what it is scaled by.

    The mean may be a sum or a variance, and what is below the line may be kept from 0 by a bound.
    """
    for data, factor in binary(view, var, "relax.multiply"):
        if _root_of_statistic(view, factor) < 0:
            return (factor, var)
        shape, inner = shape_of(factor), root_of(view, data)[0]
        if shape is not None and len(shape) == 1 and view.only_user(inner) is not None:
            covers = _other_norm(view, inner)
            if covers is not None:
                return (*covers, var)
    quotient = view.call(var, "relax.divide")
    below = _root_of_statistic(view, quotient.args[1]) if quotient is not None else 0
    return (var,) if below > 0 else None


def _root_of_statistic(
    view: BlockView, expr: relax.Expr, sign: int = 1, rooted: bool = False, steps: int = 0
) -> int:
    """Return 1 for a root of a mean, a variance or a sum, -1 for the inverse of one, else 0."""
    call = view.call(root_of(view, expr)[0], *_STATISTICS, *_ROOTS, *_BOUNDS)
    if call is None or steps > _MOST_STEPS:
        return 0
    if is_call(call, *_STATISTICS):
        return sign if rooted or is_call(call, "relax.std") else 0
    exponent = scalar(view, call.args[1]) if is_call(call, "relax.power") else 0.5
    inverse = is_call(call, "relax.divide") and scalar(view, call.args[0]) is not None
    if exponent not in (0.5, -0.5):
        return 0
    sign = -sign if inverse or exponent < 0 or is_call(call, "relax.rsqrt") else sign
    rooted |= is_call(call, *_ROOTS)
    inner = (_root_of_statistic(view, arg, sign, rooted, steps + 1) for arg in call.args)
    return next((found for found in inner if found), 0)


def _softmax(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read ``exp(x) / sum(exp(x))``."""
    quotient = view.call(var, "relax.divide")
    if quotient is None or view.call(quotient.args[0], "relax.exp") is None:
        return None
    total = view.call(quotient.args[1], "relax.sum")
    same = total is not None and total.args[0].same_as(quotient.args[0])
    return (quotient.args[0], quotient.args[1], var) if same else None


def _rope(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    """Read a rotation of pairs of features, however far apart they are.

    Either a sum of products where one factor is the other's, moved and negated in part; or parts
    put together of which one is ``a c - b s`` and another ``b c + a s``.
    """
    found = rotation_at(view, var)
    if found is not None:
        return found.covers
    for plain, turned in binary(view, var, "relax.add"):
        for source, _ in binary(view, plain, "relax.multiply"):
            for moved, _ in binary(view, turned, "relax.multiply"):
                same = same_shape(shape_of(source), shape_of(moved))
                between = _turns(view, moved, source) if same else None
                if between is not None:
                    return (plain, *between, turned, var)
    call = view.call(var, *_JOINS)
    if call is None or not isinstance(call.args[0], relax.Tuple):
        return None
    parts = [root_of(view, field)[0] for field in call.args[0].fields]
    return (*parts, var) if any(_are_turned(view, a, b) for a in parts for b in parts) else None


def _turns(view: BlockView, moved: relax.Expr, source: relax.Expr) -> tuple[relax.Var, ...] | None:
    """Return what makes `moved`: parts of `source` put together, some of them negated."""
    root, stack, met, between = root_of(view, source)[0], [moved], set(), dict[relax.Var, None]()
    for _ in range(_MOST_STEPS):
        expr = root_of(view, stack.pop())[0] if stack else root
        if expr.same_as(root):
            met.add("source")
            continue
        call = view.call(expr, *_JOINS, "relax.negative", "relax.multiply")
        if call is not None and isinstance(expr, relax.Var):
            between[expr] = None
        if is_call(call, *_JOINS) and isinstance(call.args[0], relax.Tuple):
            met.add("joined")
            stack.extend(call.args[0].fields)
        elif call is not None:
            factors = [scalar(view, a) for a in call.args]
            if is_call(call, "relax.negative") or -1.0 in factors:
                met.add("negated")
            stack += [a for a, factor in zip(call.args, factors, strict=True) if factor is None]
    return tuple(between) if met == {"source", "joined", "negated"} else None


def _are_turned(view: BlockView, first: relax.Expr, second: relax.Expr) -> bool:
    """Read ``a c - b s`` and ``b c + a s``."""
    minus, plus = view.call(first, "relax.subtract"), view.call(second, "relax.add")
    if minus is None or plus is None:
        return False
    products = [view.call(arg, "relax.multiply") for arg in (*minus.args, *plus.args)]
    if any(p is None for p in products):
        return False
    sources = [{_elements(view, a) for a in p.args} for p in products if p is not None]
    ac, bs = sources[:2]
    return any(
        len(ac & bc) == len(bs & bc) == len(ac & as_) == len(bs & as_) == 1
        for bc, as_ in (sources[2:], sources[:1:-1])
    )


def _elements(view: BlockView, expr: relax.Expr) -> Hashable:
    """Return what tells tensors apart by their elements: a part by what it is of, and where."""
    while (
        call := view.call(expr, "relax.reshape", "relax.expand_dims", "relax.astype")
    ) is not None:
        expr = call.args[0]
    cut = cut_of(view, expr)
    return expr if cut is None else (cut.source, cut.axis, cut.start, cut.stop, cut.stride)


def _activation(view: BlockView, var: relax.Var) -> tuple[relax.Var, ...] | None:
    found = activation(view, var)
    return found.covers if found is not None and "float" in dtype_of(var) else None


_READ: tuple[
    tuple[Kind, Callable[[BlockView, relax.Var], tuple[relax.Var, ...] | None], bool], ...
] = (
    ("norm", _norm, False),
    ("norm", _other_norm, True),
    ("softmax", _softmax, True),
    ("rope", _rope, True),
    ("activation", _activation, True),
)
"""What reads an operation of several bindings, and whether no pass does."""


def _moves_one(view: BlockView, call: relax.Call) -> bool:
    """Tell whether a move is of one tensor; of a lookup, one that the block computes."""
    if is_call(call, *LOOKUPS):
        return root_of(view, call.args[0])[0] in view.defs
    return not isinstance(call.args[0], relax.Tuple)


def root_of(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, list[str]]:
    """Return what moves and casts made `expr` of, and their operators from there on."""
    way = way_back(view, expr)
    return way[-1][0], [step for _, step in reversed(way) if step]


def way_back(view: BlockView, expr: relax.Expr) -> list[tuple[relax.Expr, str]]:
    """Return `expr` and what moves and casts made it of, each with the operator that moved it.

    It is "" of an item of a tuple, and of the last.
    """
    way = []
    while True:
        value = view.definition(expr)
        if isinstance(value, relax.TupleGetItem):
            way.append((expr, ""))
            expr = value.tuple_value
        elif is_call(value, *MOVES, *LOOKUPS) and _moves_one(view, value):
            way.append((expr, str(value.op.name.removeprefix("relax."))))
            expr = value.args[0]
        else:
            return [*way, (expr, "")]
