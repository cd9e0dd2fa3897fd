"""Matmuls by experts in Triton: pairs one after the other, or sorted into tiles.

``expert_pairs``  dot products of a pair of row and expert, no tensor cores
``expert_tiles``  pairs sorted by expert on the device, tiles of pairs of one expert on tensor cores

A tile reads the weight of an expert for all its pairs, so it is for more pairs than experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...hardware import DeviceSpec
from ...hardware.instructions import MMA, WARP_GROUP_MMA
from ...validation import Count, Natural
from ...workload import DTYPE_BYTES, ExpertMatmul
from ..family import OWN_BASELINE_ERROR, Breaks, KernelFamily, Offer
from ..gpu_cost import ISSUE_PER_CLOCK, Launch, Rates, predicted, price, price_step, resident_blocks
from ..limits import SYSTEM_SMEM_BYTES
from ..prediction import HALF_DTYPES, Footprint, Formula, Prediction, Step, ceil_div, in_a_row
from ..shape import Problem, Size, rows_at
from ..tile_plan import TilePlan
from .experts import stored_bytes
from .matmuls import group_clocks
from .triton_matmul.packed import is_unpacked
from .triton_matmul.tiles import (
    ACCUMULATOR_OVERHEAD,
    DOTS_REGISTERS,
    IDLE_LANES,
    MEETING,
    RATES,
    SMEM_RESERVE_BYTES,
)

PAIRS, TILES = "expert_pairs", "expert_tiles"

MOST_EXPERTS = 1024
"""Programs of the kernel that sorts pairs have a counter for each expert."""

MOST_ELEMENTS = 2**31
"""Kernels count the elements of an expert's weight in int32."""

MAX_ACCUMULATORS, MAX_OF_WARPS = 128, 64
"""A thread has 128 accumulators at most, and 64 where warps multiply operands that they hold in
registers, and no ``wgmma`` reads shared memory: with more, its registers spill."""

MOST_ROWS = 8
"""Rows beyond which pairs are sorted."""

WHOLE_K = 2048
WHOLE_TILES = ((2, WHOLE_K, 8),)
"""Columns, elements of k and warps of pairs that stay apart, where a program has all of k: in the
graph of a token of Qwen3-30B-A3B 13.2 us, 14.2 with 4 warps (`2026-11-30-token.log`)."""

LONG_TILES = ((2, 2048, 4), (1, 2048, 4)), ((4, 256, 4), (8, 256, 8), (4, 1024, 4))
"""The same of other pairs whose weights lie along k: a lane has 8 elements.
First those of pairs that stay apart, then those of pairs that are added.  These, and those of
weights in words, are the best of 4 to 14 that were timed for each (`2026-11-30-experts.log`)."""

WIDE_TILES = ((32, 64, 4), (64, 32, 4)), ()
"""The same where columns lie side by side: with pairs added, tiles take 0.6 of the time."""

WORD_TILES = ((4, 1024, 1), (4, 2048, 2)), ((8, 256, 4), (4, 256, 2))
"""The same of weights in words."""

UNPACKED = 32
"""Numbers of a tile that a thread has unpacked, which fit beside its accumulators: with twice as
many, kernels were compiled with a stack."""

UNPACKING = 12
"""Instructions of "expert_tiles" for a number of a word, with all that is around it.  Fitted to 25
to 111 us of numbers in 4 bits (`2026-11-30-experts.log`)."""

PAIR_UNPACKING = 5.5
"""Those of "expert_pairs", fitted to 11 to 46 us."""

MATRIX_TILES = (
    *((16, 64, 4, 4), (16, 128, 4, 4), (32, 64, 4, 4), (32, 128, 4, 4)),
    *((64, 64, 4, 4), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 8, 4)),
    *((128, 128, 8, 3), (128, 128, 8, 4), (128, 256, 8, 4)),
)
"""Pairs, columns, warps and stages of tiles on tensor cores."""

DEEP_ROWS, DEEP_STAGES = 32, 3
"""Tiles of so many pairs have 128 of k, too, in so many stages (`2026-11-30-expert_tiles.log`)."""

DEPTHS = (64, 32)
"""Elements of k at once, of which the first is taken that fits a block: 32 of 16 bits are half a
line of L2, and took 1.1 to 1.35 times as long (`2026-11-29-judge_experts.json`)."""

