"""Results in the memory of an operand that a kernel reads for the last time, element by element."""

from __future__ import annotations

from collections.abc import Iterator

from tvm import ir, relax, tirx
from tvm.target import Target

from ..compute import description
from ..hardware.target import is_gpu
from ..matching.effects import Memory, Places, reads_of
from ..matching.expressions import found_in, variables_of
from ..matching.pattern import is_call
from ..tvm_ir import TensorLoad, TensorRegion, structural_equal, structural_map
from .modules import module_pass, rewritten


@module_pass
class AddInPlace:
    """Store the result of a kernel where an operand was, as the residual that a matmul adds.

    rewrite::

        y = R.call_tir(f, (x, w, r))    ->    y = R.call_tir_inplace(f_in_place, (x, w, r), [2])

    The kernel reads an element of r in the statement that stores the same element of y, and
    nowhere else.  Memory is planned for one tensor less.

    declines when:
        r is an argument of the function, a constant, returned, read later or by another operand of
        the call; the kernel has several results, reads r elsewhere, or is none of ours, which may
        store an element twice; the target is a GPU, whose kernels may ask for operands ahead.
    """

    target: Target

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite every function of `mod`; kernels that nothing calls any more go."""
        if is_gpu(self.target):
            return mod
        adder = _Adder(mod)
        made = rewritten(mod, adder, memory=True)
        return relax.transform.DeadCodeElimination()(made) if any(adder.kernels.values()) else mod


@relax.expr_functor.mutator
class _Adder(relax.PyExprMutator):
    memory: Memory

    def __init__(self, mod: ir.IRModule):
        super().__init__(mod)
        self.mod = mod
        self.kernels: dict[tuple[ir.GlobalVar, int], ir.GlobalVar | None] = {}

    def visit_function_(self, func: relax.Function) -> relax.Expr:
        values = self.memory.values
        self.own: set[int] = set()
        self.last: dict[int, relax.Var] = {}
        for var, value in values.items():
            if is_call(value, "relax.call_tir"):
                self.own |= self.memory.of(var)
            for place in (p for v in reads_of(value) for p in self.memory.of(v)):
                self.last[place] = var
        self.own -= self.memory.returned
        return super().visit_function_(func)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        index = next(self._indices(binding), None)
        if index is not None:
            call = binding.value
            gvar = self.kernels[call.args[0], index]
            made = relax.op.call_tir_inplace(gvar, call.args[1], [index], [binding.var.ty])
            binding = relax.VarBinding(binding.var, made)
        super().visit_var_binding_(binding)

    def _indices(self, binding: relax.VarBinding) -> Iterator[int]:
        """Yield the operands in whose memory the result of a call can be."""
        call, var = binding.value, binding.var
        if not is_call(call, "relax.call_tir") or len(call.args) > 2:
            return
        args = call.args[1].fields if isinstance(call.args[1], relax.Tuple) else []
        places = [self.memory.of(arg) for arg in args]
        for index, arg in enumerate(args):
            others: Places = frozenset().union(*places[:index], *places[index + 1 :])
            here = places[index]
            free = bool(here) and here <= self.own and here.isdisjoint(others)
            if not free or not structural_equal(arg.ty, var.ty):
                continue
            is_last = all(self.last[place].same_as(var) for place in here)
            if is_last and self._kernel(call.args[0], index) is not None:
                yield index

    def _kernel(self, gvar: ir.GlobalVar, index: int) -> ir.GlobalVar | None:
        key = gvar, index
        if key not in self.kernels:
            whole = self.mod[gvar]
            func = in_place(whole, index) if description(whole) is not None else None
            name = f"{gvar.name_hint}_in_place"
            self.kernels[key] = None if func is None else self.builder_.add_func(func, name)
        return self.kernels[key]


def in_place(func: tirx.PrimFunc, index: int) -> tirx.PrimFunc | None:
    """Return a kernel that stores its result in one of its parameters.

    None where an element is read elsewhere than where it is stored.

    `func`: its last parameter is the only result, of which it stores each element once.
    `index`: the number of the other parameter.
    """
    read, stored = func.params[index], func.params[-1]
    if not (tirx.is_buffer_var(read) and structural_equal(read.ty, stored.ty)):
        return None
    both = tirx.decl_buffer(list(read.ty.shape), str(read.ty.dtype), read.name)

    def loaded(load: TensorLoad) -> tirx.Expr:
        return tirx.BufferLoad(both, load.indices) if load.source.same_as(read) else load

    def kept(store: tirx.BufferStore) -> tirx.BufferStore:
        loads = [x for x in found_in(store.value, TensorLoad) if x.source.same_as(read)]
        if not store.buffer.same_as(stored) or not loads:
            return store
        if not all(_same(load, store) for load in loads):
            return store
        value = structural_map(store.value, (TensorLoad, loaded), order="post")
        return tirx.BufferStore(both, value, store.indices)

    def moved(region: TensorRegion) -> TensorRegion:
        there = region.source.same_as(read) or region.source.same_as(stored)
        return tirx.BufferRegion(both, region.region) if there else region

    body = structural_map(func.body, (tirx.BufferStore, kept), order="post")
    body = structural_map(body, (TensorRegion, moved), order="post")
    if variables_of(body) & {read, stored}:
        return None
    params = [*func.params[:index], both, *func.params[index + 1 : -1]]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs).without_attr("global_symbol")


def _same(load: TensorLoad, store: tirx.BufferStore) -> bool:
    """Tell whether an element is read that is stored."""
    pairs = zip(load.indices, store.indices, strict=True)
    return all(structural_equal(one, other) for one, other in pairs)
