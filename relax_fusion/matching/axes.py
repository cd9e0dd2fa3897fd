"""What the axes of a tensor hold while it is reshaped, transposed and repeated.

An axis is a sequence of atoms, the outermost first: ``[b * n, s, h]`` holds (b, n), (s), (h).
Movements are followed both ways, from a result to the tensor that it was made of and on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tvm import relax, tirx

from ..tvm_ir import Analyzer
from .operators import VIEWS
from .pattern import BlockView, PrimExpr
from .shapes import is_one, permutation, product, same_shape, shape_of

_ANALYZER = Analyzer()


@dataclass(frozen=True, eq=False)
class Atom:
    """A part of an axis; two atoms are the same only if they are one object."""

    size: PrimExpr | int


Axis = tuple[Atom, ...]


@dataclass(frozen=True)
class Placed:
    """A tensor and what its axes hold."""

    expr: relax.Expr
    axes: tuple[Axis, ...]  # the atoms of each axis; none for an axis of size 1
    order: tuple[Atom, ...]  # all atoms in the order of the tensor that was looked at first
    copied: frozenset[Atom] = frozenset()  # those along which that tensor repeats this one

    @property
    def flat(self) -> tuple[Atom, ...]:
        """The atoms in the order in which the tensor lies in memory."""
        return tuple(atom for axis in self.axes for atom in axis)

    def split(self, atom: Atom, parts: tuple[Atom, Atom]) -> Placed:
        """Return the same with two atoms in place of one."""

        def changed(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
            return tuple(b for a in atoms for b in (parts if a is atom else (a,)))

        axes = tuple(changed(axis) for axis in self.axes)
        copied = frozenset(changed(self.copied))
        return replace(self, axes=axes, order=changed(self.order), copied=copied)


def placed(expr: relax.Expr, shape: Sequence[PrimExpr | int]) -> Placed:
    """Return a tensor of `shape` with one atom for each axis."""
    axes = tuple(() if is_one(d) else (Atom(d),) for d in shape)
    return Placed(expr, axes, tuple(a for axis in axes for a in axis))


def size_of(atoms: Iterable[Atom]) -> PrimExpr | int:
    """Return the product of the sizes of atoms."""
    return product([a.size for a in atoms])


def regrouped(at: Placed, shape: Sequence[PrimExpr | int]) -> Placed | None:
    """Group the atoms anew into axes of `shape`, splitting them where it has to be."""
    rest = list(at.flat)
    axes: list[Axis] = []
    for size in reversed(shape):
        axis: list[Atom] = []
        while not same_shape((size_of(axis),), (size,)):
            if not rest:
                return None
            atom = rest.pop()
            parts = _cut(atom, size_of(axis), size)
            if parts is not None:
                at = at.split(atom, parts)
                rest.append(parts[0])
                atom = parts[1]
            axis.insert(0, atom)
        axes.insert(0, tuple(axis))
    return None if rest else replace(at, axes=tuple(axes))


def _cut(atom: Atom, inner: PrimExpr | int, size: PrimExpr | int) -> tuple[Atom, Atom] | None:
    """Cut an atom in two so that the second, with `inner` beside it, is `size`; None: too small."""
    needed = quotient(size, inner)
    if needed is None or same_shape((needed,), (atom.size,)):
        return None
    outer = quotient(atom.size, needed)
    return None if outer is None or is_one(outer) else (Atom(outer), Atom(needed))


def quotient(size: PrimExpr | int, by: PrimExpr | int) -> PrimExpr | int | None:
    """Return ``size / by`` if that is a whole number."""
    if same_shape((by,), (0,)):
        return None
    whole = _ANALYZER.simplify(tirx.floordiv(tirx.const(0, "int64") + size, by))
    if not same_shape((product([whole, by]),), (size,)):
        return None
    return int(whole) if isinstance(whole, tirx.IntImm) else whole


def broadcast(at: Placed, expr: relax.Expr) -> Placed | None:
    """Return an operand of the operator that made `at`, which may broadcast it."""
    shape = shape_of(expr)
    if shape is None or len(shape) > len(at.axes):
        return None
    extra = len(at.axes) - len(shape)
    axes, copied = list(at.axes[extra:]), {a for axis in at.axes[:extra] for a in axis}
    for i, size in enumerate(shape):
        if is_one(size):
            copied |= set(axes[i])
            axes[i] = ()
        elif not same_shape((size_of(axes[i]),), (size,)):
            return None
    return replace(at, expr=expr, axes=tuple(axes), copied=at.copied | copied)


def behind(view: BlockView, at: Placed) -> Placed | None:
    """Return the tensor that `at` was made of by moving or repeating its elements."""
    call = view.call(at.expr, *_BACKWARD)
    shape = shape_of(call.args[0]) if call is not None else None
    return None if call is None or shape is None else _BACKWARD[call.op.name](at, call, shape)


def _reshape_back(at: Placed, call: relax.Call, shape: list[PrimExpr]) -> Placed | None:
    found = regrouped(at, shape)
    return None if found is None else replace(found, expr=call.args[0])


def _permute_back(at: Placed, call: relax.Call, shape: list[PrimExpr]) -> Placed:
    order = permutation(call, len(shape))
    axes = tuple(at.axes[order.index(a)] for a in range(len(shape)))
    return replace(at, expr=call.args[0], axes=axes)


def _repeat_back(at: Placed, call: relax.Call, shape: list[PrimExpr]) -> Placed | None:
    if call.attrs.axis is None:
        return None
    axis, repeats = int(call.attrs.axis) % len(shape), int(call.attrs.repeats)
    halves = [*shape[:axis], shape[axis], repeats, *shape[axis + 1 :]]
    found = regrouped(at, halves)
    if found is None:
        return None
    axes = (*found.axes[: axis + 1], *found.axes[axis + 2 :])
    copied = found.copied | set(found.axes[axis + 1])
    return replace(found, expr=call.args[0], axes=axes, copied=copied)


def _tile_back(at: Placed, call: relax.Call, shape: list[PrimExpr]) -> Placed | None:
    repeats = [int(r) for r in call.attrs.repeats]
    if len(repeats) != len(shape):
        return None
    found = regrouped(at, [size for pair in zip(repeats, shape, strict=True) for size in pair])
    if found is None:
        return None
    copied = found.copied | {a for axis in found.axes[::2] for a in axis}
    return replace(found, expr=call.args[0], axes=found.axes[1::2], copied=copied)


_BACKWARD = {
    **dict.fromkeys(VIEWS, _reshape_back),
    "relax.permute_dims": _permute_back,
    "relax.broadcast_to": lambda at, call, _: broadcast(at, call.args[0]),
    "relax.repeat": _repeat_back,
    "relax.tile": _tile_back,
}


def ahead(view: BlockView, at: Placed, user: relax.Var) -> Placed | None:
    """Return the tensor `user` that is made of `at` by moving its elements."""
    shape = shape_of(user)
    if shape is None:
        return None
    if isinstance(view.defs[user], relax.Var):  # another name: what made `at` is not done again
        return replace(at, expr=user)
    call = view.call(user, "relax.permute_dims")
    if call is not None:
        axes = tuple(at.axes[a] for a in permutation(call, len(shape)))
        return replace(at, expr=user, axes=axes)
    is_view = view.call(user, *VIEWS) is not None or is_plain_copy(view, user)
    found = regrouped(at, shape) if is_view else None
    return None if found is None else replace(found, expr=user)


def is_plain_copy(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether `expr` is a tensor that was broadcast to its own shape."""
    call = view.call(expr, "relax.broadcast_to")
    return call is not None and same_shape(shape_of(call.args[0]), shape_of(expr))
