"""What the work of a model should take on a device, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import Decline, RelaxFusionError
from ..estimator import AttentionSize, Prediction, Size, choose, predict
from ..estimator.baseline import predict_apart
from ..estimator.family import Backend
from ..estimator.prediction import DRAM_EFFICIENCY
from ..estimator.sequence import Part, added_s, all_reduce
from ..estimator.shape import dtypes_of
from ..estimator.tile_plan import PlanTable
from ..hardware import DeviceSpec
from ..workload import DTYPE_BYTES, Atom, Attention, DynamicDim, NormMatmul, Projection, Workload
from .item import Item
from .sizes import Values, values_of

Limit = Literal["memory", "compute", "launch"]
LIMITS: tuple[Limit, ...] = ("memory", "compute", "launch")
_LIMIT_OF: Mapping[str, Limit] = {
    "dram": "memory",
    "l2": "memory",
    "compute": "compute",
    "latency": "launch",
    "launch": "launch",
}


@dataclass(frozen=True)
class ItemCost:
    """What one item should take.

    Parameters
    ----------
    item : Item
        The work.
    seconds : float or None
        Of all its calls in one call of the function; None where it cannot be priced.
    limit : {"memory", "compute", "launch", ""}
        What most of that time waits for.
    plan : str
        The tiles of the kernel; empty where it was left.
    """

    item: Item
    seconds: float | None
    limit: Limit | Literal[""] = ""
    plan: str = ""


@dataclass(frozen=True)
class FunctionCost:
    """What one call of a function should take on a device.

    Parameters
    ----------
    function : str
        Its name.
    values : dict of str to int
        The symbolic sizes.
    costs : tuple of ItemCost
        One for each item.
    """

    function: str
    values: Mapping[str, int]
    costs: tuple[ItemCost, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all that can be priced."""
        return math.fsum(cost.seconds for cost in self.costs if cost.seconds is not None)

    @property
    def unpriced(self) -> int:
        """How many calls cannot be priced."""
        return sum(cost.item.count for cost in self.costs if cost.seconds is None)

    @property
    def shares(self) -> dict[str, float]:
        """Which part of the time is limited by memory, by arithmetic and by launching."""
        total = self.seconds or 1.0
        found: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
        for cost in self.costs:
            if cost.limit and cost.seconds is not None:
                found[cost.limit] += cost.seconds / total
        return found

    @property
    def limit(self) -> str:
        """What limits most of the time; empty where nothing is priced."""
        shares = self.shares
        return max(shares, key=shares.__getitem__) if any(shares.values()) else ""

    def to_record(self) -> dict[str, Any]:
        """Return what JSON holds of it."""
        return {
            "function": self.function,
            "sizes": dict(self.values),
            "seconds": self.seconds,
            "limit": self.limit,
            "shares": self.shares,
            "unpriced_calls": self.unpriced,
            "items": [
                {
                    "chain": cost.item.chain,
                    "where": cost.item.where,
                    "count": cost.item.count,
                    "status": cost.item.status,
                    "seconds": cost.seconds,
                    "limit": cost.limit,
                    "plan": cost.plan,
                }
                for cost in self.costs
            ],
        }


def function_cost(
    function: str, items: Iterable[Item], values: Values, dev: DeviceSpec, backend: Backend
) -> FunctionCost:
    """Predict what one call of a function takes: its fused kernels, and the matmuls that are left.

    Plans are chosen anew, for the device.

    Parameters
    ----------
    function : str
        Its name.
    items : iterable of Item
        What it multiplies.
    values : mapping of str to int
        Its symbolic sizes.
    dev : DeviceSpec
        The device.
    backend : {"auto", "tir", "triton"}
        Who emits the kernels.
    """
    known = list(items)
    each = [_predicted(item, values, dev, backend) for item in known]
    seconds = added(known, [found for found, _ in each], dev)
    costs = [
        ItemCost(item, spent, _LIMIT_OF[found.bound], plan) if found else ItemCost(item, None)
        for item, spent, (found, plan) in zip(known, seconds, each, strict=True)
    ]
    return FunctionCost(function, dict(values), tuple(costs))


