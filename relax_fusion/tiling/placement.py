"""From a tiling expression to the structure of a kernel: the grid, and where statements stand.

A statement stands inside the innermost loop that indexes it, after what it reads is complete:
outside a loop over which a sum is not finished, and in a loop of its own where the one before it
is needed as a whole.  Loads and stores leave loops that do not index them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..errors import TilingError
from .expressions import Expression
from .space import IterationSpace, Loops, Step
from .structure import Compute, Load, Loop, Node, Statement, Store, Structure


@dataclass(eq=False)
class _Body:
    """A loop that is being filled."""

    name: str = ""
    items: list[Statement | _Body] = field(default_factory=list)

    def made(self) -> set[str]:
        """Return the tensors that are computed inside."""
        found: set[str] = set()
        for item in self.items:
            if isinstance(item, _Body):
                found |= item.made()
            elif isinstance(item, Compute):
                found.add(item.tensor)
        return found

    def frozen(self) -> tuple[Node, ...]:
        """Return the items as they stay."""
        return tuple(
            Loop(item.name, item.frozen()) if isinstance(item, _Body) else item
            for item in self.items
        )


def place(
    space: IterationSpace,
    expression: Expression,
    single: Collection[str] = (),
    inside: Collection[str] = (),
) -> Structure:
    """Return the structure that a tiling expression denotes.

    `space`: the loops and statements.
    `expression`: the order of the loops.
    `single`: loops of one tile, which are left out: what stood inside them may leave more loops.
    `inside`: loops that are no axes of the grid: a block goes through all their tiles.
    Raises `TilingError` if the expression has other loops than the space.
    """
    found = sorted(expression.names())
    if found != sorted(space.ordered):
        raise TilingError(
            f"tiling expression {expression} has the loops {', '.join(found)}; must have "
            f"{', '.join(sorted(space.ordered))}"
        )
    return place_ordered(space, expression.without({*single, *space.common}), single, inside)


def place_ordered(
    space: IterationSpace,
    expression: Expression,
    single: Collection[str],
    inside: Collection[str] = (),
) -> Structure:
    """Do as `place` for an expression without loops of one tile and those that all share."""
    grid = tuple(n for n in grid_axes(space, expression, single) if n not in inside)
    return _Placement(space, expression.without(grid)).structure(grid)


def grid_axes(
    space: IterationSpace, expression: Expression, single: Collection[str]
) -> tuple[str, ...]:
    """Return the loops that are axes of the grid: spatial loops of the results.

    A loop that some statement lacks (h, which C = A B has not) is none where the expression puts it
    inside a loop that one of its own statements sums over, as h in ``mnhk``: a block then makes
    all of these tiles of the result.
    """
    stored = frozenset().union(*(space.step[name].loops for name in space.results))
    several = {a.name for a in space.loops if a.size > 1} - {*single}
    always = space.common | {a.name for a in space.loops if a.batch}
    found = {*(always & several)}
    for name in space.spatial & stored & {*expression.names()}:
        sums = frozenset().union(*(s.reduced for s in space.steps if name in s.loops))
        if not sums & {*expression.path_to({name})}:
            found.add(name)
    return tuple(a.name for a in space.loops if a.name in found)


class _Placement:
    """The tree of one expression while it grows."""

    def __init__(self, space: IterationSpace, expression: Expression):
        self.space = space
        self.expression = expression
        self.order = tuple(expression.names())
        self.root = _Body()
        self.paths: dict[str, list[_Body]] = {}

    def structure(self, grid: tuple[str, ...]) -> Structure:
        """Place all statements, in order."""
        for step in self.space.steps:
            self.paths[step.out] = self._enter(self._path(step), step.waits)
            self.paths[step.out][-1].items.append(Compute(step.out))
        stores = {}
        for name in self.space.results:
            made = self.space.step[name]
            own = made.loops - made.reduced
            waits = made.waits | ({name} if made.reduced else set())
            loops = self._drop_finished(self._around({name}, own), own, waits)
            while loops and loops[-1] not in own:
                loops = loops[:-1]
            stores[name] = self._enter(loops, waits)
            stores[name][-1].items.append(Store(made.makes))
        self._drop_idle(self.root, [*self.paths.values(), *stores.values()])
        kept = self._kept(stores)
        for step in self.space.steps:
            self._load(step)
        return Structure(grid, self.root.frozen(), kept)

    def _path(self, step: Step) -> tuple[str, ...]:
        """Return the loops around a statement, outermost first."""
        reads = {read.tensor for read in step.reads} & set(self.paths)
        path = self._drop_finished(self._around(reads, step.loops), step.loops, step.waits)
        inner: list[str] = []
        for name in path:  # inside a loop that it sums over, another would add the same again
            if name in step.loops or not step.reduced & set(inner):
                inner.append(name)
        return tuple(inner)

    def _around(self, reads: Collection[str], own: Loops) -> tuple[str, ...]:
        """Return the loops outside the innermost that indexes, and those of what is read."""
        around = {body.name for name in reads for body in self.paths[name]}
        path = {*self.expression.path_to(own)} | around
        return tuple(name for name in self.order if name in path)

    def _drop_finished(
        self, path: tuple[str, ...], own: Loops, waits: Collection[str]
    ) -> tuple[str, ...]:
        """Return a path without loops that have to be over before a statement that lacks them."""
        over = frozenset().union(*(self.space.step[name].reduced for name in waits))
        return tuple(name for name in path if name in own or name not in over)

    def _enter(self, path: tuple[str, ...], waits: Collection[str]) -> list[_Body]:
        """Return the bodies along a path: the last loops that there are, or else new ones."""
        bodies = [self.root]
        for name in path:
            last = bodies[-1].items[-1] if bodies[-1].items else None
            if not isinstance(last, _Body) or last.name != name or self._needs_all(last, waits):
                last = _Body(name)
                bodies[-1].items.append(last)
            bodies.append(last)
        return bodies

    def _needs_all(self, loop: _Body, waits: Collection[str]) -> bool:
        """Tell whether a sum over a loop has to be complete that is computed inside it."""
        inside = loop.made() & set(waits)
        return any(loop.name in self.space.step[name].reduced for name in inside)

    def _drop_idle(self, body: _Body, paths: list[list[_Body]]) -> Loops:
        """Remove loops that index no statement inside; return the loops that index one."""
        indexed: Loops = frozenset()
        items: list[Statement | _Body] = []
        for item in body.items:
            if isinstance(item, _Body):
                inner = self._drop_idle(item, paths)
                idle = item.name not in inner
                items += item.items if idle else [item]
                for path in paths:
                    path[:] = [each for each in path if not idle or each is not item]
                indexed |= inner
            else:
                items.append(item)
                indexed |= self.space.step[item.tensor].loops
        body.items = items
        return indexed

    def _kept(self, stores: dict[str, list[_Body]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Return of which tensors a loop leaves a tile behind for each of its iterations."""
        found = []
        for step in self.space.steps:
            made = self.paths[step.out]
            sums = [n for n, body in enumerate(made) if body.name in step.reduced]
            depth = min(sums, default=len(made))
            users = [
                self.paths[s.out]
                for s in self.space.steps
                if any(read.tensor == step.out for read in s.reads)
            ]
            for path in [*users, stores.get(step.out, made)]:
                depth = min(depth, _common(made, path))
            own = step.loops - step.reduced
            loops = tuple(body.name for body in made[depth:] if body.name in own)
            if loops:
                found.append((step.out, loops))
        return tuple(found)

    def _load(self, step: Step) -> None:
        """Load what a statement reads of the operands, where no load around it has."""
        bodies = self.paths[step.out]
        for read in step.reads:
            load = Load(read)
            if read.tensor in self.space.step or any(load in body.items for body in bodies):
                continue
            depth = len(bodies) - 1
            while depth and bodies[depth].name not in read.loops:
                depth -= 1
            inner = bodies[depth + 1] if depth + 1 < len(bodies) else Compute(step.out)
            items = bodies[depth].items
            items.insert(next(n for n, item in enumerate(items) if item == inner), load)


