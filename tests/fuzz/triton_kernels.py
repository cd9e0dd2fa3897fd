"""Random kernels of Triton's, in its interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax_fusion.hardware import device
from relax_fusion.workload import Attention
from relax_fusion.workload.reference import numpy_dtype

from ..support import launches
from ..support.interpreted import Interpreter
from . import kernels
from .findings import Findings
from .kernels import Kernel

H200 = device("h200")


def explore(seeds: Sequence[int], interpreter: Interpreter) -> Findings:
    """Interpret kernels one by one, and compare each with its reference."""
    found = Findings()
    for seed in seeds:
        found.count += 1
        kernel = kernels.draw(seed, H200, "triton")
        if kernel is None:
            found.seen["skipped"]["no kernel of Triton"] += 1
            continue
        found.seen["kernels"][kernels.label(kernel)] += 1
        try:
            arrays, outs = interpreted(interpreter, kernel)
            kernels.judge(kernel.case, arrays, outs, stored=True)
        except Exception as err:
            found.failures.append(kernel.failed(err))
    return found


def explore_alone(seeds: Sequence[int]) -> Findings:
    """Do the same in an interpreter that ends with it."""
    interpreter = Interpreter()
    try:
        return explore(seeds, interpreter)
    finally:
        interpreter.close()


def interpreted(
    interpreter: Interpreter, kernel: Kernel
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return the inputs of a kernel, and what its launches make of them."""
    case, ((_, plan),) = kernel.case, kernel.plans.entries
    arrays = case.inputs()
    cached = isinstance(case.work, Attention) and case.work.kv_prefix
    given = {**arrays, "kv_len": case.lengths[2]} if cached else arrays
    made = launches.interpreted(interpreter, case.work, plan, given)
    return arrays, [made[o.name].astype(numpy_dtype(o.dtype)) for o in case.work.graph.outputs]
