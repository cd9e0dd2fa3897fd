"""Fuzz the fusing passes for longer than CI does, and keep the statistics.

    python scripts/fuzz.py --graphs 2000 --seed 7

Prints how many chains were fused by pass and spelling and why others were not, and writes
``benchmarks/results/fuzz_<date>.json``.  Exit status 1 if a program went wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fuzz import campaign, check  # noqa: E402


def record(found: check.Findings, graphs: int, seed: int, seconds: float) -> dict[str, Any]:
    """Return the statistics of a campaign as JSON data."""
    return {
        "graphs": found.graphs,
        "asked": graphs,
        "seed": seed,
        "seconds": round(seconds, 1),
        "runs": found.runs,
        "dynamic_graphs": found.dynamic,
        "graphs_with_a_fusion": found.fused_graphs,
        "dtypes": dict(found.dtypes),
        "kernels": dict(found.passes()),
        "spellings": {" / ".join(k): n for k, n in found.spellings.most_common()},
        "declines": {" / ".join(k): n for k, n in found.declines.most_common()},
        "failures": [str(f) for f in found.failures],
    }


def show(data: dict[str, Any]) -> str:
    """Return the statistics as text."""
    lines = [f"{data['graphs']} graphs, {data['dynamic_graphs']} dynamic, {data['seconds']} s"]
    for title in ("kernels", "spellings", "declines"):
        lines += [f"\n{title}:", *(f"{n:6}  {name}" for name, n in data[title].items())]
    return "\n".join([*lines, f"\nfailures: {len(data['failures'])}", *data["failures"]])


def main() -> int:
    """Run a campaign."""
    parser = argparse.ArgumentParser(description="differential fuzzing of the fusing passes")
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    start = time.monotonic()

    def progress(found: check.Findings) -> None:
        print(
            f"\r{found.graphs}/{args.graphs} graphs, {sum(found.spellings.values())} kernels, "
            f"{len(found.failures)} failures",
            end="",
            file=sys.stderr,
            flush=True,
        )

    found = campaign.run(args.graphs, args.seed, progress)
    print(file=sys.stderr)
    data = record(found, args.graphs, args.seed, time.monotonic() - start)
    print(show(data))
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"fuzz_{datetime.date.today().isoformat()}.json"
    (args.out / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
