"""What the estimator has to know about a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import TargetError
from ..validation import Natural, check, shown
from .instructions import NO_CAPABILITIES, Capabilities, MatrixInstruction

LEAST, MOST = 1e-30, 1e30
"""Rates and times beyond them are of no device, and prices made of them overflow."""


@dataclass(frozen=True)
class DeviceSpec:
    """One device, as the estimator sees it.  Fields that a kind does not have are 0.

    Parameters
    ----------
    name, label : str
        The key in `DEVICES`, and how messages call the device.
    kind : {"gpu", "cpu"}
        Which of the two execution models applies.
    arch : str
        What the code generator is told of an NVIDIA GPU (``"sm_90a"``); empty for all others.
        What such a GPU can do is in `capabilities`.
    sm_count : int
        Streaming multiprocessors, or cores.
    clock_hz : float
        Boost clock, the one the rates below are stated at.
    dram_bytes_per_s, l2_bytes_per_s : float
        Peak bandwidths of the whole device (CPU: of the second-level caches together).
    l2_bytes : int
        Second-level cache of a GPU, or of one core.
    read_part, l2_part : float
        Parts of these bandwidths that kernels of a GPU reach which only read.
    slowed_part, slowed_s : float
        Kernels of a GPU that multiply long reach its limit of power, and the clock falls: they take
        up to `slowed_part` longer, and half of that after `slowed_s` seconds.
    l3_cycles_per_byte : float
        Cycles that a core of a CPU takes for a byte that its second-level cache does not hold.
    launch_s : float
        Time that one more kernel (CPU: one more parallel region) costs.
    fma_float32_flops_per_s : float
        Without tensor cores.  Sums are kept in float32, so this is the rate of every dtype.
    tensor_float16_flops_per_s, tensor_bfloat16_flops_per_s, tensor_tf32_flops_per_s : float
        Dense, with float32 accumulation.
    tensor_int8_flops_per_s : float
        The same of int8 and uint8, with int32 accumulation.
    smem_per_sm_bytes, smem_per_block_bytes : int
        Shared memory of a multiprocessor, and the most that one block may use.
    registers_per_sm, max_registers_per_thread : int
        32-bit registers.
    max_threads_per_block, max_threads_per_sm, max_blocks_per_sm : int
        Limits of a launch.
    warp_size, wave_size : int
        Threads that a plan counts as a warp, 32 on every GPU, and those that the GPU runs in step.
    vector_bytes, vector_registers : int
        Width and number of a core's vector registers.
    l1_bytes : int
        First-level data cache of one core.
    fma_per_cycle : int
        Vector multiply-adds that one core starts each cycle.
    target_kind : str
        The kind of TVM target that compiles for it.
    target_attrs : tuple of (str, object)
        What else that target has to say.
    missing_dtypes : tuple of str
        Element types that its kernels cannot read or write.
    capabilities : Capabilities
        What its instructions offer to kernels.
    modelled_on : str
        Label of the device whose numbers these are, where a target named none; else empty.
    measured : bool
        Whether prices were compared with times of kernels on it; reports say where they were not.
    """

    name: str
    label: str
    kind: Literal["gpu", "cpu"]
    arch: str
    sm_count: Natural
    clock_hz: float
    dram_bytes_per_s: float
    l2_bytes: Natural
    l2_bytes_per_s: float
    launch_s: float
    fma_float32_flops_per_s: float
    tensor_float16_flops_per_s: float = 0.0
    tensor_bfloat16_flops_per_s: float = 0.0
    tensor_tf32_flops_per_s: float = 0.0
    tensor_int8_flops_per_s: float = 0.0
    smem_per_sm_bytes: Natural = 0
    smem_per_block_bytes: Natural = 0
    registers_per_sm: Natural = 0
    max_registers_per_thread: Natural = 0
    max_threads_per_block: Natural = 0
    max_threads_per_sm: Natural = 0
    max_blocks_per_sm: Natural = 0
    warp_size: Natural = 0
    vector_bytes: Natural = 0
    vector_registers: Natural = 0
    l1_bytes: Natural = 0
    fma_per_cycle: Natural = 0
    wave_size: Natural = 32
    read_part: float = 0.922
    l2_part: float = 2.04
    slowed_part: float = 0.497
    slowed_s: float = 139e-6
    l3_cycles_per_byte: float = 2.7 / 64  # a line in 2.7 cycles: fitted to times on Zen 5
    target_kind: str = "cuda"
    target_attrs: tuple[tuple[str, Any], ...] = ()
    missing_dtypes: tuple[str, ...] = ()
    capabilities: Capabilities = NO_CAPABILITIES
    modelled_on: str = ""
    measured: bool = False

    def __post_init__(self) -> None:
        check(self, TargetError, f"device {shown(self.name)}")
        for field, value in vars(self).items():
            if isinstance(value, float) and value and not LEAST <= abs(value) <= MOST:
                text = f"{field} is {value}, must be 0 or {LEAST}..{MOST}"
                raise TargetError(f"device {self.name!r}: {text}")
        self._require_positive(_COMMON_FIELDS)
        self._require_positive(_GPU_FIELDS if self.kind == "gpu" else _CPU_FIELDS)
        if self.kind == "gpu":
            self._check_gpu()
        elif self.vector_bytes < 4 or self.vector_bytes & (self.vector_bytes - 1):
            raise TargetError(
                f"device {self.name!r}: vector_bytes is {self.vector_bytes}, must be a power of "
                "two >= 4"
            )

    def _require_positive(self, names: Iterable[str]) -> None:
        for field in names:
            value = getattr(self, field)
            if value <= 0:
                raise TargetError(f"device {self.name!r}: {field} is {value}, must be > 0")

    def _check_gpu(self) -> None:
        if self.smem_per_block_bytes > self.smem_per_sm_bytes:
            raise TargetError(
                f"device {self.name!r}: a block may use {self.smem_per_block_bytes} B of shared "
                f"memory, more than the {self.smem_per_sm_bytes} B of its multiprocessor"
            )
        if self.max_threads_per_block > self.max_threads_per_sm:
            raise TargetError(
                f"device {self.name!r}: a block may have {self.max_threads_per_block} threads, "
                f"more than the {self.max_threads_per_sm} of its multiprocessor"
            )
        for each in self.capabilities.matrix_instructions:
            if self.tensor_flops_per_s(each.dtype) <= 0:
                raise TargetError(
                    f"device {self.name!r}: it has {each.name} of {each.dtype}, whose tensor-core "
                    "rate must be > 0"
                )
        if self.wave_size & (self.wave_size - 1):
            raise TargetError(
                f"device {self.name!r}: wave_size is {self.wave_size}, must be a power of two"
            )
        if self.max_threads_per_sm % self.warp_size:
            raise TargetError(
                f"device {self.name!r}: max_threads_per_sm {self.max_threads_per_sm} is no "
                f"multiple of the warp size {self.warp_size}"
            )

    @property
    def description(self) -> str:
        """The label, the device that stands in where the target named none, and a warning."""
        priced = f", priced as {self.modelled_on}" if self.modelled_on else ""
        return self.label + priced + (", whose prices were not measured" * (not self.measured))

    def can_generate(self, instruction: MatrixInstruction) -> bool:
        """Tell whether code that is generated for `arch` may use an instruction.

        Those of warp groups belong to one architecture, which must be named in full (``sm_90a``).
        """
        named = instruction.warps == 1 or self.arch.endswith("a")
        return named and instruction in self.capabilities.matrix_instructions

    def tensor_flops_per_s(self, dtype: str) -> float:
        """Return the tensor-core rate of `dtype`; 0 where the device has none for it."""
        return {
            "float16": self.tensor_float16_flops_per_s,
            "bfloat16": self.tensor_bfloat16_flops_per_s,
            "float32": self.tensor_tf32_flops_per_s,
            "int8": self.tensor_int8_flops_per_s,
            "uint8": self.tensor_int8_flops_per_s,
        }.get(dtype, 0.0)


_COMMON_FIELDS = (
    *("sm_count", "clock_hz", "dram_bytes_per_s", "l2_bytes", "l2_bytes_per_s", "launch_s"),
    "fma_float32_flops_per_s",
)
_GPU_FIELDS = (
    *("smem_per_sm_bytes", "registers_per_sm", "max_registers_per_thread"),
    *("max_threads_per_block", "max_threads_per_sm", "max_blocks_per_sm"),
    *("warp_size", "wave_size", "read_part", "l2_part", "slowed_s"),
)
_CPU_FIELDS = (
    *("vector_bytes", "vector_registers", "l1_bytes", "fma_per_cycle", "l3_cycles_per_byte"),
)
