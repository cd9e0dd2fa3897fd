"""What MLC-LLM brings, mended: positions of a batch, kernels as CPUs can run them, workspaces."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import ir, relax, tirx

from ..matching.expressions import found_in, is_number, substitute, thread_tag, variables_of
from ..matching.pattern import PrimExpr, Shape, is_call
from ..matching.shapes import product, same_shape, shape_of
from ..transforms.modules import functions_of, mapped, module_pass, rewritten, with_functions
from ..tvm_ir import SBlock, SBlockRealize

POSITIONS = "vm.builtin.attention_kv_cache_get_query_positions"
"""The function of TVM's cache that gives the positions of all tokens of a call."""


@module_pass
class TakePositionsOfBatch:
    """Take from the cache the positions of all sequences of a batch, not of one alone.

    rewrite, in a function of ``x: R.Tensor((batch_size, 1, k))``::

        p = R.call_pure_packed(POSITIONS, cache, ty_args=(R.Tensor((1,), "int32"),))
        e: R.Tensor((1, k)) = R.take(table, p, axis=0)
            ->
        q = R.call_pure_packed(POSITIONS, cache, ty_args=(R.Tensor((batch_size,), "int32"),))
        p = R.reshape(q, (batch_size, 1))
        e: R.Tensor((batch_size, 1, k)) = R.take(table, p, axis=0)

    MLC-LLM's GPT-2 and GPT-BigCode count the tokens of one sequence, so that their library can
    decode no two at once.

    declines when:
        anything but lookups reads the positions.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function that asks for fewer positions than it has tokens."""
        updated = {}
        for gvar, func in functions_of(mod, relax.Function).items():
            tokens = (shape_of(func.params[0]) or [])[:2] if func.params else []
            if len(tokens) == 2 and not is_number(tokens[0], 1) and _looks_up(func, tokens[1:]):
                updated[gvar] = _OfBatch(mod, tokens).visit_expr(func)
        return with_functions(mod, updated) if updated else mod


def _looks_up(func: relax.Function, length: Shape) -> bool:
    """Tell whether `func` asks for positions of `length`, and reads them in lookups alone."""
    asked = [
        binding.var
        for block in func.body.blocks
        for binding in block.bindings
        if _asks(getattr(binding, "value", None)) and same_shape(shape_of(binding.var), length)
    ]
    readers = [
        c for c in found_in(func.body, ir.Call) if any(a.same_as(v) for a in c.args for v in asked)
    ]
    return bool(readers) and all(getattr(c.op, "name", "") == "relax.take" for c in readers)


def _asks(value: object) -> bool:
    called = value.args[:1] if isinstance(value, ir.Call) else []
    return any(getattr(name, "global_symbol", "") == POSITIONS for name in called)


@relax.expr_functor.mutator
class _OfBatch(relax.PyExprMutator):
    """Asks for positions of `tokens`: sequences, and what each has of them."""

    def __init__(self, mod: ir.IRModule, tokens: Sequence[PrimExpr]):
        super().__init__(mod)
        self._tokens = tokens

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not _asks(call):
            return super().visit_call_(call)
        ty = relax.TensorType([product(self._tokens)], "int32")
        asked = relax.Call(call.op, call.args, call.attrs, [ty])
        return relax.op.reshape(self.builder_.emit(asked), self._tokens)


@module_pass
class NumberFirstExperts:
    """Write the numbers of the experts that are chosen first where they belong.

    rewrite: ``chosen[-1] = t`` -> ``chosen[t] = t``

    MLC-LLM's routing of tokens writes them in front of a buffer, into memory of something else.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such a store stays the same."""
        return mapped(mod, (tirx.BufferStore, _numbered))


def _numbered(store: tirx.BufferStore) -> tirx.BufferStore:
    if len(store.indices) == 1 and is_number(store.indices[0], -1):
        return tirx.BufferStore(store.buffer, store.value, [store.value])
    return store


@module_pass
class RunThreadsInTurn:
    """Make kernels that were written for GPUs, threads and all, functions that a CPU runs.

    rewrite::

        for i in T.thread_binding(n, "threadIdx.x"): S(i)    ->    for i in range(n): S(i)
        T.tvm_storage_sync("shared")                         ->    nothing

    In S-TIR a loop over threads is a loop: each thread has its part of every buffer, and blocks say
    what they need.  MLC-LLM routes tokens to experts and multiplies by their weights so, on CPUs as
    well, where TVM refuses threads.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without threads stays the same."""
        return mapped(mod, (tirx.For, _in_turn), (ir.Call, _alone))


def _in_turn(loop: tirx.For) -> tirx.For:
    if not thread_tag(loop):
        return loop
    return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)


def _alone(call: ir.Call) -> tirx.Expr:
    """Return what a call that threads make together is for one that is alone."""
    name = getattr(call.op, "name", "")
    if name == "tirx.tvm_thread_invariant":
        return call.args[0]
    return tirx.const(0, "int32") if name == "tirx.tvm_storage_sync" else call


@module_pass
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

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
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
    if not isinstance(func.body, SBlockRealize):
        return None
    root = func.body.block
    spaces = [b for b in root.alloc_buffers if b.ty.storage_scope in ("", "global")]
    if not spaces or not tirx.is_buffer_var(func.params[-1]):
        return None
    rest = [b for b in root.alloc_buffers if not any(b.same_as(space) for space in spaces)]
    block = SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body,
        alloc_buffers=rest, annotations=root.annotations,
    )  # fmt: skip
    body = SBlockRealize(func.body.iter_values, func.body.predicate, block)
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
