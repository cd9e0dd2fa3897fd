"""The matrix instructions of NVIDIA's tensor cores that kernels of this library use, as data.

Source: PTX ISA, sections "Multiply-and-Accumulate Instruction: mma", "Asynchronous Multiply-and-
Accumulate Instruction: wgmma.mma_async" and "Warp-level matrix load instruction: ldmatrix".
"""

from __future__ import annotations

from dataclasses import dataclass

PIECE_BYTES = 16
"""What one lane of ``ldmatrix`` names, and the most that one asynchronous copy moves."""

SLICE_BYTES = 2 * PIECE_BYTES
"""Bytes of k of one instruction, whatever the element type."""

COPY_BYTES = (PIECE_BYTES, 8, 4)
"""Sizes of one ``cp.async``.  It cannot move 2 bytes."""


@dataclass(frozen=True)
class MatrixInstruction:
    """One instruction: it adds the product of ``m x k`` and ``k x n`` elements to ``m x n`` sums.

    Parameters
    ----------
    name : str
        PTX's name, without its suffixes.
    dtype : str
        Element type of the operands; float32 is multiplied as tf32.
    m, n, k : int
        The shape; of ``wgmma``, `n` is the largest of its widths, the multiples of 8.
    warps : int
        How many warps execute it together.
    """

    name: str
    dtype: str
    m: int
    n: int
    k: int
    warps: int = 1

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
