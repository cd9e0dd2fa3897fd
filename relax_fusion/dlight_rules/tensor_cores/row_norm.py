"""The norm in front of a product, taken out of a PrimFunc as expressions of single elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from ...compute.activations import ACCUMULATE
from ...tvm_ir import SBlock, TensorLoad, structural_map

NORM_BLOCKS = ("mean_sum", "square_sum", "x_norm")
"""The statistics in their order, and the normalised rows."""


@dataclass(frozen=True)
class RowNorm:
    """What the stages of a norm compute; see `relax_fusion.compute.contraction`.

    Parameters
    ----------
    sums : tuple of s_tir.SBlock
        The statistics, in order.
    result : s_tir.SBlock
        The normalised rows.
    """

    sums: tuple[SBlock, ...]
    result: SBlock

    @staticmethod
    def of(blocks: Mapping[str, SBlock]) -> RowNorm | None:
        """Return the norm among the blocks of a PrimFunc, by their names."""
        *statistics, result = NORM_BLOCKS
        if result not in blocks:
            return None
        return RowNorm(tuple(blocks[n] for n in statistics if n in blocks), blocks[result])

    @property
    def x(self) -> tirx.Var:
        """The buffer of the rows."""
        return self.result.reads[0].source

    @property
    def factors(self) -> tuple[tirx.Var, ...]:
        """The buffers of gamma, and beta if there is one."""
        kept = [self.x, *(block.body.buffer for block in self.sums)]
        found = [region.source for region in self.result.reads]
        return tuple(b for b in found if not any(b.same_as(other) for other in kept))

    def summand(self, index: int, x: tirx.Expr, sums: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return what an element adds to a statistic, given those before it."""
        return self._with(self.sums[index].body.value.b, [x], sums)

    def normalised(self, values: Sequence[tirx.Expr], sums: Sequence[tirx.Expr]) -> tirx.Expr:
        """Return a normalised element, given it, gamma and beta in float32, and the statistics."""
        value = self.result.body.value
        if isinstance(value, tirx.Cast) and str(value.ty.dtype) != ACCUMULATE:
            value = value.value  # the rounding, which the caller does
        return self._with(value, values, sums)

    def _with(
        self, value: tirx.Expr, values: Sequence[tirx.Expr], sums: Sequence[tirx.Expr]
    ) -> tirx.Expr:
        """Put given values in the place of what an expression loads."""
        places = [
            *zip((self.x, *self.factors), values, strict=False),
            *zip((block.body.buffer for block in self.sums), sums, strict=False),
        ]

        def given(load: TensorLoad) -> tirx.Expr:
            return next((v for buffer, v in places if buffer.same_as(load.source)), load)

        def widened(cast: tirx.Cast) -> tirx.Expr:
            return given(cast.value) if isinstance(cast.value, TensorLoad) else cast

        value = structural_map(value, (tirx.Cast, widened), order="post")
        return structural_map(value, (TensorLoad, given))
