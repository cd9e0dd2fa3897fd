"""The cases of `cases` as the estimator sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.suites.attention.cases import CASES, Case
from relax_fusion.estimator.shape import AttentionSize
from relax_fusion.workload import Attention, Dim, DynamicDim


@dataclass(frozen=True)
class CaseIn:
    """A case in a dtype, its tensors ``[b, s, n, h]``; see `benchmarks.judge.judgement.Subject`."""

    case: Case
    dtype: str

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def size(self) -> AttentionSize:
        return AttentionSize(self.case.batch, *self.case.lengths)

    @property
    def extent(self) -> int:
        return self.case.lengths[0]

    def work(self, *, symbolic: bool = False) -> Attention:
        return self.case.work(self._dims() if symbolic else self.size, self.dtype)

    def _dims(self) -> tuple[Dim, Dim, Dim]:
        """Return batch and lengths that are known at run time; a single query stays one."""
        queries, keys = self.case.lengths
        kv_len = DynamicDim("kv_len")
        q_len = kv_len if queries == keys else DynamicDim("q_len")
        return DynamicDim("batch"), 1 if queries == 1 else q_len, kv_len

    def to_json(self) -> dict[str, Any]:
        return {"case": self.case.name, "dtype": self.dtype}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> CaseIn:
        return CaseIn(CASES[stored["case"]], stored["dtype"])
