"""Where the rules pay, best first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from tvm import ir, relax
from tvm.target import Target

from ..canonical.rewriter import canonicalise
from ..equivalence.operators import Uninterpreted
from ..errors import EquivalenceError
from ..hardware.target import device_of, host_target
from ..matching.bindings import Identity, items_of
from ..matching.known_effects import memory_of
from ..matching.pattern import BlockView, belongs_to_a_library, is_call, operator_of
from ..matching.shapes import dtype_of, shape_of
from ..report.decision import Rewrite
from ..transforms.modules import functions_of, module_pass
from ..tvm_ir import GenericConst
from .firing import Firing, Rewriting, comparison
from .formula import Term
from .matcher import Found, constant_of, found_at, made, same_result
from .price import CARRIED, ELEMENTWISE, Price
from .rules import INEXACT, RULES, Rule

MOST_SWEEPS = 8
"""A module is looked through at most so many times; each time, no part of it is rewritten twice."""

MOST_FIRINGS = 512
"""In a function, at most so many parts are rewritten each time: those that save the most."""

MOST_PRODUCTS = 2**35
"""Matmuls of constants take at most so many products of numbers in a module: seconds of a CPU."""

MOST_WAYS = 4
"""Of so many ways in which a formula is found at a place, the one that saves most is taken."""

_LEAST_PART = 1e-9
"""What saves less than this part of what it costs is left: that may be a rounding."""


@dataclass(frozen=True)
class AlgebraOptions:
    """What `SimplifyAlgebra` is told.

    Parameters
    ----------
    target : Target, optional
        The device whose rates count; by default the target in scope, else this machine's CPU.
    bounds : mapping of str to int
        Largest values of symbolic variables, by name.
    exact : bool
        Whether to keep to the rules whose roundings ``docs/numerics.md`` allows.
    validate : bool or "strict"
        Interpret each part before and after, and leave it where they differ, or raise.
    rewrites : list of Rewrite, optional
        Gets a record of every part that was rewritten.
    """

    target: Target | None = None
    bounds: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True
    validate: bool | Literal["strict"] = False
    rewrites: list[Rewrite] | None = None


@module_pass
class SimplifyAlgebra:
    """Compute the same by less, by the rules of `RULES`.

    rewrite::

        y = R.add(R.matmul(x, A), R.matmul(x, B))      # A, B constant
            ->
        y = R.matmul(x, A + B)                         # added when compiling

    A rule applies where operations and bytes of what goes are more than those of what comes, at the
    least and at the largest sizes; of several that meet, the one that saves most.

    declines when:
        a tensor in between is read elsewhere, so that nothing is saved; a constant is read
        elsewhere; something writes to a tensor; the numbers would be others than
        ``docs/numerics.md`` allows, unless ``exact=False``.

    Parameters
    ----------
    options : AlgebraOptions
        Device, bounds, which rules, and the list that receives what was rewritten.
    """

    options: AlgebraOptions = field(default_factory=AlgebraOptions)

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        options = self.options
        target = options.target or Target.current(allow_none=True) or host_target()
        search = _Search(options, Price(device_of(target), options.bounds))
        for _ in range(MOST_SWEEPS):
            chosen = {hash(f.found.root): f for f in search.firings(mod)}
            if not chosen:
                break
            roots = {f"relax.{f.rule.pattern.op}" for f in chosen.values()}
            rewrite = Rewriting(chosen)
            mod = canonicalise(mod, dict.fromkeys(roots, rewrite.rewritten))
        return mod


class _Search:
    """Looks for places where a rule pays."""

    def __init__(self, options: AlgebraOptions, price: Price):
        self.options, self.price = options, price
        self.products = MOST_PRODUCTS
        self.checked: dict[tuple[str, ...], str] = {}
        self.by_operator: dict[str, list[Rule]] = {}
        for rule in RULES:
            if rule.numbers != INEXACT or not options.exact:
                self.by_operator.setdefault(f"relax.{rule.pattern.op}", []).append(rule)

    def firings(self, mod: ir.IRModule) -> list[Firing]:
        """Return the rules to apply, no two of which meet; those that save most come first."""
        functions = {
            gvar.name_hint: func
            for gvar, func in functions_of(mod, relax.Function).items()
            if not belongs_to_a_library(func)
        }
        read = Counter(c for func in functions.values() for c in _constants_read(func))
        taken: list[Firing] = []
        for name, func in functions.items():
            memory = memory_of(name, func, mod)
            found: list[Firing] = []
            for block in func.body.blocks:
                if isinstance(block, relax.DataflowBlock):
                    view = BlockView(block, mod, self.options.bounds, memory)
                    found += self._in_block(view, read)
            found.sort(key=lambda f: -float(f"{f.saved_s:.6g}"))  # prices differ by roundings
            taken += self._apart(name, found)
        return taken

    def _in_block(self, view: BlockView, read: Counter[Identity]) -> Iterator[Firing]:
        for binding in view.bindings:
            rules = self.by_operator.get(operator_of(binding.value), ())
            if binding.var in view.casts or not rules or shape_of(binding.var) is None:
                continue
            for rule in rules:
                if dtype_of(binding.var) in rule.dtypes:
                    ways = found_at(view, rule.pattern, binding.var, rule.numbers == INEXACT)
                    fits = (found for found in ways if _may(view, rule, found, read))
                    some = [(self._saved(view, rule, f), f) for f in islice(fits, MOST_WAYS)]
                    saved, found = max(some, key=lambda one: one[0], default=(0.0, None))
                    if found is not None and saved > 0:
                        yield Firing(rule, found, saved)

    def _saved(self, view: BlockView, rule: Rule, found: Found) -> float:
        """Return the seconds that a rule saves at the largest sizes; 0 where it does not pay."""
        builder, come = relax.BlockBuilder(), list[tuple[relax.Var, relax.Expr]]()

        def emit(term: Term, value: relax.Expr) -> relax.Expr:
            var = relax.DataflowVar("made", value.ty)
            come.extend([] if term.is_constant else [(var, value)])
            return var

        whole = made(found.whole(rule.result, rule.pattern.op), found, builder, emit)
        if whole is None or not same_result(whole, found.root):
            return 0.0
        gone = [(v, view.defs[v]) for v in _unread(view, found) if constant_of(view, v) is None]
        names = [v for v in found.names.values() if isinstance(v, relax.Var) and v in view.index]
        given = {hash(v): view.defs[v] for v in names if _is_inside(view, v)}
        given = {key: call for key, call in given.items() if is_call(call, *CARRIED)}
        parts = (
            self.price.of(part, _is_inside(view, found.root), given) for part in (gone[::-1], come)
        )
        before, after = parts
        saved = [b - a for b, a in zip(before, after, strict=True)]
        least = [_LEAST_PART * b for b in before]
        if any(s < -x for s, x in zip(saved, least, strict=True)):
            return 0.0
        return saved[1] if any(s > x for s, x in zip(saved, least, strict=True)) else 0.0

    def _apart(self, function: str, found: list[Firing]) -> list[Firing]:
        """Leave what meets another that saves more, and what is refused; tell of the others."""
        taken: list[Firing] = []
        seen: set[Identity] = set()
        for firing in found:
            places = {hash(v) for v in (firing.found.root, *firing.found.inside)}
            if seen & places or firing.products > self.products or len(taken) == MOST_FIRINGS:
                continue
            told = self._validation(firing, function)
            if told is None or None in firing.constants.values():
                continue
            seen |= places
            self.products -= firing.products
            taken.append(firing)
            if self.options.rewrites is not None:
                root, rule = firing.found.root.name, firing.rule
                record = Rewrite(function, root, str(rule), rule.numbers, firing.saved_s, told)
                self.options.rewrites.append(record)
        return taken

    def _validation(self, firing: Firing, function: str) -> str | None:
        """Say whether a rule was checked at its place; None where it is wrong."""
        if not self.options.validate:
            return ""
        names = [f"{n}: {e.ty}" for n, e in sorted(firing.found.names.items())]
        key = (str(firing.rule), *names)
        if key not in self.checked:
            try:
                found = comparison(firing.rule, firing.found).difference()
                self.checked[key] = "checked" if found is None else f"wrong: {found}"
            except Uninterpreted as err:
                self.checked[key] = f"not checked: {err} is not interpreted"
        told = self.checked[key]
        if told.startswith("wrong") and self.options.validate == "strict":
            where = f"{firing.rule} at {firing.found.root.name} in {function}"
            raise EquivalenceError(f"{where} would compute something else: {told}")
        return None if told.startswith("wrong") else told


def _constants_read(func: relax.Function) -> Iterator[Identity]:
    """Yield the constants of a function, as often as bindings read them."""
    for block in func.body.blocks:
        for binding in items_of(block.bindings):
            args = binding.value.args if isinstance(binding.value, relax.Call) else ()
            fields = (f for a in args for f in (a.fields if isinstance(a, relax.Tuple) else (a,)))
            yield from (hash(a) for a in fields if isinstance(a, GenericConst))


def _may(view: BlockView, rule: Rule, found: Found, read: Counter[Identity]) -> bool:
    """Tell whether a rule may be applied, whatever it saves."""
    tensors = [found.root, *found.inside, *found.names.values()]
    if not all(map(view.memory.is_constant, tensors)):
        return False
    if any(shape_of(t) is None for t in tensors):
        return False
    if not rule.is_mixed and any(dtype_of(t) != found.dtype for t in tensors):
        return False
    for name, expr in found.names.items():
        if name.isupper() and not _is_alone(view, expr, read):
            return False
    return rule.when(found)


def _is_alone(view: BlockView, expr: relax.Expr, read: Counter[Identity]) -> bool:
    """Tell whether a constant is read once, in one layout."""
    value = view.definition(expr)
    if isinstance(value, GenericConst):
        return read[hash(value)] <= 1
    return view.only_user(expr) is not None and _is_alone(view, value.args[0], read)


def _is_inside(view: BlockView, var: relax.Var) -> bool:
    """Tell whether only element-wise operators read a tensor, which then is in no memory."""
    readers = view.uses(var)
    is_read = not view.escapes(var) and bool(readers)
    return is_read and all(operator_of(view.defs[v]) in ELEMENTWISE for v in readers)


def _unread(view: BlockView, found: Found) -> list[relax.Var]:
    """Return the bindings of a formula that nothing else reads, the last first."""
    gone = [found.root]
    for var in sorted(found.inside, key=view.index.__getitem__, reverse=True):
        if not view.escapes(var) and all(u in gone for u in view.uses(var)):
            gone.append(var)
    return list(dict.fromkeys(gone))
