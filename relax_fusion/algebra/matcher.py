"""Formulas found in a block, and made in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from tvm import ir, relax

from ..equivalence.interpreter import Interpreter
from ..equivalence.sizes import Sizes
from ..matching.constants import is_factor, scalar
from ..matching.pattern import BlockView, Definitions, is_call
from ..matching.shapes import dtype_of, same_shape, shape_of
from ..tvm_ir import GenericConst, structural_equal
from ..workload.reference import numpy_dtype
from .formula import NUMBERS, Term

_COMMUTATIVE = ("add", "multiply", "maximum", "minimum")
_DIGITS = 1e-7
"""A factor that is rounded by more, as to float16, would be another one for all elements."""

_ASSOCIATIVE = ("add", "multiply")
MOST_TERMS = 5
"""So many terms of a sum or a product are put in another order, at most."""

_LAID = ("relax.permute_dims", "relax.reshape", "relax.expand_dims", "relax.squeeze")
"""A constant that any of these moves is a constant."""

Emit = Callable[[Term, relax.Expr], relax.Expr]
"""Binds what a term is, and returns what it is called."""

Bindings = list[tuple[relax.Var, relax.Expr]]


@dataclass(frozen=True)
class Found:
    """A formula that a variable is bound to."""

    root: relax.Var
    view: BlockView
    names: Mapping[str, Any] = field(default_factory=dict)
    """What the names of the formula stand for."""
    attributes: Mapping[str, relax.Call] = field(default_factory=dict)
    """Calls whose attributes have a name."""
    inside: tuple[relax.Var, ...] = ()
    """What is bound to the parts of the formula, but for names and the whole."""
    regroups: bool = False
    """Whether terms of sums and products may be put in another order."""
    rest: int = 0
    """How many terms of the whole are beside the formula; their names are ``rest0`` and so on."""

    @property
    def dtype(self) -> str:
        """The dtype of the whole."""
        return dtype_of(self.root)

    def number(self, name: str) -> float:
        """Return the value of a constant of one element."""
        return float(self.names[name].value.numpy().reshape(-1)[0])

    def whole(self, term: Term, op: str) -> Term:
        """Return a formula with the terms that are beside it, which `op` joins."""
        for n in range(self.rest):
            term = Term(op, (term, Term(name=f"rest{n}")))
        return term


def found_at(
    view: BlockView, pattern: Term, root: relax.Var, regroups: bool = False
) -> Iterator[Found]:
    """Yield the ways in which a variable is a formula, or one among terms that are regrouped."""
    return _matched(view, pattern, root, Found(root, view, regroups=regroups))


def _matched(view: Definitions, term: Term, expr: relax.Expr, found: Found) -> Iterator[Found]:
    if not term.op:
        yield from _named(view, term, expr, found)
        return
    call = view.call(expr, f"relax.{term.op}")
    if call is None or len(call.args) != len(term.args) or not isinstance(expr, relax.Var):
        return
    if found.regroups and term.op in _ASSOCIATIVE:
        yield from _regrouped(view, term, expr, found)
    if not expr.same_as(found.root):
        found = replace(found, inside=(*found.inside, expr))
    if term.name:
        known = found.attributes.get(term.name, call)
        if not structural_equal(known.attrs, call.attrs):
            return
        found = replace(found, attributes={**found.attributes, term.name: call})
    orders: Sequence[Sequence[relax.Expr]] = [list(call.args)]
    if term.op in _COMMUTATIVE:
        orders = [*orders, list(call.args)[::-1]]
    for args in orders:
        yield from _all_matched(view, list(zip(term.args, args, strict=True)), found)


def _regrouped(view: Definitions, term: Term, expr: relax.Expr, found: Found) -> Iterator[Found]:
    """Yield what is found among the terms of a sum, or the factors of a product, in any order."""
    inside: list[relax.Var] = []

    def terms(value: relax.Expr) -> list[relax.Expr]:
        call = view.call(value, f"relax.{term.op}")
        is_part = value.same_as(expr) or found.view.only_user(value) is not None
        if call is None or not isinstance(value, relax.Var) or not is_part:
            return [value]
        inside.append(value)
        return [part for arg in call.args for part in terms(arg)]

    parts, wanted = terms(expr), list(_terms(term, term.op))
    is_root = expr.same_as(found.root)
    if not max(3, len(wanted)) <= len(parts) <= MOST_TERMS or len(inside) < 2:
        return
    if is_root or len(parts) == len(wanted):
        found = replace(found, inside=(*found.inside, *inside[is_root:]))
        yield from _chosen(view, wanted, parts, found)


def _terms(term: Term, op: str) -> Iterator[Term]:
    if term.op != op:
        yield term
    else:
        for arg in term.args:
            yield from _terms(arg, op)


def _chosen(
    view: Definitions, wanted: list[Term], parts: list[relax.Expr], found: Found
) -> Iterator[Found]:
    """Yield what is found with some of several terms, and the others beside it."""
    if not wanted:
        rest = {f"rest{n}": part for n, part in enumerate(parts)}
        yield replace(found, names={**found.names, **rest}, rest=len(rest)) if rest else found
        return
    for n, part in enumerate(parts):
        for one in _matched(view, wanted[0], part, found):
            yield from _chosen(view, wanted[1:], [*parts[:n], *parts[n + 1 :]], one)


def _all_matched(
    view: Definitions, pairs: list[tuple[Term, relax.Expr]], found: Found
) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    for one in _matched(view, *pairs[0], found):
        yield from _all_matched(view, pairs[1:], one)


def _named(view: Definitions, term: Term, expr: relax.Expr, found: Found) -> Iterator[Found]:
    """Yield what is found with a name standing for `expr`, if it may."""
    if term.value is not None:
        if scalar(view, expr) == term.value:
            yield found
        return
    if term.name in NUMBERS:
        expr = view.definition(expr)
        if scalar(view, expr) is None:
            return
    elif term.is_constant and constant_of(view, expr) is None:
        return
    known = found.names.get(term.name)
    if known is None:
        yield replace(found, names={**found.names, term.name: expr})
    elif known.same_as(expr) or structural_equal(known, expr):
        yield found


def constant_of(view: Definitions, expr: relax.Expr) -> relax.Expr | None:
    """Return the constant that a tensor is, or is in another layout; None if it is none."""
    value = view.definition(expr)
    if is_call(value, *_LAID):
        return constant_of(view, value.args[0])
    return value if isinstance(value, GenericConst) else None


def made(
    term: Term, found: Found, builder: relax.BlockBuilder, emit: Emit, folds: bool = True
) -> relax.Expr | None:
    """Make what a formula is of the names that were found; None if a number is none of its dtype.

    Numbers of others are rounded once, or not at all where they are not to be folded.
    """
    if term.is_number and (folds or not term.op):
        value = number_of(term, found)
        rounded = _rounded(np.array(value), found.dtype) if is_factor(value) else None
        if rounded is None or not math.isclose(float(rounded), value, rel_tol=_DIGITS):
            return None
        return relax.const(rounded, found.dtype)
    if not term.op:
        return found.names[term.name]
    args = [made(arg, found, builder, emit, folds) for arg in term.args]
    if any(arg is None for arg in args):
        return None
    return emit(term, builder.normalize(_called(term, args, found)))


def number_of(term: Term, found: Found) -> float:
    """Return the value of a formula of numbers."""
    if term.value is not None:
        return term.value
    if not term.op:
        return found.number(term.name)
    values = [np.float64(number_of(arg, found)) for arg in term.args]
    with np.errstate(all="ignore"):
        return float(getattr(np, term.op)(*values))


def _called(term: Term, args: list[relax.Expr], found: Found) -> relax.Expr:
    if term.op == "row":
        return relax.op.reshape(args[0], (shape_of(args[0]) or [])[-1:])
    if term.op == "column":
        return relax.op.reshape(args[0], [*(shape_of(args[0]) or [])[-1:], 1])
    if term.op == "matmul":
        return relax.op.matmul(*args)
    if " + " in term.name:
        outer, inner = (found.attributes[name].attrs for name in term.name.split(" + "))
        axes = axes_of_both(outer, inner, len(shape_of(args[0]) or ()))
        return getattr(relax.op, term.op)(*args, axis=axes, keepdims=bool(inner.keepdims))
    attrs = found.attributes[term.name].attrs if term.name else None
    return relax.Call(ir.Op.get(f"relax.{term.op}"), args, attrs)


def axes_of_both(outer: Any, inner: Any, rank: int) -> list[int]:
    """Return the axes of two reductions, one after the other, of a tensor of some rank."""
    first = range(rank) if inner.axis is None else [int(a) % rank for a in inner.axis]
    left = range(rank) if inner.keepdims else [a for a in range(rank) if a not in first]
    then = left if outer.axis is None else [left[int(a) % len(left)] for a in outer.axis]
    return sorted({*first, *then})


def appending(bindings: Bindings) -> Emit:
    """Return what binds terms at the end of a list."""

    def emit(_: Term, value: relax.Expr) -> relax.Expr:
        bindings.append((relax.DataflowVar("made", value.ty), value))
        return bindings[-1][0]

    return emit


def folded(term: Term, found: Found) -> relax.Expr | None:
    """Compute a formula of constants in float64, and round it once; None if that loses digits.

    What is made of a matrix that is stored transposed is so, too.
    """
    bindings: Bindings = []

    def laid(expr: relax.Expr) -> None:
        value = found.view.definition(expr)
        if is_call(value, *_LAID):
            laid(value.args[0])
            bindings.append((expr, value))

    for part in term.parts():
        if part.name in found.names:
            laid(found.names[part.name])
    values: dict[relax.Var, Any] = {}
    whole = made(term, found, relax.BlockBuilder(), appending(bindings))
    worker = Interpreter()
    worker.run(bindings, values, Sizes())
    array = _rounded(worker.value(whole, values, Sizes()), found.dtype)
    if array is None:
        return None
    if array.ndim == 2 and any(is_call(value, "relax.permute_dims") for _, value in bindings):
        return relax.op.permute_dims(relax.const(array.T.copy(), found.dtype))
    return relax.const(array, found.dtype)


def _rounded(exact: np.ndarray, dtype: str) -> np.ndarray | None:
    """Round numbers once; None if one becomes infinite, or a row or column too small for its dtype.

    What a matrix multiplies by a small row may be large, and what multiplies a small column, too.
    """
    kind = numpy_dtype(dtype)
    with np.errstate(over="ignore"):
        rounded = exact.astype(kind)
    eps = 0.0 if kind.kind in "iu" else float(ml_dtypes.finfo(kind).eps)
    error = rounded.astype("float64") - exact
    for axis in range(-min(exact.ndim, 2), 0) or [()]:
        lost, whole = (np.square(v).sum(axis) for v in (error, exact))
        if not (lost <= eps**2 * whole).all():  # nor where something is infinite
            return None
    return rounded


def same_result(expr: relax.Expr, root: relax.Var) -> bool:
    """Tell whether an expression has the shape and the dtype of a variable."""
    return dtype_of(expr) == dtype_of(root) and same_shape(shape_of(expr), shape_of(root))
