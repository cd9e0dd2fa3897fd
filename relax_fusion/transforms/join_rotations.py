"""Heads of queries and keys that are normalised and rotated: one kernel instead of two."""

from __future__ import annotations

from tvm import ir, relax, s_tir, tirx

from ..compute.ranges import root_of
from ..matching.bindings import items_of
from ..matching.effects import IN_PLACE, free_vars
from ..matching.norm_rotation import norm_rotation_of, without_mark
from ..matching.pattern import is_call
from .modules import functions_of, module_pass

_NAME = "rms_norm_rotations"


@module_pass
class JoinRotations:
    """Let one function normalise and rotate the heads of queries and of keys.

    rewrite::

        q1 = R.call_tir(rms_norm_rotation, (q, g, cos, sin))
        k1 = R.call_tir(rms_norm_rotation1, (k, h, cos, sin))
            ->
        both = R.call_tir(rms_norm_rotations, (q, g, cos, sin, k, h, cos, sin))
        q1 = both[0]; k1 = both[1]

    declines when:
        one is made of the other; a tensor is changed in place between the two.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        builder, changed = relax.BlockBuilder(mod), False
        for gvar, func in functions_of(mod, relax.Function).items():
            blocks = [_joined(block, mod, builder) for block in func.body.blocks]
            if all(map(ir.Node.same_as, blocks, func.body.blocks)):
                continue
            body = relax.SeqExpr(blocks, func.body.body)
            new = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
            builder.update_func(gvar, new)
            changed = True
        return relax.transform.Normalize()(builder.get()) if changed else mod


def _joined(
    block: relax.BindingBlock, mod: ir.IRModule, builder: relax.BlockBuilder
) -> relax.BindingBlock:
    """Return a block whose neighbouring rotations are joined, two at a time."""
    if not isinstance(block, relax.DataflowBlock):
        return block
    bindings, waiting, found = items_of(block.bindings), None, False
    for binding in list(bindings):
        if not _rotates(binding, mod):
            continue
        first, waiting = waiting, binding
        if first is None:
            continue
        front = _in_front(bindings, first, binding)
        if front is not None:
            pair = _pair(first, binding, mod, builder)
            at = bindings.index(first)
            rest = [b for b in bindings[at + 1 :] if b not in front and b is not binding]
            bindings = [*bindings[:at], *front, *pair, *rest]
            waiting, found = None, True
    return relax.DataflowBlock(bindings) if found else block


def _rotates(binding: relax.Binding, mod: ir.IRModule) -> bool:
    """Tell whether a binding is the one result of a kernel that rotates heads."""
    value = binding.value
    if not isinstance(binding, relax.VarBinding) or not is_call(value, "relax.call_tir"):
        return False
    if len(value.args) > 2 or not isinstance(binding.var.ty, relax.TensorType):
        return False
    return norm_rotation_of(mod, value) is not None


def _in_front(
    bindings: list[relax.Binding], first: relax.Binding, second: relax.Binding
) -> list[relax.Binding] | None:
    """Return what has to move in front of both for the second to be computed with the first."""
    between = bindings[bindings.index(first) + 1 : bindings.index(second)]
    if any(is_call(b.value, *IN_PLACE) or isinstance(b, relax.MatchCast) for b in between):
        return None
    needed, front = {*free_vars(second.value)}, list[relax.Binding]()
    for binding in reversed(between):
        if binding.var in needed:
            front.insert(0, binding)
            needed.update(free_vars(binding.value))
    return None if first.var in needed else front


def _pair(
    first: relax.Binding, second: relax.Binding, mod: ir.IRModule, builder: relax.BlockBuilder
) -> list[relax.Binding]:
    """Return one call in the place of two, and its results by their names."""
    calls = first.value, second.value
    function = builder.add_func(_both(*(mod[call.args[0]] for call in calls)), _NAME)
    args = relax.Tuple([arg for call in calls for arg in call.args[1].fields])
    types = [first.var.ty, second.var.ty]
    made = builder.normalize(relax.op.call_tir(function, args, types))
    both = relax.DataflowVar("both", made.ty)
    items = [builder.normalize(relax.TupleGetItem(both, index)) for index in range(2)]
    results = zip((first.var, second.var), items, strict=True)
    return [relax.VarBinding(both, made), *(relax.VarBinding(v, item) for v, item in results)]


def _both(first: tirx.PrimFunc, second: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function that does what two do, each with one result."""
    second = s_tir.renew_defs(second)
    roots = [func.body.block for func in (first, second)]
    body = tirx.SeqStmt([stmt for root in roots for stmt in root.body.seq])
    *given, result = first.params
    *others, other = second.params
    buffers = [buffer for root in roots for buffer in root.alloc_buffers]
    func = tirx.PrimFunc(
        [*given, *others, result, other], root_of(body, buffers), first.ret_type, first.attrs
    )
    return without_mark(func.without_attr("global_symbol"))
