"""The function of a group, and a call of it."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, relax, tirx
from tvm.relax.expr import _update_type

from ..matching.bindings import Identity, items_of


def fits(parts: Sequence[relax.VarBinding], most: int) -> bool:
    """Tell whether bindings can be one function.

    It may have at most so many parameters, if `most` is not 0.  Where numbers are among them, all
    sizes have to be such, or those of tensors: FuseTIR defines others twice.
    """
    defined = {hash(b.var) for b in parts}
    given = {hash(a): a for a in _arguments(parts) if hash(a) not in defined}.values()
    results = 1 + sum(isinstance(b.var.ty, ir.TupleType) for b in parts)
    if most and len(given) + results > most:
        return False
    if not any(isinstance(a.ty, ir.PrimType) for a in given):
        return True
    tensors = [a for a in given if isinstance(a.ty, relax.TensorType)]
    dims = (d for t in tensors for d in items_of(t.ty.shape.values))
    known = {hash(d) for d in (*dims, *given) if _is_size(d)}
    types = [e.ty for e in (*tensors, *(b.var for b in parts))]
    sizes = {hash(v) for ty in types for v in relax.analysis.tir_vars_in_type(ty)}
    return sizes <= known


def _is_size(expr: relax.Expr) -> bool:
    return isinstance(expr, ir.Var) and isinstance(expr.ty, ir.PrimType)


def _arguments(parts: Sequence[relax.VarBinding]) -> list[relax.Expr]:
    """Return what the bindings of a group read."""
    found: list[relax.Expr] = []
    for binding in parts:
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            found.append(value.tuple_value)
        else:
            found += items_of(value.args[1].fields)
    return found


def group_function(
    builder: relax.BlockBuilder, parts: Sequence[relax.VarBinding], results: Sequence[relax.Var]
) -> list[relax.VarBinding]:
    """Add a function that computes `parts`, and return what binds its results to its call.

    What does not occur among the parts, or is no number, is a parameter.
    """
    made = _Function(parts, results)
    function = made.function()
    gvar = builder.add_func(function, made.name)
    call = relax.Call(gvar, made.arguments)
    types = [var.ty for var in results]
    _update_type(call, types[0] if len(types) == 1 else ir.TupleType(types))  # else sizes are lost
    call = builder.normalize(call)
    if len(results) == 1:
        return [relax.VarBinding(results[0], call)]
    every = relax.DataflowVar(made.name, call.ty)
    items = (builder.normalize(relax.TupleGetItem(every, i)) for i in range(len(results)))
    bound = map(relax.VarBinding, results, items)
    return [relax.VarBinding(every, call), *bound]


class _Function:
    """Writes the function of a group."""

    def __init__(self, parts: Sequence[relax.VarBinding], results: Sequence[relax.Var]):
        self.parts, self.results = parts, [hash(var) for var in results]
        self.params: list[relax.Var] = []
        self.arguments: list[relax.Expr] = []
        self.known: dict[Identity, relax.Expr] = {}
        called = [b.value.args[0].name_hint for b in parts if isinstance(b.value, relax.Call)]
        self.name = "_".join(["fused", *called])

    def function(self) -> relax.Function:
        """Return the function; its sizes are parameters where no tensor has them."""
        bindings = [self._binding(b, hash(b.var) in self.results) for b in self.parts]
        block = relax.DataflowBlock(bindings)
        made = [self.known[var] for var in self.results]
        body = relax.SeqExpr([block], made[0] if len(made) == 1 else relax.Tuple(made))
        func = self._primitive(body)
        free = relax.analysis.free_symbolic_vars(func)
        if sizes := [size for size in free if hash(size) not in self.known]:
            self.params.append(relax.Var("tir_vars", relax.ShapeType(sizes)))
            self.arguments.append(relax.ShapeExpr(sizes))
            func = self._primitive(body)
        return relax.utils.copy_with_new_vars(func)

    def _primitive(self, body: relax.SeqExpr) -> relax.Function:
        attrs = ir.make_node("ir.DictAttrs", Primitive=True)
        return relax.Function(self.params, body, body.body.ty, True, attrs)

    def _binding(self, binding: relax.VarBinding, is_result: bool) -> relax.VarBinding:
        value = binding.value
        if isinstance(value, relax.TupleGetItem):
            made: relax.Expr = relax.TupleGetItem(self._inside(value.tuple_value), value.index)
        else:
            args = relax.Tuple([self._inside(a) for a in items_of(value.args[1].fields)])
            made = relax.Call(value.op, [value.args[0], args], value.attrs, value.ty_args)
        made = relax.BlockBuilder().normalize(made)
        kind = relax.Var if is_result else relax.DataflowVar
        var = kind("gv" if is_result else binding.var.name, binding.var.ty)
        self.known[hash(binding.var)] = var
        return relax.VarBinding(var, made)

    def _inside(self, expr: relax.Expr) -> relax.Expr:
        """Return what stands for an argument in the function."""
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            return expr
        if hash(expr) not in self.known:
            name = expr.name if isinstance(expr, ir.Var) else f"param_{len(self.params)}"
            param = expr if _is_size(expr) else relax.Var(name, expr.ty)
            self.params.append(param)
            self.arguments.append(expr)
            self.known[hash(expr)] = param
        return self.known[hash(expr)]
