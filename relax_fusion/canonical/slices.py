"""Canonical movements: slices of rows in front of what computes each row apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import ir, relax

from ..matching.bindings import Identity, items_of
from ..matching.effects import Memory, reads_of
from ..matching.known_effects import memory_of
from ..matching.operators import named
from ..matching.pattern import belongs_to_a_library, is_call, operator_of
from ..transforms.modules import functions_of, module_pass
from ..tvm_ir import Analyzer, structural_equal
from .rewriter import ITEM, sizes_of
from .rows import POSITIONAL, PRODUCTS, RULES, Part, operands_of, part_of, rebuilt

_ENDS = (*PRODUCTS, "relax.nn.rms_norm", "relax.nn.layer_norm")
"""Nothing of these is between the scores of attention and its values."""


@module_pass
class MoveSlices:
    """Compute only the rows that are read: move a slice in front of operators that keep rows apart.

    rewrite::

        a = R.nn.attention(q, k, v, causal_mask="BottomRight")    # all rows of the last layer
        x = R.add(r, R.matmul(R.reshape(a, [b, s, n]), w))
        y = R.strided_slice(x, [1], [s - 1], [s])                 # of which the head reads one
            ->
        a = R.nn.attention(q[:, s - 1:], k, v, causal_mask="BottomRight")
        y = R.add(r[:, s - 1:], R.matmul(R.reshape(a, [b, 1, n]), w))

    So are the first rows, which encoders pool, and rows by number, as ``R.take(x, i, axis=1)``.
    Nothing is computed twice but masks of positions, which each kernel makes for itself: a value
    whose other rows are read by anything else stays whole, and the slice behind it.  A slice moves
    only if a matmul or attention has fewer rows by it.

    declines when:
        a value is a result of the function; an operator mixes rows, or is no operator of Relax; a
        shape is not known; something writes to a tensor that is read; there may be more rows by
        number than there are; in front of causal attention, unless the rows are the last; in front
        of an all-reduce, unless its shape says which rows, so that all workers take the same.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        builder, changed = relax.BlockBuilder(mod), False
        for gvar, func in functions_of(mod, relax.Function).items():
            if belongs_to_a_library(func):
                continue
            builder.begin_scope(func.params)
            while (new := _moved(gvar, func, builder, mod)) is not None:
                func, changed = new, True
                builder.update_func(gvar, func)
            builder.end_scope()
        return relax.transform.Normalize()(builder.get()) if changed else mod


def _moved(
    gvar: ir.GlobalVar, func: relax.Function, builder: relax.BlockBuilder, mod: ir.IRModule
) -> relax.Function | None:
    """Return a function with one slice moved, None if there is none to move."""
    memory, sizes = memory_of(gvar.name_hint, func, mod), sizes_of(func)
    blocks = items_of(func.body.blocks)
    for n, block in enumerate(blocks):
        if isinstance(block, relax.DataflowBlock):
            bindings = _Block(items_of(block.bindings), memory, builder).moved(sizes)
            if bindings is not None:
                blocks[n] = relax.DataflowBlock(bindings)
                body = relax.SeqExpr(blocks, func.body.body)
                return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return None


@dataclass(frozen=True)
class _Cut:
    """Along which axis rows of a value are computed alone, and of which axes of operands.

    Others read all rows of what is computed `again`.
    """

    axis: int
    axes: Mapping[int, int]
    again: bool = False


