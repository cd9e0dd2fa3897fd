"""The end of a tensor-core kernel: from accumulators through the epilogue to memory.

A lane holds runs of neighbouring columns.  What the epilogue reads beside them is loaded, and what
it makes is stored, several columns at a time where their addresses are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from tvm import tirx

from ...estimator.limits import VECTOR_LOAD_BYTES
from ...matching.expressions import chooses, different, loads_of, ramp, substitute
from ...tvm_ir import Analyzer, T, TensorLoad, structural_equal, structural_map
from ...workload import DTYPE_BYTES
from .fragments import local
from .mma_kernel import MmaKernel
from .sums import Run
from .tile import Place, int32, int64, is_multiple


class MmaEpilogue:
    """Emits what becomes of the sums of a kernel, into the IR builder that is open.

    The statements are made once, for variables in the place of the row, of the column in units of
    ``width`` and of the sums, and then repeated for every run of a lane.
    """

    def __init__(self, kernel: MmaKernel) -> None:
        """Make the statements for `width` columns: as many as divide the runs and n."""
        self.kernel, self.product = kernel, kernel.product
        columns = self.product.columns
        self.width = gcd(kernel.tile.run, columns) if isinstance(columns, int) else 1
        self.row, self.place = tirx.Var("row", "int64"), tirx.Var("place", "int64")
        self.sums = [
            [tirx.Var(f"sum{part}_{i}", kernel.types.total) for i in range(self.width)]
            for part in range(kernel.tile.parts)
        ]
        self.analyzer = Analyzer()
        self.statements: list[tirx.Stmt] = []
        made = [self._column(i) for i in range(self.width)]
        for stores in zip(*made, strict=True):  # several where a pair is rotated
            wheres, values = zip(*stores, strict=True)
            self._store(list(wheres), self._with_wide_loads(list(values)))

    def emit(self, rows: Sequence[Sequence[Run]]) -> None:
        """Emit the epilogue of sums of this lane, row by row."""
        kernel = self.kernel
        for runs in rows:
            row = kernel.first_row + int64(runs[0].row)
            with T.If(row < self.product.rows), T.Then():
                for run in runs:
                    for first in range(0, kernel.tile.run, self.width):
                        column = kernel.first_column + int64(run.column + int32(first))
                        self._repeat(row, column, [s[first : first + self.width] for s in run.sums])

    def _repeat(
        self, row: tirx.Expr, column: tirx.Expr, sums: Sequence[Sequence[tirx.Expr]]
    ) -> None:
        """Repeat the statements for a row and the columns from one on."""
        values: dict[tirx.Var, tirx.Expr] = {self.row: row, self.place: column // self.width}
        for names, own in zip(self.sums, sums, strict=True):
            values |= zip(names, own, strict=True)
        body = tirx.SeqStmt(self.statements) if len(self.statements) > 1 else self.statements[0]
        body = substitute(body, values)
        if not is_multiple(self.product.columns, self.kernel.tile.plan.block_n):
            body = tirx.IfThenElse(column < int64(self.product.columns), body, None)
        T.add_to_parent(body)

    def _column(self, i: int) -> list[tuple[Place, tirx.Expr]]:
        """Return what is stored for one of the columns, and where."""
        column = self.place * int64(self.width) + int64(i)
        return self.product.results(self.row, column, lambda part: self.sums[part][i])

    def _store(self, wheres: list[Place], values: list[tirx.Expr]) -> None:
        """Make one store of all values if they are neighbours, else one of each."""
        buffer = wheres[0][0]
        lanes = self._vector(wheres)
        if lanes == 1:
            self.statements += [
                tirx.BufferStore(buffer, value, where)
                for (_, where), value in zip(wheres, values, strict=True)
            ]
            return
        staged = local("results", self.width, str(buffer.ty.dtype))
        for i, value in enumerate(values):
            self.statements.append(tirx.BufferStore(staged, value, [int32(i)]))
        for first in range(0, self.width, lanes):
            vector = staged[ramp(int32(first), lanes)]
            *outer, last = wheres[first][1]
            where = [*outer, ramp(last, lanes)]
            self.statements.append(tirx.BufferStore(buffer, vector, where))

    def _with_wide_loads(self, values: list[tirx.Expr]) -> list[tirx.Expr]:
        """Load what all values read of one tensor at once, if it lies side by side.

        rewrite: ``f(r[j]); f(r[j + 1])`` -> ``v[0:2] = r[j:j + 2]; f(v[0]); f(v[1])``
        """
        loads = [different(loads_of(value)) for value in values]
        # A choice guards addresses that are no part of a tensor
        if any(chooses(value) for value in values) or len({len(each) for each in loads}) > 1:
            return values
        for same in zip(*loads, strict=True):  # what each value reads at the same place in it
            wheres = [(load.source, list(load.indices)) for load in same]
            lanes = self._vector(wheres)
            if lanes == 1:
                continue
            staged = local("operand", self.width, str(same[0].source.ty.dtype))
            for first in range(0, self.width, lanes):
                *outer, last = wheres[first][1]
                vector = same[0].source[(*outer, ramp(last, lanes))]
                to = [ramp(int32(first), lanes)]
                self.statements.append(tirx.BufferStore(staged, vector, to))
            values = [
                _replaced(value, load, staged[int32(i)])
                for i, (value, load) in enumerate(zip(values, same, strict=True))
            ]
        return values

    def _vector(self, wheres: Sequence[Place]) -> int:
        """Return how many of these elements one instruction moves: 1 if they are no neighbours."""
        buffer, first = wheres[0]
        element = DTYPE_BYTES.get(str(buffer.ty.dtype))
        if element is None:  # no float: a condition, an index
            return 1
        lanes = gcd(self.width, VECTOR_LOAD_BYTES // element)
        distances = [
            [self._constant(a - b) for a, b in zip(where, first, strict=True)]
            for _, where in wheres
        ]
        side_by_side = [[0] * (len(first) - 1) + [i] for i in range(len(wheres))]
        aligned = [first[-1], *buffer.ty.shape[-1:]][: len(first)]
        if distances == side_by_side and all(self._constant(a % lanes) == 0 for a in aligned):
            return lanes
        return 1

    def _constant(self, value: tirx.Expr) -> int | None:
        value = self.analyzer.simplify(value)
        return int(value) if isinstance(value, tirx.IntImm) else None


def _replaced(value: tirx.Expr, load: TensorLoad, by: tirx.Expr) -> tirx.Expr:
    """Return `value` with another expression in the place of a load."""

    def replace(other: TensorLoad) -> tirx.Expr:
        same = structural_equal(load, other)
        return by if same else other

    return structural_map(value, (TensorLoad, replace))
