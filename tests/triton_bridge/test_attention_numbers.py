"""What the launches of attention compute, in the interpreter and emulated, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx

from relax_fusion.estimator.families.triton_attention.tiles import padded
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.launch.arguments import Out, TensorMap, is_tensor
from relax_fusion.triton_bridge.attention import Case as AttentionCase
from relax_fusion.triton_bridge.attention import attention_cases
from relax_fusion.triton_bridge.steps import Step
from relax_fusion.workload import Attention, DynamicDim
from tests.gpu.attention_cases import Case, cases

from .attention_common import H200, parameters, plan_of
from .common import launch_of
from .kernels import gluon_on_cpu
from .kernels.interpreted import Interpreter, not_dependent


def in_float16(case: Case) -> Case:
    """Return the case in float16; the interpreter rounds to bfloat16 in its own way."""
    return replace(case, work=replace(case.work, dtype="float16", out_dtype="float16"))


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
    steps = chosen(attention_cases(case.work, plan, params, most_queries, H200, {}), values)
    tensors = {p.name: a for p, a in zip(params, given, strict=True) if is_tensor(p)}
    dtypes = {n: str(a.dtype) for n, a in tensors.items()}
    tensors["out0"] = np.full(case.out_shape(), np.nan)
    dtypes["out0"] = case.work.out_dtype
    names = {name: name for name in tensors}
    launches = [launch_of(s, values, tensors, dtypes, names, ["out0"]) for s in steps]
    floats = {n: a if a.dtype == bool else a.astype(np.float64) for n, a in tensors.items()}
    return interpreter(floats, dtypes, launches)["out0"]


def chosen(found: list[AttentionCase], values: Values) -> list[Step]:
    """Return the launches of the first condition that holds."""
    return next(steps for when, steps in found if when is True or values(when))


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


def emulated(case: Case, plan: TilePlan) -> np.ndarray:
    """Return the result of the one launch of `case` under a plan for Gluon's kernels."""
    arrays = case.inputs()
    given = [*arrays.values(), *([case.lengths[2]] if case.work.kv_prefix else [])]
    params = parameters(case.work, plan)
    values = Values(params, given)
    (step,) = chosen(attention_cases(case.work, plan, params, None, H200, {}), values)
    tensors = {p.name: a for p, a in zip(params, given, strict=True) if is_tensor(p)}
    out = np.full(case.out_shape(), np.nan)

    def known(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(known, value))
        if isinstance(value, TensorMap):
            shown = mapped(value, values, tensors[value.of.name])
            return gluon_on_cpu.Map(shown, value.block)
        if isinstance(value, Out):
            return gluon_on_cpu.Pointer(out.reshape(-1))
        if is_tensor(value):
            return gluon_on_cpu.Pointer(tensors[value.name].reshape(-1))
        return gluon_on_cpu.values(values(getattr(value, "value", value)))

    args = {name: known(value) for name, value in step.args.items()}
    args |= not_dependent(step.constexprs)
    gluon_on_cpu.launch(step.function, tuple(values(n) for n in step.grid), args)
    return out


def mapped(value: TensorMap, values: Values, tensor: np.ndarray) -> np.ndarray:
    """Return what a tensor map shows of `tensor`, if the device has such maps."""
    shape, strides = ([values(n) for n in sizes] for sizes in value.layout(tensor.shape))
    assert sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) < tensor.size
    steps = [s * tensor.itemsize for s in strides]
    assert all(step % 16 == 0 for step in steps[:-1])
    return np.lib.stride_tricks.as_strided(tensor, shape, steps)


def gluon_plan(family: str, work: Attention) -> TilePlan:
    """Return the plan of the smallest tiles of a family for Hopper."""
    width = padded(work.head_dim)
    return {
        "flash": TilePlan(128, 64, width, num_stages=2, num_warps=12),
        "groups": TilePlan(16, 64, width, split_k=4, num_warps=4),
        "halves": TilePlan(64, 64, width, split_k=2, num_stages=2, num_warps=8),
    }[family]


@pytest.mark.parametrize("family", ["flash", "groups", "halves"])
@pytest.mark.parametrize(
    "name",
    [
        *("layout_bnsh_bsnh_bsnh", "layout_bsnh_bnsh_bnsh", "v_dim_48", "grouped", "bias_1001"),
        *("mask_0110", "everything", "dynamic_2x16x64", "cache_dynamic", "cache_static"),
    ],
)
def test_launches_for_hopper_match_the_reference(family: str, name: str) -> None:
    case = CASES[name]
    plan = replace(gluon_plan(family, case.work), backend="triton", family=family)
    case.check(case.inputs(), emulated(case, plan), stored=True)


@pytest.mark.parametrize("keys", [72, 65])
def test_biases_are_copied_as_tiles_where_their_rows_are_aligned(keys: int) -> None:
    case = CASES["bias_float16"]
    dims = (False, True, True, True)
    work = replace(case.work, bias_dims=dims, kv_len=DynamicDim("kv_len"), q_heads=2, kv_heads=1)
    case = replace(case, work=work, sizes={**case.sizes, "kv_len": keys})
    plan = replace(gluon_plan("flash", work), backend="triton", family="flash")
    case.check(case.inputs(), emulated(case, plan), stored=True)