MAPPED_ROWS = 64
"""Tiles of so many pairs read weights by tensor maps where they can: by pointers they took up to
1.27 times as long (`2026-11-29-judge_experts.json`).  Lower ones are offered both ways."""

AGAIN = 0.5
"""Of the weights that "expert_pairs" reads again, for another pair of an expert, so much has left
L2: 0.3 to 0.6 where they lie along k (`2026-11-29-judge_experts.json`)."""

SORT_S, SORT_PAIR_S = 3e-6, 0.3e-9
"""Sorting pairs takes so many seconds, and for each pair.  Assumed."""


@dataclass(frozen=True)
class ExpertPlan(TilePlan):
    """Tile sizes of a matmul by experts."""

    unroll: Count = 1
    """Blocks of k of a turn of the loop of "expert_pairs"."""
    tensor_map: Natural = 0
    """1 where "expert_tiles" reads weights by a tensor map, 0 where by pointers."""


class TritonExperts(KernelFamily[ExpertMatmul]):
    """Rows by the weights of their experts: "expert_pairs" and "expert_tiles"."""

    names = (PAIRS, TILES)
    language = "triton"
    error = OWN_BASELINE_ERROR
    plan = ExpertPlan
    breaks = Breaks((1, 4, 8, 32, 128, 512, 2048), 4096)

    def takes(self, problem: Problem[ExpertMatmul]) -> bool:
        """Take matmuls by experts on GPUs that Triton knows."""
        has = problem.dev.capabilities
        return problem.is_plain("gpu", ExpertMatmul) and has.async_copies

    def refuses(self, problem: Problem[ExpertMatmul]) -> str | None:
        """Refuse dtypes, packed weights, and numbers that the kernels do not count to."""
        work, dev = problem.work, problem.dev
        if work.dtype not in HALF_DTYPES:
            return f"dtype is {work.dtype}, the Triton kernels take {' and '.join(HALF_DTYPES)}"
        if MMA[work.dtype] not in dev.capabilities.matrix_instructions:
            return f"the {dev.label} has no tensor cores for {work.dtype}"
        if work.packed is not None and not is_unpacked(work.packed):
            return "the Triton kernels read words of 2, 4 or 8 fields, a scale for each group"
        if work.experts > MOST_EXPERTS:
            return f"there are {work.experts} experts, the Triton kernels take {MOST_EXPERTS}"
        elements = work.columns * work.k
        if elements >= MOST_ELEMENTS:
            return f"an expert has {elements} elements, the Triton kernels count to {MOST_ELEMENTS}"
        return None

    def plans(self, problem: Problem[ExpertMatmul]) -> Iterator[Offer]:
        """Yield tiles of both kernels."""
        work = problem.work
        if not (work.share and (work.gate is not None or work.activation)):
            for block_n, block_k, warps in _tiles_for(work):
                plan = ExpertPlan(1, block_n, block_k, num_warps=warps, family=PAIRS)
                yield Offer(plan, last=MOST_ROWS)
        for rows, columns, warps, stages in MATRIX_TILES:
            numbers = {"num_warps": warps, "num_stages": stages}
            deep = [ExpertPlan(rows, columns, k, **numbers, family=TILES) for k in DEPTHS]
            fitting = [p for p in deep if not any(self.violations(p, problem))][:1]
            deeper = replace(deep[0], block_k=2 * DEPTHS[0], num_stages=DEEP_STAGES)
            is_deep = rows <= DEEP_ROWS and work.packed is None
            is_deep = is_deep and not any(self.violations(deeper, problem))
            for fits in [*fitting, *([deeper] if is_deep else [])]:
                mapped = replace(fits, tensor_map=1)
                both = [fits] if any(self.violations(mapped, problem)) else [fits, mapped]
                for each in both[-1:] if rows >= MAPPED_ROWS else both:
                    yield Offer(each, first=1)

    def violations(self, plan: TilePlan, problem: Problem[ExpertMatmul]) -> Iterator[str]:
        """Yield what kernels ask for, and what a block has not."""
        work, dev = problem.work, problem.dev
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(plan, name)
            if value < 1 or value & (value - 1):
                yield f"{name} is {value}, triton needs a power of two"
        if plan.split_k != 1:
            yield f"split_k is {plan.split_k}, experts' kernels reduce in 1 part"
        sums = _accumulators(plan, work)
        if plan.family == PAIRS:
            if plan.block_m != 1:
                yield f"block_m is {plan.block_m}, family {PAIRS!r} takes 1 pair"
            if plan.block_k < 8:
                yield f"block_k is {plan.block_k}, a lane loads 8"
            if plan.block_n < 2 and work.gate is not None and work.gate.interleaved:
                yield f"block_n is {plan.block_n}, a gate of neighbours needs 2 columns"
            if work.share and (work.gate is not None or work.activation):
                yield f"family {PAIRS!r} adds the products of a row, and activates none before"
        else:
            for name in ("block_m", "block_n", "block_k"):
                if getattr(plan, name) < 16:
                    yield f"{name} is {getattr(plan, name)}, tensor cores need 16"
            used, most = _smem(plan, work), dev.smem_per_block_bytes
            if used > most:
                yield f"needs {used} B of shared memory, the {dev.label} has {most} B per block"
            if getattr(plan, "tensor_map", 0):
                yield from _unmapped(plan, problem)
        groups = WARP_GROUP_MMA[work.dtype] in dev.capabilities.matrix_instructions
        fitting = MAX_ACCUMULATORS if groups or plan.family == PAIRS else MAX_OF_WARPS
        if work.packed is not None and plan.family == TILES:  # which are unpacked in registers
            sums += ceil_div(plan.block_n * plan.block_k, dev.warp_size * max(plan.num_warps, 1))
            fitting += UNPACKED
        if sums > fitting:
            yield f"a thread has {sums} numbers, at most {fitting} fit its registers"

    def price(self, plan: TilePlan, problem: Problem[ExpertMatmul]) -> Formula:
        """Price the product by the rates of matmuls, and the small launches around it."""
        work, dev = problem.work, problem.dev
        threads = plan.num_warps * dev.warp_size
        beside = DOTS_REGISTERS if plan.family == PAIRS else ACCUMULATOR_OVERHEAD
        foot = Footprint(_smem(plan, work), _accumulators(plan, work) + beside, threads)
        of = _pairs_at if plan.family == PAIRS else _tiles_at
        return Formula(foot, lambda size: of(plan, work, dev, foot, size))


