"""A GPU that the library does not know is one entry, and until then an error that says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tvm.target import Target

from relax_fusion import DEVICES, DeviceSpec, Report, TargetError, make_target
from relax_fusion.estimator import candidates
from relax_fusion.estimator.families.matmuls import SCALAR_FAMILIES
from relax_fusion.estimator.registry import family_of
from relax_fusion.hardware import Capabilities, device, register
from relax_fusion.hardware.instructions import MMA
from relax_fusion.hardware.target import device_of, has_triton
from relax_fusion.workload import NormMatmul, Projection

from ..support.patterns import linears
from ..support.targets import compile_chain

UNMEASURED = ", whose prices were not measured"

T4 = DeviceSpec(
    name="t4",
    label="T4",
    kind="gpu",
    arch="sm_75",
    sm_count=40,
    clock_hz=1.59e9,
    dram_bytes_per_s=320e9,
    l2_bytes=4 << 20,
    l2_bytes_per_s=1.0e12,
    launch_s=5e-6,
    fma_float32_flops_per_s=8.1e12,
    tensor_float16_flops_per_s=65e12,
    smem_per_sm_bytes=64 << 10,
    smem_per_block_bytes=64 << 10,
    registers_per_sm=65536,
    max_registers_per_thread=255,
    max_threads_per_block=1024,
    max_threads_per_sm=1024,
    max_blocks_per_sm=16,
    warp_size=32,
)
ORIN = replace(
    T4,
    name="orin",
    label="Orin",
    arch="sm_87",
    capabilities=Capabilities(async_copies=True, matrix_instructions=(MMA["float16"],)),
)
ARC = replace(
    T4,
    name="arc",
    label="Arc",
    arch="",
    target_kind="vulkan",
    target_attrs=(("supports_float16", True), ("supports_16bit_buffer", True)),
)


@pytest.fixture
def described() -> Iterator[None]:
    for spec in (T4, ORIN, ARC):
        assert register(spec) is spec
    yield
    for spec in (T4, ORIN, ARC):
        del DEVICES[spec.name]


@pytest.mark.usefixtures("described")
def test_one_entry_makes_a_target() -> None:
    for spec in (T4, ORIN):
        target = make_target(spec.name)
        assert device_of(target) == spec and str(target.attrs["arch"]) == spec.arch
        found = device_of(Target({"kind": "cuda", "arch": spec.arch}))
        assert replace(found, label=spec.label, modelled_on="") == spec
        assert found.description == f"{spec.arch} GPU, priced as {spec.label}{UNMEASURED}"
    assert has_triton(make_target("orin")) and not has_triton(make_target("t4"))
    found = device_of(make_target("arc"))
    assert replace(found, missing_dtypes=()) == ARC and "float16" not in found.missing_dtypes


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize(
    ("name", "family"), [("t4", {"dot_products", "fma_tiles"}), ("orin", {"few_rows", "mma"})]
)
def test_one_entry_is_enough_to_compile(name: str, family: set[str]) -> None:
    compiled = compile_chain(linears(16, "float16")[0], make_target(name), backend="tir")
    (decision,) = compiled.report.decisions
    assert decision.fused and decision.plans is not None
    assert {plan.family for _, plan in decision.plans.entries} <= family
    assert compiled.kernels() and compiled.report.device == device(name).label + UNMEASURED


def test_plans_use_the_instructions_that_an_entry_names() -> None:
    for dtype, families in (("float16", {"mma", "dot_products"}), ("bfloat16", {*SCALAR_FAMILIES})):
        work = NormMatmul(512, 1024, (Projection(1024, "nk"),), None, dtype, dtype)
        assert {plan.family for plan in candidates(work, ORIN, "tir")} == families
        languages = {family_of(plan).language for plan in candidates(work, ORIN, "triton")}
        assert languages == {"triton" if dtype == "float16" else "tir"}
        copied = replace(ORIN, capabilities=replace(ORIN.capabilities, async_copies=False))
        assert {plan.family for plan in candidates(work, copied, "tir")} == {*SCALAR_FAMILIES}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "H300"}, "device 'H300': its name must be in lower case and not empty"),
        ({"name": ""}, "device '': its name must be in lower case"),
        ({"name": "h200"}, "device 'h200' is known already, with other numbers"),
        ({"arch": "sm_91"}, "arch is 'sm_91', must be of sm_50"),
        ({"arch": ""}, "arch is '', must be of sm_50"),
        ({"name": "llvm"}, "device 'llvm': its name is that of a kind of targets"),
        ({"name": "cuda"}, "device 'cuda': its name is that of a kind of targets"),
        ({"name": 5}, "device 5: name is 5; must be a valid string"),
        ({"kind": "fpga"}, "device 't4': kind is 'fpga'; must be 'gpu' or 'cpu'"),
        ({"clock_hz": float("nan")}, "clock_hz is nan; must be a finite number"),
        ({"sm_count": "3"}, "sm_count is '3'; must be a valid integer"),
        ({"l2_bytes": 2**31}, "l2_bytes is 2147483648; must be less than"),
        ({"target_attrs": 5}, "target_attrs is 5; must be a valid tuple"),
        ({"capabilities": None}, "capabilities is None; must be"),
    ],
    ids=str,
)
def test_entries_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetError, match=message):
        register(replace(T4, **change))
    for spec, words in ((3, "is 3, must be a DeviceSpec"), (device("cpu"), "'cpu' is a CPU")):
        with pytest.raises(TargetError, match=f"device {words}"):
            register(spec)
    assert register(device("h200")) is device("h200") and "t4" not in DEVICES


@pytest.mark.parametrize(
    "change", [{"target_kind": "zzz"}, {"target_attrs": (("supports_float16", "x"),)}], ids=str
)
def test_targets_that_tvm_does_not_read(change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "arc", replace(ARC, **change))
    with pytest.raises(TargetError, match=r"device 'arc': TVM reads no target of kind '.*' with "):
        make_target("arc")


UNKNOWN = ["sm_50", "sm_75", "sm_87", "sm_100a", "sm_103", "sm_120"]


@pytest.mark.parametrize("arch", UNKNOWN)
def test_an_architecture_without_a_device_is_an_error(arch: str) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    with pytest.raises(TargetError) as caught:
        compile_chain(linears(16, "float16")[0], target)
    assert "\n" not in str(caught.value)
    where = ", which TVM takes where it finds no GPU," if arch == "sm_50" else ""
    assert f"no device of arch '{arch}'{where} is known" in str(caught.value)
    for way in ("'model' (of h100, ", "relax_fusion.hardware.register(DeviceSpec(...))"):
        assert way in str(caught.value)


@pytest.mark.parametrize("arch", UNKNOWN)
def test_a_named_device_lends_its_numbers_not_its_instructions(arch: str) -> None:
    dev = device_of(Target({"kind": "cuda", "arch": arch, "model": "h200"}))
    assert (dev.name, dev.arch, dev.sm_count) == ("h200", arch, 132)
    assert dev.description == f"{arch} GPU, priced as H200{UNMEASURED}"
    assert not dev.capabilities.warp_group_mma
    assert dev.capabilities.async_copies == (arch not in ("sm_50", "sm_75"))
    assert dev.smem_per_block_bytes <= {"sm_50": 48, "sm_75": 64, "sm_120": 99}.get(arch, 227) << 10


@pytest.mark.parametrize(
    ("config", "label"),
    [
        ({"kind": "cuda", "arch": "sm_90"}, "sm_90 GPU, priced as H100 SXM"),
        ({"kind": "metal"}, f"metal GPU, priced as Apple M1{UNMEASURED}"),
        ({"kind": "opencl", "device": "mali"}, f"opencl GPU, priced as Mali-G710 MP10{UNMEASURED}"),
        ({"kind": "webgpu"}, f"webgpu GPU, priced as Iris Xe{UNMEASURED}"),
    ],
    ids=str,
)
def test_reports_name_the_device_that_stands_in(config: dict[str, str], label: str) -> None:
    target = Target(config, host="llvm")
    assert device_of(target).description == label
    report = Report(device=label)
    assert report.text() == f"for {label}\n\nno chain of any pattern was found"
    if config["kind"] != "cuda":
        compiled = compile_chain(linears(16, "float32")[0], target)
        assert compiled.report.text().startswith(f"for {label}\n\n")