def _common(one: list[_Body], other: list[_Body]) -> int:
    """Return how many loops two paths have in common, the root included."""
    count = 0
    while count < min(len(one), len(other)) and one[count] is other[count]:
        count += 1
    return count


def distinct(
    space: IterationSpace,
    found: Iterable[Expression],
    single: Collection[str] = (),
    inside: Collection[str] = (),
) -> dict[Structure, Expression]:
    """Rule 1: keep one expression of those for which a block does the same.

    Where the loops of the results are axes of the grid, their order says nothing; nor does that of
    loops without a common statement.  Loops in `single` have one tile, which makes more the same;
    those `inside` are no axes of the grid.
    """
    kept: dict[Structure, Expression] = {}
    seen: set[Expression] = set()
    for expression in found:
        left = expression.without({*single, *space.common})
        if left not in seen:
            seen.add(left)
            kept.setdefault(place_ordered(space, left, single, inside), expression)
    return kept


def keeps_partial_results(space: IterationSpace, structure: Structure) -> bool:
    """Rule 2: tell whether tiles of an intermediate are kept for all iterations of a loop.

    So it is where a loop over sums of an intermediate stands around one over its elements, as in
    ``kn`` of ``C[m, n] = sum k``.  Results that are kept (E in ``mn(k,h)``) are not meant, nor sums
    of which results are made element by element.
    """
    return any(name not in space.final for name, _ in structure.kept)
