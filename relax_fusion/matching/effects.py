"""What bindings do to memory: what each reads, writes, and shares with other variables.

TVM's types tell pure calls from impure ones, and in-place calls pass for pure.  Whoever moves the
reading of a tensor, or makes one tensor a view of another, asks `Memory` first.

Two parameters of a function are taken for two tensors, as who calls in-place code has to see to.
A PrimFunc behind ``R.call_tir``, or a function behind ``R.call_dps_packed``, writes its outputs
only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from tvm import ir, relax

from ..tvm_ir import GenericConst
from .bindings import Identity, items_of
from .operators import VIEWS

Places: TypeAlias = frozenset[int]
"""Pieces of memory, numbered within one `Memory`."""

Storage: TypeAlias = Places | tuple["Storage", ...]
"""Where a value may lie: a tensor in one of several places, a tuple in those of its fields."""

NOWHERE: Places = frozenset()
HIDDEN: Places = frozenset({0})
"""All state out of sight: who changes it, as packed functions may, keeps its turn."""

MAY_BE_VIEWS = frozenset(VIEWS) | {
    f"relax.{name}"
    for name in (
        *("builtin.stop_lift_params", "dist.annotate_sharding", "dist.redistribute"),
        *("dist.redistribute_replica_to_shard", "hint_on_device", "make_closure"),
        *("memory.alloc_tensor", "memory.ensure_zero_offset", "memory.view", "nn.batch_flatten"),
        *("to_vdevice", "vm.alloc_tensor", "wrap_param"),
    )
}
"""Operators whose results may be views of their arguments."""

IN_PLACE = frozenset({"relax.call_tir_inplace", "relax.call_inplace_packed"})
PACKED = frozenset({"relax.call_pure_packed", "relax.call_py_func", "relax.invoke_pure_closure"})
"""Calls that promise to write nothing, and may return what they are given."""

ONLY_READ = frozenset({"relax.assert_op", "relax.call_dps_packed", "relax.print"})
"""Calls of the world outside that neither write nor return what they are given."""


class Effects(NamedTuple):
    """What evaluating a binding does to memory."""

    touched: Places = NOWHERE
    """Places that it reads, fills or changes.  To name a tensor once more touches none."""
    written: Places = NOWHERE
    """Those that it may change."""


@dataclass(frozen=True)
class _Summary:
    """Which parameters a Relax function writes, and which it may return."""

    written: tuple[bool, ...]
    returned: tuple[bool, ...]
    hidden: bool


class Memory:
    """Where the values of a function lie, and which bindings write there.

    A call that it does not know writes everything that it is handed, and may return it.

    `scope`: what to look at.  A block alone does not tell which of its inputs are the same tensor.
    `mod`: the module, to look into the Relax functions that are called.
    `effects`: what the binding of each variable does, in the order of evaluation, branches
    included.
    `values`: what is bound to each variable, in the same order.
    `given`, `constants`, `returned`, `written`: the places of parameters, of constants, of the
    result, and of all that is changed in sight.
    `looked_elsewhere`: whether the function calls others of the module.
    """

    def __init__(
        self,
        scope: relax.Function | relax.BindingBlock,
        mod: ir.IRModule | None = None,
        _callees: dict[ir.GlobalVar, _Summary | None] | None = None,
    ):
        self.effects: dict[relax.Var, Effects] = {}
        self.values: dict[relax.Var, relax.Expr] = {}
        self.given, self.constants, self.returned = NOWHERE, NOWHERE, NOWHERE
        self._mod, self.looked_elsewhere = mod, False
        self._callees = {} if _callees is None else _callees
        self._numbers = itertools.count(1)
        self._kept: list[object] = [scope]  # identities are those of what is alive
        self._storage: dict[Identity, Storage] = {}
        self._order: dict[Identity, int] = {}
        self._sources: dict[Identity, list[Identity]] = {}
        self._last: dict[Identity, int] = {}
        if isinstance(scope, relax.Function):
            self.given = _union(self.of(p) for p in scope.params)
            storage, _ = self._sequence(scope.body)
            self.returned = _flat(storage)
            self._use(map(hash, reads_of(scope.body)))
        else:
            self._block(scope)
        self._writers = [
            (self._order[hash(v)], e.written) for v, e in self.effects.items() if e.written - HIDDEN
        ]
        self.written = _union(places for _, places in self._writers) - HIDDEN

    def of(self, expr: relax.Expr) -> Places:
        """Return every place where `expr`, or a field of it, may lie."""
        return _flat(self._at(expr))

    def is_constant(self, expr: relax.Expr) -> bool:
        """Tell whether nothing writes the memory of `expr`."""
        return self.of(expr).isdisjoint(self.written)

    def is_exposed(self, expr: relax.Expr) -> bool:
        """Tell whether the memory of `expr` is overwritten, or given to the caller."""
        return not self.of(expr).isdisjoint(self.written | self.returned)

    def changes(self, expr: relax.Expr, since: relax.Var, until: relax.Var) -> bool:
        """Tell whether `expr` may change between the bindings of two variables."""
        first, last = self._order[hash(since)], self._order[hash(until)] - 1
        return self._changes(self.of(expr), first, last)

    def changes_in_use(self, var: relax.Var, since: relax.Var) -> bool:
        """Tell whether what `var` holds may change from behind the binding of `since` on.

        What happens behind the last use of `var`, under any of its names, does not count.
        """
        start = self._order[hash(since)]
        return self._changes(self.of(var), start, self._last.get(hash(var), start))

    def _changes(self, places: Places, after: int, last: int) -> bool:
        return any(
            after < at <= last and not places.isdisjoint(written) for at, written in self._writers
        )

    # --- evaluation --------------------------------------------------------------------------

    def _sequence(self, body: relax.Expr) -> tuple[Storage, Effects]:
        """Evaluate the body of a function or a branch."""
        before = len(self.effects)
        for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
            self._block(block)
        inside = itertools.islice(self.effects.values(), before, None)
        return self._at(body.body if isinstance(body, relax.SeqExpr) else body), _both(*inside)

    def _block(self, block: relax.BindingBlock) -> None:
        for binding in items_of(block.bindings):
            var, value = binding.var, binding.value
            storage, (touched, written) = self._evaluate(value, var.ty)
            key, places, reads = hash(var), _flat(storage), reads_of(value)
            self._storage[key] = storage
            if isinstance(value, relax.Call):
                touched |= places
            self._use(map(hash, reads))
            self._order[key] = len(self._order)
            self._sources[key] = [hash(v) for v in reads if not self.of(v).isdisjoint(places)]
            self.effects[var], self.values[var] = Effects(touched, written), value

    def _use(self, variables: Iterable[Identity]) -> None:
        """Note that variables, and all that they may be other names of, are used here."""
        here, stack = len(self._order), list(variables)
        while stack:
            key = stack.pop()
            if self._last.get(key) != here:
                self._last[key] = here
                stack += self._sources.get(key, ())

    def _evaluate(self, value: relax.Expr, ty: ir.Type) -> tuple[Storage, Effects]:
        """Return where a value lies, and what it takes to make it."""
        if isinstance(value, relax.Call):
            return self._call(value, ty)
        if isinstance(value, relax.If):
            condition = Effects(touched=self.of(value.cond))
            (yes, in_yes), (no, in_no) = map(
                self._sequence, (value.true_branch, value.false_branch)
            )
            return _either(yes, no), _both(condition, in_yes, in_no)
        if isinstance(value, relax.SeqExpr):
            return self._sequence(value)
        if isinstance(value, relax.Function):
            return _union(map(self.of, free_vars(value))), Effects()
        if isinstance(value, relax.Var | relax.Tuple | relax.TupleGetItem):
            return self._at(value), Effects()
        return self._new(ty), Effects()

    def _call(self, call: relax.Call, ty: ir.Type) -> tuple[Storage, Effects]:
        op, args = call.op, items_of(call.args)
        handed = _union(map(self.of, args))
        if isinstance(op, ir.GlobalVar) and (callee := self._callee(op)) is not None:
            written, returned = (
                _union(self.of(a) for a, yes in zip(args, flags, strict=True) if yes)
                for flags in (callee.written, callee.returned)
            )
            written |= HIDDEN if callee.hidden else NOWHERE
            return self._new(ty, returned), Effects(handed | written, written)
        name = op.name if isinstance(op, ir.Op) else ""
        if name in IN_PLACE:
            return self._in_place(call, ty, handed)
        if name in PACKED:
            return self._new(ty, handed), Effects(handed | HIDDEN, HIDDEN)
        if name in ONLY_READ:
            return self._new(ty), Effects(handed | HIDDEN, HIDDEN)
        if name in MAY_BE_VIEWS:
            return self._new(ty, handed), Effects(handed)
        if name and _is_pure(name):
            return self._new(ty), Effects(handed)
        handed |= self.of(op)
        return self._new(ty, handed), Effects(handed | HIDDEN, handed | HIDDEN)

    def _in_place(self, call: relax.Call, ty: ir.Type, handed: Places) -> tuple[Storage, Effects]:
        """Evaluate a call whose output i is argument j where ``inplace_indices[i]`` is j >= 0."""
        packed = call.op.name == "relax.call_inplace_packed"
        args = call.args[1:] if packed else call.args[1].fields
        indices = [int(i) for i in call.attrs.inplace_indices]
        types = ty.fields if isinstance(ty, ir.TupleType) and len(indices) > 1 else [ty]
        outs = tuple(
            self._at(args[i]) if i >= 0 else self._new(t)
            for i, t in zip(indices, types, strict=True)
        )
        written = _union(self.of(args[i]) for i in indices if i >= 0)
        written |= HIDDEN if packed else NOWHERE
        return outs if len(outs) > 1 else outs[0], Effects(handed | written, written)

    def _callee(self, gvar: ir.GlobalVar) -> _Summary | None:
        """Return what a function of the module does, None if that is not known."""
        self.looked_elsewhere = True
        func = self._mod.functions.get(gvar) if self._mod is not None else None
        if isinstance(func, relax.Function) and gvar not in self._callees:
            self._callees[gvar] = None  # nothing is known of it inside of itself
            inside = Memory(func, self._mod, self._callees)
            places = [inside.of(p) for p in func.params]
            self._callees[gvar] = _Summary(
                tuple(not p.isdisjoint(inside.written) for p in places),
                tuple(not p.isdisjoint(inside.returned) for p in places),
                any(e.written & HIDDEN for e in inside.effects.values()),
            )
        return self._callees.get(gvar)

    def _at(self, expr: relax.Expr) -> Storage:
        known = self._storage.get(hash(expr))
        if known is not None:
            return known
        if isinstance(expr, relax.Var | GenericConst):
            self._kept.append(expr)
            made = self._storage[hash(expr)] = self._new(expr.ty)
            if isinstance(expr, GenericConst):
                self.constants |= _flat(made)
            return made
        if isinstance(expr, relax.Tuple):
            return tuple(map(self._at, items_of(expr.fields)))
        if isinstance(expr, relax.TupleGetItem):
            whole = self._at(expr.tuple_value)
            return whole[int(expr.index)] if isinstance(whole, tuple) else whole
        return NOWHERE

    def _new(self, ty: ir.Type, shared: Places = NOWHERE) -> Storage:
        """Return places of their own for the tensors in a value, which may lie in `shared` too."""
        if isinstance(ty, ir.TupleType):
            return tuple(self._new(t, shared) for t in items_of(ty.fields))
        if isinstance(ty, relax.ShapeType | ir.PrimType):
            return NOWHERE
        return shared | {next(self._numbers)}


def free_vars(expr: relax.Expr) -> list[relax.Var]:
    """Return the Relax variables read by a bound value, but not those inside a nested function."""
    if isinstance(expr, relax.Var):
        return [expr]
    return items_of(relax.analysis.free_vars(expr))


def reads_of(value: relax.Expr) -> list[relax.Var]:
    """Return the variables that a bound value reads, the results of branches among them."""
    found = free_vars(value)
    if isinstance(value, relax.SeqExpr):
        found += free_vars(value.body)
    elif isinstance(value, relax.If):
        found += [v for b in (value.true_branch, value.false_branch) for v in reads_of(b)]
    return found


@lru_cache
def _is_pure(operator: str) -> bool:
    return bool(ir.Op.get(operator).get_attr("FPurity"))


def _flat(storage: Storage) -> Places:
    return storage if isinstance(storage, frozenset) else _union(map(_flat, storage))


def _union(places: Iterable[Places]) -> Places:
    return NOWHERE.union(*places)


def _both(*effects: Effects) -> Effects:
    return Effects(_union(e.touched for e in effects), _union(e.written for e in effects))


def _either(one: Storage, other: Storage) -> Storage:
    """Return where a value lies that is one of two."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_either, one, other))
    return _flat(one) | _flat(other)
