"""The launches of attention: their arguments, in the interpreter against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion.compute import build_prim_func
from relax_fusion.device import device
from relax_fusion.estimator.triton_attention import padded
from relax_fusion.tile_plan import PlanTable, TilePlan
from relax_fusion.triton_bridge.arguments import Out, Workspace, is_number, is_tensor
from relax_fusion.triton_bridge.attention import attention_steps
from relax_fusion.triton_bridge.steps import Step
from relax_fusion.workload import Attention
from tests.gpu.attention_cases import Case, cases

from .kernels.interpreted import Interpreter, Launch

H200 = device("h200")


def in_float16(case: Case) -> Case:
    """Return the case in float16; the interpreter rounds to bfloat16 in its own way."""
    return replace(case, work=replace(case.work, dtype="float16", out_dtype="float16"))


def plan_of(work: Attention, split_k: int = 1, **fields: Any) -> TilePlan:
    """Return the plan of the smallest pointer tiles."""
    return TilePlan(
        *(32, 32, padded(work.head_dim)),
        split_k=split_k,
        num_stages=2,
        num_warps=2,
        backend="triton",
        family=fields.pop("family", "pointer"),
        **fields,
    )


def parameters(work: Attention, plan: TilePlan) -> list[ir.Expr]:
    """Return the inputs of the PrimFunc of `work` as the pass sees them."""
    func = build_prim_func(work, PlanTable.single(plan), gpu=True)
    return [
        p if is_number(p) else relax.Var(p.name, relax.TensorType(list(p.ty.shape), p.ty.dtype))
        for p in func.params[:-1]
    ]


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


def interpreted(
    interpreter: Interpreter, case: Case, plan: TilePlan, most_queries: int | None = None
) -> np.ndarray:
    """Return the result of the launches of `case` under `plan`."""
    arrays = case.inputs()
    given = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    params = parameters(case.work, plan)
    values = Values(params, given)
    steps = attention_steps(case.work, plan, params, most_queries, H200, {})
    tensors = {p.name: a for p, a in zip(params, given, strict=True) if is_tensor(p)}
    dtypes = {n: str(a.dtype) for n, a in tensors.items()}
    tensors["out"] = np.full(case.out_shape(), np.nan)
    dtypes["out"] = case.work.out_dtype
    launches = [launch(step, values, tensors, dtypes) for step in steps]
    floats = {n: a if a.dtype == bool else a.astype(np.float64) for n, a in tensors.items()}
    return interpreter(floats, dtypes, launches)["out"]


def launch(
    step: Step, values: Values, tensors: dict[str, np.ndarray], dtypes: dict[str, str]
) -> Launch:
    """Return a launch for the interpreter, with its workspaces among `tensors`."""
    args: dict[str, Any] = {}
    for name, value in step.args.items():
        if isinstance(value, Workspace):
            room = f"room{id(value)}"
            tensors.setdefault(room, np.full([values(n) for n in value.shape], np.nan))
            args[name], dtypes[room] = room, value.dtype
        elif isinstance(value, Out):
            args[name] = "out"
        else:
            args[name] = value.name if is_tensor(value) else values(value)
    grid = tuple(values(n) for n in step.grid)
    constants = {**step.constexprs, "PDL": False}
    return Launch(step.function.__name__, grid, args, constants)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    worker = Interpreter()
    yield worker
    worker.close()


CASES = {c.name: in_float16(c) for c in cases()}


@pytest.mark.parametrize(
    ("name", "split_k"),
    [
        ("layout_bnsh_bsnh_bsnh", 1),
        ("layout_bsnh_bnsh_bnsh", 4),
        ("v_dim_48", 4),
        ("grouped", 4),
        ("bias_1001", 1),
        ("mask_0110", 1),
        ("everything", 4),
        ("dynamic_2x16x64", 4),
        ("dynamic_no_keys", 4),
        ("cache_dynamic", 1),
        ("cache_static", 4),
    ],
)
def test_launches_match_the_reference(interpreter: Interpreter, name: str, split_k: int) -> None:
    case = CASES[name]
    got = interpreted(interpreter, case, plan_of(case.work, split_k))
    case.check(case.inputs(), got, stored=True)
