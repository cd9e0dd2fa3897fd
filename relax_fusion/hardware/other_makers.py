"""GPUs of other makers than NVIDIA, one of a kind: the device that stands for its target.

Sources, by the short names used in the table:

- *guide*: Intel oneAPI GPU Optimization Guide, "Intel Xe GPU Architecture".
- *Apple*: the M1's press release of 10 November 2020.  *Metal*: Metal Feature Set Tables, Apple7.
- *reversed*: D. Johnson, "Apple G13 GPU Architecture Reference" (dougallj.github.io/applegpu).
- *CDNA3*: AMD CDNA 3 white paper, and the MI300 pages of the ROCm documentation.
- *Arm*: AnandTech, "Arm Announces New Mali-G710", 25 May 2021, after Arm's own slides.
- *C&C*: Chips and Cheese, "Inside Snapdragon 8+ Gen 1's iGPU", 5 March 2024.
- *LPDDR*: JEDEC data rate * bus width.
- *derived*, *assumed*: said in the comment how, or why.

Rates of matrix units are left out: neither our kernels nor TVM's use them on these.
"""

from __future__ import annotations

from dataclasses import replace

from .spec import DeviceSpec

_XE = DeviceSpec(
    name="iris_xe",
    label="Iris Xe",
    kind="gpu",
    arch="",
    target_kind="vulkan",
    sm_count=6,  # guide: dual subslices, of 16 execution units each
    clock_hz=1.35e9,  # Intel ARK, i7-1185G7
    dram_bytes_per_s=68.3e9,  # LPDDR4X-4266, 128 bits
    l2_bytes=3840 << 10,  # guide: L3
    l2_bytes_per_s=1.04e12,  # derived: 128 B a clock and dual subslice (guide)
    launch_s=10e-6,  # assumed: one dispatch of a command buffer, by several times NVIDIA's
    fma_float32_flops_per_s=2.07e12,  # derived: 6 * 16 units * 8 lanes (guide) * 2 * clock
    smem_per_sm_bytes=128 << 10,  # guide
    smem_per_block_bytes=64 << 10,  # guide
    registers_per_sm=16 * 7 * 1024,  # guide: 7 threads a unit, each of 128 registers of 32 B
    max_registers_per_thread=64,  # derived: those of a thread, shared by 16 lanes
    max_threads_per_block=512,  # guide
    max_threads_per_sm=1792,  # derived: 16 units * 7 threads * 16 lanes
    max_blocks_per_sm=16,  # assumed
    warp_size=32,
    wave_size=16,  # guide: SIMD16
    target_attrs=tuple(
        (f"supports_{what}", True)
        for what in ("float16", "int8", "int16", "int64", "8bit_buffer", "16bit_buffer")
    ),
)

_M1 = replace(
    _XE,
    name="m1",
    label="Apple M1",
    target_kind="metal",
    target_attrs=(("thread_warp_size", 32),),
    sm_count=8,  # Apple
    clock_hz=1.27e9,  # derived: 2.6e12 / (8 cores * 128 lanes * 2 flop)
    dram_bytes_per_s=68.3e9,  # LPDDR4X-4266, 128 bits
    l2_bytes=8 << 20,  # assumed: the system level cache, which the CPU shares
    l2_bytes_per_s=650e9,  # assumed: 64 B a clock and core
    launch_s=10e-6,  # assumed: as the Iris Xe's
    fma_float32_flops_per_s=2.6e12,  # Apple
    smem_per_sm_bytes=64 << 10,  # assumed: two threadgroups
    smem_per_block_bytes=32 << 10,  # Metal
    registers_per_sm=208 * 1024 // 4,  # reversed
    max_registers_per_thread=128,  # reversed: 256 of 16 bits
    max_threads_per_block=1024,  # Metal
    max_threads_per_sm=3072,  # Apple: 24576 threads
    max_blocks_per_sm=32,  # assumed
    wave_size=32,  # Metal
)

_MI300X = replace(
    _XE,
    name="mi300x",
    label="MI300X",
    target_kind="rocm",
    target_attrs=(("mcpu", "gfx942"),),
    sm_count=304,  # CDNA3
    clock_hz=2.1e9,  # CDNA3
    dram_bytes_per_s=5.3e12,  # CDNA3
    l2_bytes=256 << 20,  # CDNA3: the Infinity Cache, which all dies share
    l2_bytes_per_s=17.2e12,  # CDNA3: of the same
    launch_s=6e-6,  # assumed: as an NVIDIA GPU outside of a graph
    fma_float32_flops_per_s=163.4e12,  # CDNA3
    smem_per_sm_bytes=64 << 10,  # CDNA3
    smem_per_block_bytes=64 << 10,  # CDNA3
    registers_per_sm=131072,  # CDNA3: 512 KB of vector registers a compute unit
    max_registers_per_thread=256,  # CDNA3: besides as many for accumulating
    max_threads_per_block=1024,  # HIP
    max_threads_per_sm=2048,  # derived: 4 SIMDs * 8 wavefronts * 64
    max_blocks_per_sm=32,  # assumed
    wave_size=64,  # CDNA3
)

_ADRENO = replace(
    _XE,
    name="adreno730",
    label="Adreno 730",
    target_kind="opencl",
    target_attrs=(("device", "adreno"),),
    sm_count=4,  # assumed
    clock_hz=900e6,  # C&C: the highest
    dram_bytes_per_s=51.2e9,  # LPDDR5-6400, 64 bits
    l2_bytes=2 << 20,  # assumed
    l2_bytes_per_s=230e9,  # assumed: 64 B a clock and shader processor
    launch_s=20e-6,  # assumed: a queue of a phone's driver
    fma_float32_flops_per_s=1.84e12,  # derived from an assumed 256 lanes a shader processor
    smem_per_sm_bytes=32 << 10,  # OpenCL: what the driver reports
    # Operands come through the texture caches: TVM's own rules for Adreno do not stage them either.
    smem_per_block_bytes=0,
    registers_per_sm=64 * 1024,  # assumed
    max_registers_per_thread=64,  # assumed: more halve the number of waves
    max_threads_per_block=1024,
    max_threads_per_sm=2048,  # assumed
    wave_size=64,  # Qualcomm's OpenCL guide: half of a full wave of 128
)

_MALI = replace(
    _XE,
    name="mali_g710",
    label="Mali-G710 MP10",
    target_kind="opencl",
    target_attrs=(("device", "mali"),),
    sm_count=10,  # the Dimensity 9000
    clock_hz=850e6,  # the same
    dram_bytes_per_s=60e9,  # LPDDR5X-7500, 64 bits
    l2_bytes=2 << 20,  # assumed: four slices of 512 KB
    l2_bytes_per_s=540e9,  # assumed: 64 B a clock and core
    launch_s=20e-6,  # assumed: a queue of a phone's driver
    fma_float32_flops_per_s=1.09e12,  # derived: 10 cores * 64 lanes (Arm) * 2 * clock
    smem_per_sm_bytes=32 << 10,  # OpenCL: what the driver reports
    smem_per_block_bytes=32 << 10,  # the same
    registers_per_sm=64 * 1024,  # derived: 32 for each of 2048 threads
    max_registers_per_thread=64,  # Arm Mali offline compiler: more than 32 halve the threads
    max_threads_per_block=512,  # the driver's limit for kernels of few registers: 1024
    max_threads_per_sm=2048,  # Arm
    wave_size=16,  # Arm
)

GPUS: tuple[DeviceSpec, ...] = (_XE, _M1, _MI300X, _ADRENO, _MALI)
"""The devices of this module."""
