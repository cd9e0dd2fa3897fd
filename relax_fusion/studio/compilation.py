"""What a compilation decided, read from what `compile`, ``explain --json`` or a dump wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from ..cli.console import CliError
from ..cli.manifest import MANIFEST, Manifest, read_manifest
from ..cli.model_arguments import asked
from ..errors import Decline, Reason, RelaxFusionError
from ..estimator import AttentionSize, Prediction, RangePrediction
from ..estimator.family import Backend
from ..estimator.registry import table_of
from ..files import read_file
from ..hardware.target import device_of, make_target
from ..report import (
    Decision,
    FunctionGraph,
    Item,
    Joining,
    LeftOut,
    Leftover,
    Material,
    Report,
    Rewrite,
    Scheduling,
    Source,
    Text,
)
from ..report.calls import Call
from ..transforms.debug_dump import REPORT
from ..validation import read_json, shown
from ..workload import Workload
from ..workload.json import from_json

_WANTED = "a directory that `relax-fusion compile` made, or what `explain --json` wrote"

_DAMAGES = (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RelaxFusionError)
"""Reading a record raises these where it is not as expected."""


@dataclass(frozen=True)
class Texts:
    """The texts of a function's kernels."""

    function: str
    texts: tuple[Text, ...]


@dataclass(frozen=True)
class Compilation:
    """What is known of a compilation."""

    path: str
    """Where it was read."""
    facts: dict[str, Any]
    """What the file says of the model and its options, by their names."""
    report: Report
    """What was decided."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of the directory's files; empty where only a report was given."""
    bounds: dict[str, int] = field(default_factory=dict)
    """Largest values of symbolic sizes."""

    def fact(self, name: str) -> Any:
        """Return a fact about the model; None where it is not known."""
        return self.facts.get(name)

    @property
    def sources(self) -> dict[str, tuple[Text, ...]]:
        """Texts of its kernels, by function; empty where there are none, as of `explain`."""
        return {each.function: tuple(each.texts) for each in self.report.material.sources}


def read_compilation(text: str) -> Compilation:
    """Read a compiled directory, or the report of one.

    Raises `CliError` if it is neither, or damaged, by exit code 2; the message says what it is.
    """
    path = Path(text)
    if path.name == MANIFEST and path.is_file():
        path = path.parent
    if not path.exists():
        raise CliError(f"{text} does not exist; give {_WANTED}", code=2)
    if path.is_dir():
        return _of_directory(text, path)
    return _compilation(text, _record(path))


def is_compiled(path: Path) -> bool:
    """Tell whether a path is a directory that `compile` made."""
    return (path / MANIFEST).is_file()


def _of_directory(text: str, path: Path) -> Compilation:
    if not is_compiled(path):
        if path.name.endswith(".part"):
            raise CliError(
                f"{text} is what an interrupted compile left: it has no {MANIFEST}; compile again",
                code=2,
            )
        parts = sorted(path.glob(".*.part"))
        hint = f"; an interrupted compile left {parts[0].name} in it" if parts else ""
        has = "config.json" if (path / "config.json").is_file() else ""
        hint += "; it is a model, which `compile` takes" if has else ""
        raise CliError(f"{text} has no {MANIFEST}{hint}; give {_WANTED}", code=2)
    try:
        manifest = read_manifest(path)
    except CliError as err:
        raise CliError(str(err), code=2) from err
    if REPORT not in manifest.files:
        raise CliError(f"{text} has no {REPORT}; compile again", code=2)
    record = _record(path / REPORT)
    sizes = {str(name): entry.bytes for name, entry in manifest.files.items() if name != REPORT}
    return _compilation(text, record, sizes, _bounds(manifest))


def _bounds(manifest: Manifest) -> dict[str, int]:
    signature = manifest.signature
    found = {n: most for n, (_, most) in signature.sizes.items() if most} if signature else {}
    if manifest.max_seq_len is not None:
        found |= dict.fromkeys(("seq_len", "total_len"), manifest.max_seq_len)
    return found


def _record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(read_file(file))
    except OSError as err:
        raise CliError(f"{file} cannot be read: {err.strerror}", code=2) from err
    except (ValueError, RecursionError) as err:
        raise CliError(f"{file} is no JSON; give {_WANTED}", code=2) from err
    decisions = record.get("decisions") if isinstance(record, dict) else None
    if not isinstance(decisions, list) or not all(isinstance(d, dict) for d in decisions):
        raise CliError(f"{file} has no list of decisions; give {_WANTED}", code=2)
    return record


def _compilation(
    path: str,
    record: dict[str, Any],
    files: Mapping[str, int] | None = None,
    bounds: Mapping[str, int] | None = None,
) -> Compilation:
    try:
        report = report_of(record)
    except _DAMAGES as err:
        raise CliError(
            f"{path} is damaged: a record is not as expected ({type(err).__name__}: "
            f"{shown(str(err))}); compile again",
            code=2,
        ) from err
    facts = {name: each for name, each in record.items() if not isinstance(each, list)}
    return Compilation(path, facts, report, dict(files or {}), dict(bounds or {}))


# --- from JSON to a report -----------------------------------------------------------------------


