"""What the benchmarks against peers share: one run on a GPU, written case by case, resumable."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import recording

Entry = dict[str, Any]
Key = tuple[Any, ...]


class DeviceLostError(Exception):
    """The GPU answers no more, as after an illegal access: what follows cannot be measured."""


def sentence(err: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"


def resumed(path: Path | None, kind: Mapping[str, Any], key_of: Callable[[Entry], Key]) -> Any:
    """Return the entries of the run to resume, by key.

    Raises
    ------
    SystemExit
        If that run was of another kind.
    """
    if path is None:
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    for name, wanted in kind.items():
        if record.get(name) != wanted:
            raise SystemExit(f"--resume: {name} is {record.get(name)!r} there, {wanted!r} here")
    return {key_of(e): e for e in record["cases"]}


def draw(path: Path, plot: Callable[[dict[str, Any], Path], None], script: str) -> bool:
    """Draw the picture of a record beside it; say so if that cannot be done here."""
    picture = path.with_suffix(".svg")
    try:
        plot(json.loads(path.read_text(encoding="utf-8")), picture)
    except ImportError:
        print(f"no matplotlib here: python scripts/{script}.py --plot {path.name} elsewhere")
        return False
    print(picture)
    return True


class GpuRun:
    """A run on the GPU and what is recorded of it; torch is imported here, for reports need none.

    Parameters
    ----------
    args : argparse.Namespace
        With ``seconds``, ``results``, ``dtype`` and ``target``.
    facts : mapping
        For the record, beside those of the machine.
    """

    script = ""
    without_gpu = ""
    """The option that needs no GPU."""

    def __init__(self, args: argparse.Namespace, facts: Mapping[str, Any]) -> None:
        import torch

        from benchmarks import gpu_timing

        if not torch.cuda.is_available():
            raise SystemExit(
                f"{self.script} needs an NVIDIA GPU; {self.without_gpu} FILE.json does not"
            )
        self.args, self.torch, self.timing = args, torch, gpu_timing
        self.began = time.monotonic()
        self.sampler = self.timing.Sampler()
        self.ceilings = self.timing.ceilings(self.sampler)
        self.record: dict[str, Any] = {
            **recording.facts(),
            "gpu": torch.cuda.get_device_name(),
            "dtype": args.dtype,
            **facts,
            "target": args.target,
            **self.ceilings,
        }

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def late(self) -> bool:
        return self.args.seconds is not None and self.elapsed() > self.args.seconds

    def check_device(self, cause: Exception) -> None:
        """Tell an error of one contender from one that leaves the GPU unusable."""
        try:
            self.torch.cuda.synchronize()
        except Exception as err:
            raise DeviceLostError(f"{sentence(cause)}; then {sentence(err)}") from cause


class Bench(GpuRun, ABC):
    """A benchmark of many cases, each with the same contenders.

    A subclass says what to do: `facts`, `measured`, and how its entries are called.

    Parameters
    ----------
    args : argparse.Namespace
        As in `GpuRun`, and ``resume``.
    report : module
        With ``line``, ``markdown``, ``summary`` and ``plot`` of what is measured, ``name_of`` an
        entry, and ``OURS``, whose wrong results fail a run.
    kind : mapping
        What a run that is resumed must have in common with this one, beside the dtype.
    """

    without_gpu = "--plot"

    def __init__(self, args: argparse.Namespace, report: Any, kind: Mapping[str, Any]) -> None:
        super().__init__(args, kind)
        self.report = report
        kind = {"dtype": args.dtype, **kind}
        self.entries: dict[Key, Entry] = resumed(args.resume, kind, self.key_of)

    # --- what a subclass says --------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def key_of(entry: Entry) -> Key:
        """Return what an entry is called."""

    @abstractmethod
    def file_name(self) -> str:
        """Return the name of the run's files, without the date."""

    @abstractmethod
    def facts(self, item: Any) -> Entry:
        """Return what is known of a case before it is measured."""

    @abstractmethod
    def measured(self, item: Any) -> Entry:
        """Measure one case; see `times` and `captured`."""

    # --- the run ---------------------------------------------------------------------------

    def say_ceilings(self) -> None:
        ceilings = ", ".join(f"{k} {v:.3f}" for k, v in self.ceilings.items())
        print(f"{self.record['gpu']}: {ceilings}", flush=True)

    def measure_all(self, todo: Iterable[Any]) -> None:
        """Measure one case after the other, as long as there is time."""
        for item in todo:
            if self.late():
                print(f"stopped after {self.elapsed():.0f} s; complete it with --resume")
                break
            entry = self.entry(item)
            self.entries[self.key_of(entry)] = entry
            print(self.report.line(entry), flush=True)
            self.write()

    def entry(self, item: Any) -> Entry:
        """Measure one case; what fails is part of the entry."""
        entry = {
            **self.facts(item),
            "copy_tb_s": self.ceilings["copy_tb_s"],
            "launch_us": self.ceilings["launch_us"],
        }
        began = self.elapsed()
        try:
            entry |= self.measured(item)
        except DeviceLostError:
            raise
        except Exception as err:
            self.check_device(err)
            entry["error"] = sentence(err)
        self.torch.cuda.empty_cache()
        return entry | {"wall_s": round(self.elapsed() - began, 1)}

    def captured(
        self,
        names: Iterable[str],
        contender: Callable[[str], Callable[[], Any]],
        check: Callable[[str, Any], None],
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the calls of the contenders as graphs, and why others failed.

        Parameters
        ----------
        names : iterable of str
            The contenders.
        contender : callable
            Makes what is to be captured, of a name.
        check : callable
            Takes a name and its call, before the call counts.
        """
        calls, failed = {}, {}
        for name in names:
            try:
                call = self.timing.Call(contender(name))
                check(name, call)
                calls[name] = call
            except Exception as err:
                self.check_device(err)
                failed[name] = sentence(err)
        return calls, failed

    def times(self, calls: Mapping[str, Any]) -> Entry:
        """Time calls in turn."""
        samples = self.sampler.sample_ms({name: call.launch for name, call in calls.items()})
        return {
            "us": {n: 1e3 * statistics.median(s) for n, s in samples.items()},
            "tenths_us": {n: _tenths(s) for n, s in samples.items()},
            "samples": {n: len(s) for n, s in samples.items()},
            "no_graph": {n: c.why_no_graph for n, c in calls.items() if c.graph is None},
        }

    def write(self) -> None:
        """Write what there is so far."""
        self.record["cases"] = list(self.entries.values())
        text = self.report.markdown(self.record)
        recording.write(self.file_name(), self.record, text, self.args.results)

    def finish(self) -> int:
        """Draw, say what was reached and return the exit status."""
        self.record["cases"] = list(self.entries.values())
        return conclude(self.record, self.report, (self.script, self.file_name()), self.args)


def conclude(
    record: dict[str, Any], report: Any, names: tuple[str, str], args: argparse.Namespace
) -> int:
    """Write and draw a record, say what was reached and return the exit status.

    Parameters
    ----------
    record : dict
        With all entries.
    report : module
        As in `Bench`.
    names : tuple of str
        Of the script, and of the files without the date.
    args : argparse.Namespace
        With ``results``, where to write.
    """
    path = recording.write(names[1], record, report.markdown(record), args.results)[0]
    print(report.summary(record))
    draw(path, report.plot, names[0])
    bad = [e for e in record["cases"] if is_bad(e, report.OURS)]
    for e in bad:
        print("WRONG OR FAILED", report.name_of(e))
    return int(bool(bad))


def merged(paths: Iterable[Path], kind: Iterable[str], key_of: Callable[[Entry], Key]) -> Any:
    """Return the record of several runs in one; an entry comes from one run as a whole.

    Of entries of one key it is the one with more contenders, of such the last.

    Raises
    ------
    SystemExit
        If the runs differ in what `kind` names.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    first = records[0]
    for name in kind:
        found = {record[name] for record in records}
        if len(found) > 1:
            raise SystemExit(f"--merge: {name} differs: {', '.join(sorted(found))}")
    entries: dict[Key, Entry] = {}
    for entry in (e for record in records for e in record["cases"]):
        before = entries.get(key_of(entry), {})
        if len(entry.get("us", ())) >= len(before.get("us", ())):
            entries[key_of(entry)] = entry
    facts = ("date", "gpu", "copy_tb_s", "read_tb_s", "launch_us")
    runs = [{name: record[name] for name in facts if name in record} for record in records]
    return {**first, "runs": runs, "cases": list(entries.values())}


def is_complete(entry: Entry, wanted: Iterable[str]) -> bool:
    """Tell whether everybody who is asked for was timed."""
    return "error" not in entry and set(wanted) <= set(entry["us"])


def is_bad(entry: Entry, ours: Iterable[str]) -> bool:
    """Tell whether something of ours gave a wrong result or none."""
    return "error" in entry or any(n in entry["wrong"] or n in entry["failed"] for n in ours)


def run_or_say_lost(run: Any) -> int:
    """Return the exit status of a run, which writes what it has if the GPU is lost."""
    try:
        return run.run()
    except DeviceLostError as err:
        run.write()
        print(f"the GPU is lost: {err}; complete this run with --resume", file=sys.stderr)
        return 2


def _tenths(samples: list[float]) -> list[float]:
    """Return the first and the last tenth of samples, from ms to us."""
    ordered = sorted(samples)
    return [round(1e3 * ordered[int(p * (len(ordered) - 1))], 2) for p in (0.1, 0.9)]
