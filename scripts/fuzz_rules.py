"""Try every schedule rule on every Relax operator that TVM legalises.

    python scripts/fuzz_rules.py --output benchmarks/results/2026-11-21-fuzz_rules.json

Each operator is called in float32, float16 and bfloat16, and with symbolic sizes.  Its PrimFuncs
go through all rules, for this CPU and for NVIDIA GPUs (none is needed: kernels of the first are
compiled to source).  What a rule schedules for the CPU must compute what TVM's own loops do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tvm.target import Target

from relax_fusion import host_target, make_target
from tests.fuzz.legalised import NOT_LEGALISED_ALONE, UNTRIED, calls, covered, registered
from tests.fuzz.rules import Job, Outcome, isolated

DTYPES = ("float32", "float16", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file for the results, as JSON")
    parser.add_argument("--only", default="", help="operators whose name begins with this")
    parser.add_argument("--seconds", type=int, default=300, help="limit for one operator")
    args = parser.parse_args()
    targets = {"host": host_target(), "sm_90a": make_target("h200"), "sm_80": make_target("a100")}
    began = time.time()
    outcomes: dict[Job, Outcome] = {}
    jobs = [job for job in all_jobs() if job[0].startswith(args.only)]
    for job, outcome in isolated(jobs, list(targets.values()), args.seconds):
        outcomes[job] = outcome
        for wrong in outcome.wrong:
            print(f"{label(job)}: {wrong}", flush=True)
    result = summary(outcomes, targets, time.time() - began)
    print(json.dumps({k: v for k, v in result.items() if k != "skipped"}, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(result["wrong"]))


def all_jobs() -> list[Job]:
    """Return every call: with numbers for its sizes in each dtype, with symbolic ones in the first.

    Calls without floats, and without symbolic sizes, have fewer variants.
    """
    jobs: list[Job] = []
    for name, call in calls().items():
        jobs += [(name, call, dtype, False) for dtype in (DTYPES if call.floats else DTYPES[:1])]
        if any(isinstance(size, str) for shape, _ in call.inputs for size in shape):
            jobs.append((name, call, DTYPES[0], True))
    return jobs


def label(job: Job) -> str:
    name, _, dtype, symbolic = job
    return f"{name}, {dtype}, {'symbolic' if symbolic else 'static'}"


def summary(outcomes: dict[Job, Outcome], targets: dict[str, Target], seconds: float) -> dict:
    """Count what the rules did, and list what went wrong."""
    scheduled: Counter[str] = Counter()
    declined: Counter[str] = Counter()
    for outcome in outcomes.values():
        scheduled.update(outcome.scheduled)
        declined.update(outcome.declined)
    return {
        "targets": {name: str(target) for name, target in targets.items()},
        "operators": len(covered()),
        "operators_registered": len(set(registered())),
        "untried": UNTRIED | {f"{prefix}*": "not alone" for prefix in NOT_LEGALISED_ALONE},
        "calls": len(outcomes),
        "functions": sum(o.functions for o in outcomes.values()),
        "scheduled": dict(sorted(scheduled.items())),
        "declined": dict(sorted(declined.items())),
        "skipped": {label(job): o.skipped for job, o in outcomes.items() if o.skipped},
        "wrong": {label(job): o.wrong for job, o in outcomes.items() if o.wrong},
        "seconds": round(seconds),
    }


if __name__ == "__main__":
    main()