def report_of(record: Mapping[str, Any]) -> Report:
    """Return the report of what `relax_fusion.report.record.record_of` made.

    Raises `TypeError`, `LookupError`, `AttributeError`, `ValueError`, `ArithmeticError` or
    `RelaxFusionError` if a part of it is missing, or is none.
    """
    works: dict[str, Workload] = {}
    decisions = [_decision(each, works) for each in record["decisions"]]
    graphs = record["graphs"]
    material = Material(
        model=str(record["model"]),
        backend=_read(Backend, record["backend"], "backend"),
        before=_read(list[FunctionGraph], graphs["before"], "graphs"),
        after=_read(list[FunctionGraph], graphs["after"], "graphs"),
        sources=[
            Source(each.function, lambda texts=each.texts: list(texts))  # type: ignore[misc]
            for each in _read(list[Texts], record.get("sources", []), "sources")
        ],
        memory=_bytes(record, "memory_bytes"),
        tvm_memory=_bytes(record, "tvm_memory_bytes"),
    )
    if record.get("target") is not None:
        material.spec = device_of(make_target(str(record["target"])))
    return Report(
        decisions,
        [_scheduling(each) for each in record["schedules"]],
        _read(list[Leftover], record["leftovers"], "leftovers"),
        [Item.from_record(each, works) for each in record["work"]],
        _read(dict[str, str], record["kernels"], "kernels"),
        str(record["device"]),
        material,
        _read(list[LeftOut], record["left_out"], "left_out"),
        _read(list[Rewrite], record["rewrites"], "rewrites"),
        _read(list[Call], record["calls"], "calls"),
        _read(list[Joining], record["joined"], "joined"),
    )


def _bytes(record: Mapping[str, Any], what: str) -> dict[str, int]:
    """Return a number of each function's coverage, where it has it."""
    told = ((each["function"], each.get(what)) for each in record["coverage"])
    known = {name: bytes for name, bytes in told if bytes is not None}
    return _read(dict[str, int], known, what)


def _read(kind: Any, value: Any, name: str) -> Any:
    return read_json(kind, json.dumps(value), ValueError, name)


def _decision(record: Mapping[str, Any], works: dict[str, Workload]) -> Decision:
    """Return a decision; what its kernel computes is read once, and kept in `works`."""
    kernel, work = str(record["kernel"]), None
    if "workload" in record and kernel in works:
        work = works[kernel]
    elif "workload" in record:
        fields = {name: it for name, it in record["workload"].items() if name != "key"}
        work = from_json(json.dumps(fields))
        if kernel:  # chains that were declined have none
            works[kernel] = work
    told = record.get("decline")
    decline = None
    if told is not None:
        times = _seconds(told["fused_s"]), _seconds(told["unfused_s"])
        decline = Decline(Reason(told["reason"]), str(told["detail"]), *times)
    return Decision(
        str(record["pattern"]),
        str(record["spelling"]),
        str(record["function"]),
        str(record["where"]),
        kernel,
        work,
        table_of(record["plans"]) if "plans" in record else None,
        tuple(_prediction(each) for each in record["predictions"]),
        decline,
        str(record.get("validation", "")),
        tuple(map(str, record["chain"])),
    )


def _prediction(record: Mapping[str, Any]) -> RangePrediction:
    size, upper, bound = record["size"], record["upper"], record["bound"]
    if isinstance(size, dict):
        size = AttentionSize(**{name: int(value) for name, value in size.items()})
    seconds = (_seconds(record[name]) for name in ("fused_s", "unfused_s"))
    fused, unfused = (Prediction(inf if s is None else s, 0.0, 0.0, 1, bound) for s in seconds)
    return RangePrediction(
        None if upper is None else int(upper),
        size if isinstance(size, AttentionSize) else int(size),
        fused,
        unfused,
        fused,
        measured_s=_seconds(record["measured_s"]),
    )


def _seconds(value: Any) -> float | None:
    """Return a time of a record; None stands for what is no finite number."""
    if value is None:
        return None
    if not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"a time is {shown(value)}; must be a number of seconds from 0 on")
    return float(value)


def _scheduling(record: Mapping[str, Any]) -> Scheduling:
    refusals = tuple(
        (str(each["rule"]), Decline(Reason(each["reason"]), str(each["detail"])))
        for each in record["refusals"]
    )
    plans = table_of(record["plans"]) if "plans" in record else None
    return Scheduling(str(record["function"]), str(record["rule"]), plans, refusals)


# --- arguments of what is compiled already -------------------------------------------------------

_MODEL = ("dtype", "quantization", "max_seq_len", "batch")
"""Arguments that say what of a model is compiled; `asked` knows those that say how."""


def check_unasked(args: argparse.Namespace, target: str, besides: Collection[str] = ()) -> None:
    """Refuse arguments that say how a model is compiled, of one that is compiled already.

    The target that it was compiled for may be said again; `besides` names arguments that say
    something else to this command.
    """
    names = (*(name for name in _MODEL if getattr(args, name, None)), *asked(args))
    given = next((name for name in names if name not in besides), None)
    if str(args.target) not in (str(make_target("llvm")), target):  # llvm by default
        given = "target"
    if given is not None:
        raise CliError(
            f"--{given.replace('_', '-')} says how a model is compiled, but {args.source} is "
            "compiled already",
            code=2,
        )
