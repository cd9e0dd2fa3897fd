"""Register tiles of a CPU, which read weights as they lie: the family "" of CPUs."""

from __future__ import annotations

from collections.abc import Iterator

from ...hardware import DeviceSpec
from ...workload import GatedFFN, NormMatmul
from ..cpu_cost import matmul_on_cpu
from ..family import OWN_BASELINE_ERROR, KernelFamily
from ..limits import core_limits, one_stage
from ..prediction import Prediction, power_dividing
from ..shape import MatmulShape, Size, matmul_shape, rows_of
from ..steps import Footprint
from ..tile_plan import TilePlan
from .matmuls import MatmulWork, refuses_integers

FAMILY = "cpu_tiles"
"""The name of the family of register tiles on CPUs."""

REG_M = (1, 2, 4, 8)
REG_N = (1, 2, 3, 4, 6, 8)
BLOCK_ROWS = (1, 2, 4)
TASKS_PER_CORE = (1, 2, 4, 8, 16)

OPERAND_REGISTERS = 2
"""Vector registers of a tile besides accumulators and row operands: a weight and a spare."""


class CpuTiles(KernelFamily[MatmulWork]):
    """Norm, matmul or gated projections: a task has some columns of all rows."""

    kind = "cpu"
    names = (FAMILY,)
    takes = (NormMatmul, GatedFFN)
    emitter = "relax_fusion.dlight_rules.cpu.contraction:emit"
    error = OWN_BASELINE_ERROR

    def refuses(self, work: MatmulWork, dev: DeviceSpec) -> str | None:
        """Refuse integers, which would be added up as float32."""
        return refuses_integers(work, "register tiles of a CPU")

    def plans(self, work: MatmulWork, dev: DeviceSpec) -> Iterator[TilePlan]:
        """Yield the register tiles that fit the registers, in blocks that fit the caches."""
        shape = matmul_shape(work)
        for lanes in _lanes(shape, dev):
            for reg_m, reg_n in _tiles(shape, dev, lanes):
                for block_m in (reg_m * r for r in BLOCK_ROWS):
                    # Rows in half of L2: the other half is for the weights that stream by.
                    if block_m > reg_m and block_m * shape.k * 4 > dev.l2_bytes // 2:
                        break
                    for block_n in column_blocks(shape, dev, reg_n):
                        yield TilePlan(
                            *(block_m, block_n, shape.k),
                            reg_m=reg_m,
                            reg_n=reg_n,
                            lanes=lanes,
                            family=FAMILY,
                        )

    def violations(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Iterator[str]:
        """Yield what a core has not, and what vectors do not divide."""
        yield from one_stage(plan)
        if plan.block_k > work.k:
            yield f"block_k is {plan.block_k}, the reduction has {work.k} elements"
        yield from core_limits(self.footprint(plan, work, dev), plan, dev)
        if work.k % plan.block_k:
            yield f"block_k is {plan.block_k}, does not divide k={work.k}"
        layouts = matmul_shape(work).layouts
        if "nk" in layouts and plan.block_k % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide block_k={plan.block_k}"
        if "kn" in layouts and plan.reg_n % plan.lanes:
            yield f"lanes is {plan.lanes}, does not divide reg_n={plan.reg_n}"

    def footprint(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec) -> Footprint:
        """Return the accumulators, and the rows and columns that a task goes over."""
        shape = matmul_shape(work)
        tile = plan.reg_m * plan.reg_n * shape.parts
        vectors, stack = 0, 0
        if "nk" in shape.layouts:  # one vector along k per accumulator
            vectors, stack = tile, tile * plan.lanes * 4
        if "kn" in shape.layouts:  # one vector holds `lanes` columns
            vectors = max(vectors, -(-tile // plan.lanes))
            stack = max(stack, tile * 4)
        step = plan.block_m * 4 + plan.reg_n * shape.parts * shape.in_bytes
        return Footprint(
            smem_bytes=0,
            registers_per_thread=vectors + plan.reg_m + OPERAND_REGISTERS,
            threads=1,
            stack_bytes=stack,
            scratch_bytes=plan.block_k * step,
        )

    def predict(self, plan: TilePlan, work: MatmulWork, dev: DeviceSpec, size: Size) -> Prediction:
        """Price rows padded to whole blocks, by the model of register tiles, fitted on CPUs."""
        return matmul_on_cpu(matmul_shape(work), plan, dev, rows_of(work, size))


def _lanes(shape: MatmulShape, dev: DeviceSpec) -> list[int]:
    """Return the widest vector that the layouts allow, and the widest that needs no tail."""
    most = dev.vector_bytes // 4
    if "nk" in shape.layouts:
        return [power_dividing(shape.k, most)]
    exact = min(power_dividing(n, most) for n in shape.contiguous)
    # A vector that goes over the end of half a head would be a gather.
    return sorted({exact, most} if shape.contiguous == shape.n_parts else {exact})


def _tiles(shape: MatmulShape, dev: DeviceSpec, lanes: int) -> Iterator[tuple[int, int]]:
    """Yield the register tiles whose accumulators and operands the registers can hold."""
    unit = lanes if "kn" in shape.layouts else 1
    columns = [unit * r for r in REG_N]
    exact = [c for c in columns if all(n % c == 0 for n in shape.n_parts)]
    vectors_per_column = shape.parts / (lanes if shape.layouts == {"kn"} else 1)
    for reg_m in REG_M:
        free = dev.vector_registers - reg_m - OPERAND_REGISTERS
        for reg_n in exact or columns:
            if reg_m * reg_n * vectors_per_column <= free:
                yield reg_m, reg_n


def column_blocks(shape: MatmulShape, dev: DeviceSpec, reg_n: int) -> list[int]:
    """Return column counts that make some tasks per core, dividing n where a divisor is near."""
    found = set()
    whole, rest = divmod(min(shape.n_parts), reg_n)
    for per_core in TASKS_PER_CORE:
        tiles = max(1, shape.n // (dev.sm_count * per_core) // reg_n)
        # About as many as there are tasks; the tiles of one may be millions.
        blocks = range(-(-whole // tiles), whole // max(tiles // 2, 1) + 1) if not rest else ()
        exact = next((whole // b for b in blocks if whole % b == 0), tiles)
        found.add(exact * reg_n)
    return sorted(found)
