"""Every pattern on every target: it compiles, and its kernels keep to what the device can do.

A sample of the matrix; ``python -m tests.targets.matrix`` goes through all of it.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tvm.target import Target

from relax_fusion import DEVICES, Reason
from relax_fusion.estimator import candidates, violations
from relax_fusion.hardware.target import device_of
from relax_fusion.workload import NormMatmul, Projection

from ..support.chains import Chain
from ..support.patterns import attentions, linears, odd_sizes, wide_rows
from ..support.targets import TARGETS, Compiled, compile_chain, generator
from .matrix import check, forms

SAMPLE = [
    pytest.param(target, chain, id=f"{target}-{chain.name}-{form}-{chain.dtype}")
    for number, target in enumerate(TARGETS)
    for place, (form, chain) in enumerate(forms())
    if (place + 5 * number) % 53 == 0
]


@pytest.mark.parametrize(("target", "chain"), SAMPLE)
def test_kernels_keep_to_the_limits(target: str, chain: Chain) -> None:
    compiled = compile_chain(chain, TARGETS[target])
    assert check(compiled) == []


@pytest.mark.parametrize("target", TARGETS)
def test_all_is_fused_that_the_device_can_hold(target: str) -> None:
    missing = device_of(TARGETS[target]).missing_dtypes
    for dtype in ("float32", "float16"):
        chain = linears(16, dtype)[0]
        decision = compile_chain(chain, TARGETS[target]).report.decisions[0]
        assert decision.fused == (dtype not in missing)
        if not decision.fused:
            assert decision.decline.reason is Reason.NO_PLAN


@pytest.mark.parametrize("target", ["metal", "webgpu", "opencl"])
def test_vectors_are_as_wide_as_the_language_has_them(target: str) -> None:
    compiled = compile_chain(wide_rows()[0], TARGETS[target])
    assert compiled.report.decisions[0].fused and check(compiled) == []
    source = compiled.source()
    assert ("load8(" in source) == (target == "opencl")
    assert re.search({"metal": "half4", "webgpu": "vec4<f16>", "opencl": "vload8"}[target], source)


def test_no_operand_is_staged_in_shared_memory_on_adreno() -> None:
    for chain in (*linears(16, "float16"), linears(1, "float16", k=512)[0]):
        compiled = compile_chain(chain, TARGETS["adreno"])
        assert compiled.report.decisions[0].fused
        for kernel in compiled.kernels():
            # What threads add up between them has nowhere else to go.
            assert all(re.match(r"red_buf|\w*_sum", name) for name in kernel.shared), kernel.shared
    (decision,) = compile_chain(attentions(16, "float16")[0], TARGETS["adreno"]).report.decisions
    assert decision.decline.reason is Reason.NO_PLAN


def test_a_plan_for_what_the_device_lacks_is_refused_with_the_reason() -> None:
    work = NormMatmul(16, 64, (Projection(64, "nk"),), None, "float16", "float16")
    plan = next(candidates(work, DEVICES["m1"]))
    vulkan = device_of(TARGETS["vulkan"])
    assert "kernels for the vulkan GPU cannot hold float16" in violations(plan, work, vulkan)
    few = replace(DEVICES["m1"], wave_size=128)
    small = replace(plan, block_m=1, block_n=64, reg_m=1, reg_n=1, num_warps=2, lanes=1, block_k=64)
    assert any("no multiple of a warp's 128" in text for text in violations(small, work, few))


def _source(target: str, chain: Chain, **options: object) -> tuple[Compiled, str]:
    reason = generator(TARGETS[target])
    if reason:
        pytest.skip(reason)
    compiled = compile_chain(chain, TARGETS[target], **options)
    return compiled, compiled.source()


def test_webgpu_writes_neither_infinities_nor_64_bits() -> None:
    for chain in (attentions("n", "float32")[1], attentions(16, "float32")[4]):
        compiled, source = _source("webgpu", chain)
        assert compiled.report.decisions[0].fused
        assert "-3.402823e+38f" in source and "inf" not in source
        assert not re.search(r"\b[iu]64\b|array<[iu](8|16)>|blockIdx.z is not", source)
        # A variable of the name of a function that the kernel calls would hide it.
        called = set(re.findall(r"\b(max|min|exp|fma|select|abs|sqrt)\(", source))
        assert not called & set(re.findall(r"\bvar(?:<\w+>)? (\w+)", source))


def test_webgpu_compiles_attention_that_is_not_fused() -> None:
    # Batches of TVM's matmul rule, and an infinity in a mask: both are known to be refused.
    chain = attentions(16, "float32")[3]
    compiled, source = _source("webgpu", chain, disable="FuseAttentionChain")
    assert not [d for d in compiled.report.decisions if d.pattern == "FuseAttentionChain"]
    assert "inff" not in source


def test_metal_hides_no_function_behind_a_variable() -> None:
    _, source = _source("metal", attentions("n", "float16")[1])
    assert "max(" in source and not re.search(r"\bthread float (max|min|exp)\[", source)
    assert "threadgroup_barrier" in source


def test_opencl_barriers_are_met_by_all_threads() -> None:
    _, source = _source("opencl", attentions("n", "float32")[1])
    assert "barrier(" in source
    conditions: list[bool] = []
    for line in source.splitlines():
        text = line.strip()
        if text.startswith("}"):
            conditions.pop()
        if text.startswith("barrier("):
            assert not any(conditions), text
        if text.endswith("{"):
            conditions.append(text.startswith(("if", "}")))


def test_rocm_code() -> None:
    _, source = _source("rocm", linears(16, "float16")[0])
    assert "amdgpu_kernel" in source and "llvm.amdgcn.workitem.id.x" in source


def test_a_target_without_shared_memory_or_with_few_threads() -> None:
    chain = linears(16, "float32")[1]
    for attrs in ({"max_shared_memory_per_block": 0}, {"max_threads_per_block": 32}):
        target = Target({"kind": "metal", **attrs}, host="llvm")
        assert check(compile_chain(chain, target)) == []


ODD = [
    pytest.param(target, chain, id=f"{target}-{number}-{chain.name}")
    for place, target in enumerate(("webgpu", "metal", "vulkan", "rocm"))
    for number, chain in enumerate(odd_sizes())
    if (number + place) % 29 == 0
]


@pytest.mark.parametrize(("target", "chain"), ODD)
def test_odd_sizes_compile(target: str, chain: Chain) -> None:
    assert check(compile_chain(chain, TARGETS[target])) == []