def _tiles_for(work: ExpertMatmul) -> tuple[tuple[int, int, int], ...]:
    """Return columns, elements of k and warps of programs of "expert_pairs"."""
    if work.packed is not None:
        return WORD_TILES[bool(work.share)]
    if work.layout == "nk" and not work.share and work.k <= WHOLE_K:
        return WHOLE_TILES
    return (LONG_TILES if work.layout == "nk" else WIDE_TILES)[bool(work.share)]


def _unmapped(plan: TilePlan, problem: Problem[ExpertMatmul]) -> Iterator[str]:
    """Yield why weights cannot be read by a tensor map."""
    work, dev = problem.work, problem.dev
    if work.packed is not None:
        yield "tensor maps are for weights that are not packed"
    if not dev.capabilities.tma:
        yield f"the {dev.label} has no tensor maps"
    line = (work.k if work.layout == "nk" else work.columns) * DTYPE_BYTES[work.dtype]
    if line % 16:
        yield f"a line of a weight has {line} B, tensor maps need multiples of 16 B"
    if work.layout == "kn" and work.k % plan.block_k:
        yield f"block_k is {plan.block_k}, a tensor map of 'kn' weights needs one that divides k"


def _halves(work: ExpertMatmul) -> int:
    """Return how many products a program has that has `block_n` columns of each."""
    return 2 if work.gate is not None and not work.gate.interleaved else 1


