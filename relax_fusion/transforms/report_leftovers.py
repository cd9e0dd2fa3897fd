"""ReportLeftovers: what no kernel of ours computes, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax, tirx

from ..matching.effects import Memory
from ..matching.operations import OPERATORS, Operation, root_of
from ..matching.pattern import BlockView, belongs_to_a_library, calls_in, is_call
from ..matching.shapes import shape_of
from ..matching.surroundings import GIVEN, Surroundings
from ..report.coverage import IS_OFF, Leftover
from ..report.decision import Decision
from .modules import functions_of

_ASKED = {
    "matmul": ("FuseAttentionChain", "FuseMatmulEpilogue", "FuseRMSNormMatmul"),
    "norm": ("FuseRMSNormMatmul", "FuseGatedFFN"),
    "softmax": ("FuseAttentionChain",),
    "attention": ("FuseAttentionChain",),
    "rope": ("FuseRMSNormMatmul", "FuseMatmulEpilogue"),
    "activation": ("FuseGatedFFN", "FuseMatmulEpilogue"),
}
"""The passes that look at an operation, whose refusal says most first."""

_OF_PROJECTIONS = ("relax.exp",)
"""What is an activation, or a part of one, only behind a projection."""


@tvm.transform.module_pass(opt_level=0, name="ReportLeftovers")
@dataclass(frozen=True)
class ReportLeftovers:
    """Record each matmul, norm, softmax, rotation and activation that is left behind the patterns.

    The module stays as it is.  What nothing reads is not recorded.

    Parameters
    ----------
    leftovers : list of Leftover
        Gets one for each operation.
    decisions : list of Decision
        What the fusing passes decided.
    disabled : collection of str
        Names of passes that did not run.
    """

    leftovers: list[Leftover]
    decisions: Sequence[Decision] = ()
    disabled: Collection[str] = ()

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Look at every function of `mod`, and return it."""
        alive = relax.transform.DeadCodeElimination()(mod)
        for gvar, func in functions_of(alive, relax.Function).items():
            name = gvar.name_hint
            if (func.attrs or {}).get("Primitive"):
                continue  # what FuseDequantize made: a kernel of ours
            if belongs_to_a_library(func):
                self.leftovers.extend(_of_a_library(name, func))
                continue
            made = [d for d in self.decisions if d.function == name]
            memory = Memory(func, alive)
            for block, in_branch in _blocks(func.body):
                looker = _Looker(BlockView(block, alive, None, memory), made, self.disabled)
                self.leftovers.extend(looker.leftovers(name, in_branch))
        return mod


def _of_a_library(name: str, func: relax.Function) -> Iterator[Leftover]:
    attrs = func.attrs or {}
    library = attrs.get("Codegen") or attrs.get("Composite")
    for call in calls_in(func, *OPERATORS):
        yield Leftover(name, name, OPERATORS[call.op.name], f"it belongs to a library, {library}")


def _blocks(body: relax.Expr, branch: bool = False) -> Iterator[tuple[relax.BindingBlock, bool]]:
    """Return the blocks of a body, and of branches in it, which no pass looks into."""
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        yield block, branch
        for binding in block.bindings:
            if isinstance(binding.value, relax.If):
                yield from _blocks(binding.value.true_branch, True)
                yield from _blocks(binding.value.false_branch, True)


