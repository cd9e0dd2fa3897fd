"""What stands around an operation in its block: who made what it reads, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from tvm import ir, relax

from ..report.decision import Decision
from ..workload import Attention
from .operations import MOVES, Operation, operations, root_of
from .pattern import BlockView, is_call

GIVEN = ("a parameter", "a constant")


class Surroundings:
    """The operations that are left in a block, and ways from one to another.

    Parameters
    ----------
    view : BlockView
        The block.
    kernels : mapping of str to Decision
        Kernels of ours by their names.

    Attributes
    ----------
    found : list of Operation
        The operations, in the order of their results.
    kinds : dict of relax.Var to str
        What each variable is part of.
    """

    def __init__(self, view: BlockView, kernels: Mapping[str, Decision]):
        self.view, self.kernels = view, kernels
        self.found = list(operations(view, lambda value: bool(self.kernel(value))))
        self.kinds = {v: f.kind for f in self.found for v in f.covers}

    def attention_of(self, found: Operation) -> list[relax.Var]:
        """Return what follows until values are multiplied, and the softmax in front, if any."""
        around: list[relax.Var] = []
        if found.kind == "matmul":
            around = self._until(found.var, ("softmax",), self.view.uses)
            back = self._until(found.var, ("softmax",), lambda v: self.view.reads.get(v, []))
            if not around:
                return back
        start = around[-1] if around else found.var
        behind = self._until(start, ("matmul",), self.view.uses)
        return [*around, *behind] if behind else []

    def _until(
        self,
        start: relax.Var,
        kinds: tuple[str, ...],
        following: Callable[[relax.Var], list[relax.Var]],
    ) -> list[relax.Var]:
        """Return the way from a variable to the next operation of a kind, past no matmul."""
        ways: list[list[relax.Var]] = [[start]]
        seen = {start}
        while ways:
            way = ways.pop(0)
            for var in following(way[-1]):
                if self.kinds.get(var) in kinds:
                    return [*way[1:], var]
                if var not in seen and self.kinds.get(var) != "matmul" and len(way) < 12:
                    seen.add(var)
                    if not self.kernel(self.view.defs.get(var)):
                        ways.append([*way, var])
        return []

    def readers(self, var: relax.Var) -> list[tuple[relax.Var, list[str]]]:
        """Return who reads a value, behind moves and casts, and the operators between."""
        readers, stack = [], [(var, list[str]())]
        while stack:
            current, between = stack.pop()
            for user in self.view.uses(current):
                value = self.view.defs[user]
                if is_call(value, *MOVES):
                    stack.append((user, [*between, value.op.name.removeprefix("relax.")]))
                elif isinstance(value, relax.Var | relax.TupleGetItem):
                    stack.append((user, between))
                else:
                    readers.append((user, between))
        return readers

    def read_by(self, readers: list[tuple[relax.Var, list[str]]]) -> str:
        named = ((user, self.view.defs[user]) for user, _ in readers)
        values = [(u, v) for u, v in named if not isinstance(v, relax.Tuple)]
        names = dict.fromkeys(self.kinds.get(u) or self.name(v) for u, v in values)
        return f"read by {', '.join(names)}" if names else "a result"

    def is_matmul(self, expr: relax.Expr) -> bool:
        """Tell whether a value is of a matmul, in a kernel of ours or left."""
        kernel = self.kernel(self.view.definition(expr))
        matmul = isinstance(expr, relax.Var) and self.kinds.get(expr) == "matmul"
        return matmul or kernel not in ("", "FuseAttentionChain")

    def projects(self, reader: relax.Var, var: relax.Var) -> bool:
        """Tell whether a matmul reads `var` as its rows, itself or in a kernel without a norm."""
        value = self.view.definition(reader)
        operands: Sequence[relax.Expr] = ()
        if self.kinds.get(reader) == "matmul" and is_call(value, "relax.matmul"):
            operands = value.args[:1]
        elif self.kernel(value):
            work = self.kernels[value.args[0].name_hint].workload
            plain = not isinstance(work, Attention) and getattr(work, "norm", None) is None
            operands = value.args[1].fields[:1] if plain else ()
        return any(root_of(self.view, expr)[0].same_as(var) for expr in operands)

    def kernel(self, value: relax.Expr | None) -> str:
        """Return the pass of ours whose kernel a value calls, "" if it does not."""
        made = self.kernels.get(value.args[0].name_hint) if _calls(value) else None
        return made.pattern if made is not None else ""

    def maker(self, expr: relax.Expr) -> str:
        """Return what made a value, behind moves and casts."""
        root = root_of(self.view, expr)[0]
        if isinstance(root, ir.GenericConst):
            return "a constant"
        if isinstance(root, relax.Var) and root not in self.view.defs:
            return "a parameter"
        return self.name(self.view.definition(root))

    def unbiased(self, expr: relax.Expr) -> relax.Expr:
        """Return what a value is of, behind moves, and steps with parameters and constants."""
        while True:
            root = root_of(self.view, expr)[0]
            call = self.view.call(root, *(f"relax.{n}" for n in ("add", "multiply", "divide")))
            computed = (
                [a for a in call.args if self.maker(a) not in GIVEN] if call is not None else []
            )
            if len(computed) != 1:
                return root
            expr = computed[0]

    def name(self, value: relax.Expr) -> str:
        if _calls(value):
            return self.kernel(value) or str(value.args[0].name_hint)
        if isinstance(value, relax.Call) and isinstance(value.op, ir.Op):
            return str(value.op.name.removeprefix("relax."))
        return "a call"


def _calls(value: relax.Expr | None) -> TypeGuard[relax.Call]:
    """Tell whether a value calls a PrimFunc."""
    return is_call(value, "relax.call_tir", "relax.call_tir_inplace")