def _column_tiles(plan: TilePlan, work: ExpertMatmul) -> int:
    return ceil_div(work.columns // _halves(work), plan.block_n)


def _accumulators(plan: TilePlan, work: ExpertMatmul) -> int:
    """Return the float32 sums of a thread; of pairs, the registers of what it holds at once.

    Those are weights, of all pairs of a row where these are added; or words, and as many sums.
    """
    elements = plan.block_n * (plan.block_k if plan.family == PAIRS else plan.block_m)
    if plan.family == PAIRS:
        elements *= work.chosen if work.share else 1
        elements = elements * (work.packed.bits if work.packed else 8) // 16
    return ceil_div(elements * _halves(work), 32 * max(plan.num_warps, 1))


def _smem(plan: TilePlan, work: ExpertMatmul) -> int:
    if plan.family == PAIRS:
        return 0
    step = (plan.block_m + _halves(work) * plan.block_n) * plan.block_k * DTYPE_BYTES[work.dtype]
    return step * plan.num_stages + SMEM_RESERVE_BYTES


def _pairs_at(
    plan: TilePlan, work: ExpertMatmul, dev: DeviceSpec, foot: Footprint, size: Size
) -> Prediction:
    """Return what going through pairs costs: those of an expert that was read before, from L2."""
    rows = rows_at(size)
    added = work.chosen if work.share else 1
    parts = ceil_div(work.k, plan.block_k)
    moved = float(sum(work.bytes(rows=rows).values()))
    read = float(rows * work.chosen * work.columns * work.k * stored_bytes(work))
    again = AGAIN * max(0.0, read - work.bytes(rows=rows)["w0"])
    idle = parts * plan.block_k / work.k - 1
    products = plan.block_k * plan.block_n * _halves(work) * added / dev.warp_size
    unpacked = products * PAIR_UNPACKING if work.packed is not None else 0.0
    launch = Launch(
        rows * work.chosen // added * _column_tiles(plan, work),
        resident_blocks(foot, dev, SYSTEM_SMEM_BYTES),
        dev.sm_count,
        steps=parts,
        clocks=unpacked / ISSUE_PER_CLOCK,
        instructions=max(products, unpacked) / plan.num_warps + MEETING / parts,
        dram_bytes=(moved + again) * (1 + IDLE_LANES * idle),
        l2_bytes=read,
    )
    return _whole(launch, RATES["gemv"], dev, work, rows)


def _tiles_at(
    plan: TilePlan, work: ExpertMatmul, dev: DeviceSpec, foot: Footprint, size: Size
) -> Prediction:
    """Return what sorting, tiles and the sum of a row's pairs cost."""
    rows = rows_at(size)
    pairs, width = rows * work.chosen, DTYPE_BYTES[work.dtype]
    columns, steps = plan.block_n * _halves(work), ceil_div(work.k, plan.block_k)
    weight_bytes = columns * plan.block_k * stored_bytes(work)
    flops = 2.0 * plan.block_m * columns * plan.block_k
    moved = float(sum(work.bytes(rows=rows).values()))
    blocks = tiles_of(work, rows, plan.block_m) * _column_tiles(plan, work)
    launch = Launch(
        blocks,
        resident_blocks(foot, dev, SYSTEM_SMEM_BYTES),
        dev.sm_count,
        steps=steps,
        ahead=plan.num_stages,
        instructions=UNPACKING * columns * plan.block_k / foot.threads if work.packed else 0.0,
        tensor_s=flops * dev.sm_count / dev.tensor_flops_per_s(work.dtype),
        clocks=max(1.0, plan.block_m / 64) * plan.block_k * width / 32 * group_clocks(columns),
        fed_bytes=weight_bytes + plan.block_m * plan.block_k * width,
        dram_bytes=moved,
        l2_bytes=float(blocks * steps * weight_bytes),
        sums=plan.block_m * columns,
    )
    product = _whole(launch, RATES["pointer"], dev, work, rows)
    small = Footprint(0, 64, 128)
    sort = Step(work.experts, small, SORT_S + pairs * SORT_PAIR_S, 8.0 * pairs)
    launches = [price_step(sort, dev), product]
    if work.share:
        moved = float((pairs + 2 * rows) * work.n * width)
        launches.append(price_step(Step(rows, small, 1e-6, moved), dev))
    return in_a_row(launches)


def _whole(
    launch: Launch, rates: Rates, dev: DeviceSpec, work: ExpertMatmul, rows: int
) -> Prediction:
    """Return the prediction of a launch, with its start."""
    start, found = dev.launch_s + rates.start_s, price(launch, rates, dev)
    whole = found._replace(seconds=found.seconds + start)
    moved = float(sum(work.bytes(rows=rows).values()))
    return predicted(whole, start, moved, work.flops(rows=rows))


def tiles_of(work: ExpertMatmul, rows: int, block_m: int) -> int:
    """Return how many tiles there should be: that of an expert is half full, if it has several."""

    def tiles(touched: float, pairs: float) -> float:
        return touched * max(1.0, pairs / touched / block_m + (block_m - 1) / (2 * block_m))

    if not work.skew:
        return round(tiles(max(1.0, work.touched(rows)), rows * work.chosen))
    likely = [share for share in work.shares if share > 1e-9]
    return round(sum(tiles(1 - (1 - share) ** rows, rows * share) for share in likely))
