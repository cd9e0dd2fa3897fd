"""Matching: a view of a dataflow block, the guards that every pattern shares, and a match.

Patterns here are small functions over a def-use view, not TVM's pattern language: one walk finds
the longest legal chain, where `FuseOpsByPattern` needs a pattern per combination of optional steps
and cannot say why it refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeGuard

from tvm import ir, relax

from ..errors import Decline, Reason
from ..tvm_ir import GenericConst, structural_walk
from ..workload import Operand, Workload, in_order
from .bindings import Identity, binders, items_of
from .effects import Memory, free_vars

PrimExpr: TypeAlias = ir.Expr
Shape: TypeAlias = Sequence[PrimExpr | int]


@dataclass(frozen=True)
class KernelArg:
    """One input of a fused kernel."""

    expr: relax.Expr
    """The tensor (or primitive value) in the caller."""
    shape: tuple[PrimExpr | int, ...] | None = None
    """The shape in which the kernel takes it; the caller reshapes where its own differs.  None: the
    graph's, where that is static, else its own."""


@dataclass(frozen=True)
class KernelOut:
    """One output of a fused kernel: the variable that it replaces and the kernel's shape of it."""

    var: relax.Var
    shape: tuple[PrimExpr | int, ...]
    dtype: str


@dataclass(frozen=True)
class Match:
    """A chain that was proved to compute a workload."""

    spelling: str
    """In which of its spellings the chain was found."""
    covers: tuple[relax.Var, ...]
    """The bindings that the kernel computes; they disappear."""
    args: tuple[KernelArg, ...]
    """Inputs, in the order of the workload's graph."""
    outs: tuple[KernelOut, ...]
    """Outputs, in the order of the workload's graph."""
    workload: Workload
    """What the kernel computes."""
    after: tuple[tuple[relax.Var, relax.Expr], ...] = ()
    """Bindings of some of `covers` that follow the kernel: movements of its results."""
    declined: tuple[tuple[str, Decline], ...] = ()
    """Steps next to the chain that its kernel leaves alone: where they are, and why."""

    @staticmethod
    def of(
        spelling: str,
        covers: tuple[relax.Var, ...],
        named: tuple[Mapping[str, KernelArg], Mapping[str, KernelOut]],
        workload: Workload,
        after: tuple[tuple[relax.Var, relax.Expr], ...] = (),
        declined: tuple[tuple[str, Decline], ...] = (),
    ) -> Match:
        """Return a match of inputs and outputs by the names that the workload's graph has.

        Inputs without a shape are taken in the one that the graph has, where that is static.
        """
        args, outs = named
        graph = workload.graph
        given = in_order(graph.inputs, args)
        inputs = tuple(map(_shaped, given, graph.inputs))
        outputs = in_order(graph.outputs, outs)
        return Match(spelling, covers, inputs, outputs, workload, after, declined)

    @property
    def where(self) -> str:
        """The names of the variables that the kernel defines, for reports."""
        return ", ".join(out.var.name for out in self.outs)


class Definitions(Protocol):
    """What a matcher asks that only looks backwards, from a value to what it is made of."""

    defs: dict[relax.Var, relax.Expr]

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Return the value bound to `expr`, or `expr` itself."""

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call of one of `ops` that defines `expr`, or None."""


def _shaped(arg: KernelArg, operand: Operand) -> KernelArg:
    shape = operand.shape or ()
    sizes = tuple(d for d in shape if isinstance(d, int))
    return KernelArg(arg.expr, arg.shape or sizes) if sizes == operand.shape else arg


