"""The chains of `cases` as the estimator sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.suites.matmul.cases import Chain
from relax_fusion.estimator import Choice, choose
from relax_fusion.hardware import DeviceSpec
from relax_fusion.workload import Dim, DynamicDim, GatedFFN, NormMatmul

CASES = ("qkv", "gate_up", "out", "down")
"""Those of `cases` that are one workload."""

ROWS = (1, 3, 4, 16, 17, 64, 100, 128, 256, 1000, 1024, 4096)


@dataclass(frozen=True)
class ChainAt:
    """A chain at a number of rows; see `benchmarks.judge.judgement.Subject`."""

    chain: Chain
    rows: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.chain.size} {self.chain.case} {self.rows}"

    @property
    def size(self) -> int:
        return self.rows

    @property
    def extent(self) -> int:
        return self.rows

    def work(self, *, symbolic: bool = False) -> NormMatmul | GatedFFN:
        dim: Dim = DynamicDim("rows") if symbolic else self.rows
        (work,) = self.chain.works(dim, self.dtype)
        return work

    def to_json(self) -> dict[str, Any]:
        return {
            "size": self.chain.size,
            "case": self.chain.case,
            "rows": self.rows,
            "dtype": self.dtype,
        }

    @staticmethod
    def from_json(stored: dict[str, Any]) -> ChainAt:
        chain = Chain(stored["case"], stored.get("size", "8b"))
        return ChainAt(chain, stored["rows"], stored.get("dtype", "float16"))


def range_uppers(subject: ChainAt, dev: DeviceSpec) -> list[int | None]:
    """Return the upper ends of the ranges of symbolic rows."""
    choice = choose(subject.work(symbolic=True), dev, always=True)
    return [p.upper for p in choice.predictions] if isinstance(choice, Choice) else [None]
