"""Plans for a generic matmul, and where a factor that is more than a load is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from ...errors import Decline, Reason
from ...estimator import choose, predict
from ...estimator.choose import Choice
from ...estimator.families.few_rows import tiles as few_rows
from ...estimator.families.matmuls import SCALAR_FAMILIES
from ...estimator.families.tensor_cores import tiles as mma
from ...estimator.shape import matmul_shape, rows_of
from ...estimator.tile_plan import PlanTable, TilePlan
from ...hardware import NO_CAPABILITIES, DeviceSpec
from ...matching.expressions import substitute
from ...workload import DTYPE_BYTES, NormMatmul
from ..tensor_cores.dequantise import Neighbours
from .layout import unravel
from .matmul import Factor, GenericMatmul


@dataclass(frozen=True)
class Planned:
    """The plan of a range of rows."""

    upper: int | None
    """The last of them; None for the open range."""
    plan: TilePlan
    """How they are computed."""
    in_front: bool = False
    """Whether kernels in front compute the factors, and leave them in memory.  Else they are
    computed on the way."""


def planned(
    form: GenericMatmul, dev: DeviceSpec, allow_tf32: bool
) -> tuple[GenericMatmul, NormMatmul, list[Planned]] | Decline:
    """Return the plans of the estimator, what they are for, and `form` as they want it.

    Tensor cores read their operands as they lie in memory; only a weight of few loads is computed
    between memory and them (`dequantisable`).  Other factors are written to memory by a kernel in
    front, where that pays, and else read by a kernel of scalar instructions, which computes them on
    the way; so they always are in a batch, for which there is one kernel, and on a CPU.
    """
    work = form.workload(allow_tf32)
    if isinstance(work, Decline):
        return work
    computed = form.x.view is None or form.w.view is None
    tensor_cores = not mma.unsupported(matmul_shape(work), dev)
    along_k = dequantisable(form) if computed and tensor_cores else None
    if along_k is not None:
        return _dequantised(along_k, dev)
    scalars_only = replace(dev, capabilities=NO_CAPABILITIES)
    # TVM computes bfloat16 as float32 on a CPU: what is not loaded has not its bits
    bitless = computed and dev.kind == "cpu" and work.dtype == "bfloat16"
    choice = choose(work, scalars_only if bitless else dev, always=True, backend="tir")
    if isinstance(choice, Decline):
        return choice
    scalars = all(plan.family in SCALAR_FAMILIES for _, plan in choice.plans.boxes)
    if not computed or scalars or dev.kind == "cpu":
        return form, work, _by_rows(choice.plans)
    scalar = choose(work, scalars_only, always=True, backend="tir")
    if isinstance(scalar, Decline):  # of integers
        in_front = _by_rows(choice.plans, in_front=True)
        detail = f"{work.dtype} that is computed first is not for a batch"
        return Decline(Reason.NO_PLAN, detail) if form.batch else (form, work, in_front)
    if form.batch:
        return form, work, _by_rows(scalar.plans)
    return form, work, _merged(_in_front_or_scalar(form, work, (choice, scalar), dev))


def _by_rows(table: PlanTable, in_front: bool = False) -> list[Planned]:
    return [Planned(box.rows, plan, in_front) for box, plan in table.boxes]


def _merged(plans: list[Planned]) -> list[Planned]:
    """Join neighbouring ranges that are computed alike."""
    merged: list[Planned] = []
    for each in plans:
        if merged and replace(merged[-1], upper=each.upper) == each:
            merged.pop()
        merged.append(each)
    return merged


def _in_front_or_scalar(
    form: GenericMatmul, work: NormMatmul, choices: tuple[Choice, Choice], dev: DeviceSpec
) -> list[Planned]:
    choice, scalar = choices
    found = []
    for p in choice.predictions:
        rows = p.upper or rows_of(work, p.size)
        on_the_way = predict(work, scalar.plans.plan_for(rows), dev, rows).seconds
        few = choice.plans.plan_for(rows).family in few_rows.FAMILIES
        in_front = not few and p.fused.seconds + _writing_s(form, work, rows, dev) < on_the_way
        table = choice.plans if in_front else scalar.plans
        found.append(Planned(p.upper, _plan_of(table, p.upper, rows), in_front))
    return found


def _dequantised(
    form: GenericMatmul, dev: DeviceSpec
) -> tuple[GenericMatmul, NormMatmul, list[Planned]] | Decline:
    """Return plans for a weight that is computed from few loads.

    A kernel in front computes it for many rows, which took 28 and 36 us at 64 and 256 rows of 4096
    x 4096 on an H200, on the way 36 and 45.  A batch has one kernel: that for few rows.
    """
    work = form.workload()
    if isinstance(work, Decline):
        return work
    found = [Planned(*entry) for entry in few_rows.few_rows_plans(work, dev)]
    if form.batch:
        return form, work, [*found[:-1], replace(found[-1], upper=None)]
    if isinstance(work.rows, int):
        if work.rows <= few_rows.MOST_ROWS:
            return form, work, found
        found = []
    choice = choose(work, dev, always=True, backend="tir")
    if isinstance(choice, Decline):
        return choice
    for p in choice.predictions:
        if p.upper is None or p.upper > few_rows.MOST_ROWS:
            plan = _plan_of(choice.plans, p.upper, p.upper or rows_of(work, p.size))
            found.append(Planned(p.upper, plan, True))
    return form, work, _merged(found)


def _writing_s(form: GenericMatmul, work: NormMatmul, rows: int, dev: DeviceSpec) -> float:
    """Return what it takes to write the computed factors, and to read them."""
    sizes = [rows * work.k] * (form.x.view is None)
    sizes += [work.outputs[0].columns * work.k] * (form.w.view is None)
    moved = 2 * sum(sizes) * DTYPE_BYTES[work.dtype]
    return len(sizes) * dev.launch_s + moved / dev.dram_bytes_per_s


def _plan_of(table: PlanTable, upper: int | None, rows: int) -> TilePlan:
    return table.boxes[-1][1] if upper is None else table.plan_for(rows)


def dequantisable(form: GenericMatmul) -> GenericMatmul | None:
    """Return `form` with its computed weight along k; None if it is not of few loads there."""
    n, k = form.size(form.columns), form.size((form.k,))
    if form.x.view is None or form.w.view is not None or int(k) % few_rows.PIECE:
        return None
    along_k = replace(form, layout="nk")

    def element(column: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        return element_of(along_k, along_k.w, column, k)

    neighbours = Neighbours(element, (int(n), int(k)), few_rows.PIECE)
    return along_k if neighbours.is_supported else None


def element_of(form: GenericMatmul, factor: Factor, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
    """Return an element of x or of w, as it is laid."""
    k = (form.k,)
    names = (form.rows, k) if factor is form.x else (form.columns, k)
    if factor is form.w and form.layout == "kn":
        names = names[::-1]
    where = {**unravel(form.extents, names[0], i), **unravel(form.extents, names[1], j)}
    return substitute(factor.value, where)
