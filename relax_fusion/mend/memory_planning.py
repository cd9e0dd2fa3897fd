"""Planning memory: TVM's pass, kept away from functions that it plans wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm import ir, relax, tirx

from ..matching.expressions import found_in
from ..matching.pattern import calls_in, is_call
from ..transforms.modules import functions_of, module_pass, rewritten, with_functions
from ..tvm_ir import structural_equal

_WIDEST = 8
"""Bytes of the largest element."""


@module_pass
class PlanMemory:
    """Let tensors of a function share memory that is known when compiling, by TVM's planner.

    rewrite::

        a = R.builtin.alloc_tensor(...)    ->    s = R.memory.alloc_storage(...)
                                                 a = R.memory.alloc_tensor(s, ...)

    TVM 0.27's StaticPlanBlockMemory has one pool of free storage for all of a function.  A branch
    of an ``If`` is given storage that only the other branch allocates, and a tensor of one device
    is given storage of another: the first ends in a segmentation fault, the second in kernels that
    read memory of the wrong device.  It also multiplies the numbers in sizes, and raises an error
    where these are beyond int64, as of ``x[:2**62]``, whose size is ``T.min(2**62, n)``.

    declines when:
        a function has branches or functions inside, tensors on several devices, or sizes with such
        numbers.  Its tensors get memory of their own, each when it is computed.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with the memory of its other functions planned."""
        left_out = {
            gvar: func
            for gvar, func in functions_of(mod, relax.Function).items()
            if _misleads_the_planner(func)
        }
        planned = relax.transform.StaticPlanBlockMemory()(with_functions(mod, {}, without=left_out))
        return with_functions(planned, left_out)


def _misleads_the_planner(func: relax.Function) -> bool:
    if found_in(func.body, relax.If) or found_in(func.body, relax.Function):
        return True
    allocated = calls_in(func.body, "relax.builtin.alloc_tensor")
    if len({int(call.args[2].value) for call in allocated}) > 1:
        return True
    return any(_largest(call.args[0].values) * _WIDEST >= 1 << 63 for call in allocated)


def _largest(shape: Sequence[tirx.Expr]) -> int:
    """Return the largest number that a product of sizes may have, as the planner multiplies."""
    return prod(max([1, *map(int, found_in(size, tirx.IntImm))]) for size in shape)


@module_pass
class NameInPlaceResults:
    """Call the result of an in-place packed function by the name of the argument that it is.

    rewrite: ``y = R.call_inplace_packed("f", x, inplace_indices=[0])`` ->
    ``_ = R.call_inplace_packed("f", x, inplace_indices=[0]); y = x``

    TVM 0.27's StaticPlanBlockMemory takes such a result for another tensor, and uses the memory of
    `x` anew behind its last use, while `y` is still read.  Behind this pass, nothing may remove
    calls whose results are not read.

    declines when: a result is of another type than its argument.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        return rewritten(mod, _NameResults(mod))


@relax.expr_functor.mutator
class _NameResults(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.call_inplace_packed"):
            return call
        indices = [int(i) for i in call.attrs.inplace_indices]
        types = [call.ty] if len(indices) == 1 else call.ty.fields
        args = [call.args[1 + j] if j >= 0 else None for j in indices]
        if any(
            a is not None and not structural_equal(a.ty, t)
            for a, t in zip(args, types, strict=True)
        ):
            return call
        made = self.builder_.emit(call)
        items = [relax.TupleGetItem(made, i) if a is None else a for i, a in enumerate(args)]
        return items[0] if len(items) == 1 else relax.Tuple(items)
