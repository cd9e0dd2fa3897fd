"""FuseDequantize: matmuls and lookups read their weights packed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from tvm import ir, relax, s_tir, tirx

from ..matching.bindings import Identity
from ..matching.dequantized import Group, dequantized, group_of, tensors_of
from ..matching.effects import Memory, free_vars
from ..matching.expressions import loads_of
from ..matching.known_effects import memory_of
from ..matching.pattern import BlockView, belongs_to_a_library, is_call
from ..matching.shapes import shape_of
from ..matching.stages import Stage, read_stages
from ..tvm_ir import TensorLoad, structural_equal, structural_hash, structural_map
from .modules import OPAQUE, functions_of, is_narrow, module_pass

WEIGHTS_OF = {
    "relax.matmul": slice(1, None),
    "relax.einsum": slice(1, None),
    "relax.take": slice(1),
    "relax.strided_slice": slice(1),
}
"""The tensors of an operator that may be weights."""

OUT_ELEMENT_WISE = 4
"""TVM's OpPatternKind of a PrimFunc behind which FuseOps may put element-wise steps."""


@module_pass
class FuseDequantize:
    """Fuse the decoding of a weight with the matmul, or the lookup, that reads it.

    rewrite::

        w = R.call_tir(dequantize, (q, s))          # or operators: shifts, casts, scales ...
        y = R.matmul(x, R.permute_dims(w))
            ->
        y = R.call_tir(dequantize_matmul, (x, q, s))

        e = R.take(w, ids, axis=0)
            ->
        e = R.call_tir(dequantize_take, (ids, q, s))

    A slice that begins where only the run knows is a lookup, too.

    Each reader decodes by itself, so that the weight is not written to memory.  Numbers are the
    same: each step is rounded as before.  Element-wise steps behind are left to TVM's FuseOps.

    declines when:
        the weight is made of an activation, of more bytes than it has, or of tensors that are
        overwritten in place; it is the left operand; the reader is not in a dataflow block, or is
        a PrimFunc other than a sum of products or a lookup, such as one with a schedule; tensors
        live on different virtual devices, or have sizes that are computed by calls, as those of
        slices may be.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function; weights that are left without a reader are dropped."""
        return Fuser(mod, _decoding).module()


Steps = Callable[[BlockView, relax.Binding], tuple[relax.Var, ...]]
"""Returns the bindings that a reader does by itself; none if there are none."""


class Fuser:
    """Fuses readers with the steps behind what they read.

    `kernels`: those of the module so far, each with the group that it was made of.
    """

    def __init__(self, mod: ir.IRModule, steps: Steps, name: str = "") -> None:
        self.mod, self.steps, self.name = mod, steps, name
        self.builder = relax.BlockBuilder(mod)
        self.kernels: dict[int, list[tuple[relax.Function, ir.GlobalVar | None]]] = {}

    def module(self) -> ir.IRModule:
        """Return the module with every function rewritten."""
        updated: dict[ir.GlobalVar, relax.Function] = {}
        for gvar, func in functions_of(self.mod, relax.Function).items():
            new = None if belongs_to_a_library(func) else self.function(gvar.name_hint, func)
            if new is not None:
                updated[gvar] = new
        if not updated:
            return self.mod
        for gvar, func in updated.items():
            self.builder.update_func(gvar, func)
        return relax.transform.Normalize()(self.builder.get())

    def function(self, name: str, func: relax.Function) -> relax.Function | None:
        """Return a function whose readers do these steps; None if it has none of them."""
        blocks, memory = list(func.body.blocks), memory_of(name, func, self.mod)
        found = [self._block(block, memory) for block in blocks]
        if not any(found):
            return None
        blocks = [new or old for new, old in zip(found, blocks, strict=True)]
        body = relax.SeqExpr(blocks, func.body.body)
        return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)

    def _block(self, block: relax.BindingBlock, memory: Memory) -> relax.BindingBlock | None:
        if not isinstance(block, relax.DataflowBlock):
            return None
        view = BlockView(block, self.mod, memory=memory)
        steps = {b.var: self.steps(view, b) for b in view.bindings}
        bindings = [self._fused(view, b, steps[b.var]) or b for b in view.bindings]
        if all(new is old for new, old in zip(bindings, view.bindings, strict=True)):
            return None
        done = {step for mine in steps.values() for step in mine}
        return relax.DataflowBlock(_without_unread(bindings, done, view.binders))

    def _fused(
        self, view: BlockView, binding: relax.Binding, steps: tuple[relax.Var, ...]
    ) -> relax.Binding | None:
        """Return a call of the kernel that takes the place of a reader, None if it is none."""
        if not steps:
            return None
        group = group_of(view, binding.var, steps)
        if group is None or any(map(is_narrow, group.called.values())):
            return None
        kernel = self._kernel(group, self.name or _name(binding.value))
        if kernel is None:
            return None
        call = relax.op.call_tir(kernel, relax.Tuple([*group.args, *group.sizes]), binding.var.ty)
        return relax.VarBinding(binding.var, call)

    def _kernel(self, group: Group, name: str) -> ir.GlobalVar | None:
        """Return the PrimFunc of a group, the same one for equal groups."""
        key = structural_hash(group.func)
        known = self.kernels.setdefault(key, [])
        for func, gvar in known:
            if structural_equal(func, group.func):
                return gvar
        body = _lowered(group)
        gvar = None if body is None else self.builder.add_func(body, name)
        known.append((group.func, gvar))
        return gvar