class Refused(Exception):
    """Raised by a guard inside a matcher; the pass turns it into a recorded `Decline`."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(detail)
        self.decline = Decline(reason, detail)


def guard(condition: bool, reason: Reason, detail: str) -> None:
    """Refuse the chain at hand unless `condition` holds."""
    if not condition:
        raise Refused(reason, detail)


class BlockView:
    """Def-use chains of one dataflow block, and the bindings that kernels have taken already.

    `mod`: its module, to look at the PrimFuncs that it calls.
    `bounds`: largest values of symbolic variables, by name.
    `memory`: what its function does to memory; by default what the block does.
    """

    def __init__(
        self,
        block: relax.DataflowBlock,
        mod: ir.IRModule,
        bounds: Mapping[str, int] | None = None,
        memory: Memory | None = None,
    ):
        self.mod = mod
        self.bounds = bounds or {}
        self.memory = memory or Memory(block, mod)
        self.bindings = items_of(block.bindings)
        self.defs = {b.var: b.value for b in self.bindings}
        self.index = {var: i for i, var in enumerate(self.defs)}
        self.reads = {var: free_vars(value) for var, value in self.defs.items()}
        self.binders = binders(self.bindings)
        self._users: dict[Identity, list[relax.Var]] = {}
        for var, reads in self.reads.items():
            for read in reads:
                self._users.setdefault(hash(read), []).append(var)
        # A plain block is only looked at: what it could fuse is declined as impure.
        self.is_dataflow = isinstance(block, relax.DataflowBlock)
        outputs = self.defs if self.is_dataflow else ()
        self.is_output = {v for v in outputs if not isinstance(v, relax.DataflowVar)}
        self.casts = {b.var for b in self.bindings if isinstance(b, relax.MatchCast)}
        self._bound = {hash(v): value for v, value in self.defs.items() if v not in self.casts}
        self._calls: dict[Identity, tuple[relax.Expr, str]] = {}
        self.taken: dict[relax.Var, Match] = {}
        self.spans: list[tuple[int, int]] = []

    def take(self, match: Match) -> None:
        """Give the bindings of a match to its kernel."""
        self.taken.update(dict.fromkeys(match.covers, match))
        places = [self.index[v] for v in match.covers]
        self.spans.append((min(places), max(places)))

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """Return the value bound to `expr` in this block, following aliases that keep its type.

        A constant that is overwritten has no value: `expr` is what holds it.
        """
        return self._defined(expr)[0]

    def call(self, expr: relax.Expr, *ops: str) -> relax.Call | None:
        """Return the call of one of `ops` that defines `expr`, or None."""
        value, operator = self._defined(expr)
        return value if operator in ops else None

    def _defined(self, expr: relax.Expr) -> tuple[relax.Expr, str]:
        """Return the value bound to `expr`, and the operator that it calls; "" if it calls none."""
        key = hash(expr)
        known = self._calls.get(key)
        if known is not None:
            return known
        held = value = expr
        while (inner := self._bound.get(hash(value))) is not None:
            held, value = value, inner
        if isinstance(value, GenericConst) and not self.memory.is_constant(held):
            value = expr
        found = value, operator_of(value)
        if key in self._bound:  # this object stays alive
            self._calls[key] = found
        return found

    def uses(self, var: relax.Var) -> list[relax.Var]:
        """Return the bindings of this block that read `var`."""
        return self._users.get(hash(var), [])

    def needs(self, var: relax.Var) -> list[relax.Var]:
        """Return what the binding of `var` reads, and the match_casts that bind its sizes."""
        return [*self.reads[var], *self.binders.get(hash(var), ())]

    def escapes(self, var: relax.Var) -> bool:
        """Tell whether `var` is read outside this block."""
        return var in self.is_output

    def only_user(self, var: relax.Var) -> relax.Var | None:
        """Return the one binding that reads `var`, or None if there is not exactly one."""
        users = self.uses(var)
        return users[0] if len(users) == 1 and not self.escapes(var) else None

    def depends_on(self, expr: relax.Expr, targets: set[relax.Var]) -> bool:
        """Tell whether `expr` is computed, within this block, from any of `targets`.

        A kernel needs all its inputs for each of its outputs, whatever the bindings that it took.
        """
        first = self._first_that_can_read(targets)
        stack = list(free_vars(expr))
        seen: set[relax.Var] = set()
        while stack:
            var = stack.pop()
            if var in targets:
                return True
            if var not in seen and self.index.get(var, -1) >= first:
                together = self.taken[var].covers if var in self.taken else (var,)
                seen.update(together)
                stack.extend(read for v in together for read in self.needs(v))
        return False

    def _first_that_can_read(self, targets: set[relax.Var]) -> int:
        """Return an index before which no binding is computed from any of `targets`."""
        first = min((self.index[t] for t in targets if t in self.index), default=len(self.index))
        while True:
            # An early binding of a kernel waits for what the kernel's late bindings read.
            earlier = [start for start, end in self.spans if start < first <= end]
            if not earlier:
                return first
            first = min(earlier)


def operator_of(expr: relax.Expr | None) -> str:
    """Return the name of the operator that `expr` calls; "" if it calls none."""
    if not isinstance(expr, relax.Call):
        return ""
    op = expr.op
    name = _OPERATORS.get(hash(op))
    if name is None:
        if not isinstance(op, ir.Op):
            return ""
        name = _OPERATORS[hash(op)] = str(op.name)
    return name


_OPERATORS: dict[Identity, str] = {}  # they live as long as the process


def is_call(expr: relax.Expr | None, *ops: str) -> TypeGuard[relax.Call]:
    """Tell whether `expr` is a call of one of the operators named `ops`."""
    return operator_of(expr) in ops


def calls_kernel(expr: relax.Expr | None) -> TypeGuard[relax.Call]:
    """Tell whether `expr` is a call of a PrimFunc."""
    return is_call(expr, "relax.call_tir", "relax.call_tir_inplace")


def calls_in(expr: relax.Expr, *ops: str) -> list[relax.Call]:
    """Return the calls of the operators named `ops` in an expression or a function."""
    found: list[relax.Call] = []
    structural_walk(expr, (relax.Call, found.append))
    return [call for call in found if is_call(call, *ops)]


def belongs_to_a_library(func: relax.Function) -> bool:
    """Tell whether an earlier pass cut `func` out for an external code generator or one kernel."""
    attrs = func.attrs or {}
    return any(name in attrs for name in ("Codegen", "Composite", "Primitive"))


def check_inner(view: BlockView, covers: Sequence[relax.Var], outs: set[relax.Var]) -> None:
    """Refuse a chain of which something inside is needed outside."""
    inside = set(covers)
    for var in covers:
        if var in outs:
            continue
        name = var.name
        guard(not view.escapes(var), Reason.LEAKED, f"{name} is a result of the function")
        others = [u.name for u in view.uses(var) if u not in inside]
        guard(not others, Reason.MULTI_USE, f"{name} is also read by {', '.join(others)}")
