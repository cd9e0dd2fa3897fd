"""The fused kernels of a report: each once, with its calls and what it costs at each size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ...errors import RelaxFusionError
from ...estimator import AttentionSize, Prediction, RangePrediction, Size, predict
from ...estimator.shape import box_sizes, rows_of
from ...estimator.tile_plan import TilePlan
from ...hardware import DeviceSpec
from ...workload import Attention, GatedFFN, NormMatmul, Workload
from ..decision import Decision
from . import numbers
from .floors import Floor, floor_of

MISS = 0.2
"""By what part a measured time has to differ from the predicted one to be marked."""


@dataclass(frozen=True)
class Point:
    """What a kernel costs at one size.

    Parameters
    ----------
    lower, upper : int, optional
        First and last rows of the range that it was priced for; `upper` is None for the open one.
    size : Size
        Where it was priced.
    rows : int
        Rows, or query positions, of `size`.
    plan : TilePlan, optional
        The tiles that serve it.
    fused : Prediction
        Of the plan.
    unfused_s, measured_s : float, optional
        Seconds of separate kernels, and those in a tuning database.
    floor : Floor, optional
        The least that any kernel could take.
    """

    lower: int
    upper: int | None
    size: Size
    rows: int
    plan: TilePlan | None
    fused: Prediction
    unfused_s: float | None
    measured_s: float | None
    floor: Floor | None

    @property
    def share(self) -> float | None:
        """The floor over the predicted time: 1 is as fast as can be."""
        seconds = numbers.number(self.fused.seconds)
        return self.floor.seconds / seconds if self.floor is not None and seconds else None

    @property
    def text(self) -> str:
        """The size for people."""
        return size_text(self.size)

    @property
    def is_miss(self) -> bool:
        """Whether the measured time is far from the predicted one."""
        measured, predicted = numbers.number(self.measured_s), numbers.number(self.fused.seconds)
        return bool(measured and predicted and abs(measured / predicted - 1) > MISS)


@dataclass(frozen=True)
class Kernel:
    """A kernel of ours.

    Parameters
    ----------
    id : str
        What links of the page call it.
    colour : int
        Which colour it has; kernels of one title share it.
    decision : Decision
        The first of its chains.
    calls : dict of str to int
        How often each function calls it.
    spec : DeviceSpec, optional
        The device.
    """

    id: str
    colour: int
    decision: Decision
    calls: dict[str, int]
    spec: DeviceSpec | None

    @property
    def work(self) -> Workload | None:
        """What it computes."""
        return self.decision.workload

    @cached_property
    def points(self) -> list[Point]:
        """What it costs in each range of rows that was priced, rising."""
        found: list[Point] = []
        for prediction in self.decision.predictions:
            lower = (found[-1].upper or 0) + 1 if found else 1
            found.append(self._point(prediction, lower))
        return found

    @property
    def is_static(self) -> bool:
        """Whether it has one size."""
        return len(self.points) == 1 and len(self.steps) <= 1

    @property
    def fixed(self) -> str:
        """Which size it has, where all its calls have the same rows; empty where rows differ."""
        if not self.is_static:
            return ""
        size, work = self.points[0].size, self.work
        keys = work.kv_len if isinstance(work, Attention) else 0
        if isinstance(size, AttentionSize) and not isinstance(keys, int):
            return f"{numbers.times(size.q_len, 'query', 'queries')}, any number of keys"
        return f"its one size: {self.points[0].text}"

    @property
    def unit(self) -> str:
        """What its rows are."""
        return "query" if isinstance(self.work, Attention) else "row"

    @property
    def sequences(self) -> int:
        """For how many sequences attention has the same queries; 1 for the rows of matmuls."""
        size = self.points[0].size if self.points else 1
        return size.batch if isinstance(size, AttentionSize) else 1

    def _point(self, prediction: RangePrediction, lower: int) -> Point:
        size, work, plans = prediction.size, self.work, self.decision.plans
        rows = size if isinstance(size, int) else size.q_len
        plan = None
        if plans is not None:
            bounds = box_sizes(work, size) if work is not None else {"rows": rows}
            plan = plans.plan_for(**bounds)
        return Point(
            lower,
            prediction.upper,
            size,
            rows,
            plan,
            prediction.fused,
            prediction.unfused.seconds,
            prediction.measured_s,
            floor_of(work, self.spec, size),
        )

    def at(self, rows: int) -> Point | None:
        """Return what it costs at so many rows; at its own size where that is static."""
        points = self.points
        if not points or len(points) == 1:
            return points[0] if points else None
        near = next((p for p in points if p.upper is None or rows <= p.upper), points[-1])
        if near.rows == rows or self.work is None or self.spec is None:
            return near
        size = near.size
        size = rows if isinstance(size, int) else size._replace(q_len=rows)
        plans = self.decision.plans
        if plans is None:
            return near
        try:
            plan = plans.plan_for(**box_sizes(self.work, size))
            fused = predict(self.work, plan, self.spec, size)
            rows = rows_of(self.work, size)
        except (RelaxFusionError, TypeError):
            return near
        floor = floor_of(self.work, self.spec, size)
        return Point(near.lower, near.upper, size, rows, plan, fused, None, None, floor)

    @cached_property
    def steps(self) -> list[tuple[int, int | None, TilePlan]]:
        """First and last rows of each plan, at the keys and the batch of the last price."""
        table = self.decision.plans
        if table is None:
            return []
        uppers: list[int | None] = [*sorted({b.rows for b, _ in table.boxes if b.rows}), None]
        told = self.points[-1].size if self.points else 1
        fixed = (
            {"keys": told.kv_len, "batch": told.batch} if isinstance(told, AttentionSize) else {}
        )
        found: list[tuple[int, int | None, TilePlan]] = []
        lower = 1
        for upper in uppers:
            plan = table.plan_for(rows=lower if upper is None else upper, **fixed)
            if found and found[-1][2] == plan:
                lower = found.pop()[0]
            found.append((lower, upper, plan))
            lower = (upper or 0) + 1
        return found


def kernels_of(decisions: Iterable[Decision], spec: DeviceSpec | None) -> list[Kernel]:
    """Return each kernel once, the one that takes longest in all of its calls first."""
    first: dict[str, Decision] = {}
    calls: dict[str, Counter[str]] = {}
    for decision in decisions:
        first.setdefault(decision.kernel, decision)
        calls.setdefault(decision.kernel, Counter())[decision.function] += 1
    titles = list(dict.fromkeys(title_of(d) for d in first.values()))
    kernels = [
        Kernel("", titles.index(title_of(d)) % 8, d, dict(calls[name]), spec)
        for name, d in first.items()
    ]
    kernels.sort(key=lambda k: -_weight(k))
    return [
        Kernel(f"k{i}", k.colour, k.decision, k.calls, k.spec) for i, k in enumerate(kernels, 1)
    ]


def title_of(decision: Decision) -> str:
    """Return what a chain is called: the way in which it was written, and its widths."""
    name, work = decision.spelling or decision.pattern, decision.workload
    if isinstance(work, NormMatmul):
        return f"{name} {work.k}→{sum(p.columns for p in work.outputs)}"
    if isinstance(work, GatedFFN):
        return f"{name} {work.k}→{work.n}"
    if isinstance(work, Attention):
        return f"{name} {work.q_heads}×{work.head_dim}"
    return name


def _weight(kernel: Kernel) -> float:
    last = kernel.points[-1].fused.seconds if kernel.points else 0.0
    return (numbers.number(last) or 0.0) * max(kernel.calls.values())


def size_text(size: Size) -> str:
    """Return a size for people."""
    if isinstance(size, int):
        return numbers.times(size, "row")
    queries = numbers.times(size.q_len, "query", "queries")
    return f"{queries} × {size.kv_len:,} keys" + (f", batch {size.batch}" * (size.batch > 1))


def span_text(lower: int, upper: int | None) -> str:
    """Return first and last rows of a range for people."""
    if upper is None:
        return "any size" if lower == 1 else f"{lower:,} and more"
    return f"{lower:,}" if lower == upper else f"{lower:,} – {upper:,}"


def plan_text(plan: TilePlan | None) -> str:
    """Return family and tile of a plan, with signs of multiplication."""
    if plan is None:
        return numbers.MISSING
    tile = f"{plan.block_m}×{plan.block_n}×{plan.block_k}"
    return plan.text.replace(f"{plan.block_m}x{plan.block_n}x{plan.block_k}", tile)


def how_text(plan: TilePlan | None) -> str:
    """Return the warps and stages of a plan for Triton; of others what a thread holds, if much."""
    if plan is None:
        return ""
    if not plan.num_warps:
        held, tile = (plan.reg_m, plan.reg_n), (plan.block_m, plan.block_n)
        return "" if held in ((1, 1), tile) else f"{held[0]}×{held[1]} in registers"
    warps = numbers.times(plan.num_warps, "warp")
    return f"{warps}, {numbers.times(plan.num_stages, 'stage')}"


def full_text(plan: TilePlan) -> str:
    """Return all of a plan: its tile, then what tells it from others of that tile."""
    how = how_text(plan)
    return plan_text(plan) + (f" ({how})" if how else "")
