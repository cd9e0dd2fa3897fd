"""The instructions that multiply matrices, by the element type of what they multiply, as data.

In bytes they are all alike: ``mma.sync.m16n8`` takes `SLICE_BYTES` of each line along k, which are
two pieces of 16 bytes, and lane i holds the four bytes at ``4 * (i % 4)`` of a piece (PTX ISA,
sections "Matrix Fragments for mma.m16n8k16 with floating point type", "... for mma.m16n8k32" and
"... for mma.m16n8k8").  ``ldmatrix`` deals out just these, whatever they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...hardware.instructions import MMA, PIECE_BYTES, WARP_GROUP_MMA
from ...workload import DTYPE_BYTES


@dataclass(frozen=True)
class Instructions:
    """What tensor cores make of operands of one element type.

    Parameters
    ----------
    dtype : str
        Of an operand in memory.
    name : str
        How the instructions call it.
    total : str
        The dtype of sums.
    flags : tuple of int
        What ``wgmma`` is told beside: signs of the operands, and that neither is transposed.
    """

    dtype: str
    name: str
    total: str = "float32"
    flags: tuple[int, ...] = ()

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def piece(self) -> int:
        """Elements of a piece."""
        return PIECE_BYTES // self.element_bytes

    @property
    def k(self) -> int:
        """Elements of k of one instruction."""
        return MMA[self.dtype].k

    @property
    def mma(self) -> str:
        """The instruction of a warp."""
        types = f"{self._short_total}.{self.name}.{self.name}.{self._short_total}"
        return f"mma.sync.aligned.{MMA[self.dtype].shape}.row.col.{types}"

    def wgmma(self, columns: int) -> str:
        """Return the instruction of a warp group for so many columns."""
        types = f"{self._short_total}.{self.name}.{self.name}"
        shape = replace(WARP_GROUP_MMA[self.dtype], n=columns).shape
        return f"wgmma.mma_async.sync.aligned.{shape}.{types}"

    def columns(self, tile: int) -> int:
        """Return the columns of each ``wgmma`` of a tile of so many, a multiple of 16."""
        most = WARP_GROUP_MMA[self.dtype].n
        if self.total == "int32":
            most = min(most, 224)  # TVM 0.27 knows no wider ones of integers
        counts = range(1, tile // 16 + 1)
        return next(tile // n for n in counts if tile % (16 * n) == 0 and tile // n <= most)

    @property
    def registers(self) -> str:
        """The dtype that TVM gives registers of sums: 32 bits, and it knows no signed ones."""
        return "uint32" if self.total == "int32" else self.total

    @property
    def rounds(self) -> bool:
        """Whether operands are rounded in registers, where they are wider than what is read."""
        return self.name == "tf32"

    @property
    def _short_total(self) -> str:
        return {"float32": "f32", "int32": "s32"}[self.total]


INSTRUCTIONS = {
    each.dtype: each
    for each in (
        Instructions("float16", "f16", flags=(1, 1, 0, 0)),
        Instructions("bfloat16", "bf16", flags=(1, 1, 0, 0)),
        Instructions("int8", "s8", "int32"),
        Instructions("uint8", "u8", "int32"),
        Instructions("float32", "tf32", flags=(1, 1)),
    )
}
"""By the dtype of the operands."""
