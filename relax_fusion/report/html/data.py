"""The data of a page: plain, and as JSON has it; everything that a page says is in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...hardware import DeviceSpec
from . import numbers
from .candidates import MOST_POINTS, MOST_REFUSED, MOST_REJECTED, Clock
from .chains import chain_entry, graphs_by_function
from .functions import functions_of
from .kernels import MISS, Kernel, kernels_of
from .layers import MOST_NODES, layers_of
from .linters import RULES, findings_of
from .losses import OTHERS, costliest, declines_of, leftovers_of
from .sources import MOST_CHARACTERS, MOST_TEXTS, sources_of

if TYPE_CHECKING:
    from ..report import Report

SHARE_OF_TIME = 0.1
"""Of the time that the phases took, what a page takes."""

LEAST_SECONDS = 1.0
"""What a page takes in any case."""


def page_data(report: Report, seconds: float | None = None) -> dict[str, Any]:
    """Return what a page shows.

    Parameters
    ----------
    report : Report
        The decisions, and the material that the pipeline added.
    seconds : float, optional
        As in `Report.to_html`.

    Returns
    -------
    dict
        Of lists, texts, numbers and None alone.  Times are in seconds.
    """
    material = report.material
    budget = max(LEAST_SECONDS, SHARE_OF_TIME * material.seconds) if seconds is None else seconds
    clock = Clock(budget)
    kernels = kernels_of(report.fused, material.spec)
    graphs = graphs_by_function(material.before)
    chains = [chain_entry(k, graphs, material.backend, clock) for k in kernels]
    ids = {k.decision.kernel: k.id for k in kernels}
    texts, cuts = sources_of(material.sources, ids, clock)
    functions = functions_of(report, kernels)
    declines, leftovers = declines_of(report, graphs), leftovers_of(report, graphs)
    return {
        "model": material.model,
        "device": _device(report),
        "backend": material.backend,
        "compile_s": material.seconds or None,
        "functions": functions,
        "answers": {
            **_answers(kernels),
            "not_fused": costliest(declines, leftovers, functions),
        },
        "findings": findings_of(report, kernels, graphs),
        "rules": dict(RULES),
        "layers": layers_of(material.before, material.after, report.decisions, kernels),
        "chains": chains,
        "declines": declines,
        "leftovers": leftovers,
        "left_out": [asdict(each) for each in report.left_out],
        "others": OTHERS,
        "schedules": _schedules(report),
        "sources": texts,
        "notes": [*_missing(report, kernels), *cuts, *_limits(budget, chains)],
        "counts": {
            "fused": len(report.fused),
            "declined": len(report.declined),
            "at_a_loss": sum(d["count"] for d in declines if d["is_loss"]),
        },
    }


def _device(report: Report) -> dict[str, Any]:
    spec: DeviceSpec | None = report.material.spec
    if spec is None:
        return {"name": report.device, "known": False}
    rates = (
        ("float16", spec.tensor_float16_flops_per_s),
        ("float32", spec.fma_float32_flops_per_s),
    )
    return {
        "name": report.device or spec.description,
        "known": True,
        "kind": spec.kind,
        "bandwidth": spec.dram_bytes_per_s,
        "rates": [{"dtype": name, "flops": rate} for name, rate in rates if rate],
        "launch_s": spec.launch_s,
    }


def _answers(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return the kernel that is farthest from its floor, and how far each is at its worst."""
    worst = []
    for kernel in kernels:
        known = [(p.share, p) for p in kernel.points if p.share is not None]
        if known:
            share, point = min(known, key=lambda pair: pair[0])
            entry = {
                "id": kernel.id,
                "share": share,
                "size": point.text,
                "bound": point.fused.bound,
            }
            entry["seconds"] = numbers.number(point.fused.seconds)
            entry["floor_s"] = point.floor.seconds if point.floor is not None else None
            worst.append(entry)
    return {"slowest": sorted(worst, key=lambda w: w["share"])}


def _schedules(report: Report) -> list[dict[str, Any]]:
    """Return which rule made which kernels, by rule."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in report.schedules:
        why = "; ".join(f"{rule}: {decline}" for rule, decline in each.refusals)
        groups.setdefault((each.rule or "none: its loops stay as they are", why), []).append(
            each.function
        )
    return [
        {"rule": rule, "functions": names, "refusals": why} for (rule, why), names in groups.items()
    ]


def _missing(report: Report, kernels: Sequence[Kernel]) -> list[str]:
    """Say what a page lacks, and why."""
    material, told = report.material, []
    if not report.decisions:
        told.append("The report holds no decision: no chain of any pattern was found.")
    elif not kernels:
        told.append("No chain was fused; see what was declined.")
    if material.spec is None:
        told.append("The report names no device, so there are no floors and no candidates.")
    if not material.before:
        told.append("The report holds no graphs: it was not filled by the whole pipeline.")
    if not material.sources:
        told.append("The report holds no kernel texts: the phase that schedules did not run.")
    if kernels and not any(p.measured_s is not None for k in kernels for p in k.points):
        told.append(
            "No kernel was measured, so all times are predictions. `relax-fusion tune` measures "
            "kernels, and --database brings their times here."
        )
    odd = sum(numbers.number(p.fused.seconds) is None for k in kernels for p in k.points)
    if odd:
        told.append(f"{odd} predictions are no finite numbers, and are left out of sums and plots.")
    return told


def _limits(budget: float, chains: Sequence[dict[str, Any]]) -> list[str]:
    """Say what a page leaves out on purpose."""
    late = sum("used up" in chain["candidates"]["missing"] for chain in chains)
    late_told = f" They were used up: {late} kernels have no candidates." if late else ""
    return [
        f"Candidates and kernel texts may take {numbers.seconds(budget)}: a tenth of the time that "
        f"the phases took, and at least {numbers.seconds(LEAST_SECONDS)}.{late_told}",
        f"A plot of candidates shows the {MOST_POINTS} fastest plans of a range and up to "
        f"{MOST_REFUSED} refused ones of a rule; a table lists the chosen plan and the "
        f"{MOST_REJECTED} fastest rejected ones.",
        f"A graph shows up to {MOST_NODES} bindings before, in and behind a layer. A kernel has up "
        f"to {MOST_TEXTS} texts in a language, of {MOST_CHARACTERS:,} characters each.",
        "The floor of a kernel is the larger of two times: its bytes (each operand counted once) "
        "at the peak bandwidth, and its matmul operations at the peak rate of its dtype. Launches "
        "are not in it. On a CPU a share above 100 % means that operands stay in a cache.",
        "Overheads are what a kernel takes before and after its work: its launch, its first loads, "
        "and a second kernel that joins parts, where the keys or a sum are cut into parts.",
        f"A measured time that differs by more than {numbers.percent(MISS)} from the predicted one "
        "is marked as a miss.",
        "Costs of operators outside of fused kernels are the least that they can take: a launch, "
        "and their bytes at the bandwidth that is reached, or their operations at the peak rate.",
    ]
