"""Checking a match: its bindings and the reference of its workload on the same inputs.

No size and no input is proved by this, but a wrong operand, order, axis, constant, mask or rounding
shows at the first one.  The numbers are float64, so that nothing but a mistake makes a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax

from ..matching.effects import IN_PLACE, MAY_BE_VIEWS, free_vars
from ..matching.pattern import BlockView, Match, is_call
from ..matching.rebuild import order
from ..matching.shapes import dtype_of
from ..tvm_ir import structural_equal
from .comparison import Comparison, Invalid, Run
from .inputs import assignments, kinds, telling
from .operators import Uninterpreted
from .region import NAMES, Region, back, free_vars_of, region_of
from .shrinking import affordable, possible, shrinks
from .sizes import WHOLE, Shrink, Sizes

_FAILURES = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RuntimeError, TypeError, ValueError),
)

MOST_TRIES = 16
"""Dynamic dimensions are tried at so many sets of sizes."""


@dataclass(frozen=True)
class Mismatch:
    """A kernel would compute something else."""

    detail: str  # which result, at which sizes, on which inputs, and how far off


@dataclass(frozen=True)
class Unchecked:
    """A match that could not be checked, and why."""

    detail: str


class Checker:
    """Checks matches, each structure once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[relax.Expr, Mismatch | Unchecked | None]]] = {}
        self._writers: tuple[BlockView | None, list[relax.Var]] = (None, [])

    def check(self, view: BlockView, match: Match) -> Mismatch | Unchecked | None:
        """Compare what a match covers with its workload; None if they agree."""
        try:
            return self._checked(view, match)
        except Uninterpreted as err:
            return Unchecked(f"{err} is not interpreted")
        except _FAILURES as err:  # nothing that is checked may fail for the checker's sake
            told = " ".join(str(err).split())
            return Unchecked(f"the checker failed: {type(err).__name__}: {told}")

    def _checked(self, view: BlockView, match: Match) -> Mismatch | Unchecked | None:
        wrong = _wrong_operands(match)
        if wrong is not None:
            return Mismatch(wrong)
        region = region_of(view, match)
        if self._writers[0] is not view:
            self._writers = view, [b.var for b in view.bindings if is_call(b.value, *IN_PLACE)]
        wrong = overwritten(view, region, self._writers[1])
        if wrong is not None:
            return Mismatch(wrong)
        key = (region.hash, repr(match.workload), tuple(sorted(view.bounds.items())))
        known = self._known.setdefault(key, [])
        for structure, found in known:
            if structural_equal(structure, region.structure, map_free_vars=True):
                return found
        found = _Check(region, view).result()
        known.append((region.structure, found))
        return found


def check_match(view: BlockView, match: Match) -> Mismatch | Unchecked | None:
    """Compare what a match covers with its workload; return None if both computed the same."""
    return Checker().check(view, match)


def _wrong_operands(match: Match) -> str | None:
    """Say which operand or result is of another number or dtype than the workload has."""
    graph = match.workload.graph
    if len(graph.inputs) != len(match.args) or len(graph.outputs) != len(match.outs):
        found = f"{len(match.args)} operands and {len(match.outs)} results"
        return f"{found}; the workload has {len(graph.inputs)} and {len(graph.outputs)}"
    given = [(o, dtype_of(a.expr)) for o, a in zip(graph.inputs, match.args, strict=True)]
    given = [(o, dtype) for o, dtype in given if o.shape is not None]
    given += [(o, out.dtype) for o, out in zip(graph.outputs, match.outs, strict=True)]
    for operand, dtype in given:
        if operand.dtype != dtype:
            return f"{operand.name} is {dtype}; the workload has {operand.dtype}"
    return None


