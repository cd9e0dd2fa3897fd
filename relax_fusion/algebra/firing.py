"""A rule at a place: what it makes there, and how that is checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import relax

from ..canonical.rewriter import Rewriter
from ..equivalence.rewrites import Rewrite
from ..matching.bindings import Identity
from ..matching.shapes import shape_of
from ..tvm_ir import GenericConst
from .formula import Term
from .matcher import Bindings, Found, appending, folded, made
from .rules import EXACT, Rule


@dataclass(frozen=True)
class Firing:
    """A rule at a place, and the seconds that it saves at the largest sizes."""

    rule: Rule
    found: Found
    saved_s: float

    @cached_property
    def constants(self) -> dict[str, relax.Expr | None]:
        """What the constant parts of the result come to, by their names in `result`."""
        parts = list(_constant_parts(self.rule.result))
        return {f"folded{n}": folded(p, self.found) for n, p in enumerate(parts)}

    @property
    def products(self) -> int:
        """How many products of numbers the matmuls of constant parts take."""
        shapes, total = {n: shape_of(e) or [1] for n, e in self.found.names.items()}, 0
        for part in (p for whole in _constant_parts(self.rule.result) for p in whole.parts()):
            if part.op == "matmul":
                left, right = ([shapes[p.name] for p in a.parts() if p.name] for a in part.args)
                total += max(math.prod(map(int, s)) for s in left) * int(right[0][-1])
        return total

    @cached_property
    def result(self) -> Term:
        """The formula of the result, with names for its constant parts."""
        whole = self.found.whole(self.rule.result, self.rule.pattern.op)
        parts = list(_constant_parts(self.rule.result))
        return _replaced(whole, {p: Term(name=f"folded{n}") for n, p in enumerate(parts)})


@dataclass
class Rewriting:
    """Applies firings, each once."""

    chosen: dict[Identity, Firing]

    def rewritten(self, rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        """Return what a rule makes in the place of the value at hand."""
        firing = self.chosen.pop(hash(rewriter.var), None)
        if firing is None:
            return None
        names = {n: rewriter.names.get(e, e) for n, e in firing.found.names.items()}
        for name, value in firing.constants.items():
            names[name] = value if isinstance(value, GenericConst) else rewriter.emit(value)
        whole = firing.result

        def emit(part: Term, value: relax.Expr) -> relax.Expr:
            return value if part is whole else rewriter.emit(value)

        return made(whole, replace(firing.found, names=names), rewriter.builder, emit)


def comparison(rule: Rule, found: Found, result: Term | None = None) -> Rewrite:
    """Return a formula and what takes its place as what can be compared, of fresh inputs."""
    builder, sides = relax.BlockBuilder(), []
    names = {n: e if Term(name=n).is_number else relax.Var(n, e.ty) for n, e in found.names.items()}
    fresh = replace(found, names=names)
    for term in (rule.pattern, rule.result if result is None else result):
        bindings: Bindings = []
        term = fresh.whole(term, rule.pattern.op)
        whole = made(term, fresh, builder, appending(bindings), folds=False)
        sides.append((bindings, whole))
    leaves = [e for e in names.values() if isinstance(e, relax.Var)]
    (before, old), (after, new) = sides
    return Rewrite(leaves, before, after, (old, new), rule.numbers == EXACT)


def _constant_parts(term: Term) -> Iterator[Term]:
    """Yield the largest parts of a formula that are computed when compiling, numbers left out."""
    if term.op and term.is_constant and not term.is_number:
        yield term
    else:
        for arg in term.args:
            yield from _constant_parts(arg)


def _replaced(term: Term, parts: Mapping[Term, Term]) -> Term:
    known = parts.get(term)
    return known or replace(term, args=tuple(_replaced(arg, parts) for arg in term.args))