class _Looker:
    """Looks at one block, and says what was left in it and why."""

    def __init__(self, view: BlockView, decisions: Sequence[Decision], disabled: Collection[str]):
        self.view, self.disabled = view, disabled
        self.around = Surroundings(view, {d.kernel: d for d in decisions if d.kernel})
        self.refusals: dict[str, dict[str, Decision]] = {}
        for decision in decisions:
            for name in () if decision.fused else (*decision.chain, *decision.where.split(", ")):
                self.refusals.setdefault(name, {})[decision.pattern] = decision

    def leftovers(self, function: str, in_branch: bool) -> Iterator[Leftover]:
        """Return one record for each operation."""
        why: Mapping[str, Callable[[Operation], tuple[str, str]]] = {
            "matmul": self._matmul,
            "norm": self._norm,
            "softmax": self._softmax,
            "attention": lambda _: ("the pass did not see it", "attention"),
            "rope": self._rope,
            "activation": self._activation,
        }
        for found in self.around.found:
            reason, chain = why[found.kind](found)
            if not chain and is_call(self.view.defs[found.var], *_OF_PROJECTIONS):
                continue
            refusal = self._refusal(found)
            if in_branch:
                reason = "it stands in a branch of a condition, which no pass looks into"
            elif refusal is not None:
                reason = f"{refusal.pattern}: {refusal.decline}"
            elif off := [name for name in _asked(found.kind, chain) if name in self.disabled]:
                reason = f"{off[0]}{IS_OFF}"
            yield Leftover(function, found.var.name, found.kind, reason, chain)

    def _refusal(self, found: Operation) -> Decision | None:
        """Return the refusal of a chain that the operation is in, by a pass that looks at it."""
        near = list(found.covers)
        if found.kind in ("matmul", "softmax"):
            near += self.around.attention_of(found)
        refusals = [self.refusals.get(var.name, {}) for var in reversed(near)]
        for pattern in _ASKED[found.kind]:
            for by_pattern in refusals:
                if pattern in by_pattern:
                    return by_pattern[pattern]
        return next((d for r in refusals for d in r.values()), None)

    def _matmul(self, found: Operation) -> tuple[str, str]:
        """Say what a matmul is that is no projection."""
        value = self.view.defs[found.var]
        attention = self.around.attention_of(found)
        if attention:
            around = next(v for v in attention if self.around.kinds.get(v) == "softmax")
            return f"it is part of the attention around {around.name}, which is left, too", ""
        if not is_call(value, "relax.matmul"):
            spelling = value.op.name.removeprefix("relax.") if is_call(value, *OPERATORS) else ""
            return f"it is written as {spelling or 'a function of TIR'}", "projection"
        left, right = (shape_of(arg) for arg in value.args)
        if left is None or right is None:
            return "the shape of an operand is not known", "projection"
        if len(left) < 2 or len(right) < 2:
            return "an operand is a vector", ""
        if len(right) == 2:
            return "no pass took it for a projection", "projection"
        made = self.around.maker(value.args[1])
        sizes = "x".join(str(d.value if isinstance(d, tirx.IntImm) else d) for d in right)
        if made in GIVEN:
            return f"its weight is a batch of matrices, {sizes}", "projection"
        return f"both operands are batches of matrices; the right one, {sizes}, is of {made}", ""

    def _norm(self, found: Operation) -> tuple[str, str]:
        """Say who reads a norm."""
        written = "it is written out as no pass reads it; " if found.written_out else ""
        readers = self.around.readers(found.var)
        for reader, between in readers:
            if self.around.projects(reader, found.var):
                how = f"the projection that reads it{_behind(between)} is in a kernel of its own"
                return written + how, "norm -> projection"
        return f"{written}no projection multiplies it: it is {self.around.read_by(readers)}", ""

    def _softmax(self, found: Operation) -> tuple[str, str]:
        if self.around.attention_of(found):
            return "its scores, or what reads it, are of no form that the pass knows", "attention"
        readers = self.around.read_by(self.around.readers(found.var))
        return f"its result is not multiplied by values: it is {readers}", ""

    def _rope(self, found: Operation) -> tuple[str, str]:
        """Say what is turned: what both products of the sum are made of."""
        ends = (
            self.view.call(v, "relax.add", "relax.subtract") for v in (found.var, *found.covers)
        )
        total = next((call for call in ends if call is not None), None)
        first, second = map(self.around.sources, total.args) if total is not None else ([], [])
        both = [a for a in first if any(a.same_as(b) for b in second)]
        if not both:
            return "it turns a parameter", "rope"
        turned = next((a for a in both if self.around.is_projection(a)), both[0])
        product = self.view.call(total.args[0], "relax.multiply") if total is not None else None
        ways = [root_of(self.view, a) for a in product.args] if product is not None else []
        steps = next((steps for root, steps in ways if root.same_as(turned)), [])
        return f"it turns what {self.around.maker(turned)} made{_behind(steps)}", "rope"

    def _activation(self, found: Operation) -> tuple[str, str]:
        value = self.view.defs[found.var]
        name = "activation" if found.written_out else self.around.name(value).removeprefix("nn.")
        inside = set(found.covers)
        read = {v for var in found.covers for v in self.view.reads[var] if v not in inside}
        sources = [root for v in read for root in self.around.sources(v)]
        if not sources:
            return f"{name} of parameters or constants", ""
        projected = any(map(self.around.is_projection, sources))
        chain = "projection -> activation" if projected else ""
        made = ", ".join(sorted(map(self.around.maker, sources)))
        return f"{name} of what {made} made", chain


def _asked(kind: str, chain: str) -> Sequence[str]:
    """Return the passes that would have taken an operation that is part of a chain."""
    if kind == "matmul":
        return ("FuseMatmulEpilogue",) if chain else ("FuseAttentionChain",)
    return _ASKED[kind]


def _behind(steps: Sequence[str]) -> str:
    return f" behind {', '.join(dict.fromkeys(steps))}" if steps else ""
