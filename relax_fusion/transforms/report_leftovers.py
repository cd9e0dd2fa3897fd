"""ReportLeftovers: what no kernel of ours computes, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile

from tvm import ir, relax, tirx

from ..matching.effects import Memory
from ..matching.movements import Moved, Run, moves
from ..matching.neighbours import GIVEN, Neighbours
from ..matching.operations import KINDS, Operation, root_of, way_back
from ..matching.pattern import BlockView, belongs_to_a_library, calls_in, is_call
from ..matching.shapes import shape_of
from ..report.coverage import IS_OFF, Leftover
from ..report.decision import Decision
from .modules import functions_of, module_pass

_ASKED = {
    "matmul": ("FuseAttentionChain", "FuseMatmulEpilogue", "FuseRMSNormMatmul"),
    "norm": ("FuseRMSNormMatmul", "FuseGatedFFN"),
    "softmax": ("FuseAttentionChain",),
    "attention": ("FuseAttentionChain",),
    "rope": ("FuseRMSNormMatmul", "FuseMatmulEpilogue"),
    "norm and rope": ("FuseRMSNormMatmul", "FuseProjections", "FuseMatmulEpilogue"),
    "activation": ("FuseGatedFFN", "FuseMatmulEpilogue"),
    "convolution": ("FuseMatmulEpilogue",),
    "routing": ("RouteExperts",),
}
"""The passes that look at an operation, whose refusal says most first."""

_PAIRING = ("split", "strided_slice")
"""These operators cut heads into the parts that a rotation pairs."""

_OF_PROJECTIONS = ("relax.exp",)
"""These operators are an activation, or a part of one, only behind a projection."""


@module_pass
class ReportLeftovers:
    """Record the operations of transformers that are left behind the patterns, each by its kind.

    The module stays as it is.  What nothing reads is not recorded.
    """

    leftovers: list[Leftover]  # gets one for each operation
    decisions: Sequence[Decision] = ()  # what the fusing passes decided
    disabled: Collection[str] = ()  # names of passes that did not run

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
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
    for call in calls_in(func, *KINDS):
        yield Leftover(name, name, KINDS[call.op.name], f"it belongs to a library, {library}")


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
        self.around = Neighbours(view, {d.kernel: d for d in decisions if d.kernel})
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
            "norm and rope": self._norm_and_rope,
            "activation": self._activation,
            "convolution": self._convolution,
            "routing": self._routing,
        }
        for found in self.around.found:
            reason, chain = why[found.kind](found)
            part = is_call(self.view.defs[found.var], *_OF_PROJECTIONS)
            if not reason or (part and not chain):
                continue
            refusal = self._refusal(found)
            if in_branch:
                reason = "it stands in a branch of a condition, which no pass looks into"
            elif refusal is not None:
                apart = f"{reason}; " if found.kind == "norm and rope" else ""
                reason = f"{apart}{refusal.pattern}: {refusal.decline}"
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
            spelling = value.op.name.removeprefix("relax.") if is_call(value, *KINDS) else ""
            return f"it is written as {spelling or 'a function of TIR'}", "projection"
        left, right = (shape_of(arg) for arg in value.args)
        if left is None or right is None:
            return "the shape of an operand is not known", "projection"
        if len(left) < 2 or len(right) < 2:
            return "an operand is a vector", ""
        if len(right) == 2:
            return "no pass took it for a projection", "projection"
        for arg, shape in zip(value.args, (left, right), strict=True):
            if self.around.is_looked_up(arg):
                off = f"; FuseExperts{IS_OFF}" if "FuseExperts" in self.disabled else ""
                matrices = f"its weight is a batch of matrices, {_sizes(shape)}, looked up"
                return f"{matrices}{off}", "projection"
        made, sizes = self.around.maker(value.args[1]), _sizes(right)
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
        readers = self.around.readers(found.var)
        if any(self.around.projects(reader, found.var) for reader, _ in readers):
            return "a projection multiplies it, whose kernel takes no softmax along", ""
        by = self.around.read_by(readers)
        return f"its result is not multiplied by values: it is {by}", ""

    def _rope(self, found: Operation) -> tuple[str, str]:
        """Say what is rotated, what both products of the sum are made of, and why it was left."""
        ends = (
            self.view.call(v, "relax.add", "relax.subtract") for v in (found.var, *found.covers)
        )
        total = next((call for call in ends if call is not None), None)
        first, second = map(self.around.sources, total.args) if total is not None else ([], [])
        both = [a for a in first if any(a.same_as(b) for b in second)]
        if not both:
            return "it turns a parameter", "rope"
        rotated = next((a for a in both if self.around.is_projection(a)), both[0])
        product = self.view.call(total.args[0], "relax.multiply") if total is not None else None
        ways = [(a, *root_of(self.view, a)) for a in product.args] if product is not None else []
        of_it = ((a, steps) for a, root, steps in ways if root.same_as(rotated))
        source, steps = next(of_it, (None, list[str]()))
        if self.around.kinds.get(rotated) == "norm" and "FuseNormRotation" in self.disabled:
            return f"FuseNormRotation{IS_OFF}", "rope"
        what = f"it turns what {self.around.maker(rotated)} made{_behind(steps)}"
        return what + self._why_not_rotated(rotated, source), "rope"

    def _norm_and_rope(self, found: Operation) -> tuple[str, str]:
        """Say of whose result a kernel of ours normalises and rotates the heads."""
        made = self.around.maker(self.view.defs[found.var].args[1].fields[0])
        return f"one kernel normalises and rotates the heads of what {made} made", "rope"

    def _why_not_rotated(self, made: relax.Expr, source: relax.Expr | None) -> str:
        """Say why neither the kernel that `made` a tensor nor one of a norm rotates `source`."""
        if self.around.kinds.get(made) == "norm":
            return "; FuseNormRotation does not read the two as one"
        if not self.around.is_projection(made):
            return ", which is no projection"
        if not self.around.kernel(self.view.definition(made)):
            return ", which is in no kernel of ours"
        if source is None:
            return "; arithmetic stands between"
        followed: set[relax.Var] = set()
        for var in (made, *self.view.uses(made)):
            *rows, last = shape_of(var) or [None]
            if isinstance(last, tirx.IntImm):
                whole = Moved(var, (*range(len(rows)), (Run(int(last), 1),)))
                followed |= {moved.var for moved in moves(self.view, whole)}
        beyond = takewhile(lambda at: at[0] not in followed, way_back(self.view, source))
        steps = [step for _, step in beyond if step and step not in _PAIRING]
        if not steps:
            return "; its kernel has no rotation of such pairs"
        return f"; its kernel does not follow {steps[-1]}"

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
        return f"{name} of what {self._makers(sources)} made", chain

    def _convolution(self, found: Operation) -> tuple[str, str]:
        value = self.view.defs[found.var]
        weight, groups = shape_of(value.args[1]), int(value.attrs.groups)
        sizes = "of unknown sizes" if weight is None else _sizes(weight)
        return f"it is no matmul: {self.around.name(value)}, weights {sizes}, groups {groups}", ""

    def _routing(self, found: Operation) -> tuple[str, str]:
        """Say of what the largest are chosen; nothing where they are results, as of sampling."""
        readers = self.around.readers(found.var)
        sources = self.around.sources(self.view.defs[found.var].args[0])
        if not sources or not readers:
            return "", ""
        return (
            f"it chooses of what {self._makers(sources)} made, {self.around.read_by(readers)}",
            "routing",
        )

    def _makers(self, sources: Sequence[relax.Expr]) -> str:
        return ", ".join(sorted(set(map(self.around.maker, sources))))


def _sizes(shape: Sequence[tirx.Expr]) -> str:
    return "x".join(str(d.value if isinstance(d, tirx.IntImm) else d) for d in shape)


def _asked(kind: str, chain: str) -> Sequence[str]:
    """Return the passes that would have taken an operation that is part of a chain."""
    if kind == "matmul":
        return ("FuseMatmulEpilogue",) if chain else ("FuseAttentionChain",)
    return _ASKED[kind]


def _behind(steps: Sequence[str]) -> str:
    return f" behind {', '.join(dict.fromkeys(steps))}" if steps else ""
