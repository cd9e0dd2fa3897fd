"""What one call of a function takes by the plans of its chains, and what it takes at least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..errors import RelaxFusionError
from ..estimator import Prediction, Size
from ..estimator.baseline import predict_unfused
from ..estimator.prediction import DRAM_EFFICIENCY
from ..estimator.sequence import other_s
from ..estimator.shape import sizes_of
from ..hardware import DeviceSpec
from ..workload import Attention, Workload
from ..workload.dims import extent
from ..workload.roofline import matmul_flops
from .costs import added, collective, peak_flops, planned, rate_of, size_of
from .decision import Decision
from .item import Item
from .material import Material, Node
from .sizes import BATCHES, Values, all_known

if TYPE_CHECKING:
    from .report import Report

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

COLLECTIVE = "runtime.disco."
"""The names of Disco's collectives among launches begin so."""

SHOWN_SIZES = (1, 16, 64, 256, 1024, 4096)
"""A call is priced at these values of symbolic sizes, as far as a function can have them."""


@dataclass(frozen=True)
class Call:
    """What one call of a function takes, by the plans of its chains."""

    function: str
    sizes: dict[str, int]
    """Its symbolic sizes."""
    fused_s: Seconds
    """Seconds of fused chains."""
    rest_s: Seconds | None = None
    """The least that other kernels take; None where nobody counted them."""
    unfused_s: Seconds | None = None
    floor_s: Seconds | None = None
    """What our kernels for the parts of fused chains take, launched separately, and the least that
    any kernels could take for these; None where one of them is not known."""

    @property
    def seconds(self) -> float:
        """Seconds of all kernels, of which those beside fused chains take at least so long."""
        return self.fused_s + (self.rest_s or 0.0)


def calls_of(report: Report) -> list[Call]:
    """Return what one call of each function that runs fused kernels takes, at several sizes.

    Symbolic sizes all have the same value, or their largest where that is less; batches are 1.
    """
    if report.material.spec is None:
        return []
    functions = dict.fromkeys(i.function for i in report.work if i.status == "fused")
    return [
        call_at(report, function, values, report.material.spec)
        for function in functions
        for values in _values(_fused(report, function), _limits(function, report))
    ]


def _fused(report: Report, function: str) -> list[Item]:
    return [i for i in report.work_of(function) if i.status == "fused"]


def call_at(report: Report, function: str, values: Values, spec: DeviceSpec) -> Call:
    """Return what one call of a function takes at some symbolic sizes.

    Kernels beside fused chains are priced at the sizes for which the report counted their bytes.
    """
    own, decisions = _fused(report, function), {d.kernel: d for d in report.fused}
    graph = next((g for g in report.material.after if g.function == function), None)
    nodes = graph.nodes if graph is not None else ()
    others = [n for n in nodes if n.is_kernel and n.op not in decisions]
    beside = math.fsum(
        other_s(n.moved, _compute_s(n, spec), spec)
        for n in others
        if not n.op.startswith(COLLECTIVE)
    )
    rest = None if graph is None else _sum_of([beside, _summed(function, values, report)])
    each = [_priced(i, values, decisions[i.kernel], report.material) for i in own]
    *both, floor = zip(*each, strict=True)
    fused, unfused = (added(own, found, spec) for found in both)
    known = math.fsum(seconds for seconds in fused if seconds is not None)
    return Call(function, dict(values), known, rest, _sum_of(unfused), _sum_of(floor))


def _summed(function: str, values: Values, report: Report) -> float | None:
    """Return what the collectives between workers take, in all calls; None for one unknown."""
    spec = report.material.spec
    assert spec is not None
    each = [i for i in report.work_of(function) if i.kind == "collective"]
    found = [(i.count, collective(i, values, spec)) for i in each]
    return _sum_of(None if one is None else count * one.seconds for count, one in found)


def _limits(function: str, report: Report) -> dict[str, int]:
    """Return the largest values of a function's symbolic sizes, of those that have one."""
    graphs = [*report.material.before, *report.material.after]
    found = next((dict(g.limits) for g in reversed(graphs) if g.function == function), {})
    for name, most in report.material.most.items():
        found[name] = min(most, found.get(name, most))
    return found


def _values(items: Iterable[Item], limits: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the sizes at which a function is priced."""
    names = sorted(frozenset().union(*(item.names for item in items)))
    ends = [limits.get(name, SHOWN_SIZES[-1]) for name in names if name not in BATCHES]
    most = max(ends, default=1)
    return [
        {name: 1 if name in BATCHES else min(size, limits.get(name, size)) for name in names}
        for size in sorted({*(size for size in SHOWN_SIZES if size <= most), most})
    ]


_Priced = tuple[Prediction | None, Prediction | None, float | None]


def _priced(item: Item, values: Values, decision: Decision, material: Material) -> _Priced:
    """Return what a chain takes by its plans and unfused, once, and at least, in all calls."""
    work, spec, plans = decision.workload, material.spec, decision.plans
    size = size_of(item, work, values) if work is not None else None
    if work is None or plans is None or spec is None or size is None:
        return None, None, None
    try:
        found, _ = planned(item, work, plans, values, spec)
        known = {p.size: p.unfused for p in decision.predictions}
        unfused = known.get(size) or predict_unfused(work, spec, size, backend=material.backend)
    except RelaxFusionError:
        return None, None, None
    if found is None or not math.isfinite(found.seconds):
        return None, None, None
    floor = floor_s(work, spec, size)
    return found, unfused, None if floor is None else item.count * floor


def _sum_of(each: Iterable[float | None]) -> float | None:
    known = all_known(list(each))
    return None if known is None else math.fsum(known)


def least_s(node: Node, spec: DeviceSpec | None) -> float | None:
    """Return the least that an operator takes as a kernel of its own.

    It is a launch, and the longer of its bytes at the bandwidth that is reached and its operations
    at the peak rate.
    """
    if spec is None:
        return None
    return spec.launch_s + max(
        node.moved / (spec.dram_bytes_per_s * DRAM_EFFICIENCY), _compute_s(node, spec)
    )


def _compute_s(node: Node, spec: DeviceSpec) -> float:
    return node.flops / peak_flops(node.dtype, spec)


def floor_s(work: Workload, spec: DeviceSpec, size: Size) -> float | None:
    """Return the least that a kernel takes: its bytes or its operations at the peak rates.

    Every operand is counted once, of keys and values those that some query sees; operations are
    those of the matmuls that no mask by position hides.  Launching is not in it.  Of dimensions
    that the size does not tell, such as the positions of rotated rows, it has one.
    """
    try:
        sizes = dict.fromkeys(work.graph.dims, 1) | sizes_of(work, size)
        moved = float(sum(_seen(work, sizes).bytes(**sizes).values()))
        flops = float(matmul_flops(work.graph, sizes, visible=True))
    except (RelaxFusionError, TypeError):
        return None
    return max(moved / spec.dram_bytes_per_s, flops / rate_of(work, spec))


def _seen(work: Workload, sizes: Mapping[str, int]) -> Workload:
    """Return attention with as many keys as some query sees, another workload as it is."""
    if not isinstance(work, Attention) or work.causal == "none":
        return work
    rows, keys = extent(work.q_len, sizes["q_len"]), extent(work.kv_len, sizes["kv_len"])
    most = rows if work.causal == "top_left" else (work.window or keys) + rows - 1
    return replace(work, kv_len=min(keys, most))
