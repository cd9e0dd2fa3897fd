"""Planning memory: TVM's pass, kept away from functions that it plans wrongly."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import ir, relax

from ..matching.expressions import found_in
from ..matching.pattern import calls_in
from .modules import functions_of, with_functions


@tvm.transform.module_pass(opt_level=0, name="PlanMemory")
@dataclass(frozen=True)
class PlanMemory:
    """Let tensors of a function share memory that is known when compiling, by TVM's planner.

    rewrite::

        a = R.builtin.alloc_tensor(...)    ->    s = R.memory.alloc_storage(...)
                                                 a = R.memory.alloc_tensor(s, ...)

    TVM 0.27's StaticPlanBlockMemory has one pool of free storage for all of a function.  A branch
    of an ``If`` is given storage that only the other branch allocates, and a tensor of one device
    is given storage of another: the first ends in a segmentation fault, the second in kernels that
    read memory of the wrong device.

    declines when:
        a function has branches or functions inside, or tensors on several devices.  Its tensors
        get memory of their own, each when it is computed.
    """

    def transform_module(self, mod: ir.IRModule, _ctx: tvm.transform.PassContext) -> ir.IRModule:
        """Return the module with the memory of its other functions planned."""
        apart = {
            gvar: func
            for gvar, func in functions_of(mod, relax.Function).items()
            if _misleads_the_planner(func)
        }
        planned = relax.transform.StaticPlanBlockMemory()(with_functions(mod, {}, without=apart))
        return with_functions(planned, apart)


def _misleads_the_planner(func: relax.Function) -> bool:
    if found_in(func.body, relax.If) or found_in(func.body, relax.Function):
        return True
    allocated = calls_in(func.body, "relax.builtin.alloc_tensor")
    return len({int(call.args[2].value) for call in allocated}) > 1