class _Block:
    """A dataflow block, and who reads what in it."""

    def __init__(
        self, bindings: Sequence[relax.Binding], memory: Memory, builder: relax.BlockBuilder
    ):
        self.bindings, self.memory, self.builder = bindings, memory, builder
        self.place = {hash(b.var): n for n, b in enumerate(bindings)}
        self.readers: dict[Identity, set[int]] = defaultdict(set)
        for n, binding in enumerate(bindings):
            for var in reads_of(binding.value):
                self.readers[hash(var)].add(n)

    def moved(self, sizes: Analyzer) -> list[relax.Binding] | None:
        """Return the bindings with one slice moved, None if there is none to move."""
        for at, binding in enumerate(self.bindings):
            part = part_of(binding, sizes)
            cuts = self._whole_cuts(at, part) if part is not None else {}
            if part is not None and any(is_call(self.bindings[n].value, *PRODUCTS) for n in cuts):
                kept = [
                    b for n, b in enumerate(self.bindings[:at]) if n not in cuts or cuts[n].again
                ]
                return [*kept, *self._computed(at, part, cuts), *self.bindings[at + 1 :]]
        return None

    def _whole_cuts(self, at: int, part: Part) -> dict[int, _Cut]:
        """Return cuts that leave no attention with scores of all rows, and values of some."""
        halves: set[int] = set()
        while True:
            cuts = self._cuts(at, part, halves)
            more = {n for n in cuts if self._halves(n, cuts)}
            if not more:
                return cuts
            halves |= more

    def _halves(self, n: int, cuts: Mapping[int, _Cut]) -> bool:
        """Tell whether a matmul of what a softmax makes is cut, and one in front of that is not."""
        value, seen = self.bindings[n].value, set[int]()
        left = [self._at(operands_of(value)[0])] if is_call(value, "relax.matmul") else []
        while left:
            at = left.pop()
            if at >= 0 and at not in seen:
                seen.add(at)
                before = self.bindings[at].value
                left += [] if is_call(before, *_ENDS) else map(self._at, reads_of(before))
        products = (at for at in seen if is_call(self.bindings[at].value, *PRODUCTS))
        softmax = any(is_call(self.bindings[at].value, *named("softmax")) for at in seen)
        return softmax and not all(at in cuts for at in products)

    def _at(self, expr: relax.Expr) -> int:
        """Return the number of the binding of a variable, -1 if it is not in the block."""
        return self.place.get(hash(expr), -1)

    def _cuts(self, at: int, part: Part, halves: set[int]) -> dict[int, _Cut]:
        """Return what is to be computed of these rows alone, by the number of its binding.

        Those of `halves` are left.
        """
        found: dict[int, _Cut] = {}
        wanted: dict[int, set[int | None]] = defaultdict(set)
        wanted[self._at(part.source)] = {part.axis}
        while (n := max(wanted)) >= 0:  # behind it are all of its readers
            binding, axes = self.bindings[n], wanted.pop(n)
            wanted[-1].clear()
            readers, cut = self.readers[hash(binding.var)], None
            if n not in halves and len(axes) == 1:
                cut = self._cut(binding, axes.pop(), part)
            if not readers <= {at, *(n for n, other in found.items() if not other.again)}:
                again = cut is not None and self._is_of_positions(n, cut, part)
                cut = replace(cut, again=True) if cut is not None and again else None
            if cut is not None:
                found[n] = cut
                for i, operand in enumerate(operands_of(binding.value)):
                    wanted[self._at(operand)].add(cut.axes.get(i))
            elif is_call(binding.value, "relax.split"):  # its parts are not cut alone
                found = {n: kept for n, kept in found.items() if n not in readers}
        return found

    def _cut(self, binding: relax.Binding, axis: int | None, part: Part) -> _Cut | None:
        """Return of which rows of operands those of a value are made, None if of others too."""
        var, value = binding.var, binding.value
        is_plain = isinstance(var, relax.DataflowVar) and isinstance(binding, relax.VarBinding)
        is_item = isinstance(value, relax.TupleGetItem)
        rule = RULES.get(ITEM if is_item else operator_of(value))
        if axis is None or not is_plain or rule is None:
            return None
        if is_item:
            split = self._at(value.tuple_value)
            if split < 0 or not is_call(self.bindings[split].value, "relax.split"):
                return None
        read = [v for operand in operands_of(value) for v in reads_of(operand)]
        if not all(map(self.memory.is_constant, (var, *read))):
            return None
        axes = rule(value, axis, part)
        return None if axes is None else _Cut(axis, axes)

    def _is_of_positions(self, n: int, cut: _Cut, part: Part) -> bool:
        """Tell whether rows differ by their numbers alone, as those of masks do."""
        value = self.bindings[n].value
        if not is_call(value, *POSITIONAL):
            return False
        for i, axis in cut.axes.items():
            at = self._at(operands_of(value)[i])
            before = self._cut(self.bindings[at], axis, part) if at >= 0 else None
            if before is None or not self._is_of_positions(at, before, part):
                return False
        return True

    def _computed(self, at: int, part: Part, cuts: Mapping[int, _Cut]) -> list[relax.Binding]:
        """Return what is computed in the place of the slice."""
        made: list[relax.Binding] = []
        names: dict[tuple[Identity, int | None], relax.Var] = {}

        def bind(key: tuple[Identity, int], name: str, value: relax.Expr) -> relax.Var:
            value, var = self.builder.normalize(value), self.bindings[at].var
            if key[0] != hash(part.source):
                var = relax.DataflowVar(name, value.ty)
            same = structural_equal(var.ty, value.ty)
            binding = relax.VarBinding(var, value) if same else relax.MatchCast(var, value, var.ty)
            made.append(binding)
            names[key] = var
            return var

        def rows(operand: relax.Expr, axis: int | None) -> relax.Expr:
            key = (hash(operand), axis)
            if axis is None or key in names:
                return names.get(key, operand)
            return bind((hash(operand), axis), "rows", part.of(operand, axis))

        for n, cut in sorted(cuts.items()):
            var, value = self.bindings[n].var, self.bindings[n].value
            operands = [rows(v, cut.axes.get(i)) for i, v in enumerate(operands_of(value))]
            bind((hash(var), cut.axis), var.name, rebuilt(value, operands, cut.axis, part))
        return made
