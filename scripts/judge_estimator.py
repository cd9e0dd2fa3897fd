"""The estimator against measurement on an NVIDIA GPU: are its first choices the fastest?

    python scripts/judge_estimator.py --sizes 8b --seconds 500
    python scripts/judge_estimator.py --sizes 8b --resume DATE-judge_estimator.json
    python scripts/judge_estimator.py --from DATE-judge_estimator.json   # today's model, no GPU;
                                                 # writes under the date of the timings

For each case and number of rows all feasible plans (a sample where there are more than --most, with
the choice and the ten first by prediction) are compiled for symbolic rows, compared with float64,
captured into CUDA graphs and timed in turn, L2 flushed before each sample.  Times include the
launch.  The exit status is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _judgement as judgement
import _judgement_report as report
import _record
from _judgement import CASES, Group
from _matmul_cases import DTYPES, SIZES, Chain
from _report import plan_words

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rows", type=int, nargs="+", default=list(judgement.ROWS))
    parser.add_argument("--dtype", default="float16", choices=DTYPES)
    parser.add_argument("--target", default="h200", help="the device that the model is asked about")
    parser.add_argument("--most", type=int, default=96, help="plans to time for a number of rows")
    parser.add_argument("--seconds", type=float, help="start nothing after so many seconds")
    parser.add_argument("--resume", type=Path, help="JSON of an earlier run to complete")
    parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="judge it again")
    parser.add_argument("--note", help="with --from: what a reader must know, kept in the record")
    parser.add_argument("--results", type=Path, default=_record.RESULTS, help="directory to write")
    return parser.parse_args(argv)


class Run:
    """One run on the GPU; torch and what needs it are imported here."""

    def __init__(self, args: argparse.Namespace) -> None:
        import _gpu_timing
        import _matmul_torch
        import _plan_module
        import torch

        from relax_fusion.target import device_of, make_target

        if not torch.cuda.is_available():
            raise SystemExit("judge_estimator needs an NVIDIA GPU; --from FILE.json does not")
        self.args, self.torch = args, torch
        self.timing, self.peers, self.modules = _gpu_timing, _matmul_torch, _plan_module
        self.began = time.monotonic()
        self.target = make_target(args.target)
        self.dev = device_of(self.target)
        earlier = judgement.load(args.resume) if args.resume else []
        self.groups = {g.key: g for g in earlier if g.dtype == args.dtype and g.plans}
        self.judgements: dict[Any, judgement.Judgement] = {}
        self.sampler = self.timing.Sampler()
        self.record: dict[str, Any] = {
            **_record.facts(),
            "gpu": torch.cuda.get_device_name(),
            "target": args.target,
            "dtype": args.dtype,
            **self.timing.ceilings(self.sampler),
            "what": "Median time in ms of a chain by plan; CUDA graph replays through the VM, L2 "
            "flushed by reading, launch included. Plans of a group were timed in one run, in turn.",
        }

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def late(self) -> bool:
        return self.args.seconds is not None and self.elapsed() > self.args.seconds

    def run(self) -> int:
        """Time everything; return the exit status."""
        for size in self.args.sizes:
            for case in self.args.cases:
                chain = Chain(case, size)
                rows = [r for r in self.args.rows if (size, case, r) not in self.groups]
                if rows and not self.late():
                    self.chain(chain, rows)
        if self.late():
            print(f"stopped after {self.elapsed():.0f} s; complete it with --resume")
        self.write()
        if self.judged():
            print(report.summary(self.judged()))
        bad = [g for g in self.groups.values() if g.wrong or g.failed]
        for g in bad:
            print(f"{g.name}: {len(g.wrong)} plans wrong, {len(g.failed)} failed")
        return int(bool(bad))

    def chain(self, chain: Chain, all_rows: list[int]) -> None:
        """Compile the plans of all numbers of rows together, then time them."""
        dtype, most = self.args.dtype, self.args.most
        uppers = judgement.range_uppers(chain, dtype, self.dev)
        ranges: dict[Any, list[int | None]] = {}
        wanted = {}
        for rows in all_rows:
            wanted[rows] = judgement.selected(chain, rows, dtype, self.dev, most)
            upper = next(u for u in uppers if u is None or rows <= u)
            for plan in wanted[rows][0]:
                ranges.setdefault(plan, []).append(upper)
        began = self.elapsed()
        work = judgement.workload(chain, None, dtype)
        compiled, failed = self.modules.compile_plans(work, ranges, self.target)
        took = self.elapsed() - began
        print(f"{chain.size} {chain.case}: {len(compiled)} plans compiled in {took:.0f} s")
        weights = self.peers.Weights(chain, dtype, self.timing.DEVICE)
        machines: dict[int, Any] = {}
        for rows in all_rows:
            if self.late():
                return
            plans, feasible = wanted[rows]
            group = Group(chain, rows, dtype, feasible=feasible)
            group.failed = [kept(p, failed[p]) for p in plans if p in failed]
            calls = {p: (machines, *compiled[p]) for p in plans if p in compiled}
            try:
                self.time(group, self.peers.Problem(weights, rows), calls)
            except Exception as err:
                group.failed.append({"plan": "all", "why": _sentence(err)})
                self.torch.cuda.synchronize()  # raises, and ends the run, if the GPU is lost
            self.torch.cuda.empty_cache()
            self.groups[group.key] = group
            self.say(group)
            self.write()

    def time(self, group: Group, problem: Any, compiled: dict[Any, tuple[Any, ...]]) -> None:
        """Check and time the plans of a group."""
        reference = problem.reference()
        eager = self.timing.error_of(problem.eager(), reference)
        allowed = self.timing.allowed_error(eager, group.dtype)
        calls = {}
        for plan, (machines, executable, name) in compiled.items():
            try:
                call = self.timing.Call(function_of(machines, executable, name, problem))
                error = self.timing.error_of(call.checked_result(), reference)
            except Exception as err:
                group.failed.append(kept(plan, _sentence(err)))
                self.torch.cuda.synchronize()
                continue
            if error <= allowed:
                calls[plan] = call
            else:
                group.wrong.append(kept(plan, f"error {error:.2e}, allowed {allowed:.1e}"))
        del reference
        samples = self.sampler.sample_ms({p: call.launch for p, call in calls.items()})
        group.plans = list(samples)
        group.ms = [round(statistics.median(s), 6) for s in samples.values()]

    def say(self, group: Group) -> None:
        """Print a group in one line."""
        text = f"{group.name}: {len(group.plans)} plans"
        if group.plans:
            j = self.judged()[-1][1]
            text += f", best {1e3 * group.ms[j.best]:.1f} us {plan_words(group.plans[j.best])}"
            text += f", regret {j.regret:.1%} {plan_words(group.plans[j.chosen])}"
            text += f", table {j.table_regret:.1%}, rank {j.correlation:.3f}, {j.choose_ms:.0f} ms"
        problems = [*group.wrong, *group.failed]
        text += "".join(f"; {p['plan']}: {p['why'][:100]}" for p in problems[:2])
        print(text, flush=True)

    def judged(self) -> judgement.Judged:
        """Judge the groups that have timings, each once."""
        groups = [g for g in self.groups.values() if g.plans]
        for group in groups:
            if group.key not in self.judgements:
                self.judgements[group.key] = judgement.judge(group, self.dev)
        return [(group, self.judgements[group.key]) for group in groups]

    def write(self) -> None:
        """Write what there is so far."""
        write(self.record, list(self.groups.values()), self.judged(), self.args.results)


def write(
    facts: dict[str, Any], groups: list[Group], judged: judgement.Judged, directory: Path
) -> None:
    """Write the groups and how the model fares, with the facts of the run that timed them."""
    record = {k: v for k, v in facts.items() if k not in ("overall", "groups")}
    text = f"{record['gpu']}, {record['dtype']}. {record['what']}\n\n"
    if "note" in record:
        text += f"{record['note']}\n\n"
    if "overall_when_timed" in record:
        text += report.earlier(record["overall_when_timed"]) + "\n\n"
    if judged:
        record["overall"] = report.overall(judged)
        text += report.markdown(groups, judged)
    record["groups"] = [g.to_json() for g in groups]
    kind = "" if record["dtype"] == "float16" else f"-{record['dtype']}"
    _record.write(f"judge_estimator{kind}", record, text, directory)


def function_of(
    machines: dict[int, Any], executable: Any, name: str, problem: Any
) -> Callable[[], Any]:
    """Return the call of a function of a module on the tensors of a problem."""
    import tvm
    from tvm import relax

    tensors, parameters = dict(problem.inputs), problem.weights.by_name
    order = [tensors.pop("x"), *parameters.values(), *tensors.values()]
    args = [tvm.runtime.from_dlpack(t) for t in order]
    if id(executable) not in machines:  # to make one takes a C compiler
        machines[id(executable)] = relax.VirtualMachine(executable, args[0].device)
    function = machines[id(executable)][name]
    return lambda: function(*args)


def kept(plan: Any, why: str) -> dict[str, Any]:
    """Return what is stored of a plan that has no time."""
    return {"plan": plan_words(plan), "why": why}


def judge_stored(path: Path, args: argparse.Namespace) -> int:
    """Judge the timings of a file with the model as it is now, and write that.

    Date, machine and versions stay those of the timings; what the model of then reached is kept.
    """
    from relax_fusion.target import device_of, make_target

    groups = judgement.load(path)
    facts = json.loads(path.read_text(encoding="utf-8"))
    judged = judgement.judge_all(groups, device_of(make_target(args.target)))
    if not judged:
        raise SystemExit(f"{path} holds no timings")
    if "overall" in facts:
        facts.setdefault("overall_when_timed", facts["overall"])
    if args.note:
        facts["note"] = args.note
    write(facts, groups, judged, args.results)
    print(report.summary(judged))
    return 0


def _sentence(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"


def main() -> int:
    args = arguments()
    return judge_stored(args.stored, args) if args.stored else Run(args).run()


if __name__ == "__main__":
    raise SystemExit(main())
