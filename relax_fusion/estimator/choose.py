"""From a workload to the plans it runs with, or to the reason why it should not be fused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import Decline, Reason, TilePlanError
from ..hardware import DeviceSpec
from ..tile_plan import PlanTable, TilePlan
from ..workload import INTEGER_DTYPES, Attention, MatmulChain, NormMatmul, Workload
from ..workload.checks import check_workload
from . import chain_cost, mma, mma_chain, skinny
from .candidates import candidates, next_power
from .cost import predict, predict_unfused
from .launch_limits import launch_limits, launchable, served
from .prediction import Prediction, format_seconds
from .ranges import ranges, regime
from .shape import Size, matmul_shape, rows_of
from .triton_cost import FILL_S
from .violations import violations

CLOSED_RANGE_LOSS = 0.1
"""Part of its time that a closed range may lose for the others' sake.  The kernels of a chain are
replaced for all sizes or for none, and predictions of close alternatives err by as much."""

MODEL_ERROR = {("gpu", "tir"): 1.2, ("gpu", "triton"): 0.9, ("cpu", "tir"): 1.0}
"""Factor by which a predicted ratio may be wrong, by device and back end.  Chains that were
predicted to win by less with TIR on an H200 came out between 0.6 and 1.1 of the unfused speed.  On
a CPU they are far apart.  So are Triton's kernels and TVM's, or they are predicted to be level (one
row): then Triton's were 1.1 to 1.2 times as fast."""

CHAIN_ERROR = 1.85
"""The same for chains of matmuls on tensor cores.  One with biases, an activation and a residual
was predicted to win by 1.5 on an H200 and reached 0.82 of the speed of the two matmuls; those that
are predicted to win by more (G1 to G3 of MCFuser) reached 1.6."""

FAMILY_ERROR = {skinny.FAMILY: 1.0}
"""The same for kernels of the back end "tir" that are priced by their own timings."""


@dataclass(frozen=True)
class RangePrediction:
    """What one range of the dynamic dimension should cost, with and without fusing.

    Parameters
    ----------
    upper : int, optional
        Last size of the range, None for the open one.
    size : int or AttentionSize
        The size that was priced.
    fused, unfused : Prediction
        At that size.
    error : float
        Factor by which the two must differ to count (`MODEL_ERROR`).
    """

    upper: int | None
    size: Size
    fused: Prediction
    unfused: Prediction
    error: float = 1.0

    @property
    def loses(self) -> bool:
        """Whether this range speaks against fusing.

        The open range, and a static size, must win by more than the model's error; a closed range
        may lose a little for the sake of the open one.
        """
        allowed = 1 / self.error if self.upper is None else 1 + CLOSED_RANGE_LOSS
        return self.fused.seconds > self.unfused.seconds * allowed


@dataclass(frozen=True)
class Choice:
    """The plans of a workload and why they were chosen.

    Parameters
    ----------
    plans : PlanTable
        By rows of a matmul workload, by query positions of an attention.
    predictions : tuple of RangePrediction
        One per range that was looked at, also where neighbours came out with the same plan.
    """

    plans: PlanTable
    predictions: tuple[RangePrediction, ...]


