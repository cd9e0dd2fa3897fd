"""The attention rule: what it schedules, what it declines, and the CUDA source that comes out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tvm
from tvm import te
from tvm.runtime import tensor
from tvm.s_tir import dlight
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules import FusedRule
from relax_fusion.errors import Decline
from relax_fusion.estimator.tile_plan import PLAN_ATTR, PlanTable, TilePlan
from relax_fusion.hardware.target import host_target
from relax_fusion.workload import DynamicDim

from ..support.attention_cases import BASE, cases
from ..support.quick import machine, quickly
from ..support.triton_modules import module_of
from .compiled import cuda, cuda_source, divergent_barriers, kernels, shared_bytes

CPU_PLAN = PlanTable.single(
    TilePlan(block_m=16, block_n=64, block_k=32, lanes=16, family="cpu_attention")
)
GPU_PLAN = PlanTable.single(
    TilePlan(block_m=16, block_n=32, block_k=32, num_warps=4, family="fma_attention")
)
GPU_RANGES = PlanTable(
    (
        (1, TilePlan(1, 32, 32, num_warps=2, family="fma_attention")),
        (None, TilePlan(16, 32, 32, reg_m=2, reg_n=2, num_warps=4, family="fma_attention")),
    )
)
DYNAMIC = replace(
    BASE,
    batch=DynamicDim("batch"),
    q_len=DynamicDim("q_len"),
    kv_len=DynamicDim("kv_len"),
    causal="bottom_right",
)
BY_NAME = {case.name: case for case in cases()}


@pytest.mark.parametrize("name", ["grouped", "bias_1111", "cache"])
def test_through_relax(name: str) -> None:
    case = BY_NAME[name]
    with host_target():
        module = dlight.ApplyDefaultSchedule(FusedRule())(module_of(case.work, CPU_PLAN, outputs=1))
    assert module["fused"].attrs["tirx.is_scheduled"] == 1
    vm = machine(quickly(module))
    arrays = case.inputs()
    length = [tvm.runtime.ShapeTuple([case.lengths[2]])] if case.work.kv_prefix else []
    got = vm["main"](*(tensor(a) for a in arrays.values()), *length)
    case.check(arrays, got.numpy())


@pytest.mark.parametrize("name", ["cache", "dynamic_2x16x64"])
def test_cuda_through_relax(name: str) -> None:
    with cuda():
        module = dlight.ApplyDefaultSchedule(FusedRule())(
            module_of(BY_NAME[name].work, GPU_PLAN, outputs=1)
        )
    executable = tvm.compile(module, target=cuda())
    devices = [m for m in executable.mod.imports[0].imports if m.kind == "cuda"]
    assert len(kernels(devices[0].inspect_source())) == 1


def test_cpu_schedule() -> None:
    func = build_prim_func(BASE, CPU_PLAN)
    text = FusedRule().apply(func, host_target(), False).mod.script()
    assert text.count("T.parallel(") == 1
    assert "T.vectorized(T.int64(16))" in text
    assert "thread_binding" not in text and '"shared"' not in text


def test_one_kernel_per_range() -> None:
    assert len(kernels(cuda_source(BASE, GPU_PLAN))) == 1
    assert len(kernels(cuda_source(DYNAMIC, GPU_RANGES))) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("table", [GPU_PLAN, GPU_RANGES], ids=["plain", "ranges"])
def test_cuda_barriers_and_memory(dtype: str, table: PlanTable) -> None:
    work = replace(DYNAMIC, head_dim=128, v_dim=128, dtype=dtype, out_dtype=dtype)
    for kernel in kernels(cuda_source(work, table)):
        assert "__syncthreads" in kernel
        assert divergent_barriers(kernel) == 0
        assert 0 < shared_bytes(kernel) <= 49152
        assert "expf(" in kernel


@pytest.mark.parametrize(
    "name",
    [
        *("tail_1x63", "odd_dims", "layout_bnsh_bnsh_bnsh", "everything", "bias_min", "cache"),
        "merged",
    ],
)
def test_cuda_compiles(name: str) -> None:
    (kernel,) = kernels(cuda_source(BY_NAME[name].work, GPU_PLAN))
    assert divergent_barriers(kernel) == 0


@pytest.mark.parametrize("name", ["bias_min", "softcap_under_bias_min", "everything"])
def test_unrolled_rows_share_no_variable(name: str) -> None:
    plan = TilePlan(16, 32, 32, reg_m=2, reg_n=2, num_warps=8, family="fma_attention")
    assert "__syncthreads" in cuda_source(BY_NAME[name].work, PlanTable.single(plan))


def test_cuda_computes_tanh_itself() -> None:
    # With --use_fast_math, as TVM compiles CUDA, tanhf is right to eleven bits only.
    assert "tanh" not in cuda_source(BY_NAME["softcap"].work, GPU_PLAN)


@pytest.mark.parametrize(
    ("kind", "barrier"), [("metal", "threadgroup_barrier"), ("opencl", "barrier")]
)
def test_other_gpus_get_source(kind: str, barrier: str) -> None:
    config = {"kind": kind, "max_threads_per_block": 256, "max_shared_memory_per_block": 32768}
    target = Target({**config, "thread_warp_size": 32}, host="llvm")
    work = replace(DYNAMIC, q_heads=4, mask_dims=(True, False, True, True), dtype="float16")
    source = cuda_source(replace(work, window=40, softcap=5.0, alibi="float32"), GPU_PLAN, target)
    assert barrier in source and "slopes_ptr" in source


def test_large_tensors_are_indexed_in_64_bits() -> None:
    work = replace(DYNAMIC, kv_prefix=True, mask_dims=(True, True, True, True))
    for kernel in kernels(cuda_source(work, GPU_RANGES)):
        at = re.findall(r"\b(?:k|v|mask|q|out)_ptr\[(.*)\]", kernel)
        assert len(at) >= 5
        # Sizes that are not known are 64 bits wide, so is what is computed from one.
        assert all("int64_t" in index for index in at), at


def test_divergence_is_noticed() -> None:
    assert divergent_barriers("void f() {\n if (a) {\n __syncthreads();\n }\n}") == 1
    assert divergent_barriers("void f() {\n if (a) {\n }\n __syncthreads();\n}") == 0


def test_declines_other_functions() -> None:
    func = build_prim_func(BASE, CPU_PLAN)
    assert FusedRule().apply(func.without_attr(PLAN_ATTR), host_target(), False) is None
    for attrs in ("something else", "3", "[]", '{"kind": "Attention"}'):
        other = func.with_attr("relax_fusion.workload", attrs)
        assert FusedRule().attempt(other, host_target()) is None
    for plans in (3, [1], [{"upto": {}}]):
        assert FusedRule().attempt(func.with_attr(PLAN_ATTR, plans), host_target()) is None


@pytest.mark.parametrize("table", [CPU_PLAN, GPU_PLAN], ids=["cpu", "gpu"])
def test_declines_another_body_under_its_attributes(table: PlanTable) -> None:
    described = build_prim_func(BASE, table).attrs
    x = te.placeholder((4, 4), "float32", "x")
    other = te.create_prim_func([x, te.compute((4, 4), lambda i, j: x[i, j] + 1.0, "tile")])
    for name in ("relax_fusion.workload", PLAN_ATTR):
        other = other.with_attr(name, described[name])
    target = host_target() if table is CPU_PLAN else cuda()
    assert isinstance(FusedRule().attempt(other, target), Decline)
    assert FusedRule().apply(other, target, False) is None


def test_a_plan_for_the_wrong_machine_is_declined() -> None:
    def reason(table: PlanTable, target: Target) -> str:
        func = build_prim_func(BASE, table)
        assert FusedRule().apply(func, target, False) is None
        return FusedRule().attempt(func, target).detail

    assert "there is 'cpu_attention' for Attention on a cpu" in reason(GPU_PLAN, host_target())
    assert "family is 'cpu_attention', there is 'attention'" in reason(CPU_PLAN, cuda())
    large = PlanTable.single(TilePlan(16, 32, 32, num_warps=64, family="fma_attention"))
    assert "a plan of 64 warps" in reason(large, cuda())


def test_decode_runs_heads_in_parallel() -> None:
    work = replace(BASE, batch=1, q_len=1, q_heads=16, kv_heads=8)
    text = FusedRule().apply(build_prim_func(work, CPU_PLAN), host_target(), False).mod.script()
    assert re.search(r"in T\.parallel\(T\.int64\(8\)\)", text)
