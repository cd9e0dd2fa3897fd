"""Random kernels of Triton's, in its interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import device
from relax_fusion.launch.arguments import is_number, is_tensor
from relax_fusion.triton_bridge.attention import attention_cases
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.steps import Step
from relax_fusion.workload import Attention

from ..support.workloads import results
from ..triton_bridge.common import launch_of
from ..triton_bridge.kernels.interpreted import Interpreter
from ..triton_bridge.test_attention_numbers import Values, chosen
from . import kernels
from .kernels import Findings, Kernel

H200 = device("h200")


def explore(seeds: Sequence[int], interpreter: Interpreter) -> Findings:
    """Interpret kernels one by one, and compare each with its reference."""
    found = Findings()
    for seed in seeds:
        found.workloads += 1
        kernel = kernels.draw(seed, H200, "triton")
        if kernel is None:
            found.skipped["no kernel of Triton"] += 1
            continue
        found.kernels[kernels.label(kernel)] += 1
        try:
            arrays, outs = interpreted(interpreter, kernel)
            kernels.judge(kernel.case, arrays, outs, stored=True)
        except Exception as err:
            found.failures.append(f"{kernel}: {type(err).__name__}: {str(err)[-300:]}")
    return found


def interpreted(
    interpreter: Interpreter, kernel: Kernel
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Return the inputs of a kernel, and what its launches make of them."""
    case, ((_, plan),) = kernel.case, kernel.plans.entries
    arrays = case.inputs()
    cached = isinstance(case.work, Attention) and case.work.kv_prefix
    given = [*arrays.values(), *([case.lengths[2]] if cached else [])]
    params = _parameters(kernel)
    values = Values(params, given)
    tensors = {p.name: a for p, a in zip(params, given, strict=True) if is_tensor(p)}
    dtypes = {n: str(a.dtype) for n, a in tensors.items()}
    outputs = results(case.work, kernels.sizes_of(case))
    for number, (shape, dtype) in enumerate(outputs):
        tensors[f"out{number}"], dtypes[f"out{number}"] = np.full(shape, np.nan), dtype
    names = ({n: n for n in tensors}, [f"out{n}" for n in range(len(outputs))])
    steps = _steps(kernel, plan, params, values)
    launches = [launch_of(s, values, tensors, dtypes, *names) for s in steps]
    floats = {n: a if a.dtype == bool else a.astype(np.float64) for n, a in tensors.items()}
    made = interpreter(floats, dtypes, launches)
    outs = [made[f"out{n}"].astype(dtype) for n, (_, dtype) in enumerate(outputs)]
    return arrays, outs


def _parameters(kernel: Kernel) -> list[Any]:
    """Return the inputs of the PrimFunc as the pass that emits kernels sees them."""
    work = kernel.case.work
    params = build_prim_func(work, kernel.plans).params
    return [
        p if is_number(p) else relax.Var(p.name, relax.TensorType(list(p.ty.shape), p.ty.dtype))
        for p in params[: len(work.graph.inputs)]
    ]


def _steps(kernel: Kernel, plan: TilePlan, params: list[Any], values: Values) -> list[Step]:
    work: Any = kernel.case.work
    if isinstance(work, Attention):
        return chosen(attention_cases(work, plan, params, None, H200, {}), values)
    return contraction_steps(work, plan, params, None, H200, {})
