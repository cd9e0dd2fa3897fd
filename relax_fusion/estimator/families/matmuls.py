"""What kernels of norms, matmuls and gated projections have in common, and the price of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...hardware import DeviceSpec
from ...workload import INTEGER_DTYPES, GatedFFN, NormMatmul, Packed
from ...workload.formats import E2M1, EXPONENT
from .. import prediction
from ..family import OWN_BASELINE_ERROR, KernelFamily
from ..gpu_cost import LEAST_S, Launch, Rates, Times, column, predicted, price, stacked, summed
from ..limits import VECTOR_LOAD_BYTES, block_limits, tile_extents, vector_loads
from ..shape import MatmulShape, Problem, Size, rows_at
from ..tile_plan import TilePlan
from .tensor_cores import tiles as mma

MatmulWork: TypeAlias = NormMatmul | GatedFFN

MatmulProblem: TypeAlias = Problem[MatmulWork]

DOT_PRODUCTS, FMA_TILES = SCALAR_FAMILIES = ("dot_products", "fma_tiles")
"""The names of the families of matmuls on GPUs without tensor cores."""

MAX_PADDING = 0.05
"""Part of a dimension that a tile may compute in vain (MCFuser's third rule)."""

THREAD_OVERHEAD_REGISTERS = 32
"""Addresses, loop counters and staged loads of a GPU thread.  Assumed: what nvcc reports for a
matmul kernel, less its accumulators and operands, lies between 20 and 40."""

NEXT_LAUNCH_S = 2.0e-6
"""A further launch for other projections of the same rows takes 2.0e-6 seconds: it follows without
a gap."""

NORM_S = 0.7e-6
"""A norm's kernel in front adds 0.7e-6 seconds to what it takes by itself: the matmul, though both
are launched together, waits for it.  Fitted on an H200 to kernels with and without a norm."""

SLOTS_PART = 0.65
"""A multiprocessor issues activations in this part of its instruction slots."""

COPY_EFFICIENCY = 0.75
"""Unpacking weights to a copy reaches this part of the peak bandwidth of memory: 17 to 89 us for
four weights on an H200."""

UNALIGNED_STORES_PER_CLOCK = 0.65
"""A multiprocessor stores so many pieces a clock where rows of results are no multiples of 16
bytes: threads store what lies far apart.  Measured: 0.55 to 0.85, of 2305 to 50257 columns that are
stored alone or in pairs (`2026-11-28-unaligned_rows.json`)."""


def columns_fit(shape: MatmulShape, block_n: int) -> bool:
    """Tell whether `block_n` pads n by no more than `MAX_PADDING`, or is the least tile."""
    padded = sum(prediction.ceil_div(n, block_n) * block_n for n in shape.n_parts)
    return block_n <= 32 or padded <= shape.n * (1 + MAX_PADDING)


def matmul_limits(
    foot: prediction.Footprint, plan: TilePlan, problem: MatmulProblem, *, is_static: bool = False
) -> Iterator[str]:
    """Yield what a block has not, which loads do not fit, and what no kernel of TIR can do."""
    shape = problem.shape
    yield from block_limits(foot, plan, problem, is_static=is_static)
    yield from vector_loads(plan, shape.dtype, tile_extents(plan, shape.layouts))
    if shape.k == 1:
        # TVM 0.27 mixes index types when it simplifies a bound reduction of one element.
        yield "the reduction has 1 element, backend 'tir' needs 2 on a GPU"


def refuses_integers(problem: MatmulProblem, kernels: str) -> str | None:
    """Return that kernels of float32 sums do not add up integers."""
    dtype = problem.work.dtype
    if dtype not in INTEGER_DTYPES:
        return None
    known = " and ".join(map(repr, mma.FAMILIES))
    what = f"dtype is {dtype}, {kernels} add up float32"
    needs = "adding up integers needs tensor cores (CUDA, sm_80 or newer)"
    return f"{what}; {needs}: families {known}, or dot products"


def packed_form(work: MatmulWork) -> Packed | None:
    """Return how the weights are stored; None if their elements lie one after the other."""
    return work.packed if isinstance(work, GatedFFN) else work.outputs[0].packed


def refuses_scattered(problem: MatmulProblem) -> str | None:
    """Return that no kernel for a GPU has weights whose words it would not read along k.

    The rule for matmuls that no pass made takes them to tensor cores.  Neither has one parameters
    of a norm for each sequence: those of Triton do.
    """
    form, norm = packed_form(problem.work), problem.work.norm
    if norm is not None and norm.each:
        return f"gamma has a row for each {norm.each} rows; TIR's kernels of a GPU take one row"
    if form is None:
        return None
    if form.number == E2M1 or form.scale_dtype == EXPONENT:
        return "numbers of 4 bits or powers of 2 as scales have no fused kernel of a GPU"
    if not form.is_in_order:
        return "words lie across k, or have zeros apart; fused kernels of a GPU take words along k"
    if form.fields == 1 and "kn" in problem.shape.layouts:
        return "bytes lie across k; fused kernels of a GPU take bytes along k"
    return None


def group_clocks(wide: float) -> float:
    """Return the clocks in which shared memory gives the operands of one ``wgmma``.

    That is 64 lines of one operand and `wide` of the other, 32 bytes each, at 128 bytes a clock.
    """
    return 16 + wide / 4


class Tile(NamedTuple):
    """What a plan asks for, whatever the workload's rows are: numbers, or arrays of many plans.

    `rows`, `columns`: rows and columns that the blocks of a cluster cover together.
    `blocks`: thread blocks of a cluster.
    `residents`, `multiprocessors`: as in `Launch`.
    `depth`: elements of k of a step of all blocks that share the sum over k.
    `weight_bytes`, `row_bytes`: bytes that a block gets in a step, of weights and for each of its
    rows.
    `asked_bytes`: bytes of weights that a block asks of L2 in a step.
    `elements`: results whose activations a block computes.
    `rereads`: part of the weights that comes from memory again for each further tile of rows.
    `reopened`: part that reading weights takes longer, as pages of memory are opened again.
    `in_front`: whether a norm's kernel is in front.
    `row_s`: seconds for each row, beside all: of a norm inside, and of adding up parts of split
    sums.
    `copied`: whether packed weights are unpacked to a copy in front.
    `aligned`: whether rows of any width are stored as fast.
    `late_s`: seconds that a kernel of one row takes longer behind another than by itself.
    `ahead`, `tensor_s`, `clocks`, `instructions`, `sums`, `store_s`, `hides`, `meetings`, `begins`:
    as in `Launch`.
    """

    rows: Any
    columns: Any
    blocks: Any
    residents: Any
    multiprocessors: Any
    depth: Any
    ahead: Any = 1
    tensor_s: Any = 0.0
    clocks: Any = 0.0
    instructions: Any = 0.0
    weight_bytes: Any = 0.0
    row_bytes: Any = 0.0
    asked_bytes: Any = 0.0
    sums: Any = 0.0
    elements: Any = 0.0
    store_s: Any = 0.0
    hides: Any = False
    meetings: Any = 0.0
    begins: Any = True
    rereads: Any = 0.0
    reopened: Any = 0.0
    in_front: Any = False
    row_s: Any = 0.0
    copied: Any = False
    aligned: Any = True
    late_s: Any = 0.0


class Columns(NamedTuple):
    """The columns of the weights of each launch of a workload, and its shape."""

    shape: MatmulShape
    launches: Sequence[Sequence[int]]

    @staticmethod
    def of(shape: MatmulShape) -> Columns:
        """Return those of one launch a projection."""
        return Columns(shape, [[n] for n in shape.n_parts])


def launch_of(
    tile: Tile, shape: MatmulShape, columns: Sequence[int], dev: DeviceSpec, rows: Any
) -> Launch:
    """Return the launch for weights of so many columns."""
    row_tiles = prediction.ceil_div(rows, tile.rows)
    blocks = row_tiles * sum(prediction.ceil_div(n, tile.columns) for n in columns) * tile.blocks
    steps = prediction.ceil_div(shape.k, tile.depth)
    sums, results = sum(columns) * shape.parts, sum(columns) * (shape.parts if shape.rotated else 1)
    weights = sums * shape.k * np.where(tile.copied, shape.in_bytes, shape.stored_bytes)
    read = weights * (1 + tile.rereads * (row_tiles - 1)) * (1 + tile.reopened)
    moved = rows * (results * shape.out_bytes + shape.k * shape.in_bytes)
    slots_per_s = SLOTS_PART * dev.fma_float32_flops_per_s / 2 / dev.sm_count
    return Launch(
        blocks,
        tile.residents,
        tile.multiprocessors,
        steps,
        tile.ahead,
        tensor_s=tile.tensor_s,
        clocks=tile.clocks,
        instructions=tile.instructions,
        fed_bytes=tile.weight_bytes + tile.row_bytes * np.minimum(rows, tile.rows),
        dram_bytes=read + moved,
        l2_bytes=blocks * steps * tile.asked_bytes,
        sums=tile.sums,
        store_s=tile.store_s + tile.elements * shape.slots / slots_per_s,
        hides=tile.hides,
        meetings=tile.meetings,
        begins=tile.begins,
    )


def launches(tile: Tile, rates: Rates, columns: Columns, dev: DeviceSpec, rows: Any) -> Times:
    """Return what the launches of a workload cost, with that of a norm, from launch to end.

    `tile`, `rates`: of one plan, or of many.
    `rows`: rows of x; of many sizes an array of shape ``(sizes, 1)``, for which the seconds of many
    plans have the shape ``(sizes, plans)``.
    """
    shape, each = columns
    found = summed([price(launch_of(tile, shape, some, dev, rows), rates, dev) for some in each])
    seconds = start_s(rates, columns, dev) + found.seconds
    row_bytes, bandwidth = shape.side_row_bytes, dev.dram_bytes_per_s * prediction.DRAM_EFFICIENCY
    if shape.has_norm:
        # x is read, and written for the matmul
        moved_s = rows * (shape.x_row_bytes + shape.k * shape.in_bytes) / bandwidth
        seconds = seconds + tile.in_front * (NORM_S + np.maximum(LEAST_S, moved_s))
    seconds = seconds + rows * (row_bytes / bandwidth + _unaligned_s(tile, shape, dev) + tile.row_s)
    copied = tile.copied * _copy_s(shape, dev)
    seconds = seconds + tile.late_s * (rows == 1)
    return found._replace(seconds=seconds + copied, dram=found.dram + copied)


def start_s(rates: Rates, columns: Columns, dev: DeviceSpec) -> Any:
    """Return what launching takes, and getting into stride."""
    return dev.launch_s + rates.start_s + (len(columns.launches) - 1) * NEXT_LAUNCH_S


def _copy_s(shape: MatmulShape, dev: DeviceSpec) -> float:
    """Return what unpacking weights to a copy takes."""
    moved = shape.parts * shape.n * shape.k * (shape.stored_bytes + shape.in_bytes)
    return NEXT_LAUNCH_S + moved / (COPY_EFFICIENCY * dev.dram_bytes_per_s)


def _unaligned_s(tile: Tile, shape: MatmulShape, dev: DeviceSpec) -> Any:
    """Return what the stores of a row of results take where it is no multiple of 16 bytes."""
    most = VECTOR_LOAD_BYTES // shape.out_bytes
    parts = (n for n in shape.n_parts if n * shape.out_bytes % 16)
    stores = sum(n // prediction.power_dividing(n, most) for n in parts)
    each = UNALIGNED_STORES_PER_CLOCK * dev.clock_hz * dev.sm_count
    return np.where(tile.aligned, 0.0, stores / each)


@dataclass(frozen=True)
class TilePrice(prediction.Price):
    """The price of a plan whose blocks have tiles, by what its launches ask for and reach."""

    dev: DeviceSpec
    foot: prediction.Footprint
    tile: Tile
    rates: Rates
    columns: Columns
    early_s: float = 0.0

    def at(self, size: Size) -> prediction.Prediction:
        """Return what the launches cost."""
        rows, shape = rows_at(size), self.columns.shape
        found = launches(self.tile, self.rates, self.columns, self.dev, rows)
        moved = shape.weight_bytes + rows * shape.row_bytes
        start = start_s(self.rates, self.columns, self.dev)
        return predicted(found, start, moved, shape.flops(rows))

    @staticmethod
    def seconds(
        prices: Sequence[TilePrice], sizes: Sequence[Size], wanted: prediction.Wanted
    ) -> prediction.Seconds:
        """Return what `at` does, of all plans at all sizes."""
        tiles, rates = stacked([p.tile for p in prices]), stacked([p.rates for p in prices])
        rows, first = column([rows_at(size) for size in sizes]), prices[0]
        return launches(tiles, rates, first.columns, first.dev, rows).seconds


class GpuMatmul(KernelFamily[MatmulWork]):
    """A family of norms, matmuls and gated projections on GPUs."""

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all without adapters."""
        return problem.is_plain("gpu", NormMatmul, GatedFFN)


class CpuMatmul(KernelFamily[MatmulWork]):
    """A family of norms, matmuls and gated projections on CPUs."""

    emitter = "relax_fusion.dlight_rules.cpu.contraction:emit"
    error = OWN_BASELINE_ERROR
    norms_heads = True

    def takes(self, problem: Problem[Any]) -> bool:
        """Take all without adapters."""
        return problem.is_plain("cpu", NormMatmul, GatedFFN)
