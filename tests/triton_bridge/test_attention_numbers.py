"""What the launches of attention compute, in the interpreter and emulated, against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.estimator import violations
from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan, padded
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.launch.arguments import Out, Part, TensorMap, is_tensor
from relax_fusion.triton_bridge import attention
from relax_fusion.triton_bridge.attention import attention_cases
from relax_fusion.workload import Attention, DynamicDim

from ..support.attention_cases import BASE, Case, cases
from ..support.interpreted import Interpreter, not_dependent
from ..support.launches import H200, Values, interpreted, parameters, plan_of
from ..support.slow import sampled
from ..support.workloads import Arrays
from .kernels import gluon_on_cpu

EVERY = (True, True, True, True)
FEW_PROGRAMS = replace(H200, sm_count=3)
"""A device on which a program of few multiprocessors has several tiles, one after the other."""


def long(name: str, q_len: int, kv_len: int, edit: Any = None, **changes: Any) -> Case:
    """Return a case of more rows than a tile has."""
    return Case(name, replace(BASE, batch=1, q_len=q_len, kv_len=kv_len, **changes), edit=edit)


def _hide_some(arrays: Arrays) -> None:
    arrays["bias"][..., 5] = arrays["bias"][..., 40:60] = -np.inf
    arrays["bias"][:, :, 9] = -np.inf
    arrays["bias"][:, 1, 2, 3] = np.nan


LONG = [
    long("long_causal", 150, 150, causal="bottom_right"),
    long("long_few_keys", 300, 77, causal="bottom_right"),
    long("long_top_left", 300, 77, causal="top_left", q_heads=6),
    long("long_window", 140, 260, causal="bottom_right", window=40),
    long("long_sinks", 300, 200, causal="top_left", window=7, sinks="float32"),
    long("long_both_sides", 140, 140, window=9, q_layout="bnsh"),
    long("long_alibi", 130, 75, bias_dims=EVERY, alibi="float32", softcap=2.0),
    long("long_mask", 200, 70, mask_dims=(True, True, True, False), sinks="float16"),
]
MORE = [
    long("infinite_bias", 33, 65, _hide_some, bias_dims=EVERY),
    long("head_dim_256", 17, 17, head_dim=256, v_dim=256, scale=0.1),
    long("head_dim_112", 3, 37, head_dim=112, v_dim=128, scale=0.1),
]


def in_float16(case: Case) -> Case:
    """Return the case in float16; the interpreter rounds to bfloat16 in its own way."""
    return replace(case, work=replace(case.work, dtype="float16", out_dtype="float16"))


def arguments(case: Case) -> dict[str, Any]:
    """Return the operands of a case, numbers among them."""
    return case.inputs() | ({"kv_len": case.lengths[2]} if case.work.kv_prefix else {})


CASES = {c.name: in_float16(c) for c in [*cases(), *MORE, *LONG]}
SHORT = [name for name in CASES if not name.startswith("long")]


@pytest.mark.parametrize(
    ("name", "split_k"), sampled([(n, 4 if i % 4 else 1) for i, n in enumerate(SHORT)], 3)
)
def test_launches_match_the_reference(interpreter: Interpreter, name: str, split_k: int) -> None:
    case = CASES[name]
    got = interpreted(interpreter, case.work, plan_of(case.work, split_k), arguments(case))
    case.check(case.inputs(), got["out"], stored=True)


@pytest.mark.parametrize("name", ["sinks", "sinks_only", "long_top_left"])
def test_more_parts_than_are_merged_at_once(
    interpreter: Interpreter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MERGED_PARTS", 2)
    monkeypatch.setattr(attention, "MERGED_COLUMNS", 16)
    case = CASES[name]
    plan = replace(plan_of(case.work, 4), block_n=16)
    got = interpreted(interpreter, case.work, plan, arguments(case))
    case.check(case.inputs(), got["out"], stored=True)


@pytest.mark.parametrize("name", ["long_causal", "long_window", "long_alibi"])
def test_blocks_that_all_rows_see_are_not_masked(interpreter: Interpreter, name: str) -> None:
    case = CASES[name]
    plan = replace(plan_of(case.work), block_m=64, block_n=64)
    got = interpreted(interpreter, case.work, plan, arguments(case))
    case.check(case.inputs(), got["out"], stored=True)


def emulated(case: Case, plan: TilePlan) -> np.ndarray:
    """Return the result of the one launch of `case` under a plan for Gluon's kernels."""
    tensors, params = arguments(case), parameters(case.work)
    values = Values(params, list(tensors.values()))
    (step,) = values.chosen(attention_cases(case.work, plan, params, None, FEW_PROGRAMS, {}))
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
        "flash": TilePlan(128, 64, width, num_stages=2, num_warps=12, family="flash"),
        "groups": AttentionPlan(16, 64, width, groups=4, num_warps=4, family="groups"),
        "halves": AttentionPlan(
            *(64, 64, width), groups=2, num_stages=2, num_warps=8, family="halves"
        ),
    }[family]


