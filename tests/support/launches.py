"""The launches of a workload under a plan for Triton, and what they compute in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion.compute.reference import dims_of, reference_prim_func
from relax_fusion.estimator.families.generated.plan import GeneratedPlan
from relax_fusion.estimator.families.triton_attention.tiles import padded
from relax_fusion.estimator.families.triton_experts import TILES, ExpertPlan
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec, device
from relax_fusion.launch.arguments import (
    InOut,
    Out,
    Part,
    TensorMap,
    Workspace,
    is_number,
    is_tensor,
)
from relax_fusion.triton_bridge.attention import Case as LaunchCase
from relax_fusion.triton_bridge.attention import attention_cases
from relax_fusion.triton_bridge.contraction import contraction_steps
from relax_fusion.triton_bridge.experts import ExpertOrder, expert_steps, order_steps
from relax_fusion.triton_bridge.generated.launch import generated_steps
from relax_fusion.triton_bridge.launches import Step
from relax_fusion.triton_bridge.operands import named_operands
from relax_fusion.workload import Attention, Workload
from relax_fusion.workload.reference import sizes_of

from .interpreted import Interpreter, Launch, Mapped, not_dependent, same_tuple
from .workloads import Arrays, shape_of

H200 = device("h200")


def plan_of(work: Attention, split_k: int = 1, **fields: int) -> TilePlan:
    """Return a plan of small pointer tiles for an attention."""
    block = fields.pop("block_m", 32), fields.pop("block_n", 32), padded(work.head_dim)
    return TilePlan(*block, split_k=split_k, num_stages=2, num_warps=4, family="attention")


def parameters(work: Workload) -> list[ir.Expr]:
    """Return the inputs of the PrimFunc of `work` as the pass that emits kernels sees them."""
    params = reference_prim_func(work.graph).params
    return [
        p if is_number(p) else relax.Var(p.name, relax.TensorType(list(p.ty.shape), p.ty.dtype))
        for p in params[: len(work.graph.inputs)]
    ]


def launch_cases(
    work: Any,
    plan: TilePlan,
    params: Sequence[ir.Expr],
    most: int | None = None,
    dev: DeviceSpec = H200,
) -> list[LaunchCase]:
    """Return conditions, and the launches where they are the first that hold.

    `most` rows or query positions are there at most.
    """
    if isinstance(work, Attention):
        return attention_cases(work, plan, params, most, dev, {})
    if isinstance(plan, ExpertPlan):
        given, dependent = named_operands(work, params), dev.capabilities.dependent_launch
        order, steps = sorted_pairs(plan, given["ids"], work.experts, most, dependent)
        given |= order._asdict()
        return [(True, [*steps, *expert_steps(work, plan, given, most, dev, {})])]
    if isinstance(plan, GeneratedPlan):
        dims = dims_of(work.graph, reference_prim_func(work.graph).params)
        return [(True, generated_steps(work, plan, params, dims, {}, dev))]
    return [(True, contraction_steps(work, plan, params, most, dev, {}))]


def sorted_pairs(
    plan: ExpertPlan, ids: Any, experts: int, most: int | None, dependent: bool
) -> tuple[ExpertOrder, list[Step]]:
    """Return what a plan reads the order of pairs from, and the launches that find it, if any."""
    tokens, chosen = ids.ty.shape.values
    sizes = (tokens * chosen,), (experts + 1,)
    order = ExpertOrder(*(Workspace(size, "int32") for size in sizes))
    pairs = None if most is None else most * int(chosen)
    steps = order_steps(ids, order, experts, pairs, dependent)
    return order, steps if plan.family == TILES else []


class Values:
    """The symbolic sizes of parameters, known from arrays and numbers."""

    def __init__(self, params: Sequence[ir.Expr], given: Sequence[np.ndarray | int]):
        self.dims: dict[ir.Var, int] = {}
        for param, value in zip(params, given, strict=True):
            if isinstance(value, int):
                self.dims[param] = value
                continue
            sizes = zip(param.ty.shape.values, value.shape, strict=True)
            self.dims |= {d: n for d, n in sizes if isinstance(d, ir.Var)}

    def __call__(self, value: Any) -> Any:
        """Return a number as Python's."""
        if not isinstance(value, ir.Expr):
            return value
        known = tvm_ffi.structural_map(
            value, (ir.Var, lambda v: tirx.IntImm(str(v.ty.dtype), self.dims[v]))
        )
        return int(tvm.sym.Analyzer().simplify(known).value)

    def chosen(self, cases: Sequence[LaunchCase]) -> list[Step]:
        """Return the launches of the first condition that holds."""
        return next(steps for when, steps in cases if when is True or self(when))


def launch_of(
    step: Step,
    values: Callable[[Any], Any],
    tensors: dict[str, np.ndarray],
    dtypes: dict[str, str],
    inputs: Mapping[str, str],
    outputs: Sequence[str],
) -> Launch:
    """Return a launch for the interpreter, with its workspaces among `tensors`.

    `inputs` and `outputs` are the names of the tensors of the function, `values` gives numbers.
    """

    def known(value: Any) -> Any:
        if isinstance(value, tuple):
            return same_tuple(value, map(known, value))
        if isinstance(value, Workspace):
            room = f"room{id(value)}"
            tensors.setdefault(room, np.full([values(n) for n in value.shape], np.nan))
            dtypes[room] = value.dtype
            return room
        if isinstance(value, Out):
            return outputs[value.index]
        if isinstance(value, TensorMap):
            return Mapped(known(value.of), tuple(value.block))
        if isinstance(value, Part):  # it is only read: a copy will do
            name = inputs[value.of.name]
            part = f"{name} from {value.start}"
            tensors[part], dtypes[part] = tensors[name].reshape(-1)[value.start :], dtypes[name]
            return part
        if isinstance(value, InOut):
            return inputs[value.tensor.name]
        return inputs[value.name] if is_tensor(value) else values(value)

    args = {name: known(value) for name, value in step.args.items()}
    grid = tuple(map(values, step.grid))
    return Launch(step.function.__name__, grid, args, not_dependent(step.constexprs))


def interpreted(
    interpreter: Interpreter,
    work: Workload,
    plan: TilePlan,
    inputs: Mapping[str, Any],
    most: int | None = None,
) -> Arrays:
    """Return the results of `work` by name, in float64.

    `inputs` are its operands, numbers among them, by name and in order.
    """
    params = parameters(work)
    values = Values(params, list(inputs.values()))
    tensors = {n: np.asarray(a) for n, a in inputs.items() if not isinstance(a, int)}
    dtypes = {n: str(a.dtype) for n, a in tensors.items()}
    sizes, outputs = sizes_of(work.graph, inputs), work.graph.outputs
    tensors |= {o.name: np.full(shape_of(o, sizes), 77.0) for o in outputs}
    dtypes |= {o.name: o.dtype for o in outputs}
    names = {name: name for name in tensors}
    results = [o.name for o in outputs]
    launches = [
        launch_of(step, values, tensors, dtypes, names, results)
        for step in values.chosen(launch_cases(work, plan, params, most))
    ]
    floats = {n: a if a.dtype == bool else a.astype(np.float64) for n, a in tensors.items()}
    made = interpreter(floats, dtypes, launches)
    return {o.name: made[o.name] for o in outputs}
