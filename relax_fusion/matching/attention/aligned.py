"""Masks and biases lined up with the scores that they are applied to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tvm import relax, tirx

from ...errors import Reason
from ...workload import MaskDims
from ..axes import Atom, Placed, behind, broadcast, placed, regrouped, size_of
from ..element_values import Element, Index, integer
from ..elements import Elements
from ..pattern import BlockView, KernelArg, PrimExpr, guard
from ..shapes import same_shape, shape_text
from .scores import INFINITE


@dataclass(frozen=True)
class Grid:
    """The scores of an attention: ``[batch, heads, q_len, kv_len]``.

    `finite`: whether a negative number is read as minus infinity, too, which `hiding` has to prove.
    `floor`: the least that later steps leave of a score.
    """

    view: BlockView
    sizes: tuple[PrimExpr | int, PrimExpr | int, PrimExpr | int, PrimExpr | int]
    finite: bool = False
    floor: float = -INFINITE
    addends: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False)
    """What `masks` found behind tensors, to which sums of sums lead many times."""

    def hides(self, number: float) -> bool:
        """Tell whether a score of `number`, or one that it is added to, is read as hidden."""
        return max(number, self.floor) == -INFINITE or (self.finite and number < 0)

    def aligned(self, expr: relax.Expr, shape: Sequence[PrimExpr]) -> Aligned:
        """Line a tensor up with scores of `shape`, to which it may be broadcast."""
        detail = f"a mask is on scores as {shape_text(shape)}, which are no queries by keys"
        guard(same_shape(shape[-2:], self.sizes[2:]), Reason.LAYOUT, detail)
        whole = placed(expr, self.sizes)
        rows, columns = ((axis[0] if axis else None) for axis in whole.axes[-2:])
        scores = regrouped(whole, shape)
        at = None if scores is None else broadcast(scores, expr)
        detail = f"the mask is {expr.ty}, the scores {shape_text(shape)}"
        guard(at is not None, Reason.SHAPE, detail)
        assert at is not None
        return Aligned(self, at, rows, columns)


@dataclass(frozen=True)
class Aligned:
    """A tensor and which of the scores each of its elements belongs to."""

    grid: Grid
    at: Placed
    rows: Atom | None
    columns: Atom | None

    def operand(self, expr: relax.Expr) -> Aligned | None:
        """Return an operand of the operator that made this tensor, element by element."""
        found = broadcast(self.at, expr)
        return None if found is None else replace(self, at=found)

    def behind(self) -> Aligned | None:
        """Return the tensor that this one was made of by moving its elements."""
        found = behind(self.grid.view, self.at)
        if found is None or not {self.rows, self.columns} - {None} <= set(found.order):
            return None  # an axis of queries or of keys was cut in two
        return replace(self, at=found)

    def over(self, expr: relax.Expr, axes: tuple[tuple[Atom, ...], ...]) -> Aligned:
        """Return a tensor with `axes` that has one element for all scores along the others."""
        kept = {a for axis in axes for a in axis}
        copied = frozenset(self.at.order) - kept
        return replace(self, at=replace(self.at, expr=expr, axes=axes, copied=copied))

    @cached_property
    def places(self) -> dict[Atom, tirx.Var]:
        """An index variable for each atom."""
        return {a: tirx.Var("at", "int64") for a in self.at.order}

    @cached_property
    def elements(self) -> Elements:
        """What reads elements of the block at these places."""
        return Elements(self.grid.view, [(var, atom.size) for atom, var in self.places.items()])

    def element(self) -> Element | None:
        """Return an element by its row and column, if it is known by its position."""
        return self.elements.at(self.at.expr, self.index)

    @property
    def index(self) -> Index:
        """The index of an element by the places of its atoms."""
        return tuple(self._place(axis) for axis in self.at.axes)

    def _place(self, axis: tuple[Atom, ...]) -> PrimExpr:
        place: PrimExpr = integer(0)
        for atom in axis:
            place = place * atom.size + self.places[atom]
        return self.elements.analyzer.simplify(place)

    @property
    def row(self) -> tirx.Var | None:
        """The variable of the query's position."""
        return self.places.get(self.rows) if self.rows is not None else None

    @property
    def column(self) -> tirx.Var | None:
        """The variable of the key's position."""
        return self.places.get(self.columns) if self.columns is not None else None

    @property
    def heads(self) -> tuple[Atom, ...]:
        """The atoms of the heads."""
        outer = [a for a in self.at.order if a not in (self.rows, self.columns)]
        batch = self.grid.sizes[0]
        cuts = (i for i in range(len(outer) + 1) if same_shape((size_of(outer[:i]),), (batch,)))
        first = next(cuts, None)
        return () if first is None else tuple(outer[first:])

    def source(self) -> Aligned:
        """Return the tensor furthest back that a kernel can read in place of this one."""
        best, at = self, self.behind()
        while at is not None:
            if at.dims() is not None:
                best = at
            at = at.behind()
        return best

    def dims(self) -> MaskDims | None:
        """Tell which dimensions of the scores a kernel finds in this tensor; None: it cannot."""
        stored = [a for a in self.at.order if a not in self.at.copied]
        if list(self.at.flat) != stored:
            return None
        heads = self.heads
        outer = [a for a in self.at.order if a not in (self.rows, self.columns, *heads)]
        found = []
        groups = (outer, heads, (self.rows,), (self.columns,))
        for size, atoms in zip(self.grid.sizes, groups, strict=True):
            own = [a for a in atoms if a is not None and a not in self.at.copied]
            if own and not same_shape((size_of(own),), (size,)):
                return None
            found.append(bool(own))
        return (found[0], found[1], found[2], found[3])

    def arg(self, expr: relax.Expr | None = None) -> tuple[KernelArg, MaskDims]:
        """Return the tensor, or `expr` of its shape, as a kernel takes it."""
        dims = self.dims()
        detail = f"a mask of {self.at.expr.ty} is not the same for whole batches or heads"
        guard(dims is not None, Reason.SHAPE, detail)
        assert dims is not None
        shape = tuple(s if has else 1 for s, has in zip(self.grid.sizes, dims, strict=True))
        return KernelArg(self.at.expr if expr is None else expr, shape), dims
