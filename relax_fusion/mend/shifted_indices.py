"""Indices that run backwards or begin elsewhere, and are divided: TVM loses where they begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tvm import ir, tirx

from ..matching.expressions import found_in, is_number, variables_of
from ..transforms.modules import functions_of, module_pass, with_functions
from ..tvm_ir import Analyzer, ConstIntBound, SBlock, SBlockRealize, TensorLoad, structural_map

DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)
KNOWN = (*DIVISIONS, tirx.Div, tirx.Mod, tirx.Add, tirx.Sub, tirx.Mul)


@module_pass
class DivideShiftedIndices:
    """Round towards zero where an index is divided that is no sum of loops: the result is the same.

    rewrite: ``x[(15 - i) % 8] for i in 16`` -> ``x[T.truncmod(15 - i, 8)] for i in 16``

    TVM simplifies places in memory, and what it schedules, by ``IterMapSimplify``.  That divides by
    negative steps (``(7 - i) % 8`` becomes ``-(i % -8)``), and lets all divisions of a loop begin
    where one of them does (``((i + 12) % 24 + 13) % 24`` becomes ``(i + 13) % 24``).  An index with
    a division that it does not know stays as it is.

    CompactBufferRegion does the same to axes of blocks between which there is a buffer, and ends in
    an error where TVM cannot prove that a size divides three times that size, as n * n + 2.

    declines when:
        what is divided is a sum of loops, each times a size, of which nothing is lost.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such an index stays the same object."""
        functions = functions_of(mod, tirx.PrimFunc).items()
        return with_functions(mod, {gvar: _Indices(func).function() for gvar, func in functions})


class _Indices:
    """The indices of one function, and between what numbers its loops are."""

    def __init__(self, func: tirx.PrimFunc):
        self.func = func
        loops = [(loop.loop_var, loop.min, loop.extent) for loop in found_in(func.body, tirx.For)]
        blocks = found_in(func.body, SBlock)
        axes = [axis for block in blocks for axis in block.iter_vars]
        self.own = {buffer for block in blocks for buffer in block.alloc_buffers}
        self.ranges = {var: ir.Range.from_min_extent(*dom) for var, *dom in loops}
        self.ranges |= {axis.var: axis.dom for axis in axes}
        self._analyzer: Analyzer | None = None

    def function(self) -> tirx.PrimFunc:
        """Return the function with other divisions."""
        if not any(found_in(self.func.body, kind) for kind in DIVISIONS):
            return self.func
        places = [
            (TensorLoad, self._load),
            (tirx.BufferStore, self._store),
            (ir.Range, self._range),
            (SBlockRealize, self._realize),
        ]
        body = structural_map(self.func.body, places, order="post")
        return self.func if body.same_as(self.func.body) else self.func.with_body(body)

    def _index(self, index: tirx.Expr) -> tirx.Expr:
        return structural_map(index, (DIVISIONS, self._divided), order="post")

    def _load(self, load: TensorLoad) -> TensorLoad:
        indices = [*map(self._index, load.indices)]
        return load if _same(indices, load.indices) else tirx.BufferLoad(load.source, indices)

    def _store(self, store: tirx.BufferStore) -> tirx.BufferStore:
        indices = [*map(self._index, store.indices)]
        same = _same(indices, store.indices)
        return store if same else tirx.BufferStore(store.buffer, store.value, indices)

    def _realize(self, realize: SBlockRealize) -> SBlockRealize:
        """Return a block whose axes are bound to other divisions, if it has a buffer in between."""
        block = realize.block
        if not any(region.source in self.own for region in (*block.reads, *block.writes)):
            return realize  # there, TVM finds again the loop that was divided
        divided = partial(self._divided, whole=True)
        values = [
            structural_map(v, (DIVISIONS, divided), order="post") for v in realize.iter_values
        ]
        same = _same(values, realize.iter_values)
        return realize if same else SBlockRealize(values, realize.predicate, block)

    def _range(self, range_: ir.Range) -> ir.Range:
        """Return a part of a tensor that a block reads or writes."""
        first = self._index(range_.min)
        same = first.same_as(range_.min)
        return range_ if same else ir.Range.from_min_extent(first, range_.extent)

    def _divided(self, division: tirx.FloorDiv | tirx.FloorMod, whole: bool = False) -> tirx.Expr:
        """Return a division that rounds towards zero, and what makes it the same as the other.

        `whole`: what divides has to be a size, too.
        """
        a, b = division.a, division.b
        if (
            self._is_sum(division if whole else a)
            or not _is_known(a)
            or not variables_of(a) & self.ranges.keys()
        ):
            return division
        zero = tirx.const(0, str(a.ty.dtype))
        rest, is_rest = tirx.truncmod(a, b), isinstance(division, tirx.FloorMod)
        made = rest if is_rest else tirx.truncdiv(a, b)
        if self._is_positive(b) and self._is_positive(a):
            return made
        exact = rest >= zero
        if not self._is_positive(b):
            signs = (tirx.all(rest < zero, b < zero), tirx.all(rest > zero, b > zero))
            exact = tirx.any(tirx.EQ(rest, zero), *signs)
        return tirx.Select(exact, made, made + b if is_rest else made - 1)

    def _is_sum(self, dividend: tirx.Expr) -> bool:
        """Tell whether an expression is a sum of loops, which sizes multiply and divide."""
        if isinstance(dividend, tirx.Add):
            return self._is_sum(dividend.a) and self._is_sum(dividend.b)
        if isinstance(dividend, (*DIVISIONS, tirx.Mul)):
            return self._is_sum(dividend.a) and self._is_size(dividend.b)
        return is_number(dividend, 0) or dividend in self.ranges

    def _is_size(self, factor: tirx.Expr) -> bool:
        if isinstance(factor, tirx.Mul):
            return self._is_size(factor.a) and self._is_size(factor.b)
        if isinstance(factor, tirx.IntImm):
            return int(factor) > 0
        if variables_of(factor) & self.ranges.keys():
            return False
        if isinstance(factor, tirx.Var):
            return True
        rest = tirx.floormod(factor * 3, factor)  # TVM proves it of n + 1, not of n * n + 1
        return bool(Analyzer().can_prove_equal(rest, 0))

    def _is_positive(self, value: tirx.Expr) -> bool:
        """Tell whether a number is proved not to be negative."""
        if self._analyzer is None:
            self._analyzer = Analyzer()
            for var, dom in self.ranges.items():
                self._analyzer.bind(var, dom)
            for size in variables_of([p.ty for p in self.func.params]):
                self._analyzer.update(size, ConstIntBound(0, ConstIntBound.POS_INF))
        return bool(self._analyzer.can_prove(value >= tirx.const(0, str(value.ty.dtype))))


def _same(made: Sequence[tirx.Expr], before: Sequence[tirx.Expr]) -> bool:
    return all(a.same_as(b) for a, b in zip(made, before, strict=True))


def _is_known(value: tirx.Expr) -> bool:
    """Tell whether ``IterMapSimplify`` knows an expression, or what TVM may make of it."""
    if isinstance(value, KNOWN):
        return _is_known(value.a) and _is_known(value.b)
    return isinstance(value, tirx.Var | tirx.IntImm | TensorLoad)
