"""The device table and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax_fusion.errors import TargetError
from relax_fusion.hardware import DEVICES, device, generic_cpu

GPUS = [d for d in DEVICES.values() if d.kind == "gpu"]
NVIDIA = [d for d in GPUS if d.target_kind == "cuda"]


def test_every_name_leads_to_its_device():
    for name, spec in DEVICES.items():
        assert spec.name == name
        assert device(name.upper()) is spec


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


@pytest.mark.parametrize(
    ("arch", "expected"), [("sm_90a", 90), ("sm_86", 86), ("sm_100f", 100), ("", 0), ("gfx90a", 0)]
)
def test_capabilities_are_numbers(arch, expected):
    assert replace(device("h200"), arch=arch).capability == expected


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
    ("h200", {"sm_count": 0}, "sm_count must be > 0"),
    ("h200", {"dram_bytes_per_s": -1.0}, "dram_bytes_per_s must be > 0"),
    ("h200", {"warp_size": 0}, "warp_size must be > 0"),
    ("m1", {"wave_size": 24}, "wave_size is 24, must be a power of two"),
    ("m1", {"smem_per_block_bytes": -1}, "smem_per_block_bytes must be >= 0"),
    ("h200", {"smem_per_block_bytes": 1 << 20}, "1048576 B of shared memory, more than the 233472"),
    ("h200", {"max_threads_per_block": 4096}, "4096 threads, more than the 2048"),
    ("h200", {"max_threads_per_sm": 2047}, "2047 is no multiple of the warp size 32"),
    ("cpu", {"vector_bytes": 24}, "vector_bytes is 24, must be a power of two"),
    ("cpu", {"l1_bytes": 0}, "l1_bytes must be > 0"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[str(b[1]) for b in BAD])
def test_contradictions_are_refused(name, change, message):
    with pytest.raises(TargetError, match=message):
        replace(device(name), **change)


@pytest.mark.parametrize(("cores", "vector_bytes"), [(0, 32), (-1, 32), (4, 0), (4, 48)])
def test_generic_cpu_refuses_nonsense(cores, vector_bytes):
    with pytest.raises(TargetError):
        generic_cpu(cores, vector_bytes)
