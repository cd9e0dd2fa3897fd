"""What a device can do, as data: the numbers that the estimator needs, each with its source.

NVIDIA's GPUs and CPUs; other GPUs are in :mod:`.other_makers`.  Sources, by the short names used in
the table:

- *guide*: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
- *throughput*: the same guide, table "Throughput of Native Arithmetic Instructions".
- *H100 wp*, *A100 wp*, *GA102 wp*, *AD102 wp*: NVIDIA's architecture whitepapers.  Tensor-core
  rates are dense (half of what is printed for sparse matrices), with float32 accumulation.
- *H200 ds*: the H200 Tensor Core GPU datasheet.
- *measured*: on one H200, or on one AMD EPYC (Zen) core pair for the CPU.
- *derived*, *assumed*: said in the comment how, or why.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import TargetError
from ..validation import shown
from .other_makers import GPUS
from .spec import DeviceSpec

__all__ = ["DEVICES", "STATIC_SMEM_BYTES", "DeviceSpec", "device", "generic_cpu"]

STATIC_SMEM_BYTES = 48 * 1024
"""Shared memory that a CUDA kernel can declare statically, per block (guide: more is dynamic)."""


_H200 = DeviceSpec(
    name="h200",
    label="H200",
    kind="gpu",
    arch="sm_90a",  # guide: compute capability 9.0, with its architecture-specific instructions
    sm_count=132,  # H100 wp (SXM5), measured
    clock_hz=1.98e9,  # derived: 66.9e12 / (132 SMs * 128 lanes * 2 flop)
    dram_bytes_per_s=4.8e12,  # H200 ds
    l2_bytes=60 << 20,  # measured: what the driver reports
    l2_bytes_per_s=10.1e12,  # derived: the 5120 B per clock of A100 wp, at this clock
    # Measured: what one kernel adds in the replay of a CUDA graph.  Outside of one, a call through
    # the Relax VM takes 4.7e-6; the smaller figure does not flatter fusing.
    launch_s=3.4e-6,
    fma_float32_flops_per_s=66.9e12,  # H100 wp, SXM5
    tensor_float16_flops_per_s=989.4e12,  # H100 wp, SXM5
    tensor_bfloat16_flops_per_s=989.4e12,  # H100 wp, SXM5
    tensor_tf32_flops_per_s=494.7e12,  # H100 wp, SXM5
    tensor_int8_flops_per_s=1978.9e12,  # H100 wp, SXM5
    smem_per_sm_bytes=228 * 1024,  # guide, 9.0
    smem_per_block_bytes=227 * 1024,  # guide, 9.0
    registers_per_sm=65536,  # guide
    max_registers_per_thread=255,  # guide
    max_threads_per_block=1024,  # guide
    max_threads_per_sm=2048,  # guide, 9.0
    max_blocks_per_sm=32,  # guide, 9.0
    warp_size=32,  # guide
)

_H100 = replace(
    _H200,
    name="h100",
    label="H100 SXM",
    dram_bytes_per_s=3.35e12,  # H100 wp, SXM5 80 GB
    l2_bytes=50 << 20,  # H100 wp
)

_H100_PCIE = replace(
    _H100,
    name="h100_pcie",
    label="H100 PCIe",
    sm_count=114,  # H100 wp, PCIe
    clock_hz=1.755e9,  # H100 wp, PCIe boost
    dram_bytes_per_s=2.0e12,  # H100 wp, PCIe
    l2_bytes_per_s=9.0e12,  # derived as for the H200
    fma_float32_flops_per_s=51.2e12,  # H100 wp, PCIe
    tensor_float16_flops_per_s=756e12,  # H100 wp, PCIe
    tensor_bfloat16_flops_per_s=756e12,  # H100 wp, PCIe
    tensor_tf32_flops_per_s=378e12,  # H100 wp, PCIe
    tensor_int8_flops_per_s=1513e12,  # H100 wp, PCIe
)

_A100 = replace(
    _H200,
    name="a100",
    label="A100 80GB SXM",
    arch="sm_80",  # guide
    sm_count=108,  # A100 wp
    clock_hz=1.41e9,  # A100 wp
    dram_bytes_per_s=2.039e12,  # A100 80GB datasheet, SXM
    l2_bytes=40 << 20,  # A100 wp
    l2_bytes_per_s=7.2e12,  # derived: 5120 B per clock (A100 wp) * clock
    fma_float32_flops_per_s=19.5e12,  # A100 wp
    tensor_float16_flops_per_s=312e12,  # A100 wp
    tensor_bfloat16_flops_per_s=312e12,  # A100 wp
    tensor_tf32_flops_per_s=156e12,  # A100 wp
    tensor_int8_flops_per_s=624e12,  # A100 wp
    smem_per_sm_bytes=164 * 1024,  # guide, 8.0
    smem_per_block_bytes=163 * 1024,  # guide, 8.0
)

_A100_40GB = replace(
    _A100,
    name="a100_40gb",
    label="A100 40GB SXM",
    dram_bytes_per_s=1.555e12,  # A100 wp
)

_RTX4090 = replace(
    _H200,
    name="rtx4090",
    label="RTX 4090",
    arch="sm_89",  # guide
    sm_count=128,  # AD102 wp
    clock_hz=2.52e9,  # AD102 wp
    dram_bytes_per_s=1.008e12,  # AD102 wp
    l2_bytes=72 << 20,  # AD102 wp: 73728 KB
    l2_bytes_per_s=5.2e12,  # assumed: 16 B per clock and SM; no figure is published
    fma_float32_flops_per_s=82.6e12,  # AD102 wp
    tensor_float16_flops_per_s=165.2e12,  # AD102 wp, float32 accumulation
    tensor_bfloat16_flops_per_s=165.2e12,  # AD102 wp
    tensor_tf32_flops_per_s=82.6e12,  # AD102 wp
    tensor_int8_flops_per_s=660.6e12,  # AD102 wp
    smem_per_sm_bytes=100 * 1024,  # guide, 8.9
    smem_per_block_bytes=99 * 1024,  # guide, 8.9
    max_threads_per_sm=1536,  # guide, 8.9
    max_blocks_per_sm=24,  # guide, 8.9
)

_RTX3080 = replace(
    _H200,
    name="rtx3080",
    label="RTX 3080",
    arch="sm_86",  # guide
    sm_count=68,  # GA102 wp, the 10 GB card
    clock_hz=1.71e9,  # GA102 wp
    dram_bytes_per_s=760e9,  # GA102 wp
    l2_bytes=5 << 20,  # GA102 wp: 5120 KB
    l2_bytes_per_s=1.86e12,  # assumed: 16 B per clock and SM; no figure is published
    fma_float32_flops_per_s=29.8e12,  # GA102 wp
    tensor_float16_flops_per_s=59.5e12,  # GA102 wp, float32 accumulation
    tensor_bfloat16_flops_per_s=59.5e12,  # GA102 wp
    tensor_tf32_flops_per_s=29.8e12,  # GA102 wp
    tensor_int8_flops_per_s=238e12,  # GA102 wp
    smem_per_sm_bytes=100 * 1024,  # guide, 8.6
    smem_per_block_bytes=99 * 1024,  # guide, 8.6
    max_threads_per_sm=1536,  # guide, 8.6
    max_blocks_per_sm=16,  # guide, 8.6
)


def generic_cpu(cores: int = 8, vector_bytes: int = 32) -> DeviceSpec:
    """Return a processor of `cores` cores with vector registers of `vector_bytes` bytes.

    Raises
    ------
    TargetError
        If `cores` is not positive or `vector_bytes` is no power of two of at least 4.
    """
    for name, value in (("cores", cores), ("vector_bytes", vector_bytes)):
        if not isinstance(value, int):
            raise TargetError(f"device 'cpu': {name} is {shown(value)}, must be an integer")
    clock_hz = 2.6e9  # measured: the clock of a server core under load; desktop cores run higher
    fma_per_cycle = 2  # two 256-bit (Zen, Skylake) or 512-bit (Zen 5, Skylake-SP) FMA pipes
    # JEDEC DDR4-3200 moves 25.6e9 B/s a channel.  Assumed: two channels up to 16 cores, else eight.
    channels = 2 if cores <= 16 else 8
    return DeviceSpec(
        name="cpu",
        label=f"{cores}-core CPU",
        kind="cpu",
        arch="",
        sm_count=cores,
        clock_hz=clock_hz,
        dram_bytes_per_s=channels * 25.6e9,
        l2_bytes=512 << 10,  # Zen 2 and 3; newer cores have 1 or 2 MB
        l2_bytes_per_s=cores * clock_hz * 32,  # Zen and Skylake: 32 or 64 B per cycle to L1
        launch_s=5e-6,  # assumed: waking a thread pool takes a few microseconds
        # Lanes of float32 * pipes * 2 flop (multiply and add)
        fma_float32_flops_per_s=cores * clock_hz * fma_per_cycle * 2 * max(vector_bytes // 4, 1),
        vector_bytes=vector_bytes,
        # AVX-512 names 32 registers, AVX2 and SSE 16; NEON names 32 but 16 is always safe
        vector_registers=32 if vector_bytes >= 64 else 16,
        l1_bytes=32 << 10,  # Zen and Skylake; newer cores have 48 KB
        fma_per_cycle=fma_per_cycle,
        target_kind="llvm",
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec
    for spec in (
        *(_H200, _H100, _H100_PCIE, _A100, _A100_40GB, _RTX4090, _RTX3080, *GPUS),
        generic_cpu(),
    )
}
"""The devices that are known by name."""


def device(name: str) -> DeviceSpec:
    """Return the device called `name` in `DEVICES`, in any case.

    Raises
    ------
    TargetError
        If there is none; the message lists the names.
    """
    spec = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise TargetError(f"unknown device {shown(name)}; known are {', '.join(sorted(DEVICES))}")
    return spec
