"""Runs a suite: one case after the other, its record, resuming, merging, exit status."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.report import Entry
from benchmarks.sessions import SESSIONS, DeviceLostError, sentence
from benchmarks.suite import Suite


class Runner:
    """One run of a suite, which is written down after every case."""

    def __init__(self, suite: Suite) -> None:
        self.suite, self.args = suite, suite.args
        self.began = time.monotonic()
        self.entries = resumed(suite)
        suite.session = SESSIONS[suite.device](suite.name)
        suite.begin()
        facts = {**recording.facts(), **suite.session.facts, **suite.kind()}
        self.record = {**facts, "target": self.args.target} if suite.has_target else facts

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> int:
        """Measure everything and return the exit status; keep what there is if the GPU is lost."""
        try:
            self.measure()
        except DeviceLostError as err:
            self.write()
            print(f"the GPU is lost: {err}; complete this run with --resume", file=sys.stderr)
            return 2
        return conclude(self.suite, self.write())

    def measure(self) -> None:
        """Measure one case after the other, as long as there is time."""
        suite = self.suite
        keyed = [(suite.key_of(suite.facts(item)), item) for item in suite.items()]
        todo = [
            item
            for key, item in keyed
            if key not in self.entries or not suite.is_complete(self.entries[key], item)
        ]
        suite.prepare(todo)
        for item in todo:
            if self.args.seconds is not None and self.elapsed() > self.args.seconds:
                print(f"stopped after {self.elapsed():.0f} s; complete it with --resume")
                break
            entry = self.entry(item)
            self.entries[suite.key_of(entry)] = entry
            self.write()
            print(suite.line(entry, self.record), flush=True)

    def entry(self, item: Any) -> Entry:
        """Measure one case; what fails is part of the entry."""
        suite, began = self.suite, self.elapsed()
        entry = suite.facts(item)
        try:
            entry |= suite.measured(item)
        except DeviceLostError:
            raise
        except Exception as err:
            suite.session.check(err)
            entry["error"] = sentence(err)
        suite.session.free()
        return entry | {"wall_s": round(self.elapsed() - began, 1)}

    def write(self) -> Entry:
        """Write what there is so far."""
        self.record |= self.suite.session.facts
        self.record["cases"] = list(self.entries.values())
        write(self.suite, self.record)
        return self.record


def main(kind: type[Suite], argv: Sequence[str] | None = None) -> int:
    """Do what a command line asks of a suite; return the exit status."""
    args = kind.arguments(argv)
    suite = kind.of(args)
    if suite.has_picture and args.plot is not None:
        return 0 if draw(suite, args.plot) else 1
    if args.merge:
        return conclude(suite, merged(suite, args.merge))
    status = suite.without_a_run()
    return Runner(suite).run() if status is None else status


def write(suite: Suite, record: Entry) -> Path:
    """Write a record and its tables; return the JSON."""
    text = suite.markdown(record)
    return recording.write(suite.stem(record), record, text, suite.args.results)[0]


def conclude(suite: Suite, record: Entry) -> int:
    """Write and draw a record, say what was reached and return the exit status."""
    path = write(suite, record)
    print(suite.summary(record) or suite.markdown(record))
    if suite.has_picture:
        draw(suite, path)
    print(f"wrote {path}", file=sys.stderr)
    bad = [e for e in record["cases"] if suite.is_bad(e)]
    for e in bad:
        print("WRONG OR FAILED", suite.name_of(e))
    missed = suite.must_reach and any(v[3] < v[2] for v in suite.verdicts(record))
    return int(bool(bad) or missed)


def read(path: Path) -> Entry:
    """Return the record of a file; cases were groups in older ones."""
    record = recording.results(path, "cases", "groups")
    return {"cases": record.pop("groups", None), **record}


def draw(suite: Suite, path: Path) -> bool:
    """Draw the picture of a record beside it; say so if that cannot be done here."""
    picture = path.with_suffix(".svg")
    try:
        suite.plot(read(path), picture)
    except ImportError:
        print(f"no matplotlib here: python -m benchmarks plot {path.name} elsewhere")
        return False
    if picture.exists():
        print(picture)
    return True


def resumed(suite: Suite) -> dict[tuple[Any, ...], Entry]:
    """Return the entries of the run to resume, by key.

    Raises
    ------
    SystemExit
        If that run was of another kind.
    """
    if suite.args.resume is None:
        return {}
    record = read(suite.args.resume)
    for name, wanted in suite.kind().items():
        there = record.get(name, suite.plain.get(name))
        if there != wanted:
            raise SystemExit(f"--resume: {name} is {there!r} there, {wanted!r} here")
    return {suite.key_of(e): e for e in record["cases"]}


def merged(suite: Suite, paths: Iterable[Path]) -> Entry:
    """Return the record of several runs in one; an entry comes from one run as a whole.

    Of entries of one key it is the one with more contenders, of such the last.

    Raises
    ------
    SystemExit
        If the runs differ in their kind.
    """
    records = [read(path) for path in paths]
    first = records[0]
    for name in suite.kind():
        found = {record.get(name, suite.plain.get(name)) for record in records}
        if len(found) > 1:
            raise SystemExit(f"--merge: {name} differs: {', '.join(sorted(found))}")
    entries: dict[tuple[Any, ...], Entry] = {}
    for entry in (e for record in records for e in record["cases"]):
        before = entries.get(suite.key_of(entry), {})
        if len(entry.get("us", ())) >= len(before.get("us", ())):
            entries[suite.key_of(entry)] = entry
    facts = ("date", "gpu", "copy_tb_s", "read_tb_s", "launch_us")
    runs = [{name: record[name] for name in facts if name in record} for record in records]
    return {**first, "runs": runs, "cases": list(entries.values())}