HOPPER = [
    (family, case.name)
    for case in CASES.values()
    for family in ("flash", "groups", "halves")
    if not violations(gluon_plan(family, case.work), case.work, H200)
]


@pytest.mark.parametrize(("family", "name"), sampled(HOPPER, 2))
def test_launches_for_hopper_match_the_reference(family: str, name: str) -> None:
    case = CASES[name]
    case.check(case.inputs(), emulated(case, gluon_plan(family, case.work)), stored=True)


@pytest.mark.parametrize("l2_bytes", [1, H200.l2_bytes])
@pytest.mark.parametrize("name", ["long_causal", "long_sinks"])
def test_flash_in_deeper_rings(name: str, l2_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages of keys; tiles of all heads in turn, or each tile to a program of its own."""
    case = CASES[name]
    dev = replace(FEW_PROGRAMS, l2_bytes=l2_bytes)
    monkeypatch.setattr(f"{__name__}.FEW_PROGRAMS", dev)
    plan = replace(gluon_plan("flash", case.work), block_n=32, num_stages=3)
    case.check(case.inputs(), emulated(case, plan), stored=True)


@pytest.mark.parametrize(("rows", "keys", "groups"), [(32, 32, 4), (16, 16, 8)])
def test_tiles_of_groups(rows: int, keys: int, groups: int) -> None:
    case = CASES["everything"]
    plan = replace(gluon_plan("groups", case.work), block_m=rows, block_n=keys)
    plan = replace(plan, groups=groups, num_warps=groups)
    case.check(case.inputs(), emulated(case, plan), stored=True)


@pytest.mark.parametrize("keys", [72, 65])
def test_biases_are_copied_as_tiles_where_their_rows_are_aligned(keys: int) -> None:
    case = CASES["bias_float16"]
    dims = (False, True, True, True)
    work = replace(case.work, bias_dims=dims, kv_len=DynamicDim("kv_len"), q_heads=2, kv_heads=1)
    case = replace(case, work=work, sizes={**case.sizes, "kv_len": keys})
    case.check(case.inputs(), emulated(case, gluon_plan("flash", work)), stored=True)


@pytest.mark.parametrize("sinks", [None, "float32"])
def test_a_query_that_sees_no_key_gives_zeros_whatever_the_keys_hold(sinks: str | None) -> None:
    def edit(arrays: Arrays) -> None:
        arrays["mask"][:, :, 3] = False
        arrays["k"][...] = arrays["v"][...] = np.nan

    case = in_float16(long("hidden", 70, 40, edit, mask_dims=EVERY, sinks=sinks))
    got = emulated(case, gluon_plan("flash", case.work))
    seen = case.inputs()["mask"].any(-1).swapaxes(1, 2)
    assert (got[~seen] == 0).all() and np.isnan(got[seen]).all() and not seen[:, 3].any()
