"""The matmuls of a chain, read from the blocks of its PrimFunc."""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import ir, sym, tirx

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
        sums, store = self.acc.body.buffer, self.out.body
        at = (self.batch, row, column)[-len(self.out.iter_vars) :]

        def own(load: ir.TensorLoad) -> tirx.Expr:
            return total(0) if load.source.same_as(sums) else load

        value = tvm_ffi.structural_map(placed(store.value, self.out, at), (ir.TensorLoad, own))
        simplify = sym.Analyzer().simplify
        where = [simplify(placed(index, self.out, at)) for index in store.indices]
        return [((store.buffer, where), simplify(value))]
