"""What a tensor-core kernel computes and in which sizes, read from the blocks of a contraction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from ...compute.activations import ACCUMULATE
from ...estimator.families.tensor_cores.tiles import SUM_BYTES
from ...estimator.prediction import ceil_div
from ...estimator.tile_plan import TilePlan
from ...matching.expressions import substitute
from ...tvm_ir import Analyzer, SBlock, TensorLoad, TensorRegion, structural_map
from ...workload import WeightLayout
from .dequantise import Neighbours
from .layout import INSTRUCTIONS, LANES, Instructions, run_length

Place = tuple[tirx.Var, list[tirx.Expr]]
"""A buffer and indices into it."""

Total = Callable[[int], tirx.Expr]
"""The sum of a part."""


@dataclass(frozen=True)
class MmaTile:
    """Sizes of one thread block."""

    plan: TilePlan  # ``reg_m`` rows and ``reg_n`` columns are accumulated by a warp, for each part
    parts: int  # accumulators of a column
    layout: WeightLayout  # of the weight
    dtype: str  # of the operands

    @property
    def instructions(self) -> Instructions:
        """What multiplies the operands."""
        return INSTRUCTIONS[self.dtype]

    @property
    def warps_m(self) -> int:
        """Warps along the rows."""
        return self.plan.block_m // self.plan.reg_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.plan.num_warps * LANES

    @property
    def run(self) -> int:
        """Neighbouring columns in the accumulators of a lane."""
        return run_length(self.plan.reg_n, self.layout, self.instructions.element_bytes)

    @property
    def x_elements(self) -> int:
        """Elements of x in a stage."""
        return self.plan.block_m * self.plan.block_k

    @property
    def part_elements(self) -> int:
        """Elements of one part of the weight in a stage."""
        return self.plan.block_n * self.plan.block_k

    @property
    def stage_elements(self) -> int:
        """Elements of a stage."""
        return self.x_elements + self.parts * self.part_elements

    @property
    def shared_elements(self) -> int:
        """Elements in shared memory: all stages, or the sums that a cluster adds up."""
        stages = self.plan.num_stages * self.stage_elements
        if self.plan.split_k == 1:
            return stages
        sums = self.plan.block_m * self.parts * self.plan.block_n
        return max(stages, sums * SUM_BYTES // self.instructions.element_bytes)


@dataclass(frozen=True)
class Product:
    """The blocks of a matmul and of what becomes of its sums, taken out of a PrimFunc."""

    acc: SBlock
    out: SBlock
    """The blocks; axes of `acc` are a part, a row, a column, and k."""
    float8: bool = False
    """Whether the device has instructions for 8-bit floats."""

    @property
    def rows(self) -> tirx.Expr:
        """Rows of x."""
        return self.acc.iter_vars[1].dom.extent

    @property
    def columns(self) -> tirx.Expr | int:
        """Columns of each part."""
        extent = self.acc.iter_vars[2].dom.extent
        return int(extent) if isinstance(extent, tirx.IntImm) else extent

    @property
    def depth(self) -> int:
        """Reduced elements."""
        return int(self.acc.iter_vars[3].dom.extent)

    @property
    def parts(self) -> int:
        """Accumulators of a column."""
        return int(self.acc.iter_vars[0].dom.extent)

    @property
    def layout(self) -> WeightLayout:
        """Whether the weight is contiguous along k or along its columns; along k if computed."""
        k = tirx.Var("k", "int64")
        load = self.weight_at(0, int64(0), k)
        return "nk" if self.weight_is_computed or load.indices[-1].same_as(k) else "kn"

    @property
    def dtype(self) -> str:
        """Type of the operands."""
        return str(self.weight_at(0, int64(0), int64(0)).ty.dtype)

    @property
    def weight_is_computed(self) -> bool:
        """Whether an element of the weight is more than a load."""
        return not isinstance(self.weight_at(0, int64(0), int64(0)), TensorLoad)

    def operands(self) -> list[tirx.Var]:
        """Return the buffers that are read, each once."""
        found: list[tirx.Var] = []
        for block in (self.acc, self.out):
            for region in block.reads:
                buffer = region.source
                if not any(buffer.same_as(b) for b in (*found, self.acc.body.buffer)):
                    found.append(buffer)
        return found

    def x_at(self, row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """Return the element of x that is multiplied in a row."""
        return self._operand(0, (int64(0), row, int64(0), k))

    def weight_at(self, part: int, column: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        """Return the element of the weight that is multiplied in a column: a load, or more."""
        return self._operand(1, (int64(part), int64(0), column, k))

    def _operand(self, side: int, place: Sequence[tirx.Expr]) -> tirx.Expr:
        product = self.acc.body.value.b
        operand = product.b if side else product.a
        if isinstance(operand, tirx.Cast):  # made wider, as sums are
            operand = operand.value
        # Which of two weights an element is from depends on its part alone.
        return Analyzer().simplify(placed(operand, self.acc, place))

    def neighbours(self, part: int, width: int) -> Neighbours:
        """Return what `width` weights of a column are, which lie side by side along k."""
        extents = self.columns, self.depth
        return Neighbours(partial(self.weight_at, part), extents, width, self.float8)

    def results(
        self, row: tirx.Expr, column: tirx.Expr, total: Total
    ) -> list[tuple[Place, tirx.Expr]]:
        """Return what is stored for a column of a row, and where; `total` is the sum of a part."""
        axes = len(self.out.iter_vars)
        places = [[row, column, int64(part)][:axes] for part in range(2 if axes == 3 else 1)]
        return [
            self._result(place, lambda part: total(int(part))) for place in places
        ]  # both of a rotated pair

    def _result(
        self, place: Sequence[tirx.Expr], total: Callable[[tirx.Expr], tirx.Expr]
    ) -> tuple[Place, tirx.Expr]:
        """Return what is stored at one place of the axes of `out`, and where.

        `total` is the sum at a position along the first axis of `acc`.
        """
        sums, store = self.acc.body.buffer, self.out.body
        simplify = Analyzer().simplify

        def own(load: TensorLoad) -> tirx.Expr:
            return total(simplify(load.indices[0])) if load.source.same_as(sums) else load

        value = structural_map(placed(store.value, self.out, place), (TensorLoad, own))
        where = [simplify(placed(index, self.out, place)) for index in store.indices]
        return (store.buffer, where), simplify(value)


def is_multiple(columns: tirx.Expr | int, width: int) -> bool:
    """Tell whether so many columns are known to be whole tiles."""
    return isinstance(columns, int) and columns % width == 0


def fill_a_tile(columns: tirx.Expr | int, width: int) -> bool:
    """Tell whether so many columns are known to be at least a tile."""
    return isinstance(columns, int) and columns >= width


def tiles_of(columns: tirx.Expr | int, width: int) -> tirx.Expr:
    """Return how many tiles so many columns are, int32."""
    if isinstance(columns, int):
        return int32(ceil_div(columns, width))
    return ((columns + int64(width - 1)) // int64(width)).astype("int32")


def last_tile(columns: tirx.Expr | int, width: int) -> tirx.Expr:
    """Return the first column of a tile that ends with the last one, or 0, int32."""
    if isinstance(columns, int):
        return int32(max(columns - width, 0))
    return tirx.max(columns.astype("int32") - int32(width), int32(0))


def int32(value: int) -> tirx.Expr:
    """Return `value` as the integer type of indices inside a block."""
    return tirx.const(value, "int32")


def uint32(value: int) -> tirx.Expr:
    """Return `value` as the type of registers, and of addresses in shared memory."""
    return tirx.const(value, "uint32")


def int64(value: tirx.Expr | int) -> tirx.Expr:
    """Return `value` in the type of indices into tensors."""
    return tirx.const(value, "int64") if isinstance(value, int) else value.astype("int64")


def placed(value: tirx.Expr, block: SBlock, place: Sequence[tirx.Expr]) -> tirx.Expr:
    """Return an expression of a block at one place of its axes."""
    at = {iv.var: e for iv, e in zip(block.iter_vars, place, strict=True)}
    return substitute(value, at)


def whole(buffer: tirx.Var) -> TensorRegion:
    """Return the whole of a buffer as a region."""
    return buffer[tuple(slice(0, size) for size in buffer.ty.shape)]


NORM_BLOCKS = ("mean_sum", "square_sum", "x_norm")
"""The statistics in their order, and the normalised rows."""

POST_NORM = "first_square_sum"
"""The statistic of a norm in front of the residual."""


@dataclass(frozen=True)
class RowNorm:
    """What the stages of a norm compute; see `relax_fusion.compute.contraction`."""

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
