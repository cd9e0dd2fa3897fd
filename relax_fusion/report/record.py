"""A report as what JSON has, its parts by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..workload import Workload
from ..workload.json import as_record
from .coverage import Coverage
from .decision import Decision, Scheduling
from .material import Source, Text

if TYPE_CHECKING:
    from .report import Report

MOST_CHARACTERS = 16_000
"""A record has at most so many characters of one text."""

_MARK = 80
"""The note on the rest of a cut text has at most this many characters."""

MOST_TEXTS = 3
"""A record has at most so many texts of one PrimFunc in one language."""


def record_of(report: Report, sources: bool = False) -> dict[str, Any]:
    """Return a report in lists, dictionaries and what JSON has, as `Report.to_json` says."""
    record: dict[str, Any] = {
        "device": report.device,
        "backend": report.material.backend,
        "model": report.material.model,
        "decisions": [_decision(d) for d in report.decisions],
        "leftovers": [asdict(each) for each in report.leftovers],
        "schedules": [_scheduling(s) for s in report.schedules],
        "coverage": [_covered(c) for c in report.coverage],
        "calls": [asdict(call) for call in report.calls],
        "work": [item.to_record() for item in report.work],
        "graphs": {
            "before": [asdict(graph) for graph in report.material.before],
            "after": [asdict(graph) for graph in report.material.after],
        },
        "kernels": report.kernels,
        "left_out": [asdict(each) for each in report.left_out],
        "rewrites": [asdict(each) for each in report.rewrites],
        "joined": [asdict(each) for each in report.joined],
    }
    if sources:
        every = {source.function: source for source in report.material.sources}
        record["sources"] = [
            {"function": name, "texts": [asdict(text) for text in texts_of(source)]}
            for name, source in every.items()
        ]
    return record


def texts_of(source: Source) -> list[Text]:
    """Return the texts of one PrimFunc's kernels, as much of them as a record holds."""
    try:
        every = source.texts
    except Exception as err:  # a text is no reason to lose a report
        return [Text(source.function, "TVMScript", f"# no text: {err}")]
    kept: list[Text] = []
    for text in every:
        if sum(k.language == text.language for k in kept) < MOST_TEXTS:
            kept.append(Text(text.title, text.language, _shortened(text)))
    return kept


def _shortened(text: Text) -> str:
    if len(text.text) <= MOST_CHARACTERS:
        return text.text
    kept = text.text[: MOST_CHARACTERS - _MARK]
    mark = "//" if text.language == "CUDA C++" else "#"
    return f"{kept}\n{mark} ... {len(text.text) - len(kept):,} more characters are left out\n"


def _decision(decision: Decision) -> dict[str, Any]:
    record: dict[str, Any] = {
        "pattern": decision.pattern,
        "spelling": decision.spelling,
        "function": decision.function,
        "where": decision.where,
        "chain": decision.chain,
        "kernel": decision.kernel,
        "fused": decision.fused,
    }
    if decision.workload is not None:
        record |= _work(decision.workload)
    if decision.plans is not None:
        record["plans"] = decision.plans.to_attr()
    record["predictions"] = [
        {
            "upper": p.upper,
            "size": p.size if isinstance(p.size, int) else p.size._asdict(),
            "fused_s": p.fused.seconds,
            "unfused_s": p.unfused.seconds,
            "bound": p.fused.bound,
            "measured_s": p.measured_s,
        }
        for p in decision.predictions
    ]
    if decision.validation:
        record["validation"] = decision.validation
    if decision.decline is not None:
        record["decline"] = {
            "reason": decision.decline.reason.value,
            "detail": decision.decline.detail,
            "fused_s": decision.decline.fused_s,
            "unfused_s": decision.decline.unfused_s,
        }
    return record


@lru_cache(maxsize=256)
def _work(work: Workload) -> Mapping[str, Any]:
    workload = {"key": work.key, "type": type(work).__name__, **as_record(work)}
    return {"workload": workload, "graph": str(work.graph).splitlines()}


def _scheduling(scheduling: Scheduling) -> dict[str, Any]:
    record: dict[str, Any] = {"function": scheduling.function, "rule": scheduling.rule}
    if scheduling.plans is not None:
        record["plans"] = scheduling.plans.to_attr()
    record["refusals"] = [
        {"rule": rule, "reason": decline.reason.value, "detail": decline.detail}
        for rule, decline in scheduling.refusals
    ]
    return record


def _covered(coverage: Coverage) -> dict[str, Any]:
    record: dict[str, Any] = {"function": coverage.function, "chains": coverage.chains}
    if coverage.launches is not None:
        record |= {
            "launches": coverage.launches.kernels,
            "per_layer": coverage.per_layer,
            "copies": coverage.launches.copies,
            "copied_bytes": coverage.copied,
            "memory_bytes": coverage.launches.memory,
            "tvm_memory_bytes": coverage.launches.tvm_memory,
            "symbols": dict(coverage.launches.symbols),
        }
    return record
