"""Heads that are a part of a larger tensor: cuts along axes, and the heads that are left.

A cut is read backwards, as movements are: the axis of the source holds a further atom, of which one
element was kept, or a longer atom, of which some neighbours were.  A kernel can read the source if
its heads are then at equal distances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from ...workload import Heads
from ..axes import Atom, Placed, size_of
from ..movements import Cut, cut_of
from ..pattern import BlockView, PrimExpr
from ..shapes import same_shape


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

    Parameters
    ----------
    at : Placed
        The tensor.
    stored : sequence of Atom
        Its atoms of batch and heads, in order.
    ends : tuple of Atom, optional
        Those of positions and features; None for a single one.
    kept : sequence of Kept
        What is read of its atoms.
    batch : PrimExpr or int
        The batch size.
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