@lru_cache(maxsize=1024)  # a model asks for the same few workloads once per layer
def choose(
    work: Workload,
    dev: DeviceSpec,
    *,
    plans: PlanTable | TilePlan | None = None,
    always: bool = False,
    backend: str = "tir",
) -> Choice | Decline:
    """Choose tile plans for `work` on `dev`.

    Parameters
    ----------
    plans : PlanTable or TilePlan, optional
        A user's own.  It is checked, priced and taken, even if fusing is predicted not to pay.
    always : bool
        Choose plans even if fusing is predicted not to pay.
    backend : {"tir", "triton"}
        Who is to emit the kernel, where it has one for `work`.

    Returns
    -------
    Choice or Decline
        `Reason.NO_PLAN` if no tile fits the device, `Reason.NOT_PROFITABLE` if separate kernels
        are predicted to be faster in the open range (or for a static size), or by more than
        `CLOSED_RANGE_LOSS` in a closed one; the open range must win by `MODEL_ERROR`.

    Raises
    ------
    GraphError
        If `work` has a size or a name that no kernel can have.
    TilePlanError
        If a plan of `plans` does not fit; the message has every violation.
    """
    check_workload(work)
    if plans is not None:
        table = PlanTable.single(plans) if isinstance(plans, TilePlan) else plans
        return _checked(work, dev, table)
    found = list(candidates(work, dev, backend))
    if not found:
        return Decline(Reason.NO_PLAN, _nothing_fits(work, dev))
    priced_at = ranges(work, regime(found))
    chosen = [
        _best(launchable(found, work, dev, upper), work, dev, inside) for upper, inside in priced_at
    ]
    predictions = tuple(
        RangePrediction(
            upper,
            inside[-1],
            fused,
            _unfused(work, dev, inside[-1], backend, fused_by=plan),
            _error(work, plan, dev),
        )
        for (upper, inside), (plan, fused) in zip(priced_at, chosen, strict=True)
    )
    losing = [p for p in predictions if p.loses]
    if losing and not always:
        return _unprofitable(losing, is_static=len(priced_at) == 1)
    entries = [(upper, plan) for (upper, _), (plan, _) in zip(priced_at, chosen, strict=True)]
    return Choice(PlanTable(_merged(entries)), predictions)


def _error(work: Workload, plan: TilePlan, dev: DeviceSpec) -> float:
    if isinstance(work, MatmulChain) and dev.kind == "gpu":
        return CHAIN_ERROR
    return FAMILY_ERROR.get(plan.family, MODEL_ERROR[dev.kind, plan.backend])


def _nothing_fits(work: Workload, dev: DeviceSpec) -> str:
    """Return why there is no plan; integers have no kernel but those of tensor cores."""
    if isinstance(work, MatmulChain) and dev.kind == "gpu":
        wide = f"rows of {work.r} elements between the matmuls fit no tile of the {dev.label}"
        return mma_chain.unsupported(work, dev) or wide
    if isinstance(work, Attention) or work.dtype not in INTEGER_DTYPES:
        return f"no tile of the family fits the {dev.label}"
    shape = matmul_shape(work)
    sizes = ", ".join(map(str, mma.copied(shape)))
    step = f"operands of {work.dtype} are copied 4 bytes at least at once, along {sizes} elements"
    return mma.unsupported(shape, dev) or step


def _unfused(
    work: Workload, dev: DeviceSpec, size: Size, backend: str, *, fused_by: TilePlan
) -> Prediction:
    """Return what the chain costs if it is left to TVM, under the assumptions of the other side.

    The model of Triton's kernels counts the time in which a kernel fills and drains the device.  A
    chain of matmuls is left to the passes that fuse each of them, by `backend`.
    """
    if isinstance(work, MatmulChain):
        apart = chain_cost.priced(work, dev, rows_of(work, size))
        parts = [_alone(part, dev, rows, backend) for part, rows in apart]
        return chain_cost.together(parts, work, dev)
    alone = predict_unfused(work, dev, size)
    if fused_by.backend == "triton" and not isinstance(work, Attention):
        return replace(alone, seconds=alone.seconds + FILL_S[fused_by.family])
    return alone


def _alone(part: NormMatmul, dev: DeviceSpec, rows: int, backend: str) -> Prediction:
    """Return what one matmul of a chain costs; TVM schedules it where no tile of ours fits."""
    found = list(candidates(part, dev, backend))
    return _best(found, part, dev, [rows])[1] if found else predict_unfused(part, dev, rows)


def _checked(work: Workload, dev: DeviceSpec, table: PlanTable) -> Choice:
    """Price a user's table, or raise what is wrong with it."""
    wrong = [
        f"plan {plan.key}: {sentence}"
        for plan, upper in {plan: upper for upper, plan in table.entries}.items()
        for sentence in (
            *violations(plan, work, dev),
            *launch_limits(plan, work, dev, served(work, upper)),
        )
    ]
    if wrong:
        raise TilePlanError("; ".join(wrong))
    predictions = []
    for upper, (*_, size) in ranges(work, regime(plan for _, plan in table.entries)):
        plan = table.plan_for(rows_of(work, size))
        unfused = _unfused(work, dev, size, plan.backend, fused_by=plan)
        predictions.append(RangePrediction(upper, size, predict(work, plan, dev, size), unfused))
    return Choice(table, tuple(predictions))


