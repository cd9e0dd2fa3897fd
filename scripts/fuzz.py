"""Fuzz what the passes match and what the kernels compute.

    python scripts/fuzz.py --graphs 100000 --workloads 3000 --jobs 2 --minutes 60

Random functions go through all fusing passes: every match is validated, and the whole function is
compared before and after.  Some are compiled by the whole pipeline and by TVM's, and run on arrays
that begin anywhere: ours has to compile what TVM's does, and be as near to the truth.  Random
workloads are compiled for this processor (two of three) or run in Triton's interpreter, by random
plans, and compared with their reference.  The result is written to ``--output``; a file that is
there already is continued behind its last seed.  Exit status 1 if anything failed or a floor was
not reached.

    python scripts/fuzz.py --show 4236 --kinds groups     # its function, made small if it fails
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":  # before TVM is imported: its CUDA fails in processes that are forked
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

from benchmarks.arguments import at_least, minutes, results_file  # noqa: E402
from benchmarks.recording import facts, markdown_table, results, write_results  # noqa: E402
from relax_fusion.errors import Reason  # noqa: E402
from relax_fusion.passes import PATTERNS  # noqa: E402
from tests.fuzz import campaign, compiled, functions, matches, movements  # noqa: E402

FUNCTIONS = ("graphs", "compiled", "groups")
"""Kinds whose seeds are Relax functions."""

MATCHES = 0.02
"""Matches of each pass for each function, at the least."""

DECLINES = {
    **dict.fromkeys((Reason.SHAPE, Reason.ATTRIBUTE, Reason.LAYOUT, Reason.AXIS), 0.01),
    **dict.fromkeys((Reason.SIDE_EFFECT, Reason.MULTI_USE, Reason.LEAKED), 0.005),
    **dict.fromkeys((Reason.DTYPE, Reason.OVERWRITTEN), 0.0005),
    Reason.CYCLE: 0.0001,
    **dict.fromkeys((Reason.MATERIALISED, Reason.VDEVICE, Reason.NOT_PROFITABLE), 0.0002),
}
"""Declines of each reason for each function, at the least.

