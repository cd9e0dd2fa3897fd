"""What a device offers to kernels: instructions of NVIDIA's tensor cores and of CPUs, as data.

Source: PTX ISA, sections "Multiply-and-Accumulate Instruction: mma", "Asynchronous Multiply-and-
Accumulate Instruction: wgmma.mma_async" and "Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PIECE_BYTES = 16
"""One lane of ``ldmatrix`` names 16 bytes, and one asynchronous copy moves as many at most."""

SLICE_BYTES = 2 * PIECE_BYTES
"""One instruction has 32 bytes of k, whatever the element type."""

COPY_BYTES = (PIECE_BYTES, 8, 4)
"""One ``cp.async`` moves so many bytes.  It cannot move 2."""


@dataclass(frozen=True)
class MatrixInstruction:
    """Instruction that adds the product of ``m x k`` and ``k x n`` elements to ``m x n`` sums."""

    name: str
    """PTX's name, without its suffixes."""
    dtype: str
    """Element type of the operands; float32 is multiplied as tf32."""
    m: int
    n: int
    k: int
    """The shape; of ``wgmma``, `n` is the largest of its widths, the multiples of 8."""
    warps: int = 1
    """How many warps execute it together."""

    @property
    def shape(self) -> str:
        """The shape as PTX spells it."""
        return f"m{self.m}n{self.n}k{self.k}"


_DEPTHS = {"float16": 16, "bfloat16": 16, "int8": 32, "uint8": 32, "float32": 8}
"""Elements of k by element type: `SLICE_BYTES` of each."""

MMA = {t: MatrixInstruction("mma.sync", t, 16, 8, k) for t, k in _DEPTHS.items()}
"""What a warp multiplies out of its registers, by element type.  Needs sm_80."""

WARP_GROUP_MMA = {
    t: MatrixInstruction("wgmma.mma_async", t, 64, 256, k, warps=4) for t, k in _DEPTHS.items()
}
"""What four warps multiply out of shared memory, by element type.  Needs sm_90a and nothing newer:
later architectures have no ``wgmma``."""


@dataclass(frozen=True)
class Dot(MatrixInstruction):
    """One instruction of a CPU: it adds products of `k` neighbours to each of `n` sums."""

    other: str = ""  # element type of the second operand; `dtype` is that of the first
    intrinsic: str = ""  # how LLVM calls it
    adds: bool = True  # whether it takes the sums that it adds to; else an addition follows


def _dot(name: str, types: str, shape: tuple[int, int], intrinsic: str, adds: bool = True) -> Dot:
    first, _, other = types.partition(" x ")
    return Dot(name, first, 1, *shape, other=other or first, intrinsic=intrinsic, adds=adds)


PAIR_DOT = _dot("vdpbf16ps", "bfloat16", (16, 2), "x86.avx512bf16.dpbf16ps.512")
BYTE_DOT = _dot("vpdpbusd", "uint8 x int8", (16, 4), "x86.avx512.vpdpbusd.512")

CPU_INSTRUCTIONS = {
    "avx512bf16": (PAIR_DOT,),
    "avx512vnni": (BYTE_DOT,),
    "avxvnni": (_dot("vpdpbusd", "uint8 x int8", (8, 4), "x86.avx512.vpdpbusd.256"),),
    "avxvnniint8": (
        _dot("vpdpbssd", "int8", (8, 4), "x86.avx2.vpdpbssd.256"),
        _dot("vpdpbuud", "uint8", (8, 4), "x86.avx2.vpdpbuud.256"),
    ),
    "avx512bw": (_dot("vpmaddwd", "int16", (16, 2), "x86.avx512.pmaddw.d.512", False),),
    "avx2": (_dot("vpmaddwd", "int16", (8, 2), "x86.avx2.pmadd.wd", False),),
    "sse2": (_dot("pmaddwd", "int16", (4, 2), "x86.sse2.pmadd.wd", False),),
    "dotprod": (
        _dot("sdot", "int8", (4, 4), "aarch64.neon.sdot.v4i32.v16i8"),
        _dot("udot", "uint8", (4, 4), "aarch64.neon.udot.v4i32.v16i8"),
    ),
    "bf16": (_dot("bfdot", "bfloat16", (4, 2), "aarch64.neon.bfdot.v4f32.v8bf16"),),
}
"""What vectors of CPUs multiply, by the feature of a target, as LLVM calls it, that tells of it.
No instruction here saturates: sums of bytes are exact in int32.  Sources: Intel's Architecture
Instruction Set Extensions Programming Reference; Arm's Architecture Reference Manual."""


@dataclass(frozen=True)
class Capabilities:
    """What kernels ask of a device, beside its sizes and rates.

    Parameters
    ----------
    async_copies : bool
        Copies from global to shared memory that no thread waits for (``cp.async``).
    dependent_launch : bool
        Launches that begin before the kernel in front of them ends (programmatic dependent launch).
    clusters : bool
        Thread blocks that run together and read each other's shared memory.
    tma : bool
        A unit that copies whole tiles by a tensor map (Tensor Memory Accelerator).
    matrix_instructions : tuple of MatrixInstruction
        Entries of the tables in :mod:`.instructions` that it executes.
    int8_rows : bool
        Whether rows may be rounded to int8 for weights of few bits, as only an option says.
    """

    async_copies: bool = False
    dependent_launch: bool = False
    clusters: bool = False
    tma: bool = False
    matrix_instructions: tuple[MatrixInstruction, ...] = ()
    int8_rows: bool = False

    @cached_property
    def warp_group_mma(self) -> bool:
        """Whether groups of warps multiply matrices out of shared memory."""
        return any(i in self.matrix_instructions for i in WARP_GROUP_MMA.values())


NO_CAPABILITIES = Capabilities()
"""Those of devices whose instructions no kernel here uses."""
