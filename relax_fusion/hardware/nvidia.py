"""NVIDIA's architectures and GPUs: the numbers that the estimator needs, each with its source.

Sources, by the short names used in the tables:

- *guide*: CUDA C++ Programming Guide, tables "Feature Support per Compute Capability" and
  "Technical Specifications per Compute Capability".
- *throughput*: the same guide, table "Throughput of Native Arithmetic Instructions".
- *H100 wp*, *A100 wp*, *GA102 wp*, *AD102 wp*: NVIDIA's architecture whitepapers.  Tensor-core
  rates are dense (half of what is printed for sparse matrices), with float32 accumulation.
- *H200 ds*: the H200 Tensor Core GPU datasheet.
- *measured*: on one H200, or one H100 where it is said; ``docs/experiments/2026-11-22-h100.md`` has
  both beside each other.
- *derived*, *assumed*: said in the comment how, or why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..errors import TargetError
from ..validation import shown
from .instructions import MMA, WARP_GROUP_MMA, Capabilities
from .spec import DeviceSpec

STATIC_SMEM_BYTES = 48 * 1024
"""Shared memory that a CUDA kernel can declare statically, per block (guide: more is dynamic)."""


@dataclass(frozen=True)
class Architecture:
    """What GPUs of the same compute capability have in common."""

    capabilities: Capabilities
    """What their instructions offer."""
    smem_per_block_bytes: int
    """Shared memory that one thread block may use; 0 where the guide says nothing."""


# Tensor cores before sm_80 multiply other shapes, of which no kernel here is made.
_OLDER = Capabilities()
_AMPERE = Capabilities(async_copies=True, matrix_instructions=tuple(MMA.values()))
_BLACKWELL = replace(_AMPERE, tma=True, clusters=True, dependent_launch=True)
_HOPPER = replace(_BLACKWELL, matrix_instructions=(*MMA.values(), *WARP_GROUP_MMA.values()))

ARCHITECTURES = {  # guide
    **dict.fromkeys((50, 52, 53, 60, 61, 62), Architecture(_OLDER, 48 << 10)),
    **dict.fromkeys((70, 72), Architecture(_OLDER, 96 << 10)),
    75: Architecture(_OLDER, 64 << 10),
    **dict.fromkeys((80, 87), Architecture(_AMPERE, 163 << 10)),
    **dict.fromkeys((86, 89), Architecture(_AMPERE, 99 << 10)),
    88: Architecture(_AMPERE, 0),
    90: Architecture(_HOPPER, 227 << 10),
    **dict.fromkeys((100, 103), Architecture(_BLACKWELL, 227 << 10)),
    **dict.fromkeys((101, 110), Architecture(_BLACKWELL, 0)),
    **dict.fromkeys((120, 121), Architecture(_BLACKWELL, 99 << 10)),
}
"""All for which CUDA 12 or 13 compiles, by ten times the compute capability."""


def capability_of(arch: str) -> int:
    """Return ten times the compute capability of an architecture: 90 for ``"sm_90a"``.

    Raises `TargetError` if there is no such architecture; the message lists those that there are.
    """
    found = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    number = int(found[1]) if found else 0
    first = {"": 0, "a": 90, "f": 100}[found[2]] if found else 0  # that has such variants
    if number not in ARCHITECTURES or number < first:
        known = ", ".join(f"sm_{number}" for number in sorted(ARCHITECTURES))
        raise TargetError(f"target 'cuda': arch is {shown(arch)}, must be of {known}")
    return number


def has_float8(capability: int) -> bool:
    """Tell whether TVM 0.27 leaves casts of 8-bit floats to CUDA's compiler."""
    return capability >= 89


def native_arch(capability: int) -> str:
    """Return the architecture that ptxas may use all instructions of a compute capability for."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


_H200 = DeviceSpec(
    name="h200",
    label="H200",
    kind="gpu",
    arch="sm_90a",  # guide: compute capability 9.0, with its architecture-specific instructions
    capabilities=_HOPPER,
    sm_count=132,  # H100 wp (SXM5), measured
    clock_hz=1.98e9,  # derived: 66.9e12 / (132 SMs * 128 lanes * 2 flop)
    dram_bytes_per_s=4.8e12,  # H200 ds
    l2_bytes=60 << 20,  # measured: what the driver reports
    l2_bytes_per_s=10.1e12,  # derived: the 5120 B per clock of A100 wp, at this clock
    # What one kernel adds in the replay of a CUDA graph.  Outside of one, a call through the Relax
    # VM takes 4.7e-6; the smaller figure does not flatter fusing.
    launch_s=3.4e-6,  # measured
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
    measured=True,
)

_H100 = replace(
    _H200,
    name="h100",
    label="H100 SXM",
    launch_s=3.6e-6,  # measured on an H100
    dram_bytes_per_s=3.35e12,  # H100 wp, SXM5 80 GB; a copy reaches 0.90, as on the H200
    l2_bytes=50 << 20,  # H100 wp; measured on an H100
)

_H100_PCIE = replace(
    _H100,
    name="h100_pcie",
    label="H100 PCIe",
    measured=False,
    sm_count=114,  # H100 wp, PCIe
    clock_hz=1.755e9,  # H100 wp, PCIe boost
    dram_bytes_per_s=2.0e12,  # H100 wp, PCIe
    l2_bytes_per_s=9.0e12,  # derived as for the H200
    launch_s=3.4e-6,  # assumed: as the H200's
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
    measured=False,
    arch="sm_80",  # guide
    capabilities=_AMPERE,
    sm_count=108,  # A100 wp
    clock_hz=1.41e9,  # A100 wp
    dram_bytes_per_s=2.039e12,  # A100 80GB datasheet, SXM
    l2_bytes=40 << 20,  # A100 wp
    l2_bytes_per_s=7.2e12,  # derived: 5120 B per clock (A100 wp) * clock
    launch_s=3.4e-6,  # assumed: as the H200's
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
    launch_s=3.4e-6,  # assumed: as the H200's
)

_RTX4090 = replace(
    _H200,
    name="rtx4090",
    label="RTX 4090",
    measured=False,
    arch="sm_89",  # guide
    capabilities=_AMPERE,
    sm_count=128,  # AD102 wp
    clock_hz=2.52e9,  # AD102 wp
    dram_bytes_per_s=1.008e12,  # AD102 wp
    l2_bytes=72 << 20,  # AD102 wp: 73728 KB
    l2_bytes_per_s=5.2e12,  # assumed: 16 B per clock and SM; no figure is published
    launch_s=3.4e-6,  # assumed: as the H200's
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
    measured=False,
    arch="sm_86",  # guide
    capabilities=_AMPERE,
    sm_count=68,  # GA102 wp, the 10 GB card
    clock_hz=1.71e9,  # GA102 wp
    dram_bytes_per_s=760e9,  # GA102 wp
    l2_bytes=5 << 20,  # GA102 wp: 5120 KB
    l2_bytes_per_s=1.86e12,  # assumed: 16 B per clock and SM; no figure is published
    launch_s=3.4e-6,  # assumed: as the H200's
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

GPUS = (_H100, _H100_PCIE, _H200, _A100, _A100_40GB, _RTX4090, _RTX3080)
"""The GPUs of this module.  The first of an architecture stands for targets that name none."""
