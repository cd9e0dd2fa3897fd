"""TVM's FuseOps, without the groups that TVM 0.27 makes no kernels of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, relax

from ..matching.bindings import Identity, binders, bound_sizes, items_of
from ..matching.expressions import found_in
from ..matching.pattern import BlockView, calls_in, is_call
from ..matching.rebuild import order
from ..matching.shapes import has_computed_sizes
from ..transforms.modules import OPAQUE, functions_of, is_narrow, with_functions
from ..tvm_ir import structural_map

_ITEM = "relax_fusion.item."
"""A function that stands for an item of a tuple has this name, followed by a number."""


@tvm.transform.module_pass(opt_level=0, name="FuseOps")
@dataclass(frozen=True)
class FuseOps:
    """TVM's FuseOps, but for some calls, whose PrimFuncs are marked as opaque.

    Of tensors whose sizes contain calls: FuseOps takes those for calls of Relax operators where it
    makes a parameter of such a tensor, as ``x[m - n : m]`` is one, and ends in an InternalError.

    Of PrimFuncs with sizes of int32, which no tensor of Relax has: FuseTIR ends in such an error.

    With numbers, in groups that have sizes which are sizes of none of their parameters, such as
    ``exp(arange(m, m + n))``: FuseTIR defines a size twice, and ends in an InternalError.

    Items of tuples that no group could compute are read in front of the groups.  A group that reads
    several items of two or more tuples gets its parameters confused by FuseOps, and one that only
    takes an item of another item is refused by FuseTIR.

    FuseOps does not look at sizes, either: a group that it puts in front of the match_cast that
    binds one of its sizes is put behind it.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with groups."""
        functions = functions_of(mod, relax.Function)
        bound = {g.name_hint: _bound(func) for g, func in functions.items()}
        calls = _calls(functions.values())
        odd = [c for c in calls if has_computed_sizes(c, c.args[1]) or is_narrow(mod[c.args[0]])]
        mod = _without_items(_opaque(mod, odd))
        fused = relax.transform.FuseOps()(mod)
        numbers = [call for call in _calls(_groups_with_numbers(fused)) if _has_numbers(call)]
        if numbers:
            fused = relax.transform.FuseOps()(_opaque(mod, numbers))
        return _with_items(_in_order(fused, bound))


def _calls(functions: Iterable[relax.Function]) -> list[relax.Call]:
    return [call for func in functions for call in calls_in(func, "relax.call_tir")]


def _opaque(mod: ir.IRModule, calls: Iterable[relax.Call]) -> ir.IRModule:
    """Return the module with the PrimFuncs of calls marked."""
    called = {mod.get_global_var(call.args[0].name_hint) for call in calls}
    return with_functions(mod, {g: mod[g].with_attr("op_pattern", OPAQUE) for g in called})


def _has_numbers(call: relax.Call) -> bool:
    return any(isinstance(ty, ir.PrimType) for ty in call.args[1].ty.fields)


def _groups_with_numbers(mod: ir.IRModule) -> list[relax.Function]:
    """Return the groups that take numbers, and sizes apart."""
    functions = functions_of(mod, relax.Function).values()
    groups = [f for f in functions if "Primitive" in (f.attrs or {})]
    both = {ir.PrimType, relax.ShapeType}
    return [group for group in groups if both <= {type(p.ty) for p in group.params}]


# --- sizes of match_casts ---------------------------------------------------------------------


def _bound(func: relax.Function) -> list[set[Identity]]:
    """Return the sizes that match_casts bind, block by block."""
    return [bound_sizes(items_of(block.bindings)) for block in func.body.blocks]


def _in_order(mod: ir.IRModule, bound: Mapping[str, Sequence[set[Identity]]]) -> ir.IRModule:
    """Put groups behind the match_casts that bind their sizes."""
    updated: dict[ir.GlobalVar, relax.Function] = {}
    for gvar, func in functions_of(mod, relax.Function).items():
        if not any(sizes := bound.get(gvar.name_hint, ())):
            continue
        blocks = []
        for block, own in zip(func.body.blocks, sizes, strict=True):
            view = BlockView(block, mod)
            view.binders = binders(view.bindings, own)
            places = order(view, [])
            assert places is not None, "FuseOps makes one group of nothing that a match_cast is in"
            blocks.append(type(block)([view.bindings[i] for i in places if isinstance(i, int)]))
        body = relax.SeqExpr(blocks, func.body.body)
        updated[gvar] = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return with_functions(mod, updated)


# --- items of tuples --------------------------------------------------------------------------


def _without_items(mod: ir.IRModule) -> ir.IRModule:
    """Put calls in the place of items of tuples that no group could compute."""

    def hidden(binding: relax.VarBinding) -> relax.VarBinding:
        item = binding.value
        if not isinstance(item, relax.TupleGetItem) or hash(item.tuple_value) in made:
            return binding
        function = relax.ExternFunc(f"{_ITEM}{int(item.index)}")
        call = relax.op.call_pure_packed(function, item.tuple_value, ty_args=[binding.var.ty])
        return relax.VarBinding(binding.var, builder.normalize(call))

    builder = relax.BlockBuilder()
    updated = {}
    for gvar, func in functions_of(mod, relax.Function).items():
        made = {hash(b.var) for b in found_in(func, relax.VarBinding) if _can_join(mod, b.value)}
        updated[gvar] = structural_map(func, (relax.VarBinding, hidden))
    return with_functions(mod, updated)


def _can_join(mod: ir.IRModule, value: relax.Expr) -> bool:
    """Tell whether a value may be computed by a group."""
    if not is_call(value, "relax.call_tir"):
        return False
    return int((mod[value.args[0]].attrs or {}).get("op_pattern", OPAQUE)) < OPAQUE


def _with_items(mod: ir.IRModule) -> ir.IRModule:
    """Undo `_without_items`."""

    def shown(call: relax.Call) -> relax.Expr:
        name = call.args[0].global_symbol if is_call(call, "relax.call_pure_packed") else ""
        if not name.startswith(_ITEM):
            return call
        index = int(name.removeprefix(_ITEM))
        return builder.normalize(relax.TupleGetItem(call.args[1], index))

    builder = relax.BlockBuilder()
    functions = functions_of(mod, relax.Function).items()
    return with_functions(mod, {g: structural_map(f, (relax.Call, shown)) for g, f in functions})
