"""The launches of a plan of the chain engine."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from tvm import ir, tirx

from ...estimator.families.generated.plan import GeneratedPlan, Launched, launches, many
from ...hardware import DeviceSpec
from ...launch.arguments import TensorMap, Workspace
from ...workload import Chain, DynamicDim
from .. import math
from ..kernel import KernelOptions
from ..launches import Step, ceil_div, fewer
from ..operands import named_operands
from .text import HELPERS, KernelText, Means, Parameter, kernel_text
from .tiles import Blocks


def generated_steps(
    work: Chain,
    plan: GeneratedPlan,
    inputs: Sequence[ir.Expr],
    dims: Mapping[str, ir.Expr],
    bounds: Mapping[str, int],
    dev: DeviceSpec,
) -> list[Step]:
    """Return the launches that compute `work`, in order.

    `inputs` are those of ``work.graph``, in order, `dims` the values of its dynamic dimensions, and
    `bounds` the largest values, of some of them, with which these launches are called.
    """
    given = named_operands(work, inputs)
    few = {name: fewer(size, bounds.get(name)) for name, size in dims.items()}
    every = launches(work.graph, plan)
    dependent = dev.capabilities.dependent_launch and len(every) > 1
    steps = []
    for number, launched in enumerate(every):
        last = number == len(every) - 1
        means = Means(
            tensor_maps=bool(plan.tensor_maps) and number == 0,
            waits=dependent and number > 0,
            announces=dependent and not last,
        )
        for operand in launched.graph.outputs if not last else ():
            shape = [few[d.name] if isinstance(d, DynamicDim) else d for d in operand.shape or ()]
            given[operand.name] = Workspace(shape, operand.dtype)
        steps.append(_step(launched, means, given, dims))
    return steps


def _step(
    launched: Launched, means: Means, given: Mapping[str, Any], dims: Mapping[str, ir.Expr]
) -> Step:
    kernel = kernel_text(launched.graph, launched.schedule, many(launched.graph), means)
    function = function_of(kernel)
    values = [_argument(p, given) for p in kernel.operands]
    values += [tirx.Cast("int32", dims[name]) for name in kernel.sizes]
    options = KernelOptions(
        num_warps=launched.warps, num_stages=launched.stages, dependent_launch=means.waits
    )
    grid = [_blocks(launched, dims)]
    return Step(function, grid, dict(zip(function.arg_names, values, strict=True)), {}, options)


def _argument(parameter: Parameter, given: Mapping[str, Any]) -> Any:
    tensor = given[parameter.tensor]
    return TensorMap(tensor, parameter.box) if parameter.box else tensor


def _blocks(launched: Launched, dims: Mapping[str, ir.Expr]) -> Any:
    """Return the blocks of the grid."""
    blocks = Blocks.of(launched.graph, launched.schedule, many(launched.graph))
    total: Any = 1
    for loop in launched.schedule.structure.grid:
        size = blocks.size[loop]
        count = dims[size.name] if isinstance(size, DynamicDim) else size
        total = total * ceil_div(count, blocks.block[loop])
    return total


@lru_cache(maxsize=4096)
def function_of(kernel: KernelText) -> JITFunction:
    """Return a kernel that can be compiled, or called.

    Its source is found by Python's `inspect`, as that of a function in a file.
    """
    digest = hashlib.sha256(kernel.text.encode()).hexdigest()[:16]
    file = f"<generated {kernel.name} {digest}>"
    lines = kernel.text.splitlines(keepends=True)
    linecache.cache[file] = (len(kernel.text), None, lines, file)
    known = {"tl": tl, "triton": triton, "__name__": __name__}
    known |= {name: getattr(math, name) for name in HELPERS}
    exec(compile(kernel.text, file, "exec"), known)
    return known[kernel.name]
