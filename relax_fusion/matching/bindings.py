"""Bindings of TVM: their variables as keys, their arrays, and the sizes that a match_cast binds.

Two Python objects may stand for one of TVM's, so ``is`` does not tell, and a dictionary that is
keyed by variables calls ``==`` of TVM at each look-up: a third of the time of matching, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import tvm_ffi
from tvm import ir, relax

from .expressions import found_in

Identity: TypeAlias = int
"""``hash`` of a variable or another expression: its address.

No two that are alive have the same.  Whoever keeps one keeps the object alive, too.
"""

_Item = TypeVar("_Item")
_item: Any = tvm_ffi.get_global_func("ffi.ArrayGetItem")


def items_of(array: Sequence[_Item]) -> list[_Item]:
    """Return what an array of TVM holds; iterating over it asks for its length at each item."""
    return [_item(array, i) for i in range(len(array))]


def bound_sizes(bindings: Sequence[relax.Binding]) -> set[Identity]:
    """Return the sizes that match_casts among bindings in a valid order bind.

    A match_cast checks those that are named in front of it.
    """
    found: set[Identity] = set()
    named: set[Identity] = set()
    if any(isinstance(b, relax.MatchCast) for b in bindings):
        for binding in bindings:
            if isinstance(binding, relax.MatchCast):
                named.update(_names(binding.value))
                found.update(s for s in _definable(binding) if s not in named)
            named.update(_names(binding))
    return found


def binders(bindings: Sequence[relax.Binding]) -> dict[Identity, list[relax.Var]]:
    """Return, by variable, the match_casts of a block that bind the sizes its binding needs."""
    bound = bound_sizes(bindings)
    makers: dict[Identity, relax.Var] = {}
    for binding in bindings if bound else ():
        if isinstance(binding, relax.MatchCast):
            for size in _definable(binding):
                makers.setdefault(size, binding.var)
    needed: dict[Identity, list[relax.Var]] = {}
    for binding in bindings if bound else ():
        names = (_names(binding) & makers.keys()) & bound
        found = {hash(makers[size]): makers[size] for size in names}
        found.pop(hash(binding.var), None)
        if found:
            needed[hash(binding.var)] = list(found.values())
    return needed


def _definable(cast: relax.MatchCast) -> list[Identity]:
    return [hash(size) for size in relax.analysis.definable_tir_vars_in_type(cast.ty)]


def _names(node: relax.Binding | relax.Expr) -> set[Identity]:
    """Return the variables that a binding or a value names, those in types among them."""
    return {hash(var) for var in found_in(node, ir.Var)}
