"""Memory that kernels work in, as tensors that the plan of the memory knows."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import ir, relax, s_tir, tirx

from ..matching.expressions import substitute, variables_of
from ..matching.pattern import is_call
from .modules import functions_of, rewritten


@tvm.transform.module_pass(opt_level=0, name="LiftWorkspaces")
@dataclass(frozen=True)
class LiftWorkspaces:
    """Make results of the buffers that PrimFuncs allocate in global memory, for several kernels.

    rewrite::

        def sort(x, y): w = alloc(n, 4); S    ->    def sort(x, y, w): S
        y = call_tir(sort, x, out_ty=Y)             t = call_tir(sort, x, out_ty=(Y, W)); y = t[0]

    Otherwise the host code of the function allocates them in every call, apart from all tensors.

    declines when:
        a size of the buffer is not one of the call's: neither a dim of a tensor nor a number.  The
        call keeps the function as it is, as does whoever calls it from outside.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with calls of new functions; `mod` itself if there are none."""
        lifted = {
            gvar: found
            for gvar, func in functions_of(mod, tirx.PrimFunc).items()
            if (found := _lifted(func)) is not None
        }
        if not lifted:
            return mod
        return relax.transform.DeadCodeElimination()(rewritten(mod, _Lift(mod, lifted)))


Lifted = tuple[tirx.PrimFunc, list[tirx.Var]]


def _lifted(func: tirx.PrimFunc) -> Lifted | None:
    """Return a function with its workspaces as last parameters, and these; None without any."""
    if not isinstance(func.body, s_tir.SBlockRealize):
        return None
    root = func.body.block
    spaces = [b for b in root.alloc_buffers if b.ty.storage_scope in ("", "global")]
    if not spaces or not tirx.is_buffer_var(func.params[-1]):
        return None
    rest = [b for b in root.alloc_buffers if not any(b.same_as(space) for space in spaces)]
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body,
        alloc_buffers=rest, annotations=root.annotations,
    )  # fmt: skip
    body = s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, block)
    return tirx.PrimFunc([*func.params, *spaces], body, func.ret_type, func.attrs), spaces


@relax.expr_functor.mutator
class _Lift(relax.PyExprMutator):
    """Gives calls the workspaces of what they call as results."""

    def __init__(self, mod: ir.IRModule, lifted: dict[ir.GlobalVar, Lifted]):
        super().__init__(mod)
        self.mod = mod
        self.lifted = lifted
        self.new: dict[ir.GlobalVar, ir.GlobalVar] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.call_tir") or call.args[0] not in self.lifted:
            return call
        gvar, (func, spaces) = call.args[0], self.lifted[call.args[0]]
        out = call.ty_args[0]
        results = list(out.fields) if isinstance(out, ir.TupleType) else [out]
        types = _types(call, self.mod[gvar], spaces, results)
        if types is None:
            return call
        if gvar not in self.new:
            self.new[gvar] = self.builder_.add_func(
                func.without_attr("global_symbol"), f"{gvar.name_hint}_with_workspace"
            )
        args = [self.new[gvar], *call.args[1:]]
        both = relax.Call(call.op, args, call.attrs, [ir.TupleType([*results, *types])])
        emitted = self.builder_.emit(both)
        items = [relax.TupleGetItem(emitted, i) for i in range(len(results))]
        return relax.Tuple(items) if isinstance(out, ir.TupleType) else items[0]


def _types(
    call: relax.Call, func: tirx.PrimFunc, spaces: list[tirx.Var], results: list[relax.TensorType]
) -> list[relax.TensorType] | None:
    """Return the types of workspaces in terms of the caller; None if it does not know a size."""
    if len(call.args) != 2 or len(call.args[1].fields) + len(results) != len(func.params):
        return None
    known: dict[tirx.Var, tirx.Expr] = {}
    for param, given in zip(func.params, [*call.args[1].fields, *results], strict=True):
        if not tirx.is_buffer_var(param):
            known[param] = given
            continue
        shape = (given.ty if isinstance(given, relax.Expr) else given).shape
        known |= dict(zip(param.ty.shape, shape.values, strict=True)) if shape is not None else {}
    if any(var not in known for space in spaces for d in space.ty.shape for var in variables_of(d)):
        return None
    return [
        relax.TensorType([substitute(d, known) for d in space.ty.shape], str(space.ty.dtype))
        for space in spaces
    ]
