"""What a benchmark says of itself; `benchmarks.runner` does the rest."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import recording, report
from benchmarks.recording import markdown_table
from benchmarks.report import Entry, Verdict


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
        kinds = {n: record.get(n, plain) for n, plain in self.plain.items()}
        told = (str(kinds[n]) for n, plain in self.plain.items() if kinds[n] != plain)
        return "-".join([self.name, *told])

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


def done(record: Entry) -> list[Entry]:
    """Return the entries of what could be measured."""
    return [e for e in record["cases"] if "error" not in e]
