"""Chains of matmuls on tensor cores: numbers without a GPU, the code, and what plans may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import MatmulChainRule
from relax_fusion.dlight_rules.tensor_cores.chain import emit
from relax_fusion.estimator import candidates, footprint, predict, violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import NO_CAPABILITIES
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload import DynamicDim, MatmulChain
from relax_fusion.workload.reference import numpy_dtype

from ..support.chain_cases import HALF, MMA, ChainCase, tensor_core_chains
from .test_attention import cuda, divergent_barriers, kernels
from .warps_on_cpu import run_kernel

H200 = device_of(make_target("h200"))
LORA = MatmulChain(512, 4096, 16, 4096, ("nk", "nk"), (), (2.0, "residual"), "float16", "float16")
CASES = tensor_core_chains()


def computed(case: ChainCase, plan: TilePlan) -> np.ndarray:
    """Return the result of a case, by its kernel on numpy."""
    work = case.work
    func = emit(work, plan, cuda())
    shape = case.out_shape()
    arrays = [array.copy().reshape(-1) for array in case.inputs().values()]
    result = np.zeros(np.prod(shape), numpy_dtype(work.out_dtype))
    tensors = {p.name: a for p, a in zip(func.params, [*arrays, result], strict=True)}
    run_kernel(func, "mma_chain", tensors, {"rows": shape[-2]})
    return result.reshape(shape)


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str) -> None:
    case, plan = CASES[name]
    assert violations(plan, case.work, H200) == ()
    case.check(case.inputs(), computed(case, plan))


def test_the_check_notices_a_bias_of_another_column() -> None:
    case = ChainCase(replace(HALF, inner=("bias",)))
    arrays = case.inputs()
    wrong = {**arrays, "bias0_0": np.roll(arrays["bias0_0"], 1)}
    with pytest.raises(AssertionError):
        case.check(wrong, computed(case, MMA))


def source(work: MatmulChain, table: PlanTable) -> tuple[str, str]:
    """Return the CUDA source, and the code that launches it."""
    func = build_prim_func(work, table).with_attr("global_symbol", "main")
    schedule = MatmulChainRule().attempt(func, cuda())
    assert isinstance(schedule, tvm.s_tir.Schedule), schedule
    library = tvm.compile(schedule.mod, target=cuda())
    return library.mod.imports[0].inspect_source(), library.mod.inspect_source("ll")


def test_one_kernel_multiplies_twice() -> None:
    plan = TilePlan(
        *(64, 256, 64), reg_m=16, reg_n=64, lanes=8, num_stages=4, num_warps=4, family="mma"
    )
    code, host = source(LORA, PlanTable.single(plan))
    (kernel,) = kernels(code)
    assert divergent_barriers(kernel) == 0
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in code
    assert "cvt.rn.f16x2.f32" in code
    # 16 columns of A for each of four slices, then 64 columns of B for the only slice
    assert kernel.count("mma_sync") == 2 * 4 + 8
    assert str(4 * (64 + 16) * 64 * 2) in host  # four stages of x and A


def test_ranges_of_rows_are_kernels_of_their_own() -> None:
    work = replace(LORA, rows=DynamicDim("rows"))
    few = replace(MMA, block_m=16, num_warps=1)
    table = PlanTable(((16, few), (None, MMA)))
    code, _ = source(work, table)
    assert len(kernels(code)) == 2
    func = build_prim_func(work, table)
    text = MatmulChainRule().apply(func, cuda(), False).mod.script()
    assert "if T.tvm_thread_invariant(rows > T.int64(0))" in text  # else nothing is launched


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_candidates_fit_and_have_a_price(dtype: str) -> None:
    batched = replace(LORA, rows=512, k=64, r=256, n=64, layouts=("kn", "kn"), batch=8, outer=())
    for work in (LORA, replace(LORA, rows=7, r=12), batched):
        work = replace(work, dtype=dtype, out_dtype=dtype)
        found = list(candidates(work, H200))
        assert len(found) == len(set(found)) > 20
        for plan in found[:: len(found) // 20]:
            assert violations(plan, work, H200) == ()
            assert footprint(work, plan, H200).registers_per_thread <= 255
            assert predict(work, plan, H200, 100).seconds > H200.launch_s


def test_wide_intermediates_and_float32_have_no_plan() -> None:
    assert not list(candidates(replace(LORA, r=2048), H200))
    assert not list(candidates(replace(LORA, dtype="float32", out_dtype="float32"), H200))
    assert not list(candidates(replace(LORA, k=4095), H200))
    assert not list(candidates(LORA, replace(H200, capabilities=NO_CAPABILITIES)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "wgmma"}, "family is 'wgmma'"),
        ({"num_warps": 4}, "num_warps is 4"),
        ({"reg_n": 8, "block_n": 8}, "reg_n is 8, must be a multiple of 16"),
        ({"num_stages": 1}, "num_stages is 1"),
        ({"lanes": 1}, "lanes is 1"),
        ({"split_k": 2}, "split_k is 2, 1 in chains"),
        ({"backend": "triton"}, "family is 'mma', backend 'triton' has 'generated'"),
        ({"num_stages": 90}, "of shared memory"),
    ],
)
def test_violations(change: dict[str, object], words: str) -> None:
    assert violations(MMA, HALF, H200) == ()
    assert any(words in sentence for sentence in violations(replace(MMA, **change), HALF, H200))
