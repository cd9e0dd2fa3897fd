"""What a match replaces: the bindings that compute its results, back to its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tvm import ir, relax

from ..matching.effects import IN_PLACE, free_vars
from ..matching.expressions import found_in
from ..matching.operators import named
from ..matching.pattern import BlockView, Match, is_call
from ..matching.roundings import kept_roundings
from ..tvm_ir import GenericConst, structural_hash
from ..workload import Chain
from .interpreter import Hook, Value
from .operators import Array
from .sizes import constants, variables

Bound = tuple[relax.Var, relax.Expr]

NAMES = relax.Var | relax.Tuple | relax.TupleGetItem
"""Values that only name others."""

BITS = 4
"""A coarse number has so many bits of mantissa."""

_WHOLE = named("view", "permutation", "split")
"""Operators that move all elements of a tensor, each once."""


def exact_of(bindings: Iterable[Bound]) -> frozenset[relax.Var]:
    """Return the bindings that depend on no data: no leaf, and no array, which may be a weight."""
    found: set[relax.Var] = set()
    for var, value in bindings:
        arrays = (c for c in found_in(value, GenericConst) if c.value.numpy().ndim)
        if next(arrays, None) is None and all(
            v in found for v in free_vars(value) if not is_size(v)
        ):
            found.add(var)
    return frozenset(found)


@dataclass(frozen=True)
class Region:
    """A part of a block."""

    match: Match  # what replaces it
    bindings: tuple[Bound, ...]  # in the order of the block
    leaves: tuple[relax.Var, ...]  # what they and the kernel's operands are computed from
    results: tuple[relax.Var, ...]  # what is read behind it
    after: tuple[Bound, ...]  # what leads from the kernel's outputs to the results

    @cached_property
    def exact(self) -> frozenset[relax.Var]:
        """The bindings whose dtypes round."""
        return exact_of(self.bindings)

    @cached_property
    def values(self) -> dict[relax.Var, relax.Expr]:
        """What is bound to each variable, names of other variables looked through."""
        return dict(self.bindings)

    @cached_property
    def dims(self) -> list[Any]:
        """The sizes of every tensor, each shape once."""
        match = self.match
        types = [v.ty for v in (*self.leaves, *self.values)] + [a.expr.ty for a in match.args]
        shapes = [list(dims) for ty in types for dims in _shapes(ty)]
        shapes += [list(a.shape) for a in match.args if a.shape is not None]
        shapes += [list(o.shape) for o in match.outs]
        shapes += [[a.expr] for a in match.args if is_number(a.expr)]
        shapes.append([v for v in self.leaves if is_size(v)])
        return [d for dims in shapes for d in dims]

    @cached_property
    def symbols(self) -> list[ir.Var]:
        """The symbolic sizes, in the order in which they are met."""
        return [v for d in self.dims for v in variables([d])]

    @cached_property
    def statics(self) -> set[int]:
        """The static sizes."""
        return constants(self.dims)

    @cached_property
    def pinned(self) -> set[int]:
        """Sizes of constants, which stay as they are."""
        dims: list[Any] = []
        for value in self._expressions():
            relax.analysis.post_order_visit(
                value, lambda e: dims.extend(e.ty.shape.values) if _is_table(e) else None
            )
        return constants(dims)

    def _expressions(self) -> Iterator[relax.Expr]:
        yield from (value for _, value in self.bindings if isinstance(value, relax.Expr))
        yield from (a.expr for a in self.match.args if isinstance(a.expr, relax.Expr))

    @cached_property
    def structure(self) -> relax.Expr:
        """An expression that is structurally equal for regions that compute the same."""
        match = self.match
        args = [a.expr for a in match.args]
        shapes = [a.shape for a in match.args if a.shape is not None] + [
            o.shape for o in match.outs
        ]
        after = [value for _, value in self.after]
        rest = [relax.Tuple([*args, *self.results, *self.leaves])]
        rest += [relax.ShapeExpr(list(s)) for s in shapes]
        block = relax.BindingBlock([relax.VarBinding(v, e) for v, e in self.bindings])
        return relax.SeqExpr([block], relax.Tuple([*rest, *after]))

    @cached_property
    def hash(self) -> int:
        """The structural hash of `structure`."""
        return int(structural_hash(self.structure, map_free_vars=True))


def region_of(view: BlockView, match: Match) -> Region:
    """Collect what computes the results of a match.

    What leads to a result goes back to the operands, and past them to what the operands themselves
    are computed from where a result is read from that, too, or where that is an operand as well: a
    kernel that is given a weight and the same weight transposed may read either for the other.
    """
    operands = {v for a in match.args for v in free_vars_of(a.expr)}
    operands -= {v for v in operands if not operands.isdisjoint(_forms(view, v))}
    results, behind = _results(view, match)
    while True:
        bound, leaves = back(view, (*results, *operands), operands)
        beside = leaves - operands
        inner = {v for v in operands if v in view.index and _reaches(view, v, beside)}
        if not inner:
            break
        operands -= inner
    order = sorted(bound, key=view.index.__getitem__)
    bindings = tuple((v, view.defs[v]) for v in order)
    given = [v for a in match.args for v in free_vars_of(a.expr)]
    kept = dict.fromkeys([*given, *sorted(leaves, key=str)])
    leaves_in_order = tuple(v for v in kept if v in leaves)
    return Region(match, bindings, leaves_in_order, results, (*match.after, *behind))


def _results(view: BlockView, match: Match) -> tuple[tuple[relax.Var, ...], list[Bound]]:
    """Return what is read behind a chain, and bindings outside of it that lead there.

    Where a kernel rotates some of its features, the tensors on the way to them are others than in
    the graph, but what is cut out of them for others is the same; what nobody reads may differ.
    """
    inside = set(match.covers)
    outs = [o.var for o in match.outs]
    after = dict(match.after)
    moved = {v for value in after.values() for v in free_vars(value)}
    moved |= {v for v, value in after.items() if value.same_as(view.defs[v])}
    read = [v for v in (*after, *outs) if view.escapes(v) or v not in moved]
    behind: list[Bound] = []
    stack = [u for v in moved & {*after, *outs} for u in view.uses(v) if u not in inside]
    while stack:
        user = stack.pop()
        behind.append((user, view.defs[user]))
        onward = isinstance(view.defs[user], relax.Tuple) or view.call(user, *_WHOLE) is not None
        if view.escapes(user) or (not onward and _is_read(view, user)):
            read.append(user)
        else:
            stack += view.uses(user)
    outside = {v: set(view.uses(v)) - inside for v in match.covers if v not in moved}
    read += [v for v, users in outside.items() if any(_is_read(view, u, True) for u in users)]
    behind = list({v: (v, e) for v, e in behind}.values())
    return tuple(dict.fromkeys(read)), sorted(behind, key=lambda b: view.index[b[0]])


def _is_read(view: BlockView, var: relax.Var, itself: bool = False) -> bool:
    """Tell whether anything computed from a variable leaves the block, or is overwritten."""
    stack, seen = [var] if itself else [*view.uses(var)], set()
    while stack:
        user = stack.pop()
        if view.escapes(user) or is_call(view.defs[user], *IN_PLACE):
            return True
        if user not in seen:
            seen.add(user)
            stack += view.uses(user)
    return False


def back(
    view: BlockView, starts: Iterable[relax.Var], stops: set[relax.Var]
) -> tuple[set[relax.Var], set[relax.Var]]:
    """Return the bindings that lead to some variables, and the variables where that ends."""
    bound: set[relax.Var] = set()
    leaves: set[relax.Var] = set()
    stack = list(starts)
    while stack:
        var = stack.pop()
        if var in bound or var in leaves or is_size(var):
            continue
        if var in stops or var not in view.index:
            leaves.add(var)
        else:
            bound.add(var)
            stack += view.reads[var]
    return bound, leaves


def _forms(view: BlockView, var: relax.Var) -> Iterator[relax.Var]:
    """Yield what a variable is another form of: each computed from the next one alone."""
    while var in view.index:
        read = {v for v in view.reads[var] if not is_size(v)}
        if len(read) != 1:
            return
        var = read.pop()
        yield var


def _reaches(view: BlockView, var: relax.Var, targets: set[relax.Var]) -> bool:
    """Tell whether a variable is computed from any of others."""
    if not targets:
        return False
    _, leaves = back(view, [var], targets)
    return not leaves.isdisjoint(targets)


def free_vars_of(expr: Any) -> list[relax.Var]:
    """Return the variables of an operand; sizes are none."""
    if not isinstance(expr, relax.Expr) or is_number(expr):
        return []
    return [v for v in free_vars(expr) if not is_size(v)]


def is_size(var: ir.Var) -> bool:
    """Tell whether a variable is a number, and no tensor."""
    return not isinstance(var.ty, relax.TensorType | relax.TupleType | relax.ShapeType)


def is_number(expr: Any) -> bool:
    """Tell whether an operand is a number, and no tensor."""
    return not isinstance(getattr(expr, "ty", None), relax.TensorType)


def _shapes(ty: ir.Type) -> Iterator[Any]:
    if isinstance(ty, relax.TupleType):
        for part in ty.fields:
            yield from _shapes(part)
    elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
        yield ty.shape.values
    elif isinstance(ty, relax.ShapeType) and ty.values is not None:
        yield ty.values


def _is_table(expr: Any) -> bool:
    return isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType)


def coarse(values: Array) -> Array:
    """Round to `BITS` bits of mantissa."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2**BITS) / 2**BITS, exponent)


def coarse_bindings(region: Region) -> Hook:
    """Return what rounds the bindings of a region that its kernel has to round."""
    work = region.match.workload
    between = isinstance(work, Chain) or work.is_adapted
    kept = kept_roundings(region.values, False)
    if between:  # what another kernel's matmul makes is an operand
        own = set(region.match.covers)
        named = {v: free_vars(e) for v, e in region.bindings if isinstance(e, NAMES)}
        own.update(v for var in reversed(named) if var in own for v in named[var])
        inside = {v: e for v, e in region.bindings if v in own or v in named}
        kept |= kept_roundings(inside, True)

    def rounded(var: relax.Var, value: Value) -> Value:
        return coarse(value) if var in kept else value

    return rounded
