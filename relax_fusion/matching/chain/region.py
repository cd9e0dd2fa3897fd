"""Regions of a dataflow block that one kernel could compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import relax

from ...errors import Reason
from ...workload import FLOAT_BYTES
from ..operators import ALL_MOVEMENTS
from ..pattern import BlockView, Refused, guard, is_call
from ..roundings import kept_roundings
from ..shapes import dtype_of
from .operators import OPERATORS, REDUCING
from .writer import ChainWriter, Written

MOST_CONTRACTIONS = 3
"""A region has no more matmuls: more have more loops than the tiling engine orders."""

MOST_CALLS = 48
"""A region has no more calls."""

PRODUCT = "relax.matmul"


@dataclass(frozen=True)
class Region:
    """Calls that nothing outside reads but the last of them."""

    view: BlockView
    inside: frozenset[relax.Var]
    out: relax.Var

    @cached_property
    def covers(self) -> tuple[relax.Var, ...]:
        """What they make, in the order of the block."""
        return tuple(sorted(self.inside, key=self.view.index.__getitem__))

    @property
    def products(self) -> tuple[relax.Var, ...]:
        """The results of the contractions."""
        return tuple(v for v in self.covers if self.view.call(v, PRODUCT) is not None)

    @cached_property
    def norms(self) -> frozenset[relax.Var]:
        """What reductions in front make for its calls alone."""
        read = {v for made in self.covers for v in self.view.reads[made]} - self.inside
        calls = {v for v in read if is_call(self.view.defs.get(v), *REDUCING)}
        return frozenset(v for v in calls if not _is_read(self.view, v, self.inside))

    def written(self) -> Written:
        """Write the region down as a block graph.

        Raises `Refused` if a call has a form, a dtype or a shape that no statement has.
        """
        view = self.view
        writer = ChainWriter(view, self.inside, frozenset(self._weights()))
        kept = kept_roundings({var: view.defs[var] for var in self.covers}, between=True)
        for var in self.covers:
            call = view.defs[var]
            made = replace(OPERATORS[call.op.name](writer, call), dtype=dtype_of(var))
            again = sum(user in self.inside for user in view.uses(var)) > 1
            store = again or var in kept
            writer.formulas[var] = writer.stored(made, rounds=var in kept) if store else made
        return writer.result(self.out)

    def _weights(self) -> Iterator[relax.Expr]:
        """Yield the right operands of matmuls, movements in the region looked through."""
        for var in self.products:
            weight = self.view.defs[var].args[1]
            while weight in self.inside and is_call(self.view.defs[weight], *ALL_MOVEMENTS):
                weight = self.view.defs[weight].args[0]
            if weight not in self.inside:
                yield weight

    @property
    def spelling(self) -> str:
        """The names of its operators."""
        return " ".join(self.view.defs[v].op.name.removeprefix("relax.") for v in self.covers)


def regions(view: BlockView, first: relax.Var) -> Iterator[Region]:
    """Yield the regions whose first contraction is `first`.

    What is computed for a call of a region alone belongs to it; then all of them again, without
    norms in front: a block repeats these where it has a part of their rows.
    """
    known: set[frozenset[relax.Var]] = set()
    for fronts in (True, False):
        for region in _grown(view, first, fronts):
            if region.products[0] == first and region.inside not in known:
                known.add(region.inside)
                yield region


def refuse_shared(view: BlockView, first: relax.Var) -> None:
    """Refuse two matmuls if what functions of elements make between them is read elsewhere too.

    The `Refused` names what is read by more than one call, or is a result, and its readers.
    """
    shared: relax.Var | None = None
    var: relax.Var | None = first
    while var is not None:
        readers = view.uses(var)
        if shared is None and (view.escapes(var) or len(readers) > 1):
            shared = var
        if shared is not None and any(view.call(reader, PRODUCT) is not None for reader in readers):
            guard(not view.escapes(shared), Reason.LEAKED, f"{shared.name} is a result")
            names = ", ".join(reader.name for reader in view.uses(shared))
            detail = f"{shared.name} is read by {names}; an intermediate has one reader"
            raise Refused(Reason.MULTI_USE, detail)
        maps = (r for r in readers if _belongs(view, r))
        var = next((r for r in maps if not is_call(view.defs[r], *REDUCING, PRODUCT)), None)


def _grown(view: BlockView, first: relax.Var, fronts: bool) -> Iterator[Region]:
    """Yield regions, each larger than the one before; with the norms in front or without."""
    inside = _with_sources(view, first, frozenset(), fronts)
    outside: set[relax.Var] = set()
    while len(inside) <= MOST_CALLS:
        results = [v for v in inside if _is_read(view, v, inside)]
        if len(results) == 1 and _products(view, inside) > 1:
            yield Region(view, inside, results[0])
        readers = {u for v in results for u in view.uses(v)} - inside - outside
        if not readers:
            return
        reader = min(readers, key=view.index.__getitem__)
        more = _with_sources(view, reader, inside, fronts) if _belongs(view, reader) else inside
        if more == inside or _products(view, more) > MOST_CONTRACTIONS:
            outside.add(reader)
        else:
            inside = more


def _with_sources(
    view: BlockView, var: relax.Var, inside: frozenset[relax.Var], fronts: bool
) -> frozenset[relax.Var]:
    """Return a region with a call, and with what is computed for it alone."""
    inside = inside | {var}
    for source in view.reads[var]:
        alone = source in view.defs and source not in inside and _belongs(view, source)
        if not alone or _is_read(view, source, inside):
            continue
        if fronts or not is_call(view.defs[source], *REDUCING) or _products(view, {source}):
            inside = _with_sources(view, source, inside, fronts)
    return inside


def _belongs(view: BlockView, var: relax.Var) -> bool:
    """Tell whether a call is one that statements can say.

    They compute in float32: a result of integers, booleans or 8-bit floats is rounded, which they
    do not say.
    """
    said = is_call(view.defs.get(var), *OPERATORS) and dtype_of(var) in FLOAT_BYTES
    return said and var not in view.casts


def _is_read(view: BlockView, var: relax.Var, inside: frozenset[relax.Var]) -> bool:
    """Tell whether anything but a region reads what a call makes."""
    return view.escapes(var) or not inside.issuperset(view.uses(var)) or not view.uses(var)


def _products(view: BlockView, inside: Collection[relax.Var]) -> int:
    return sum(view.call(v, PRODUCT) is not None for v in inside)
