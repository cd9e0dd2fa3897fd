"""Matmul kernels whose plans are tiles: what the launches of a plan are, and what they cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...hardware import DeviceSpec
from ..arrays import Seconds, Wanted, column, stacked, summed
from ..family import KernelFamily
from ..gpu_cost import LEAST_S, Launch, Rates, Times, predicted, price
from ..limits import VECTOR_LOAD_BYTES
from ..prediction import DRAM_EFFICIENCY, Prediction, ceil_div, power_dividing
from ..shape import MatmulShape, Size, matmul_shape, rows_of
from ..tile_plan import TilePlan
from .matmuls import MatmulWork

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


def group_clocks(wide: float) -> float:
    """Return the clocks in which shared memory gives the operands of one ``wgmma``.

    That is 64 lines of one operand and `wide` of the other, 32 bytes each, at 128 bytes a clock.
    """
    return 16 + wide / 4


class Tile(NamedTuple):
    """What a plan asks for, whatever the workload's rows are: numbers, or arrays of many plans.

    Parameters
    ----------
    rows, columns : int
        Rows and columns that the blocks of a cluster cover together.
    blocks : int
        Thread blocks of a cluster.
    residents, multiprocessors : int
        As in `Launch`.
    depth : int
        Elements of k of a step of all blocks that share the sum over k.
    weight_bytes, row_bytes : float
        Bytes that a block gets in a step, of weights and for each of its rows.
    asked_bytes : float
        Bytes of weights that a block asks of L2 in a step.
    elements : float
        Results whose activations a block computes.
    rereads : float
        Part of the weights that comes from memory again for each further tile of rows.
    reopened : float
        Part that reading weights takes longer, as pages of memory are opened again.
    in_front : bool
        Whether a norm's kernel is in front.
    row_s : float
        Seconds for each row, beside all: of a norm inside, and of adding up parts of split sums.
    copied : bool
        Whether packed weights are unpacked to a copy in front.
    aligned : bool
        Whether rows of any width are stored as fast.
    ahead, tensor_s, clocks, instructions, sums, store_s, hides, meetings, begins
        As in `Launch`.
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


class Columns(NamedTuple):
    """The columns of the weights of each launch of a workload, and its shape."""

    shape: MatmulShape
    launches: Sequence[Sequence[int]]


def launch_of(
    tile: Tile, shape: MatmulShape, columns: Sequence[int], dev: DeviceSpec, rows: Any
) -> Launch:
    """Return the launch for weights of so many columns."""
    row_tiles = ceil_div(rows, tile.rows)
    blocks = row_tiles * sum(ceil_div(n, tile.columns) for n in columns) * tile.blocks
    steps = ceil_div(shape.k, tile.depth)
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
    """Return what the launches of a workload cost, with that of a norm.

    Parameters
    ----------
    tile, rates : Tile, Rates
        Of one plan, or of many.
    columns : Columns
        The weights.
    dev : DeviceSpec
        The device.
    rows : int or array
        Rows of x; of many sizes an array of shape ``(sizes, 1)``.

    Returns
    -------
    Times
        `seconds` are from launch to end; of many they have the shape ``(sizes, plans)``.
    """
    shape, each = columns
    found = summed([price(launch_of(tile, shape, some, dev, rows), rates, dev) for some in each])
    seconds = start_s(rates, columns, dev) + found.seconds
    row_bytes, bandwidth = shape.side_row_bytes, dev.dram_bytes_per_s * DRAM_EFFICIENCY
    if shape.has_norm:
        # x is read, and written for the matmul
        moved_s = rows * (shape.x_row_bytes + shape.k * shape.in_bytes) / bandwidth
        seconds = seconds + tile.in_front * (NORM_S + np.maximum(LEAST_S, moved_s))
    seconds = seconds + rows * (row_bytes / bandwidth + _unaligned_s(tile, shape, dev) + tile.row_s)
    copied = tile.copied * _copy_s(shape, dev)
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
    stores = sum(n // power_dividing(n, most) for n in shape.unaligned)
    each = UNALIGNED_STORES_PER_CLOCK * dev.clock_hz * dev.sm_count
    return np.where(tile.aligned, 0.0, stores / each)


class TiledMatmul(KernelFamily[MatmulWork]):
    """A family of matmul kernels whose plans are tiles, and whose price is that of their launches.

    A family says what a plan's tile is (`tile_of`), and which `Rates` it reaches (`rates_of`).
    """

    @abstractmethod
    def tile_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Tile:
        """Return what `plan` asks for, whatever the rows."""

    @abstractmethod
    def rates_of(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Rates:
        """Return what the kernel of `plan` reaches."""

    def columns(self, work: MatmulWork) -> Columns:
        """Return the weights of each launch: by default, one launch a projection."""
        shape = matmul_shape(work)
        return Columns(shape, [[n] for n in shape.n_parts])

    def behind_s(self, rows: Any) -> Any:
        """Return what kernels take longer behind another than where they are timed alone."""
        return 0.0

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Return what the launches cost."""
        rows, columns = rows_of(work, size), self.columns(work)
        tile, rates = self.tile_of(plan, work, dev), self.rates_of(plan, work, dev)
        found = launches(tile, rates, columns, dev, rows)
        shape = columns.shape
        moved = shape.weight_bytes + rows * shape.row_bytes
        found = found._replace(seconds=found.seconds + self.behind_s(rows))
        return predicted(found, start_s(rates, columns, dev), moved, shape.flops(rows))

    def seconds(
        self,
        plans: Sequence[TilePlan],
        work: MatmulWork,
        dev: DeviceSpec,
        sizes: Sequence[Size],
        wanted: Wanted,
    ) -> Seconds:
        """Return what `predict` does, of all plans at all sizes."""
        tiles = stacked([self.tile_of(plan, work, dev) for plan in plans])
        rates = stacked([self.rates_of(plan, work, dev) for plan in plans])
        rows = column([rows_of(work, size) for size in sizes])
        return launches(tiles, rates, self.columns(work), dev, rows).seconds + self.behind_s(rows)
