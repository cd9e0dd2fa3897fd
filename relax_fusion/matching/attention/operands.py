"""Operands and result of an attention, without the data movement around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Reason
from ...workload import Heads
from ..axes import Atom, Placed, behind, is_one, regrouped
from ..constants import scaled
from ..movements import prefix_slice
from ..pattern import BlockView, PrimExpr, guard
from ..shapes import dtype_of, known_shape, same_shape
from .merged import Kept, heads_left, uncut

WIDENED = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True)
class Operand:
    """A query, key, value or result, and the tensors that it was made of, one after the other.

    Parameters
    ----------
    at : Placed
        The tensor; its `order` names the atoms of batch and heads.
    positions, features : Atom, optional
        What the last two dimensions of its matmul hold; None where that is a single element.
    path : tuple of relax.Var
        The bindings between it and the matmul.
    steps : int
        How many bindings there are in between.
    factor : float
        What it is multiplied by on the way.
    length : PrimExpr, optional
        How many of its positions are read, where that is not all.
    widened : bool
        Whether the matmul reads it in a wider type.
    kept : tuple of Kept
        Of which atoms of the tensor a part is read.
    """

    name: str
    at: Placed
    positions: Atom | None
    features: Atom | None
    path: tuple[relax.Var, ...] = ()
    factor: float = 1.0
    length: PrimExpr | None = None
    widened: bool = False
    steps: int = 0
    kept: tuple[Kept, ...] = ()

    @property
    def dtype(self) -> str:
        """The element type."""
        return dtype_of(self.at.expr)

    @property
    def width(self) -> PrimExpr | int:
        """How many features it has."""
        return 1 if self.features is None else self.features.size

    @property
    def stored(self) -> tuple[Atom, ...]:
        """The atoms of batch and heads that the tensor has."""
        return tuple(a for a in self.at.order if a not in self.at.copied)

    def heads_of(self, batch: PrimExpr | int) -> Heads | None:
        """Return which heads of a merged tensor these are; None if they are at no equal steps."""
        return heads_left(self.at, self.stored, (self.positions, self.features), self.kept, batch)

    @property
    def outer(self) -> int | None:
        """How many of `stored` are in front of the positions; None if this is no layout of ours."""
        flat = list(self.at.flat)
        if self.features is not None and (not flat or flat.pop() is not self.features):
            return None
        place = len(flat)
        if self.positions is not None:
            if self.positions not in flat:
                return None
            place = flat.index(self.positions)
            flat.remove(self.positions)
        return place if tuple(flat) == self.stored else None


def operand(
    name: str,
    expr: relax.Expr,
    shape: Sequence[PrimExpr | int],
    lead: Sequence[PrimExpr | int],
    axes: tuple[int, ...],
) -> Operand:
    """Describe an operand of a matmul.

    Parameters
    ----------
    name : str
        What to call it in a refusal.
    expr : relax.Expr
        The tensor.
    shape : sequence of PrimExpr or int
        Its dimensions.
    lead : sequence of PrimExpr or int
        Sizes of batch and heads of the result, to which the operand may be broadcast.
    axes : tuple of int
        Where the operand has these, and then positions and features.
    """
    rank = len(lead) + 2
    guard(len(shape) == rank, Reason.SHAPE, f"{name} is of rank {len(shape)} among {rank}")
    held: list[tuple[Atom, ...]] = [()] * rank
    atoms: list[Atom | None] = []
    copied = set()
    for axis, size in zip(axes, [*lead, *(shape[a] for a in axes[-2:])], strict=True):
        atoms.append(None if is_one(size) else Atom(size))
        if atoms[-1] is None:
            guard(is_one(shape[axis]), Reason.SHAPE, f"{name} has {shape[axis]} for {size}")
            continue
        if same_shape((shape[axis],), (size,)):
            held[axis] = (atoms[-1],)
        else:
            guard(is_one(shape[axis]), Reason.SHAPE, f"{name} has {shape[axis]} for {size}")
            copied.add(atoms[-1])
    order = tuple(a for a in atoms[:-2] if a is not None)
    return Operand(name, Placed(expr, tuple(held), order, frozenset(copied)), atoms[-2], atoms[-1])


def packed(at: Operand) -> Operand:
    """Return an operand whose tensor is a reshape of what was described."""
    found = regrouped(at.at, known_shape(at.at.expr, at.name))
    assert found is not None
    return replace(at, at=found)


def sources(view: BlockView, at: Operand) -> Iterator[Operand]:
    """Yield an operand and, one by one, the tensors that it was made of."""
    yield at
    var = at.at.expr
    while isinstance(var, relax.Var):
        readers = (_cast, _factor, _prefix, _uncut, _moved)
        before = next((b for read in readers if (b := read(view, at)) is not None), None)
        if before is None:
            return
        value = view.definition(var)
        of = (value.tuple_value,) if isinstance(value, relax.TupleGetItem) else ()
        at = replace(before, path=(*at.path, var, *of), steps=at.steps + 1)
        var = at.at.expr
        yield at


def read_by(
    view: BlockView, variables: Iterable[relax.Var], readers: Iterable[relax.Var]
) -> set[relax.Var]:
    """Return those of `variables` that nothing reads but each other and `readers`."""
    found, readers = set(variables), set(readers)
    while True:
        inside = found | readers
        others = {v for v in found if view.escapes(v) or not inside.issuperset(view.uses(v))}
        if not others:
            return found
        found -= others


def _cast(view: BlockView, at: Operand) -> Operand | None:
    """Read the tensor of which this one is only a wider form."""
    call = view.call(at.at.expr, "relax.astype")
    if call is None or WIDENED.get(dtype_of(call.args[0])) != at.dtype:
        return None
    return replace(at, at=replace(at.at, expr=call.args[0]), widened=True)


def _factor(view: BlockView, at: Operand) -> Operand | None:
    """Take a constant factor off."""
    found = scaled(view, at.at.expr)
    if found is None:
        return None
    return replace(at, at=replace(at.at, expr=found[0]), factor=at.factor * found[1])


def _prefix(view: BlockView, at: Operand) -> Operand | None:
    """Read a cache in place of the copy of its first positions."""
    cut = prefix_slice(view, at.at.expr)
    if cut is None or at.length is not None or at.at.axes[cut.axis] != (at.positions,):
        return None
    capacity = Atom(known_shape(cut.source, at.name)[cut.axis])
    axes = tuple((capacity,) if a == (at.positions,) else a for a in at.at.axes)
    source = replace(at.at, expr=cut.source, axes=axes)
    return replace(at, at=source, positions=capacity, length=cut.length)


def _uncut(view: BlockView, at: Operand) -> Operand | None:
    """Read the merged tensor of which this one is a part."""
    found = uncut(view, at.at, at.kept)
    return None if found is None else replace(at, at=found[0], kept=found[1])


def _moved(view: BlockView, at: Operand) -> Operand | None:
    before = behind(view, at.at)
    return None if before is None else replace(at, at=before)
