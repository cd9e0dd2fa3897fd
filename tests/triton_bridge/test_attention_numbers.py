"""What the launches of attention compute, in the interpreter and emulated, against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan, padded
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.launch.arguments import Out, Part, TensorMap, is_tensor
from relax_fusion.workload import Attention, DynamicDim

from ..support.attention_cases import Case, cases
from ..support.interpreted import Interpreter, not_dependent
from ..support.launches import Values, interpreted, launch_cases, parameters, plan_of
from ..support.workloads import Arrays
from .kernels import gluon_on_cpu


def in_float16(case: Case) -> Case:
    """Return the case in float16; the interpreter rounds to bfloat16 in its own way."""
    return replace(case, work=replace(case.work, dtype="float16", out_dtype="float16"))


def arguments(case: Case) -> dict[str, Any]:
    """Return the operands of a case, numbers among them."""
    return case.inputs() | ({"kv_len": case.lengths[2]} if case.work.kv_prefix else {})


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
        ("merged", 1),
        ("merged_in_turns", 4),
        ("merged_keys_and_values", 1),
        ("merged_values", 1),
    ],
)
def test_launches_match_the_reference(interpreter: Interpreter, name: str, split_k: int) -> None:
    case = CASES[name]
    got = interpreted(interpreter, case.work, plan_of(case.work, split_k), arguments(case))
    case.check(case.inputs(), got["out"], stored=True)


def emulated(case: Case, plan: TilePlan) -> np.ndarray:
    """Return the result of the one launch of `case` under a plan for Gluon's kernels."""
    tensors, params = arguments(case), parameters(case.work)
    values = Values(params, list(tensors.values()))
    (step,) = values.chosen(launch_cases(case.work, plan, params))
    out = np.full(case.out_shape(), np.nan)

    def known(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*map(known, value))
        if isinstance(value, TensorMap):
            return gluon_on_cpu.Map(mapped(value, values, tensors), value.block)
        if isinstance(value, Out):
            return gluon_on_cpu.Pointer(out.reshape(-1))
        if isinstance(value, Part) or is_tensor(value):
            return gluon_on_cpu.Pointer(elements(value, tensors))
        return gluon_on_cpu.values(values(getattr(value, "value", value)))

    args = {name: known(value) for name, value in step.args.items()}
    args |= not_dependent(step.constexprs)
    gluon_on_cpu.launch(step.function, tuple(values(n) for n in step.grid), args)
    return out


def elements(value: Any, tensors: Arrays) -> np.ndarray:
    """Return the elements from where a pointer points."""
    part = value if isinstance(value, Part) else Part(value, 0)
    return tensors[part.of.name].reshape(-1)[part.start :]


def mapped(value: TensorMap, values: Values, tensors: Arrays) -> np.ndarray:
    """Return what a tensor map shows, if the device has such maps."""
    tensor, own = elements(value.of, tensors), getattr(value.of, "of", value.of)
    layout = value.layout(tensors[own.name].shape)
    shape, strides = ([values(n) for n in sizes] for sizes in layout)
    assert sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) < tensor.size
    steps = [s * tensor.itemsize for s in strides]
    start = getattr(value.of, "start", 0) * tensor.itemsize
    assert all(step % 16 == 0 for step in (start, *steps[:-1]))
    return np.lib.stride_tricks.as_strided(tensor, shape, steps)


def gluon_plan(family: str, work: Attention) -> TilePlan:
    """Return the plan of the smallest tiles of a family for Hopper."""
    width = padded(work.head_dim)
    return {
        "flash": TilePlan(128, 64, width, num_stages=2, num_warps=12),
        "groups": AttentionPlan(16, 64, width, groups=4, num_warps=4),
        "halves": AttentionPlan(64, 64, width, groups=2, num_stages=2, num_warps=8),
    }[family]


@pytest.mark.parametrize("family", ["flash", "groups", "halves"])
@pytest.mark.parametrize(
    "name",
    [
        *("layout_bnsh_bsnh_bsnh", "layout_bsnh_bnsh_bnsh", "v_dim_48", "grouped", "bias_1001"),
        *("mask_0110", "everything", "dynamic_2x16x64", "cache_dynamic", "cache_static"),
        *("merged", "merged_in_turns", "merged_keys_and_values", "merged_cache"),
    ],
)
def test_launches_for_hopper_match_the_reference(family: str, name: str) -> None:
    case = CASES[name]
    plan = replace(gluon_plan(family, case.work), family=family)
    case.check(case.inputs(), emulated(case, plan), stored=True)


@pytest.mark.parametrize("keys", [72, 65])
def test_biases_are_copied_as_tiles_where_their_rows_are_aligned(keys: int) -> None:
    case = CASES["bias_float16"]
    dims = (False, True, True, True)
    work = replace(case.work, bias_dims=dims, kv_len=DynamicDim("kv_len"), q_heads=2, kv_heads=1)
    case = replace(case, work=work, sizes={**case.sizes, "kv_len": keys})
    plan = replace(gluon_plan("flash", work), family="flash")
    case.check(case.inputs(), emulated(case, plan), stored=True)
