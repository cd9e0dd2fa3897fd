"""Operands and result of an attention, without the data movement around them.

Heads may be a part of a larger tensor.  A cut is read backwards, as movements are: the axis of the
source holds a further atom, of which one element was kept, or a longer atom, of which some
neighbours were.  A kernel can read the source if its heads are then at equal distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm import relax, tirx

from ...errors import Reason
from ...workload import Heads
from ..axes import Atom, Placed, behind, regrouped, size_of
from ..constants import scaled
from ..movements import Cut, cut_of, prefix_slice
from ..pattern import BlockView, PrimExpr, guard
from ..shapes import dtype_of, is_one, known_shape, same_shape


@dataclass(frozen=True)
class Kept:
    """What was kept of an atom of a source: the atom `of` from element `start` on.

    `of` is None for a single element.
    """

    atom: Atom
    of: Atom | None
    start: int


def uncut(
    view: BlockView, at: Placed, kept: tuple[Kept, ...]
) -> tuple[Placed, tuple[Kept, ...]] | None:
    """Return the tensor of which `at` is a static part, and what was kept of its atoms."""
    cut = cut_of(view, at.expr)
    if cut is None or cut.stride != 1 or not 0 <= cut.start < cut.stop <= cut.extent:
        return None
    if cut.single:  # the axis is not there any more
        at = replace(at, axes=(*at.axes[: cut.axis], (), *at.axes[cut.axis :]))
    atoms, kept = _longer(at.axes[cut.axis], cut, kept)
    if atoms is None:
        return None
    axes = (*at.axes[: cut.axis], atoms, *at.axes[cut.axis + 1 :])
    return replace(at, expr=cut.source, axes=axes), kept


def _longer(
    atoms: tuple[Atom, ...], cut: Cut, kept: tuple[Kept, ...]
) -> tuple[tuple[Atom, ...] | None, tuple[Kept, ...]]:
    """Return what the axis held before a cut, None where that is not whole atoms."""
    length = cut.stop - cut.start
    if length == cut.extent:
        return atoms, kept
    if cut.extent % length == 0 and cut.start % length == 0:
        whole = Atom(cut.extent // length)
        return (whole, *atoms), (*kept, Kept(whole, None, cut.start // length))
    first, *rest = atoms
    inner = _number(size_of(rest))
    if inner is None or cut.extent % inner or cut.start % inner:
        return None, kept
    whole = Atom(cut.extent // inner)
    before = next((k for k in kept if k.atom is first), Kept(first, first, 0))
    others = tuple(k for k in kept if k.atom is not first)
    return (whole, *rest), (
        *others,
        replace(before, atom=whole, start=before.start + cut.start // inner),
    )


def heads_left(
    at: Placed,
    stored: Sequence[Atom],
    ends: tuple[Atom | None, Atom | None],
    kept: Sequence[Kept],
    batch: PrimExpr | int,
) -> Heads | None:
    """Return where the heads of ``[b, s, n, h]`` are in it, None if it is no such tensor.

    `stored`: its atoms of batch and heads, in order.
    `ends`: those of positions and features; None for a single one.
    `kept`: what is read of its atoms.
    """
    positions, features = ends
    flat = list(at.flat)
    if features is None or not flat or flat.pop() is not features:
        return None
    if positions is not None:
        if positions not in flat:
            return None
        place = flat.index(positions)
        outer, inner = flat[:place], flat[place + 1 :]
    else:
        sizes = (size_of(stored[:i]) for i in range(len(stored) + 1))
        place = next((i for i, size in enumerate(sizes) if same_shape((size,), (batch,))), 0)
        outer, inner = flat[:place], flat[place:]
    whole = outer == list(stored[:place]) and same_shape((size_of(outer),), (batch,))
    return _distances(inner, stored[place:], kept) if whole else None


def _distances(inner: Sequence[Atom], heads: Sequence[Atom], kept: Sequence[Kept]) -> Heads | None:
    """Return which of the atoms between positions and features the heads are."""
    parts = {k.atom: k for k in kept}
    if not parts.keys() <= set(inner):
        return None
    total, start = 1, 0
    found: list[tuple[Atom, int]] = []
    for atom in reversed(inner):
        part, size = parts.get(atom, Kept(atom, atom, 0)), _number(atom.size)
        if size is None:
            return None
        if part.of is not None:
            found.insert(0, (part.of, total))
        start, total = start + part.start * total, total * size
    if [atom for atom, _ in found] != list(heads):
        return None
    step = found[-1][1] if found else 1
    distance = step
    for atom, stride in reversed(found):
        if stride != distance:
            return None
        distance *= _number(atom.size) or 0
    return Heads(total, start, step)


def _number(size: PrimExpr | int) -> int | None:
    return int(size) if isinstance(size, int | tirx.IntImm) else None


WIDENED = {"float16": "float32", "bfloat16": "float32"}


@dataclass(frozen=True)
class Operand:
    """A query, key, value or result, and the tensors that it was made of, one after the other."""

    name: str
    at: Placed
    """The tensor; its `order` names the atoms of batch and heads."""
    positions: Atom | None
    features: Atom | None
    """What the last two dimensions of its matmul hold; None where that is a single element."""
    path: tuple[relax.Var, ...] = ()
    """The bindings between it and the matmul."""
    factor: float = 1.0
    """What it is multiplied by on the way."""
    length: PrimExpr | None = None
    """How many of its positions are read, where that is not all."""
    widened: bool = False
    """Whether the matmul reads it in a wider type."""
    steps: int = 0
    """How many bindings there are in between."""
    kept: tuple[Kept, ...] = ()
    """Of which atoms of the tensor a part is read."""
    shared: tuple[Operand, ...] = ()
    """Of keys, features behind these that all heads share, and what those were made of."""

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

    `name`: what to call it in a refusal.
    `lead`: sizes of batch and heads of the result, to which the operand may be broadcast.
    `axes`: where the operand has these, and then positions and features.
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


Reader: TypeAlias = Callable[[BlockView, Operand], Operand | None]


def sources(
    view: BlockView, at: Operand, readers: Sequence[Reader] | None = None
) -> Iterator[Operand]:
    """Yield an operand and, one by one, the tensors that it was made of, by some of the readers."""
    yield at
    var, readers = at.at.expr, readers or (_cast, _factor, _prefix, *MOVES)
    while isinstance(var, relax.Var):
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


MOVED = (_moved,)
MOVES = (_uncut, _moved)
"""Readers of movements, and of parts of merged tensors."""
