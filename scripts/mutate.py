"""Make mistakes in the matchers and see whether validation and tests find them.

    python scripts/mutate.py --mutants 300 --seed 1 --jobs 2 --output FILE.json
    python scripts/mutate.py --again FILE.json

Each mutant is one small change of a module.  The tests that run the changed line run on it, those
first that caught mutants of that module before, then the cheapest, until one fails.  ``--again``
runs the survivors of a results file once more, those without a reason (``why``) there.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from _mutant_tests import Failure, Known, baseline, tested  # noqa: E402
from _mutants import Mutant, mutants, sample  # noqa: E402

from benchmarks.arguments import at_least, minutes, results_file  # noqa: E402
from benchmarks.recording import facts, results, write_results  # noqa: E402
from tests.fuzz.processes import in_processes  # noqa: E402

PATHS = ("relax_fusion/matching", "relax_fusion/passes")
TESTS = ("tests/matching", "tests/passes")
PRELOADED = ("tvm", "tvm.relax", "tvm.script", "torch", "transformers", "onnx", "hypothesis")
"""What takes long to import, and is not mutated."""
FIRST = 40
"""Tests that run before the files of the others are even imported."""
WALL_SECONDS = 1800
Row = dict[str, Any]


def main() -> int:
    args = _arguments()
    record = results(args.again, "mutants") if args.again else None
    if record:
        args.paths = record["paths"]
    for name in filter(importlib.util.find_spec, PRELOADED):
        importlib.import_module(name)
    gc.freeze()  # forks share what is imported
    began = time.monotonic()
    chosen = _survivors(record) if record else sample(_all(args.paths), args.mutants, args.seed)
    known, broken = _baseline(args)
    print(f"{len(chosen)} mutants, {len(known)} tests; failing anyway: {broken}", flush=True)
    ends = time.monotonic() + 60 * args.minutes
    rows = Campaign(known, ends, args.seconds).run(chosen, args.jobs)
    if record is None:
        command = f"--mutants {args.mutants} --seed {args.seed} --jobs {args.jobs}"
        record = {**facts(), "command": f"python scripts/mutate.py {command}", "mutants": rows}
        record |= {"paths": args.paths, "tests": args.tests, "found": len(_all(args.paths))}
    else:
        _update(record, rows)
        record["again"] = [*record.get("again", ()), f"--only '{args.only}': {len(rows)} survivors"]
    record["minutes"] = round(record.get("minutes", 0) + (time.monotonic() - began) / 60, 1)
    spent = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60
    record["cpu_minutes"] = round(record.get("cpu_minutes", 0) + spent, 1)
    print(text := markdown(record))
    output = args.output or args.again
    if output is not None:
        write_results(output, record, f"# {output.stem}\n\n{text}\n")
    return int(any(r["caught"] is None and not r["why"] for r in record["mutants"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=list(PATHS), help="files or folders to change")
    parser.add_argument("--mutants", type=at_least(0), default=300)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--jobs", type=at_least(1), default=1)
    parser.add_argument("--minutes", type=minutes, default=60, help="none is begun after that")
    parser.add_argument("--seconds", type=minutes, default=60, help="of tests for each mutant")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="files or folders")
    parser.add_argument("--only", default="", help="tests of these names, as for pytest's -k")
    parser.add_argument("--compiling", action="store_true", help="and tests that compile modules")
    parser.add_argument("--output", type=results_file, help="JSON; Markdown is written beside it")
    parser.add_argument(
        "--again", type=results_file, help="a results file whose survivors to run again"
    )
    args = parser.parse_args()
    for path in (*args.paths, *(test.partition("::")[0] for test in args.tests)):
        place = (ROOT / path).resolve()
        if not place.is_relative_to(ROOT) or not (place.is_dir() or place.suffix == ".py"):
            parser.error(f"{path} is no module or folder of {ROOT.name}")
        if not place.exists():
            parser.error(f"{path} does not exist")
    return args


def _files(paths: Sequence[str]) -> list[Path]:
    """Return the modules in `paths`."""
    roots = [ROOT / path for path in paths]
    return [f for r in roots for f in (sorted(r.rglob("*.py")) if r.is_dir() else [r])]


def _all(paths: Sequence[str]) -> list[Mutant]:
    return [m for f in _files(paths) for m in mutants(f, str(f.relative_to(ROOT)))]


def _baseline(args: argparse.Namespace) -> tuple[list[Known], list[str]]:
    """Run the tests in a process of their own, as here the package is not to be imported."""
    watched = {str(f) for f in _files(args.paths)}
    work = partial(baseline, args.tests, watched, args.only)
    found = next(in_processes(work, [args.compiling], 3600))[1]
    if isinstance(found, str):
        raise SystemExit(f"the tests do not run: {found}")
    return found


class Campaign:
    """Mutants one after the other, with what is learnt about the tests on the way."""

    def __init__(self, known: Sequence[Known], ends: float, seconds: float) -> None:
        self.known, self.ends, self.seconds = known, ends, seconds
        self.kills: Counter[tuple[str, str]] = Counter()

    def run(self, chosen: Sequence[Mutant], jobs: int) -> list[Row]:
        """Test mutants; those that the time was too short for are left out."""
        rows: list[Row] = []
        for mutant, found in in_processes(self._tested, chosen, WALL_SECONDS, jobs):
            if found == "":
                continue
            if isinstance(found, Failure):
                self.kills[mutant.path, found.node] += 1
            rows.append(_row(mutant, found))
            verdict = rows[-1]["caught"] or "SURVIVES"
            print(f"{len(rows)} {mutant.path}:{mutant.line} {mutant.kind}: {verdict}", flush=True)
        return rows

    def _tested(self, mutant: Mutant) -> Failure | str | None:
        if time.monotonic() > self.ends:
            return ""
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        return tested(mutant.path, mutant.source(source), self.stages(mutant))

    def stages(self, mutant: Mutant) -> list[dict[str, float]]:
        """Return the tests that run a mutant's line: likely ones, other quick ones, the rest."""
        covering = [k for k in self.known if runs(k, mutant)]
        alone = sorted(
            (k for k in covering if not k.shares or self.kills[mutant.path, k.node]),
            key=lambda k: (-self.kills[mutant.path, k.node], k.seconds),
        )
        together = sorted((k for k in covering if k not in alone), key=lambda k: k.node)
        alone = _within(alone, self.seconds)
        stages = (alone[:FIRST], alone[FIRST:], together)
        return [{k.node: k.seconds for k in stage} for stage in stages]