Of the others, a mismatch is a failure, an overlap needs matches that no two passes of ours make at
once, and a plan that does not fit or a schedule that is missing is no matter of matching."""


class Record:
    """What was run so far, as JSON data."""

    def __init__(self, path: Path):
        self.path = path
        before = results(path, "parts") if path.exists() else {}
        self.data: dict[str, Any] = {**facts(), "commands": [], "parts": {}, **before}

    def next_seed(self, kind: str, first: int) -> int:
        """Return the seed behind the last one that was run."""
        return max([first, *(end for _, end in self.part(kind)["seeds"])])

    def part(self, kind: str) -> dict[str, Any]:
        """Return the counts of graphs, or of the workloads of a back end."""
        empty = {"count": 0, "seeds": [], "cpu_seconds": 0.0, "wall_seconds": 0.0, "failures": []}
        part: dict[str, Any] = self.data["parts"].setdefault(kind, empty)
        return part

    def add(self, kind: str, counts: dict[str, Counter[str] | int], failures: list[str]) -> None:
        """Add what a part of a campaign saw."""
        part = self.part(kind)
        for name, value in counts.items():
            if isinstance(value, int):
                part[name] = part.get(name, 0) + value
            else:
                summed = Counter(part.get(name, {})) + value
                part[name] = dict(summed.most_common())
        part["failures"] += failures

    def ran(self, kind: str, seeds: tuple[int, int], cpu: float, wall: float) -> None:
        """Note which seeds were run, and how long they took."""
        part = self.part(kind)
        ranges = part["seeds"]
        if ranges and ranges[-1][1] == seeds[0]:
            ranges[-1][1] = seeds[1]
        else:
            ranges.append(list(seeds))
        part["cpu_seconds"] = round(part["cpu_seconds"] + cpu, 1)
        part["wall_seconds"] = round(part["wall_seconds"] + wall, 1)

    def missed(self) -> list[str]:
        """Return the floors that were not reached."""
        part = self.data["parts"].get("graphs")
        if part is None:
            return []
        wanted = [(name, MATCHES, part.get("matches", {})) for name in PATTERNS]
        wanted += [(r.value, floor, part.get("declines", {})) for r, floor in DECLINES.items()]
        return [
            f"{name}: {found.get(name, 0)}, at least {int(floor * part['count'])}"
            for name, floor, found in wanted
            if found.get(name, 0) < int(floor * part["count"])  # few functions owe nothing rare
        ]

    def write(self) -> None:
        """Write the data, and beside it tables for people."""
        write_results(self.path, self.data, self.text())

    def text(self) -> str:
        """Return the tables."""
        data = self.data
        installed = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
        lines = [
            f"# Fuzzing, {data['date']}\n",
            f"{data['cpu']}, {data['cores']} cores; Python {data['python']}, {installed}.\n",
            *(f"    {command}" for command in data["commands"]),
        ]
        for kind, part in data["parts"].items():
            lines += ["", f"## {kind}\n", self._summary(part)]
            for name in ("matches", "checked", "declines", "unchecked", "kernels", "skipped"):
                if part.get(name):
                    rows = [(name, "count"), *((k, f"{n:,}") for k, n in part[name].items())]
                    lines += ["", markdown_table(rows)]
            lines += ["", f"Failures: {len(part['failures'])}.", *part["failures"]]
        lines += ["", *(f"- {note}" for note in data.get("notes", ()))]
        floors = self.missed()
        lines += ["", "Floors: " + ("; ".join(floors) if floors else "all reached") + "."]
        return "\n".join(lines) + "\n"

    def _summary(self, part: dict[str, Any]) -> str:
        seeds = ", ".join(f"{first} to {end - 1}" for first, end in part["seeds"])
        compared = f", {part['compared']:,} compared as a whole" if "compared" in part else ""
        spellings = f", {len(part['spellings'])} spellings" if "spellings" in part else ""
        time_taken = f"{part['cpu_seconds']:,.0f} CPU seconds, {part['wall_seconds']:,.0f} s"
        return f"{part['count']:,} run (seeds {seeds}){compared}{spellings}; {time_taken}."


def run(record: Record, kind: str, count: int, args: argparse.Namespace, ends: float) -> None:
    """Run seeds of one kind until they are done or the time is over."""
    first = record.next_seed(kind, args.seed)
    while first < args.seed + count and time.monotonic() < ends:
        size = campaign.SIZES[kind] * args.jobs  # what is written is not lost
        seeds = range(first, min(first + size, args.seed + count))
        cpu, wall = _cpu_seconds(), time.monotonic()
        for found in campaign.parts(kind, seeds, args.jobs):
            counts = {**found.seen, "count": found.count}
            counts |= {"compared": found.compared} if found.compared else {}
            record.add(kind, counts, [str(failure) for failure in found.failures])
        taken = _cpu_seconds() - cpu, time.monotonic() - wall
        record.ran(kind, (seeds.start, seeds.stop), *taken)
        record.write()
        part = record.part(kind)
        print(f"{kind}: {part['count']} run, {len(part['failures'])} failures", flush=True)
        first = seeds.stop


def _cpu_seconds() -> float:
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def show(seed: int, kind: str) -> None:
    """Print the function of a seed, made smaller while it goes wrong in the same way."""
    draw = movements.draw_shuffled if kind == "groups" else functions.draw
    check = matches.check if kind == "graphs" else compiled.check
    print(matches.minimised(draw(seed), seed, check=check).script())
    for failure in campaign.explorer(kind)([seed]).failures:
        print(failure.what)


def main() -> int:
    """Run a campaign."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--graphs", type=at_least(0), default=1000, help="functions at match level")
    parser.add_argument("--workloads", type=at_least(0), default=60, help="kernels that are run")
    parser.add_argument("--compiled", type=at_least(0), default=100, help="functions compiled")
    parser.add_argument(
        "--groups", type=at_least(0), default=100, help="without patterns' operators"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="the first seed")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="processes at a time")
    parser.add_argument("--minutes", type=minutes, default=1e9, help="no part begins later")
    parser.add_argument(
        "--output", type=results_file, default=ROOT / "fuzz.json", help="the result"
    )
    parser.add_argument("--show", type=at_least(0), help="print the function of this seed instead")
    kinds = ("tir", "triton", *FUNCTIONS)
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="what is run")
    args = parser.parse_args()
    if args.show is not None:
        show(args.show, next((k for k in args.kinds if k in FUNCTIONS), "graphs"))
        return 0
    record = Record(args.output)
    said = [a if a != str(args.output) else args.output.name for a in sys.argv[1:]]
    record.data["commands"].append(" ".join(["python", "scripts/fuzz.py", *said]))
    ends = time.monotonic() + 60 * args.minutes
    interpreted = args.workloads // 3
    counts = {"tir": args.workloads - interpreted, "triton": interpreted, "graphs": args.graphs}
    counts |= {"compiled": args.compiled, "groups": args.groups}
    for kind in args.kinds:
        run(record, kind, counts[kind], args, ends)
    missed = record.missed()
    print("\n".join([*missed, f"wrote {args.output}"]))
    return 1 if missed or any(p["failures"] for p in record.data["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
