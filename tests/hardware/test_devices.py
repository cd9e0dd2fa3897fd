"""The device table and what it refuses."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest

from relax_fusion.errors import TargetError
from relax_fusion.hardware import DEVICES, device, generic_cpu, nvidia, other_makers
from relax_fusion.hardware.instructions import MMA, SLICE_BYTES, WARP_GROUP_MMA
from relax_fusion.workload import DTYPE_BYTES

GPUS = [d for d in DEVICES.values() if d.kind == "gpu"]
SOURCED = [f.name for f in fields(GPUS[0]) if f.name.endswith(("_s", "_hz", "_count"))]
"""Rates, and times of a launch."""
NEITHER = (False, False)
NVIDIA = [d for d in GPUS if d.target_kind == "cuda"]


def test_every_name_leads_to_its_device():
    for name, spec in DEVICES.items():
        assert spec.name == name
        assert device(name.upper()) is spec


def test_only_what_was_measured_has_no_warning():
    measured = {n for n, spec in DEVICES.items() if spec.measured and "@" not in n}
    assert measured == {"h200", "h100", "cpu"}
    for spec in DEVICES.values():
        warned = spec.description == f"{spec.label}, whose prices were not measured"
        assert warned != spec.measured and (warned or spec.description == spec.label)


def test_unknown_name_lists_the_known():
    with pytest.raises(TargetError, match=r"unknown device 'tpu'; known are a100, .*h200"):
        device("tpu")


@pytest.mark.parametrize("spec", GPUS, ids=lambda d: d.name)
def test_fma_rate_is_lanes_times_clock(spec):
    lanes = spec.fma_float32_flops_per_s / (2 * spec.clock_hz * spec.sm_count)
    # 64 (Ampere data centre, Mali), 128 or, where two are paired or issued, 256 float32 lanes
    assert min(abs(lanes / n - 1) for n in (64, 128, 256)) < 0.01


@pytest.mark.parametrize("spec", NVIDIA, ids=lambda d: d.name)
def test_block_may_use_one_kilobyte_less_than_its_multiprocessor(spec):
    assert spec.smem_per_sm_bytes - spec.smem_per_block_bytes == 1024


@pytest.mark.parametrize(("arch", "number"), [("sm_90a", 90), ("sm_86", 86), ("sm_100f", 100)])
def test_architectures_are_compared_by_number(arch, number):
    assert nvidia.capability_of(arch) == number


@pytest.mark.parametrize("arch", ["", "gfx90a", "sm_80a", "sm_90f", "sm_90aa", "sm_91", "90"])
def test_architectures_that_there_are_not(arch):
    with pytest.raises(TargetError, match=f"arch is '{arch}', must be of sm_50, .*sm_121"):
        nvidia.capability_of(arch)


@pytest.mark.parametrize("spec", NVIDIA, ids=lambda d: d.name)
def test_gpus_have_what_their_architecture_has(spec):
    arch = nvidia.ARCHITECTURES[nvidia.capability_of(spec.arch)]
    assert spec.arch == nvidia.native_arch(nvidia.capability_of(spec.arch))
    assert spec.capabilities == arch.capabilities
    assert spec.smem_per_block_bytes == arch.smem_per_block_bytes


def test_capabilities_come_with_architectures():
    # CUDA C++ Programming Guide, "Feature Support per Compute Capability"; PTX ISA for wgmma
    first = {"async_copies": 80, "dependent_launch": 90, "clusters": 90, "tma": 90}
    for number, arch in nvidia.ARCHITECTURES.items():
        for name, since in first.items():
            assert getattr(arch.capabilities, name) == (number >= since), (number, name)
        assert arch.capabilities.warp_group_mma == (number == 90)


def test_instructions_of_all_element_types_take_as_many_bytes():
    for table in (MMA, WARP_GROUP_MMA):
        for dtype, each in table.items():
            assert each.dtype == dtype and each.k * DTYPE_BYTES[dtype] == SLICE_BYTES
        assert len({(each.m, each.n, each.warps) for each in table.values()}) == 1


@pytest.mark.parametrize(
    ("arch", "mma", "groups"),
    [("sm_90a", True, True), ("sm_90", True, False), ("sm_100a", True, False), ("sm_75", *NEITHER)],
)
def test_code_for_an_architecture_uses_what_it_has(arch, mma, groups):
    capabilities = nvidia.ARCHITECTURES[nvidia.capability_of(arch)].capabilities
    spec = replace(device("h200"), arch=arch, capabilities=capabilities)
    for dtype in MMA:
        assert spec.can_generate(MMA[dtype]) == mma
        assert spec.can_generate(WARP_GROUP_MMA[dtype]) == groups
    assert capabilities.warp_group_mma == (arch.startswith("sm_90"))


def test_every_number_of_a_table_has_its_source():
    for module in (nvidia, other_makers):
        text = Path(module.__file__).read_text(encoding="utf-8")
        tree, lines = ast.parse(text), text.splitlines()
        made = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.keywords) > 3]
        stated = [k for call in made for k in call.keywords if k.arg in SOURCED]
        assert len(stated) > 20
        assert [k.arg for k in stated if "# " not in lines[k.lineno - 1]] == []
        assert all("launch_s" in [k.arg for k in call.keywords] for call in made if call.args)


@pytest.mark.parametrize("spec", [d for d in GPUS if not d.arch], ids=lambda d: d.name)
def test_other_gpus_have_no_cuda_architecture(spec):
    assert spec.target_kind in ("metal", "opencl", "rocm", "vulkan")
    assert spec.l2_bytes_per_s > spec.dram_bytes_per_s
    assert spec.tensor_flops_per_s("float16") == 0


@pytest.mark.parametrize("spec", NVIDIA, ids=lambda d: d.name)
def test_tensor_cores_are_faster_and_tf32_is_half_of_float16(spec):
    assert spec.tensor_flops_per_s("float16") > spec.fma_float32_flops_per_s
    assert spec.tensor_flops_per_s("bfloat16") == spec.tensor_flops_per_s("float16")
    assert spec.tensor_flops_per_s("float32") == pytest.approx(
        spec.tensor_flops_per_s("float16") / 2, rel=0.01
    )
    assert spec.tensor_flops_per_s("float64") == 0


@pytest.mark.parametrize("spec", NVIDIA, ids=lambda d: d.name)
def test_integers_are_at_least_twice_as_fast_as_float16(spec):
    ratio = spec.tensor_flops_per_s("int8") / spec.tensor_flops_per_s("float16")
    # GeForce cards add float16 up in float32 at half of their rate
    assert min(abs(ratio - 2), abs(ratio - 4)) < 0.01
    assert spec.tensor_flops_per_s("uint8") == spec.tensor_flops_per_s("int8")


def test_devices_are_values():
    assert replace(device("h200")) == device("h200")
    assert len(set(DEVICES.values())) == len(DEVICES)


@pytest.mark.parametrize(("vector_bytes", "registers"), [(16, 16), (32, 16), (64, 32)])
def test_generic_cpu_scales_with_cores_and_width(vector_bytes, registers):
    small, large = generic_cpu(2, vector_bytes), generic_cpu(32, vector_bytes)
    assert large.fma_float32_flops_per_s == 16 * small.fma_float32_flops_per_s
    assert large.dram_bytes_per_s > small.dram_bytes_per_s
    assert small.vector_registers == registers
    assert "2-core" in small.label


BAD = [
    ("h200", {"sm_count": 0}, "sm_count is 0, must be > 0"),
    ("h200", {"dram_bytes_per_s": -1.0}, "dram_bytes_per_s is -1.0, must be > 0"),
    ("h200", {"warp_size": 0}, "warp_size is 0, must be > 0"),
    ("cpu", {"l3_cycles_per_byte": 1e308}, "l3_cycles_per_byte is 1e.308, must be 0 or 1e-30"),
    ("m1", {"wave_size": 24}, "wave_size is 24, must be a power of two"),
    ("m1", {"smem_per_block_bytes": -1}, "smem_per_block_bytes is -1; must be greater"),
    ("h200", {"smem_per_block_bytes": 1 << 20}, "1048576 B of shared memory, more than the 233472"),
    ("h200", {"max_threads_per_block": 4096}, "4096 threads, more than the 2048"),
    ("h200", {"max_threads_per_sm": 2047}, "2047 is no multiple of the warp size 32"),
    ("h200", {"tensor_int8_flops_per_s": 0.0}, "it has mma.sync of int8, whose tensor-core rate"),
    ("cpu", {"vector_bytes": 24}, "vector_bytes is 24, must be a power of two"),
    ("cpu", {"l1_bytes": 0}, "l1_bytes is 0, must be > 0"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[str(b[1]) for b in BAD])
def test_contradictions_are_refused(name, change, message):
    with pytest.raises(TargetError, match=message):
        replace(device(name), **change)


@pytest.mark.parametrize(("cores", "vector_bytes"), [(0, 32), (-1, 32), (4, 0), (4, 48)])
def test_generic_cpu_refuses_nonsense(cores, vector_bytes):
    with pytest.raises(TargetError):
        generic_cpu(cores, vector_bytes)