def added(
    items: Sequence[Item], each: Sequence[Prediction | None], dev: DeviceSpec
) -> list[float | None]:
    """Return what each item adds to a call of the function, all its calls together.

    `items`: all of the function.
    `each`: what one call of each takes by itself; None where that is not known.
    """
    known = [
        Part(
            found,
            item.count,
            peak_flops(item.dtype, dev) if item.work is None else rate_of(item.work, dev),
        )
        for item, found in zip(items, each, strict=True)
        if found is not None and item.kind != "collective"
    ]
    spent = iter(added_s(known, dev))

    def of(item: Item, found: Prediction | None) -> float | None:
        if found is None or item.kind != "collective":
            return None if found is None else next(spent)
        return item.count * found.seconds  # all workers wait for it

    return [of(item, found) for item, found in zip(items, each, strict=True)]


def rate_of(work: Workload, dev: DeviceSpec) -> float:
    """Return the operations a second of the units that multiply for a workload."""
    dtype = getattr(work, "dtype", None) or max(dtypes_of(work), default="float32")
    if dev.kind == "gpu" and getattr(work, "allow_tf32", False):
        return dev.tensor_flops_per_s(dtype) or dev.fma_float32_flops_per_s
    return peak_flops(dtype, dev)


def peak_flops(dtype: str, dev: DeviceSpec) -> float:
    """Return the operations a second of the units that multiply elements of a type."""
    tensor = dev.tensor_flops_per_s(dtype) if dev.kind == "gpu" and dtype != "float32" else 0.0
    return tensor or dev.fma_float32_flops_per_s


def _predicted(
    item: Item, values: Values, dev: DeviceSpec, backend: Backend
) -> tuple[Prediction | None, str]:
    try:
        if item.kind == "collective":
            return collective(item, values, dev), ""
        if item.work is None:
            return _left(item, values, dev, backend), ""
        choice = choose(item.work, dev, always=True, backend=backend)
        if isinstance(choice, Decline):
            return None, ""
        return planned(item, item.work, choice.plans, values, dev)
    except RelaxFusionError:
        return None, ""


def planned(
    item: Item, work: Workload, plans: PlanTable, values: Values, dev: DeviceSpec
) -> tuple[Prediction | None, str]:
    """Predict one call of a fused chain by the plan that serves its sizes, and tell that plan.

    Sizes follow from those of the function that calls it; None and nothing where one is not known,
    or 0.
    """
    size = size_of(item, work, values)
    if size is None:
        return None, ""
    plan = plans.plan_at(size)
    return predict(work, plan, dev, size), plan.text


def size_of(item: Item, work: Workload, values: Values) -> Size | None:
    """Return the size of a chain's kernel, as the estimator takes it; None if it is unknown or 0.

    It follows from the symbolic sizes of the function that calls it.
    """
    sizes = item.sizes(values)
    if sizes is None or 0 in sizes.values():
        return None
    ranged = {
        name: dim if isinstance(dim, int) else sizes[dim.name] for name, dim in work.ranged.items()
    }
    if isinstance(work, Attention):
        return AttentionSize(ranged["batch"], ranged["rows"], ranged["keys"])
    return ranged["rows"]


def collective(item: Item, values: Values, dev: DeviceSpec) -> Prediction | None:
    """Predict a collective between workers; None where its size is not known."""
    moved = item.bytes(values)
    return None if moved is None else all_reduce(moved, dev)


def _left(item: Item, values: Values, dev: DeviceSpec, backend: Backend) -> Prediction | None:
    """Price the matmuls of what was left, as the rules for generic ones make them."""
    if item.dtype not in DTYPE_BYTES or not item.products:
        return _by_bytes(item, values, dev)
    atoms = []
    for product in item.products:
        sizes = values_of((product.m, product.n, product.k, product.batch), values)
        if sizes is None or min(sizes) < 1:
            return None
        m, n, k, batch = sizes
        rows = DynamicDim("rows")
        work = NormMatmul(rows, k, (Projection(n, "kn"),), None, item.dtype, item.dtype)
        atoms.append(Atom(0, work, m, batch, "rule"))
    return predict_apart(atoms, dev, backend)


def _by_bytes(item: Item, values: Values, dev: DeviceSpec) -> Prediction | None:
    """Price what is of a type that no kernel here has, by its bytes and operations alone."""
    moved, flops = item.bytes(values), item.flops(values)
    if moved is None or flops is None:
        return None
    memory_s = moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    compute_s = flops / dev.fma_float32_flops_per_s
    bound: Literal["dram", "compute"] = "dram" if memory_s >= compute_s else "compute"
    return Prediction(dev.launch_s + max(memory_s, compute_s), moved, flops, 1, bound)
