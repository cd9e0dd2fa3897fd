"""What stands around an operation in its block: who made what it reads, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import ir, relax

from ..report.decision import Decision
from ..tvm_ir import GenericConst
from ..workload import Attention
from .operations import LOOKUPS, MOVES, Operation, operations, root_of
from .operators import named
from .pattern import BlockView, calls_kernel, is_call
from .shapes import same_shape, shape_of

GIVEN = ("a parameter", "a constant")
"""What is made by nothing."""

_MOST_STEPS = 12
"""From scores to their softmax, or from that to values, so many bindings are followed."""

_COMBINED = (*named("arithmetic", "join"), "relax.negative", "relax.clip")


class Neighbours:
    """The operations that are left in a block, and ways from one to another.

    `kernels`: kernels of ours by their names.
    `found`: the operations, in the order of their results.
    `kinds`: what each variable is part of.
    """

    def __init__(self, view: BlockView, kernels: Mapping[str, Decision]):
        self.view, self.kernels = view, kernels
        self.found = list(operations(view, lambda value: bool(self.kernel(value))))
        self.kinds = {v: f.kind for f in self.found for v in f.covers}

    def attention_of(self, found: Operation) -> list[relax.Var]:
        """Return the softmax that reads a matmul, or that it reads, and what follows.

        Of a softmax: what follows, up to the matmul with values; nothing where none follows.
        """
        around = [found.var]
        value = self.view.defs[found.var]
        if found.kind == "matmul":
            around = self._until(found.var, "softmax", self.view.uses)
            scores = value.args[0] if is_call(value, "relax.matmul") else None
            if not around and isinstance(scores, relax.Var):
                back = self._until(scores, "softmax", lambda v: self.view.reads.get(v, []))
                return [scores] if self.kinds.get(scores) == "softmax" else back
        behind = self._until(around[-1], "matmul", self.view.uses) if around else []
        return [*around, *behind] if behind else []

    def _until(
        self, start: relax.Var, kind: str, following: Callable[[relax.Var], list[relax.Var]]
    ) -> list[relax.Var]:
        """Return the way from scores to the next operation of a kind, past no matmul.

        All on the way are as long, along the last axis, as the scores are.
        """
        ways, seen, scores = [[start]], {start}, shape_of(start)
        while ways:
            way = ways.pop(0)
            for var in following(way[-1]):
                if self.kinds.get(var) == kind:
                    return [*way[1:], var]
                value, shape = self.view.defs.get(var), shape_of(var)
                other = self.kinds.get(var) == "matmul" or value is None or self.kernel(value)
                alike = not scores or (shape and same_shape(shape[-1:], scores[-1:]))
                if var not in seen and not other and alike and len(way) < _MOST_STEPS:
                    seen.add(var)
                    ways.append([*way, var])
        return []

    def readers(self, var: relax.Var) -> list[tuple[relax.Var, list[str]]]:
        """Return who reads a value, behind moves and casts, and the operators between."""
        readers, stack = [], [(var, list[str]())]
        while stack:
            current, between = stack.pop()
            for user in self.view.uses(current):
                value = self.view.defs[user]
                looked_up = is_call(value, *LOOKUPS) and value.args[0].same_as(current)
                if is_call(value, *MOVES) or looked_up:
                    stack.append((user, [*between, value.op.name.removeprefix("relax.")]))
                elif isinstance(value, relax.Var | relax.TupleGetItem):
                    stack.append((user, between))
                else:
                    readers.append((user, between))
        return readers

    def read_by(self, readers: list[tuple[relax.Var, list[str]]]) -> str:
        """Return a predicate that names readers."""
        named = ((user, self.view.defs[user]) for user, _ in readers)
        values = [(u, v) for u, v in named if not isinstance(v, relax.Tuple)]
        names = dict.fromkeys(self.kinds.get(u) or self.name(v) for u, v in values)
        return f"read by {', '.join(names)}" if names else "a result"

    def is_projection(self, expr: relax.Expr) -> bool:
        """Tell whether a value is of a projection, in a kernel of ours or left."""
        if self.kernel(self.view.definition(expr)) not in ("", "FuseAttentionChain"):
            return True
        left = [f for f in self.found if f.kind == "matmul" and f.var.same_as(expr)]
        return any(not self.attention_of(f) for f in left)

    def projects(self, reader: relax.Var, var: relax.Var) -> bool:
        """Tell whether a matmul reads `var` as its rows, itself or in a kernel without a norm."""
        value = self.view.definition(reader)
        operands: Sequence[relax.Expr] = ()
        if self.kinds.get(reader) == "matmul" and is_call(value, "relax.matmul"):
            operands = value.args[1:] if self.is_looked_up(value.args[0]) else value.args[:1]
        elif self.kernel(value):
            work = self.kernels[value.args[0].name_hint].workload
            plain = not isinstance(work, Attention) and getattr(work, "norm", None) is None
            operands = value.args[1].fields[:1] if plain else ()
        return any(root_of(self.view, expr)[0].same_as(var) for expr in operands)

    def is_looked_up(self, expr: relax.Expr) -> bool:
        """Tell whether a value is looked up in a table that was given, as experts' weights are."""
        lookup = self.view.call(root_of(self.view, expr)[0], *LOOKUPS)
        return lookup is not None and self.maker(lookup.args[0]) in GIVEN

    def kernel(self, value: relax.Expr | None) -> str:
        """Return the pass of ours whose kernel a value calls, "" if it does not."""
        made = self.kernels.get(value.args[0].name_hint) if calls_kernel(value) else None
        return made.pattern if made is not None else ""

    def maker(self, expr: relax.Expr) -> str:
        """Return what made a value, behind moves and casts."""
        root = root_of(self.view, expr)[0]
        if isinstance(root, GenericConst):
            return "a constant"
        if isinstance(root, relax.Var) and root not in self.view.defs:
            return "a parameter"
        return self.name(self.view.definition(root))

    def sources(self, expr: relax.Expr) -> list[relax.Expr]:
        """Return what sums, products and moves made a value of, parameters and constants apart."""
        found: list[relax.Expr] = []
        stack = [expr]
        while stack:
            root = root_of(self.view, stack.pop())[0]
            call = self.view.call(root, *_COMBINED)
            if call is not None:
                joined = isinstance(call.args[0], relax.Tuple)
                args = call.args[:1] if is_call(call, "relax.clip") else call.args
                stack = [*stack, *(call.args[0].fields if joined else args)]
            elif self.maker(root) not in GIVEN and not any(root.same_as(f) for f in found):
                found.append(root)
        return found

    def name(self, value: relax.Expr) -> str:
        """Return what a reader calls the operator, or the kernel, that computes a value."""
        if calls_kernel(value):
            return self.kernel(value) or str(value.args[0].name_hint)
        if isinstance(value, relax.Call) and isinstance(value.op, ir.Op):
            return str(value.op.name.removeprefix("relax."))
        return "a call"
