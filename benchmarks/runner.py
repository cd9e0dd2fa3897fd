"""What all benchmarks share: options, one case after the other, records, resuming, exit status."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import recording, report
from benchmarks.recording import markdown_table
from benchmarks.report import Verdict
from benchmarks.sessions import SESSIONS, DeviceLostError, sentence

Entry = dict[str, Any]


class Suite:
    """A benchmark: its options, cases and contenders, how a case is measured and reported.

    It is made of the arguments alone.  What a device is needed for is imported in `begin` or later,
    so that records can be drawn, merged and judged anywhere.

    Attributes
    ----------
    name : str
        Of the files, without the date and what is not `plain`.
    key : tuple of str
        The fields of an entry that tell it from others.
    device : {"cpu", "gpu"}
        Where it runs.
    cases, axes : tuple of str
        What ``--cases`` (the first of `case_options`, the others are older names) can be; the
        arguments, lists, whose product is what there is to measure.
    contenders, usual, ours : tuple of str
        Who can be timed; who is unless others are asked for; whose wrong results fail a run.
    dtypes : tuple of str
        The first is the default.
    plain : dict
        The kind of a run that is not mentioned in its files' names.
    has_target, has_picture, must_reach : bool
        Whether there is ``--target``, ``--plot``; whether a run fails that misses a target.
    head : tuple of str
        Of the table, if there is but one.
    """

    name, device = "", "cpu"
    key: tuple[str, ...] = ("case",)
    cases: tuple[str, ...] = ()
    axes, case_options = ("cases",), ("--cases",)
    contenders: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    ours: tuple[str, ...] = ("ours",)
    dtypes: tuple[str, ...] = ()
    plain: Mapping[str, Any] = {}
    has_target, has_picture, must_reach = True, False, False
    head: tuple[str, ...] = ()
    session: Any

    def __init__(self, args: Namespace) -> None:
        self.args = args

    # --- the command line ------------------------------------------------------------------

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        """Add the options that only this suite has."""

    @classmethod
    def check(cls, parser: ArgumentParser, args: Namespace) -> None:
        """End with the usage if arguments do not go together."""

    @classmethod
    def arguments(cls, argv: Sequence[str] | None = None) -> Namespace:
        """Read a command line."""
        verb, _, name = cls.name.partition("_")
        parser = ArgumentParser(
            prog=f"python -m benchmarks {'run' if verb == 'bench' else verb} {name}",
            description=sys.modules[cls.__module__].__doc__,
            formatter_class=RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        if cls.cases:
            add(*cls.case_options, dest="cases", nargs="+", action="extend", choices=cls.cases)
        cls.options(parser)
        if cls.contenders:
            usual = f"default: {' '.join(cls.usual)}"
            add("--contenders", nargs="+", choices=cls.contenders, help=usual)
        if cls.dtypes:
            add("--dtype", default=cls.dtypes[0], choices=cls.dtypes)
        if cls.has_target:
            add("--target", default="h200", help="what ours is compiled for (default: h200)")
        add("--seconds", type=float, help="start no case after so many seconds")
        add("--resume", type=Path, metavar="JSON", help="an earlier run to complete")
        directory = "directory to write"
        add("--results", "--output", type=Path, default=recording.RESULTS, help=directory)
        add("--merge", type=Path, nargs="+", metavar="JSON", help="make one record of several runs")
        if cls.has_picture:
            add("--plot", type=Path, metavar="JSON", help="only draw the picture of a run")
        args = parser.parse_args(argv)
        if cls.cases:
            args.cases = args.cases or list(cls.cases)
        cls.check(parser, args)
        return args

    @classmethod
    def of(cls, args: Namespace) -> Suite:
        """Return the suite that the arguments ask for."""
        return cls(args)

    def without_a_run(self) -> int | None:
        """Do what is asked for if that takes no run, and return the exit status."""
        return None

    # --- what is measured ------------------------------------------------------------------

    def kind(self) -> Entry:
        """Return the facts that a run to be resumed must have in common with this one."""
        return {name: getattr(self.args, name) for name in self.plain}

    def stem(self, record: Entry) -> str:
        """Return the name of the files of a record, without the date."""
        kinds = (str(record[n]) for n, plain in self.plain.items() if record[n] != plain)
        return "-".join([self.name, *kinds])

    def begin(self) -> None:
        """Import and make what the session needs."""

    def items(self) -> Iterable[Any]:
        """Return what there is to measure, important ones first."""
        return product(*(getattr(self.args, axis) for axis in self.axes))

    def facts(self, item: Any) -> Entry:
        """Return what is known of an item before it is measured, its key at least."""
        return dict(zip(self.key, item, strict=True))

    def absent(self, item: Any) -> Collection[str]:
        """Return the contenders that an item does not have."""
        return ()

    def asked(self, item: Any) -> list[str]:
        """Return who is timed."""
        asked = set(self.args.contenders or self.usual) if self.contenders else set()
        return [n for n in self.contenders if n in asked and n not in self.absent(item)]

    def prepare(self, items: Sequence[Any]) -> None:
        """Do once what all items need, such as to compile in parallel."""

    def measured(self, item: Any) -> Entry:
        """Measure an item."""
        raise NotImplementedError

    # --- what is said ----------------------------------------------------------------------

    def key_of(self, entry: Entry) -> tuple[Any, ...]:
        return tuple(entry[name] for name in self.key)

    def name_of(self, entry: Entry) -> str:
        return " ".join(map(str, self.key_of(entry)))

    def is_complete(self, entry: Entry, item: Any) -> bool:
        """Tell whether everybody who is asked for was timed."""
        return "error" not in entry and set(self.asked(item)) <= set(entry.get("us", ()))

    def is_bad(self, entry: Entry) -> bool:
        """Tell whether something of ours gave a wrong result or none."""
        lost = {*entry.get("wrong", ()), *entry.get("failed", ())}
        return "error" in entry or not lost.isdisjoint(self.ours)

    def intro(self, record: Entry) -> str:
        """Return what a reader of the table must know."""
        return str(record["gpu"])

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        """Return the cells of the table, below `head`."""
        raise NotImplementedError

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        """Return everything that an entry is to reach and that was timed."""
        return []

    def verdicts(self, record: Entry) -> list[Verdict]:
        """Return everything that is to be reached and was timed."""
        return [v for e in done(record) for v in self.goals(e, record)]

    def line(self, entry: Entry, record: Entry) -> str:
        """Return an entry in one line."""
        if "error" in entry:
            return f"{self.name_of(entry)}: FAILED {entry['error']}"
        return "  ".join(self.row(entry, record)) + report.what_happened(entry)

    def markdown(self, record: Entry) -> str:
        """Return a record as tables."""
        rows = [self.row(e, record) for e in done(record)]
        found = self.verdicts(record)
        parts = [self.intro(record), markdown_table([self.head, *rows])]
        parts += [report.targets_table(found)] if found else []
        parts.append(report.problems(record["cases"], self.name_of, lambda e, n: "wrong"))
        return "\n\n".join(part for part in parts if part)

    def summary(self, record: Entry) -> str:
        """Return what was reached and what was not."""
        found = self.verdicts(record)
        return report.summary(found) if found else ""

    def plot(self, record: Entry, path: Path) -> None:
        """Draw the picture of a record.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """


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


def done(record: Entry) -> list[Entry]:
    """Return the entries of what could be measured."""
    return [e for e in record["cases"] if "error" not in e]


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
        if record.get(name) != wanted:
            raise SystemExit(f"--resume: {name} is {record.get(name)!r} there, {wanted!r} here")
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
        found = {record[name] for record in records}
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