def _decoding(view: BlockView, binding: relax.Binding) -> tuple[relax.Var, ...]:
    """Return what decodes the weights of a reader; none if it reads none that are decoded."""
    if shape_of(binding.var) is None or binding.var in view.casts:
        return ()
    weights = [found for w in _weights(view, binding.value) if (found := dequantized(view, w))]
    return tuple(dict.fromkeys(step for weight in weights for step in weight.steps))


def _without_unread(
    bindings: list[relax.Binding],
    steps: Collection[relax.Var],
    binders: Mapping[Identity, list[relax.Var]],
) -> list[relax.Binding]:
    """Drop those of `steps` that nothing reads any more, nor any size that they bind."""
    kept: list[relax.Binding] = []
    read: set[relax.Var] = set()
    for binding in reversed(bindings):
        var = binding.var
        if var in steps and var not in read and isinstance(var, relax.DataflowVar):
            continue
        read.update(free_vars(binding.value), binders.get(hash(var), ()))
        kept.append(binding)
    return kept[::-1]


def _weights(view: BlockView, value: relax.Expr) -> Iterator[relax.Expr]:
    """Yield what may be weights of a reader; nothing if it is no matmul, lookup or slice."""
    if is_call(value, *WEIGHTS_OF):
        if is_call(value, "relax.strided_slice") and not _begins_at_run_time(value):
            return
        yield from list(tensors_of(value))[WEIGHTS_OF[value.op.name]]
    elif is_call(value, "relax.call_tir"):
        func = view.mod[value.args[0]]
        stages = read_stages(func) if isinstance(func, tirx.PrimFunc) else None
        tensors = list(tensors_of(value))
        if stages is None or len(stages) != 1:
            return
        loads = loads_of(stages[0].value)
        looked_up = {load.source for load in loads if any(loads_of(i) for i in load.indices)}
        first = 1 if stages[0].reduced else 0
        for tensor, param in list(zip(tensors, func.params, strict=False))[first:]:
            if stages[0].reduced or param in looked_up:
                yield tensor


def _begins_at_run_time(call: relax.Call) -> bool:
    """Tell whether only the run knows where a slice begins; any other is left to TVM's FuseOps."""
    begin = call.args[2]
    fields = begin.fields if isinstance(begin, relax.Tuple) else ()
    return any(not isinstance(at, tirx.IntImm) for at in fields)


def _name(reader: relax.Call) -> str:
    is_tir = is_call(reader, "relax.call_tir")
    own = reader.args[0].name_hint if is_tir else reader.op.name.removeprefix("relax.")
    return f"dequantize_{own}"


def _lowered(group: Group) -> tirx.PrimFunc | None:
    """Return a group as one PrimFunc, None if TVM makes no plain loops of it."""
    func = group.lowered()
    stages = None if func is None else read_stages(func)
    try:
        return None if func is None or stages is None else _with_few_stages(func, stages)
    except s_tir.ScheduleError:  # nothing reads a stage
        return None


def _with_few_stages(func: tirx.PrimFunc, stages: list[Stage]) -> tirx.PrimFunc:
    """Put formulas in the place of stages, but for the factors of a sum: rules make tiles of them.

    A factor is taken before it is transposed.  A lookup has no stage left, lest a device without a
    rule that inlines should fill the table first.
    """
    sums = [stage for stage in stages if stage.reduced]
    by_buffer = {stage.buffer: stage for stage in stages}
    kept = {s for stage in sums for s in _factors(stage, by_buffer)}
    made = {stage.buffer for stage in stages}
    widened = (TensorLoad, lambda load: _at_wide_indices(load) if load.source in made else load)
    sch = s_tir.Schedule(func.with_body(structural_map(func.body, widened)))
    for stage in stages[:-1]:
        if not stage.reduced and stage.name not in kept:
            sch.compute_inline(sch.get_sblock(stage.name))
    return sch.mod["main"].with_attr("op_pattern", OUT_ELEMENT_WISE if sums else OPAQUE)


def _at_wide_indices(load: TensorLoad) -> TensorLoad:
    """Return a load at int64 indices: TVM adds what is looked up to loops, and does not cast it."""
    indices = [i if str(i.ty.dtype) == "int64" else i.astype("int64") for i in load.indices]
    return tirx.BufferLoad(load.source, indices)


def _factors(stage: Stage, by_buffer: Mapping[tirx.Var, Stage]) -> Iterator[str]:
    """Yield the names of the stages that compute, rather than move, what a sum multiplies."""
    for load in loads_of(stage.value):
        made = by_buffer.get(load.source)
        if made is None or made is stage:
            continue
        inner = made.value
        is_moved = isinstance(inner, TensorLoad) and set(inner.indices) == set(made.spatial)
        if is_moved:
            yield from _factors(made, by_buffer)
        else:
            yield made.name