def _best(
    found: list[TilePlan], work: Workload, dev: DeviceSpec, sizes: list[Size]
) -> tuple[TilePlan, Prediction]:
    """Return the plan that loses least over `sizes`, and its price at the last of them.

    What counts is the mean of its time over the best time at each size: a plan that pads few rows
    to many is fast at the end of a range only.  Of equals, the first that was generated.
    """
    rows = next_power(_tiled_rows(work, sizes[-1]))
    # Taller tiles than rows only pad.  Where none is that low, the lowest there is must do; and the
    # instructions for few rows have eight, those of warp groups 64, which cost no more than fewer.
    many = [plan.block_m for plan in found if plan.family != skinny.FAMILY]
    lowest = max(rows, min(many, default=0))
    tensor = [plan.block_m for plan in found if plan.family in mma.FAMILIES]
    if tensor and len(many) == len(found):  # a few rows have no kernels of their own
        lowest = max(lowest, min(tensor), mma.GROUP_ROWS)
    few = max(rows, skinny.MMA_ROWS) if rows <= skinny.MOST_ROWS or not many else 0
    groups = max(lowest, mma.GROUP_ROWS) if rows >= mma.FEWEST_ROWS else lowest
    tallest = {skinny.FAMILY: few, mma.WARP_GROUPS: groups}
    low = [p for p in found if p.block_m <= tallest.get(p.family, lowest)]
    if tensor and _tiled_rows(work, sizes[0]) > skinny.MOST_ROWS:
        # Dot products, which read all weights once a row, are not worth their pricing
        low = [p for p in low if p.block_m > 1] or low
    priced = [[predict(work, plan, dev, size) for plan in low] for size in sizes]
    least = [min(p.seconds for p in column) for column in priced]
    losses = [
        sum(column[i].seconds / best for column, best in zip(priced, least, strict=True))
        for i in range(len(low))
    ]
    index = losses.index(min(losses))
    return low[index], priced[-1][index]


def _tiled_rows(work: Workload, size: Size) -> int:
    """Return the rows that tiles cover: in attention, of all query heads that share keys."""
    rows = rows_of(work, size)
    return rows * (work.q_heads // work.kv_heads) if isinstance(work, Attention) else rows


def _unprofitable(losing: list[RangePrediction], is_static: bool) -> Decline:
    """Return a decline with the times of the range in which fusing loses most."""
    worst = max(losing, key=lambda p: p.fused.seconds / p.unfused.seconds)
    fused, unfused = worst.fused.seconds, worst.unfused.seconds
    times = f"fused {format_seconds(fused)}, unfused {format_seconds(unfused)}"
    where = "in the open range" if worst.upper is None else f"in the range up to {worst.upper}"
    detail = f"{times} at {_size_text(worst.size)}" + ("" if is_static else f", {where}")
    if fused < unfused:
        detail += f"; a gain of {worst.error} times is asked for, as predictions err by that"
    return Decline(Reason.NOT_PROFITABLE, detail, fused_s=fused, unfused_s=unfused)


def _size_text(size: Size) -> str:
    if isinstance(size, int):
        return "1 row" if size == 1 else f"{size} rows"
    return f"batch {size.batch}, {size.q_len} queries, {size.kv_len} keys"


def _merged(entries: list[tuple[int | None, TilePlan]]) -> tuple[tuple[int | None, TilePlan], ...]:
    """Join neighbouring ranges that have the same plan."""
    merged: list[tuple[int | None, TilePlan]] = []
    for upper, plan in entries:
        if merged and merged[-1][1] == plan:
            merged.pop()
        merged.append((upper, plan))
    return tuple(merged)