def _within(tests: Sequence[Known], seconds: float) -> list[Known]:
    """Return the first tests, as many as usually take so long together."""
    ends = itertools.accumulate(test.seconds for test in tests)
    return [test for test, end in zip(tests, ends, strict=True) if end <= seconds]


def runs(test: Known, mutant: Mutant) -> bool:
    """Tell whether a test runs the line of a mutant, or its module where it runs at import."""
    lines = test.lines.get(str(ROOT / mutant.path), set())
    if not mutant.function:
        return bool(lines)
    return any(n in lines for n in range(mutant.line, mutant.last + 1))


def _row(mutant: Mutant, found: Failure | str | None) -> Row:
    before, after = mutant.diff((ROOT / mutant.path).read_text(encoding="utf-8"))
    names = ("path", "line", "function", "kind")
    row: Row = {name: getattr(mutant, name) for name in names}
    row |= {"before": before, "after": after, "caught": None, "by": "", "why": ""}
    if isinstance(found, Failure):
        level = "validation" if found.error == "EquivalenceError" else "test"
        return row | {"caught": level, "by": found.node, "error": found.error}
    if found is not None:
        return row | {"caught": "crash or time", "by": found}
    return row


def _survivors(record: Row) -> list[Mutant]:
    """Find the survivors without a reason in the modules as they are now."""
    wanted = [_key(r) for r in record["mutants"] if r["caught"] is None and not r["why"]]
    there = {_key(_row(m, None)): m for m in _all(record["paths"])}
    return [there[key] for key in wanted if key in there]


def _update(record: Row, rows: Sequence[Row]) -> None:
    new = {_key(row): row for row in rows}
    record["mutants"] = [new.get(_key(row), row) for row in record["mutants"]]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[n]) for n in ("path", "line", "function", "kind", "before", "after"))


def markdown(record: Row) -> str:
    """Write the results down for readers."""
    rows = record["mutants"]
    caught = Counter(r["caught"] for r in rows if r["caught"])
    share = sum(caught.values()) / max(len(rows), 1)
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    levels = ", ".join(f"{n} by {level}" for level, n in caught.most_common())
    text = [
        f"{record['cpu']}, {record['cores']} cores; Python {record['python']}, {versions}.\n",
        f"`{record['command']}`: {record['minutes']} minutes, {record['cpu_minutes']} of the "
        f"processor. {len(rows)} of {record['found']} possible mutants of "
        f"{', '.join(record['paths'])}, with {', '.join(record['tests'])}.\n",
        *(f"In turns: {once}.\n" for once in record.get("again", ())),
        f"**{sum(caught.values())} of {len(rows)} caught ({share:.1%})**: {levels}.\n",
        "| kind | mutants | caught |\n|---|---|---|",
    ]
    for kind, count in sorted(Counter(r["kind"] for r in rows).items()):
        mine = sum(r["kind"] == kind and r["caught"] is not None for r in rows)
        text.append(f"| {kind} | {count} | {mine} |")
    text.append("\n## Survivors\n")
    for r in (r for r in rows if r["caught"] is None):
        text.append(f"{r['path']}:{r['line']}, {r['function'] or 'module'} ({r['kind']}): ")
        text.append(f"{r['why'] or 'no test finds it'}\n")
        text.append(f"```diff\n- {r['before']}\n+ {r['after']}\n```\n")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
