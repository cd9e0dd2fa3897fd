"""In-place calls, kept where they stand by passes that take them for pure."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from tvm import ir, relax

from ..matching.bindings import items_of
from ..matching.effects import HIDDEN, Memory, free_vars, reads_of
from ..matching.expressions import substitute
from ..matching.known_effects import memory_of
from ..matching.pattern import is_call
from ..transforms.modules import OPAQUE, functions_of, kept, module_pass, with_functions

FORCE_PURE = "relax.force_pure"


@module_pass
class SeparateWrites:
    """End a dataflow block where a write would be passed by a reader, or removed.

    rewrite::

        with R.dataflow():                      with R.dataflow():
            a = R.exp(x)                            a = R.exp(x)
            y = R.call_tir_inplace(f, (x,))  ->     R.output(a)
            z = R.add(a, y)                     y = R.call_tir_inplace(f, (x,))
            R.output(z)                         with R.dataflow():
                                                    z = R.add(a, y)
                                                    R.output(z)

    TVM takes in-place calls for pure.  So FuseOps would compute `a` where `z` is, from what `x`
    holds then; and where nothing reads `y`, the call would be removed, though `x` is read.  There
    it is followed by ``R.call_packed("vm.builtin.copy", y)``, which does nothing.  PrimFuncs that
    are called in place become opaque, or FuseOps would make one with others that has outputs only.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with its blocks cut; `mod` itself where nothing is to be done."""
        updated: dict[ir.GlobalVar, ir.BaseFunc] = {}
        for gvar, func in functions_of(mod, relax.Function).items():
            memory = memory_of(gvar.name_hint, func, mod)
            if not memory.written:
                continue
            updated |= {g: mod[g].with_attr("op_pattern", OPAQUE) for g in _in_place(memory)}
            updated[gvar] = _Separator(func, memory).function()
        return relax.transform.Normalize()(with_functions(mod, updated)) if updated else mod


def _in_place(memory: Memory) -> set[ir.GlobalVar]:
    """Return the PrimFuncs that a function calls in place."""
    calls = [v for v in memory.values.values() if is_call(v, "relax.call_tir_inplace")]
    return {call.args[0] for call in calls}


class _Separator:
    """Cuts the blocks of one function."""

    def __init__(self, func: relax.Function, memory: Memory):
        self.func, self.memory = func, memory
        self.unread = _unread_writes(func, memory)

    def function(self) -> relax.Function:
        """Return the function with its blocks cut, itself if none is."""
        func = self.func
        body = self._sequence(func.body)
        if body.same_as(func.body):
            return func
        new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        return new.with_attr(FORCE_PURE, True) if self.unread and func.is_pure else new

    def _sequence(self, body: relax.Expr) -> relax.Expr:
        if not isinstance(body, relax.SeqExpr):
            return body
        blocks: list[relax.BindingBlock] = []
        for block in body.blocks:
            if isinstance(block, relax.DataflowBlock):
                blocks += self._cut(block)
            else:
                blocks.append(self._plain(block))
        if len(blocks) == len(body.blocks) and all(map(relax.Expr.same_as, blocks, body.blocks)):
            return body
        return relax.SeqExpr(blocks, body.body)

    def _plain(self, block: relax.BindingBlock) -> relax.BindingBlock:
        """Keep unread writes, and look into branches."""
        bindings: list[relax.Binding] = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                branches = [self._sequence(b) for b in (value.true_branch, value.false_branch)]
                binding = relax.VarBinding(binding.var, relax.If(value.cond, *branches))
            bindings.append(binding)
            if binding.var in self.unread:
                bindings.append(kept(binding.var))
        return relax.BindingBlock(bindings)

    def _cut(self, block: relax.DataflowBlock) -> list[relax.BindingBlock]:
        """Return a dataflow block in pieces; in between, the writes that nothing may pass."""
        pieces: list[list[relax.Binding]] = [[]]
        bindings = items_of(block.bindings)
        for i, binding in enumerate(bindings):
            if binding.var in self.unread or self._passed(pieces[-1], bindings[i:]):
                pieces += [[binding], []]
            else:
                pieces[-1].append(binding)
        if len(pieces) == 1:
            return [block]
        return list(_blocks(pieces, self.unread))

    def _passed(self, before: Sequence[relax.Binding], rest: Sequence[relax.Binding]) -> bool:
        """Tell whether what is computed of memory in front of its writer is read behind that."""
        writer, *after = rest
        written = self.memory.effects[writer.var].written - HIDDEN
        if not written:
            return False
        stale: set[relax.Var] = set()
        for binding in before:
            touched = self.memory.effects[binding.var].touched
            if not touched.isdisjoint(written) or not stale.isdisjoint(free_vars(binding.value)):
                stale.add(binding.var)
        return any(not stale.isdisjoint(free_vars(b.value)) for b in after)


def _unread_writes(func: relax.Function, memory: Memory) -> set[relax.Var]:
    """Return the writes in sight that TVM would remove, as no result needs theirs."""
    needed, unread = set(reads_of(func.body)), set()
    for var, value in reversed(memory.values.items()):
        pure = not relax.analysis.contains_impure_call(value)
        if pure and var not in needed:
            if not memory.effects[var].written - HIDDEN:
                continue
            unread.add(var)
        needed.update(reads_of(value))
    return unread


def _blocks(
    pieces: Sequence[Sequence[relax.Binding]], unread: Container[relax.Var]
) -> Iterator[relax.BindingBlock]:
    """Make blocks of pieces, of which every other one is a write that stands alone."""
    piece_of = {b.var: i for i, piece in enumerate(pieces) for b in piece}
    outside = {b.var for piece in pieces[1::2] for b in piece}
    for i, piece in enumerate(pieces):
        outside.update(v for b in piece for v in free_vars(b.value) if piece_of.get(v, i) != i)
    names = {v: relax.Var(v.name, v.ty) for v in outside if isinstance(v, relax.DataflowVar)}

    def renamed(binding: relax.Binding) -> relax.Binding:
        var = names.get(binding.var, binding.var)
        value = substitute(binding.value, names)
        if isinstance(binding, relax.MatchCast):
            return relax.MatchCast(var, value, binding.ty)
        return relax.VarBinding(var, value)

    for i, piece in enumerate(pieces):
        bindings = [renamed(b) for b in piece]
        if i % 2:
            copies = [
                kept(b.var) for b, old in zip(bindings, piece, strict=True) if old.var in unread
            ]
            yield relax.BindingBlock([*bindings, *copies])
        elif bindings:
            yield relax.DataflowBlock(bindings)
