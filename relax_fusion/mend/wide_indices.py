"""PrimFuncs have loops, sizes and positions of 64 bits, as the tensors of Relax."""

from __future__ import annotations

from tvm import ir, tirx

from ..matching.expressions import found_in, is_number, variables_of
from ..transforms.modules import functions_of, is_narrow, module_pass, with_functions
from ..tvm_ir import SBlock, SBlockRealize, TensorLoad, structural_map

STATEMENTS = (
    *(tirx.For, tirx.SeqStmt, tirx.BufferStore, tirx.IfThenElse),
    *(SBlock, SBlockRealize),
)
OTHERS = (tirx.Let, tirx.Ramp, tirx.Broadcast, tirx.Shuffle)
OF_TWO = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod),
    *(tirx.Min, tirx.Max, tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
    *(tirx.BitwiseAnd, tirx.BitwiseOr, tirx.BitwiseXor, tirx.LShift, tirx.RShift),
)


@module_pass
class WidenIndices:
    """Give PrimFuncs that are written with sizes of int32 those of int64.

    Relax's tensors have these.  TVM's FuseTIR takes no others, and ends in an InternalError.  Only
    what is computed of loops and sizes alone becomes wider; numbers of tensors stay as they are.

    rewrite::

        def f(x: T.Buffer((24, 128), "int8"), y: ...):
            for i, j in T.grid(24, 128): y[i, j] = x[i, j // 2]
        ->
        def f(x: T.Buffer((T.int64(24), T.int64(128)), "int8"), y: ...):
            for i, j in T.grid(T.int64(24), T.int64(128)): y[i, j] = x[i, j // T.int64(2)]

    declines when:
        a function has a number as a parameter, statements beside loops, conditions, blocks and
        stores, a thread's loop, a vector, a let, a buffer with a layout, or anything of int64.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite the PrimFuncs that are read."""
        functions = functions_of(mod, tirx.PrimFunc).items()
        wide = {g: _Widener(f).function() for g, f in functions if is_narrow(f) and _is_plain(f)}
        return with_functions(mod, wide) if wide else mod


@module_pass
class WidenPositions:
    """Read what a PrimFunc keeps between its steps at positions of int64 where its sizes are.

    rewrite: ``y[0, ids[i], j]`` -> ``y[0, T.Cast("int64", ids[i]), j]``

    A schedule puts the step that wrote there in the place of the read, its sizes with it.  TVM then
    multiplies and adds numbers of both widths, and ends in a TypeError.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every PrimFunc of `mod`; one without such a read stays the same object."""
        functions = functions_of(mod, tirx.PrimFunc).items()
        return with_functions(mod, {gvar: _with_positions(func) for gvar, func in functions})


def _with_positions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    own = {buffer for block in found_in(func.body, SBlock) for buffer in block.alloc_buffers}

    def widened(load: TensorLoad) -> TensorLoad:
        pairs = [*zip(load.indices, load.source.ty.shape, strict=True)]
        if load.source not in own or all(_dtype(i) == _dtype(n) for i, n in pairs):
            return load
        return tirx.BufferLoad(load.source, [i.astype(_dtype(n)) for i, n in pairs])

    body = structural_map(func.body, (TensorLoad, widened), order="post") if own else func.body
    return func if body.same_as(func.body) else func.with_body(body)


def _is_plain(func: tirx.PrimFunc) -> bool:
    """Tell whether all of a function is known here, and nothing of it is int64."""
    buffers = [v.ty for v in variables_of(func) if tirx.is_buffer_var(v)]
    return (
        all(map(tirx.is_buffer_var, func.params))
        and all(isinstance(s, STATEMENTS) for s in found_in(func.body, tirx.Stmt))
        and all(loop.thread_binding is None for loop in found_in(func.body, tirx.For))
        and not any(ty.strides or ty.layout or not _is_zero(ty.elem_offset) for ty in buffers)
        and not any(isinstance(e, OTHERS) or _dtype(e) == "int64" for e in found_in(func, ir.Expr))
    )


def _is_zero(offset: tirx.Expr | None) -> bool:
    return offset is None or is_number(offset, 0)


def _dtype(value: ir.Expr) -> str:
    return str(value.ty.dtype) if isinstance(value.ty, ir.PrimType) else ""


def _wide(value: tirx.Expr) -> tirx.Expr:
    """Return a size or an index as int64."""
    if isinstance(value, tirx.IntImm):
        return tirx.IntImm("int64", int(value))
    return value.astype("int64") if _dtype(value) == "int32" else value


def _same(values: list[tirx.Expr]) -> list[tirx.Expr]:
    """Return operands of one dtype: an index meets a number of a tensor as what that is."""
    if len({_dtype(v) for v in values}) == 1:
        return values
    numbers = [v for v in values if _dtype(v) == "int32" and not isinstance(v, tirx.IntImm)]
    return list(map(_narrow, values)) if numbers else list(map(_wide, values))


def _narrow(value: tirx.Expr) -> tirx.Expr:
    return value.astype("int32") if _dtype(value) == "int64" else value


class _Widener:
    """The new variables of a function, by the old ones."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.new: dict[tirx.Var, tirx.Var] = {}

    def function(self) -> tirx.PrimFunc:
        """Return the function, rewritten from the leaves of its expressions up."""
        return structural_map(
            self.func,
            [
                (ir.Var, self._var),
                (OF_TWO, lambda e: type(e)(*_same([e.a, e.b]))),
                (tirx.Select, self._select),
                (ir.Call, self._call),
                (TensorLoad, lambda e: tirx.BufferLoad(e.source, [_wide(i) for i in e.indices])),
                (ir.Range, lambda r: ir.Range.from_min_extent(_wide(r.min), _wide(r.extent))),
                (tirx.BufferStore, self._store),
                (tirx.For, self._loop),
                (SBlockRealize, self._realize),
            ],
        )

    def _var(self, var: tirx.Var) -> tirx.Var:
        if var not in self.new:
            self.new[var] = var
            if tirx.is_buffer_var(var):
                ty = var.ty
                shape = [_wide(structural_map(d, (ir.Var, self._var))) for d in ty.shape]
                how = {"scope": ty.storage_scope, "data_alignment": ty.data_alignment}
                made = tirx.decl_buffer(shape, str(ty.dtype), var.name, layout=None, **how)
                self.new[var] = made
            elif _dtype(var) == "int32":
                self.new[var] = tirx.Var(var.name, "int64")
        return self.new[var]

    def _select(self, choice: tirx.Select) -> tirx.Select:
        return tirx.Select(choice.condition, *_same([choice.true_value, choice.false_value]))

    def _call(self, call: ir.Call) -> ir.Call:
        args = [_narrow(arg) for arg in call.args]
        return ir.Call(call.op, args, call.attrs, call.ty_args, ret_ty=call.ty)

    def _store(self, store: tirx.BufferStore) -> tirx.BufferStore:
        is_number = str(store.buffer.ty.dtype) == "int32"
        value = _narrow(store.value) if is_number else store.value
        return tirx.BufferStore(store.buffer, value, [_wide(i) for i in store.indices])

    def _loop(self, loop: tirx.For) -> tirx.For:
        step = None if loop.step is None else _wide(loop.step)
        size = _wide(loop.min), _wide(loop.extent)
        how = loop.thread_binding, dict(loop.annotations), step
        return tirx.For(loop.loop_var, *size, loop.kind, loop.body, *how)

    def _realize(self, realize: SBlockRealize) -> SBlockRealize:
        values = [_wide(v) for v in realize.iter_values]
        return SBlockRealize(values, realize.predicate, realize.block)
