"""Functions that are one CUDA graph as a whole, as their callers keep to the same memory."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import ir, relax

from ..matching.effects import free_vars
from ..matching.expressions import substitute
from ..matching.pattern import is_call
from .modules import functions_of, kept, module_pass, with_functions

BOUND_ATTR = "relax_fusion.bound_memory"
"""Function attribute, a boolean: callers pass tensors of the same memory in every call, and are
done with the results of one when they make the next.  So all of the function can be one graph."""

HINTS_ATTR = "relax.rewrite_cuda_graph.capture_symbolic_vars"
"""TVM's function attribute: names of the dims that a graph may depend on."""

RUN_OR_CAPTURE = "vm.builtin.cuda_graph.run_or_capture"


@module_pass
class KeepResults:
    """Have the results of functions with `BOUND_ATTR` in planned memory, which a graph can write.

    rewrite: ``return logits`` -> ``kept = R.call_packed("vm.builtin.copy", logits); return kept``

    That function returns what it gets.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite what calls have been made writes to memory, which is not planned yet."""
        made = {gvar: _kept(func) for gvar, func in _bound(mod).items()}
        return relax.transform.Normalize()(with_functions(mod, made)) if made else mod


def _bound(mod: ir.IRModule) -> dict[ir.GlobalVar, relax.Function]:
    """Return the functions that may be one graph from their arguments to their results."""

    def is_bound(func: relax.Function) -> bool:
        attrs = func.attrs or {}
        dims = {var.name for var in relax.analysis.defined_symbolic_vars(func)}
        return bool(attrs.get(BOUND_ATTR, False)) and dims <= set(attrs.get(HINTS_ATTR, ()))

    functions = functions_of(mod, relax.Function).items()
    return {gvar: func for gvar, func in functions if is_bound(func)}


def _kept(func: relax.Function) -> relax.Function:
    if not func.body.blocks:
        return func
    *blocks, last = func.body.blocks
    *bindings, result = last.bindings
    values = {b.var: b.value for block in func.body.blocks for b in block.bindings}
    copies, names = list[relax.Binding](), dict[relax.Var, relax.Expr]()
    for var in free_vars(result.value):
        names[var] = first = _first_name(var, values)
        value = values.get(first)
        while is_call(value, "relax.reshape"):
            value = values.get(_first_name(value.args[0], values))
        if is_call(value, "relax.builtin.alloc_tensor"):
            copies.append(kept(var))
            names[var] = copies[-1].var
    returned = _whole(substitute(result.value, names), values)
    block = relax.BindingBlock([*bindings, *copies, relax.VarBinding(result.var, returned)])
    body = relax.SeqExpr([*blocks, block], func.body.body)
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)


def _first_name(var: relax.Var, values: Mapping[relax.Var, relax.Expr]) -> relax.Var:
    """Return the variable that a value was given first: what is written in place has many."""
    value = values.get(var)
    if isinstance(value, relax.TupleGetItem):
        whole = values.get(value.tuple_value)
        value = whole.fields[value.index] if isinstance(whole, relax.Tuple) else None
    return _first_name(value, values) if isinstance(value, ir.Var) else var


def _whole(expr: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Return an expression with the name of a tuple in the place of all its parts, in order."""
    if not isinstance(expr, relax.Tuple):
        return expr
    fields = [_whole(field, values) for field in expr.fields]
    found = [values.get(field) if isinstance(field, ir.Var) else None for field in fields]
    parts = [part for part in found if isinstance(part, relax.TupleGetItem)]
    if parts and len(parts) == len(fields):
        whole = parts[0].tuple_value
        same = all(p.tuple_value.same_as(whole) and p.index == i for i, p in enumerate(parts))
        if same and len(parts) == len(whole.ty.fields):
            return whole
    return relax.Tuple(fields)


def without_inputs(mod: ir.IRModule) -> ir.IRModule:
    """Tell TVM's pass that what is passed to bound functions is as lasting as weights are."""
    bound = {gvar: func.with_attr("num_input", 0) for gvar, func in _bound(mod).items()}
    return with_functions(mod, bound)


def with_whole_tuples(mod: ir.IRModule) -> ir.IRModule:
    """Pass tuples of weights as they are: taken apart, each costs the host time in each call."""
    updated: dict[ir.GlobalVar, relax.Function] = {}
    for gvar, func in functions_of(mod, relax.Function).items():
        bindings = [b for block in func.body.blocks for b in block.bindings]
        parts = {b.var: b.value for b in bindings if isinstance(b.value, relax.TupleGetItem)}
        parts = {var: part for var, part in parts.items() if part.tuple_value in func.params}
        replays = [i for i, b in enumerate(bindings) if is_run_or_capture(b.value)]
        for i in replays:
            var, call = bindings[i].var, bindings[i].value
            region = call.args[1].fields[0]
            call, updated[region] = _with_tuples(call, mod[region], parts)
            bindings[i] = relax.VarBinding(var, call)
        read = {v for b in bindings for v in free_vars(b.value)} | {*free_vars(func.body.body)}
        block = relax.BindingBlock([b for b in bindings if b.var in read or b.var not in parts])
        if replays:
            body = relax.SeqExpr([block], func.body.body)
            updated[gvar] = relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return relax.transform.Normalize()(with_functions(mod, updated)) if updated else mod


def _with_tuples(
    call: relax.Call, region: relax.Function, parts: Mapping[relax.Var, relax.TupleGetItem]
) -> tuple[relax.Call, relax.Function]:
    """Return a replay that gets tuples in the place of their parts, and what is replayed."""
    gvar, args, *rest = call.args[1].fields
    pairs = list(zip(region.params, args.fields, strict=True))
    tuples = dict.fromkeys(parts[a].tuple_value for _, a in pairs if a in parts)
    given = {t: relax.Var(t.name, t.ty) for t in tuples}
    taken = [
        relax.VarBinding(p, relax.TupleGetItem(given[parts[a].tuple_value], parts[a].index))
        for p, a in pairs
        if a in parts
    ]
    others = [(p, a) for p, a in pairs if a not in parts]
    params = [*given.values(), *(p for p, _ in others)]
    body = relax.SeqExpr([relax.BindingBlock(taken), *region.body.blocks], region.body.body)
    made = relax.Function(params, body, region.ret_ty, region.is_pure, region.attrs)
    passed = relax.Tuple([*given, *(a for _, a in others)])
    fields = relax.Tuple([gvar, passed, *rest])
    return relax.Call(call.op, [call.args[0], fields], call.attrs, call.ty_args), made


def is_run_or_capture(node: relax.Expr) -> bool:
    """Tell whether `node` records or replays a function."""
    if not is_call(node, "relax.call_builtin_with_ctx"):
        return False
    return str(node.args[0].global_symbol) == RUN_OR_CAPTURE
