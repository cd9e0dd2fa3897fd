"""The matmuls of a chain, read from the blocks of its PrimFunc."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from .tile import Accumulation, Place, Total, int64, placed


@dataclass(frozen=True)
class Side(Accumulation):
    """One of the matmuls and its steps, taken out of a PrimFunc, for one matrix of the batch.

    Parameters
    ----------
    batch : tirx.Expr
        The matrix.
    """

    batch: tirx.Expr

    def left_at(self, row: tirx.Expr, k: tirx.Expr) -> ir.TensorLoad:
        """Return the element of the left operand that is multiplied in a row."""
        return placed(self.acc.body.value.b.a.value, self.acc, (self.batch, row, int64(0), k))

    def weight_at(self, column: tirx.Expr, k: tirx.Expr) -> ir.TensorLoad:
        """Return the element of the weight that is multiplied in a column."""
        return placed(self.acc.body.value.b.b.value, self.acc, (self.batch, int64(0), column, k))

    def results(
        self, row: tirx.Expr, column: tirx.Expr, total: Total
    ) -> list[tuple[Place, tirx.Expr]]:
        """Return what is stored for one column of one row, and where."""
        at = (self.batch, row, column)[-len(self.out.iter_vars) :]
        return [self.result(at, lambda _: total(0))]