class _Check:
    """The check of one region."""

    def __init__(self, region: Region, view: BlockView):
        self.region, self.bounds = region, dict(view.bounds)
        self.comparison = Comparison(region, view.mod)

    def result(self) -> Mismatch | Unchecked | None:
        """Compare at several sizes; a difference at sizes made smaller has to show again."""
        doubts: list[Mismatch] = []
        for shrink in shrinks(self.region):
            try:
                found = self._at(shrink)
            except Invalid:
                continue
            if found is None:
                return None
            doubts.append(Mismatch(found))
            if shrink == WHOLE or len(doubts) > 1:
                return doubts[-1]
        if doubts:
            return Unchecked(f"too large to confirm a difference: {doubts[0].detail}")
        every = [Sizes(symbols) for symbols in assignments(self.region, self.bounds)]
        misfits = [self.comparison.misfit(s) for s in every if possible(self.region, s)]
        if not misfits:
            return Unchecked("the sizes that are tried make others negative")
        if all(misfits):  # at any sizes, those that the graph allows among them
            return Mismatch(f"{misfits[0]}")
        sizes = sorted({*self.region.statics, *telling(self.region)}, reverse=True)[:3]
        return Unchecked(f"sizes are too large to compute: {', '.join(map(str, sizes))}")

    def _at(self, shrink: Shrink) -> str | None:
        """Compare with static sizes as `shrink` leaves them; say what differs."""
        valid, longest = 0, 0
        every = list(assignments(self.region, self.bounds))
        for number, symbols in enumerate(every):
            sizes = Sizes(symbols, shrink)
            if number > MOST_TRIES or not affordable(self.region, sizes):
                continue
            runs = [Run(sizes, seed=number)]
            if not valid:
                runs += [Run(sizes, coarse=True, seed=number)]
                runs += [Run(sizes, kind, seed=number) for kind in kinds(self.region)[1:]]
            try:
                found = next((d for d in map(self.comparison.difference, runs) if d), None)
            except Invalid:
                if not valid and shrink != WHOLE and number > 2:
                    break
                continue
            if found is not None:
                return found
            valid, longest = valid + 1, max(longest, *symbols.values(), 0)
        wanted = max(max(s.values(), default=0) for s in every) if telling(self.region) else 0
        if not valid or longest < wanted:
            raise Invalid
        return None


Roots: TypeAlias = frozenset[Any]


def overwritten(view: BlockView, region: Region, writers: list[relax.Var]) -> str | None:
    """Say which operand has another value where the kernel stands; None if none has."""
    if not writers:
        return None
    places = [view.index[v] for v in region.match.covers]
    reads = list(_reads(view, region))
    places += [at for at, _ in reads]
    between = [w for w in writers if min(places) < view.index[w] < max(places)]
    if not between:
        return None
    known: dict[relax.Var, Roots] = {}
    for binding in view.bindings:  # in order, so that no recursion is as deep as the block
        _roots(view, binding.var, known)
    changed = {w: _roots(view, view.defs[w], known) for w in between}
    clashes = [
        (w, at, r) for w in between for at, r in reads if changed[w] & _roots(view, r, known)
    ]
    in_order = order(view, [region.match]) if clashes else None
    if in_order is None:
        return None
    new = {item: n for n, item in enumerate(in_order) if isinstance(item, int)}
    kernel = next(n for n, item in enumerate(in_order) if not isinstance(item, int))
    for writer, at, read in clashes:
        number = view.index[writer]
        if (at < number) != (kernel < new.get(number, kernel)):
            when = "after" if at < number else "before"
            return f"{read.name} is read {when} {writer.name} writes its memory"
    return None


def _reads(view: BlockView, region: Region) -> Iterator[tuple[int, relax.Var]]:
    """Yield where a kernel's bindings read others'; a name, or a tuple, reads nothing itself."""
    given = {v for a in region.match.args for v in free_vars_of(a.expr)}
    bound, leaves = back(view, region.results, given)
    named = {v: view.defs[v] for v in bound if isinstance(view.defs[v], NAMES)}
    for var in bound - named.keys():
        stack = list(view.reads[var])
        while stack:
            read = stack.pop()
            stack += free_vars(named[read]) if read in named else ()
            if read in leaves:
                yield view.index[var], read


def _roots(view: BlockView, expr: relax.Expr, known: dict[relax.Var, Roots]) -> Roots:
    """Return the tensors whose memory a value may be in."""
    if isinstance(expr, relax.Var):
        if expr not in known:
            known[expr] = frozenset([expr])  # its own, unless its binding says otherwise
            if expr in view.defs:
                known[expr] = _roots(view, view.defs[expr], known) or known[expr]
        return known[expr]
    if isinstance(expr, relax.Tuple):
        return _union(_roots(view, f, known) for f in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        inner = _roots(view, expr.tuple_value, known)
        whole = inner == frozenset([expr.tuple_value])
        return frozenset([(expr.tuple_value, int(expr.index))]) if whole else inner
    if is_call(expr, *IN_PLACE):
        packed = expr.op.name == "relax.call_inplace_packed"
        args = expr.args[1:] if packed else expr.args[1].fields
        indices = [int(i) for i in expr.attrs.inplace_indices]
        return _union(_roots(view, args[i], known) for i in indices if i >= 0)
    if is_call(expr, *MAY_BE_VIEWS):
        return _roots(view, expr.args[0], known)
    return frozenset()


def _union(found: Any) -> Roots:
    return frozenset().union(*found)
