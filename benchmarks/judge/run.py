"""What judging the estimator shares: plans timed on a GPU group by group, or read from a file."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.judge import judgement, report
from benchmarks.judge.judgement import Group
from benchmarks.report import plan_words
from benchmarks.runner import DeviceLostError, GpuRun, sentence

SubjectOf = Callable[[dict[str, Any]], Any]


def add_arguments(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add what every script of this kind takes."""
    add = parser.add_argument
    add("--dtype", default="float16", choices=dtypes)
    add("--target", default="h200", help="the device that the model is asked about")
    add("--most", type=int, default=96, help="plans to time at a size")
    add("--seconds", type=float, help="start nothing after so many seconds")
    add("--resume", type=Path, help="JSON of an earlier run to complete")
    add("--from", dest="stored", type=Path, metavar="JSON", help="judge it again")
    add("--note", help="with --from: what a reader must know, kept in the record")
    add("--results", type=Path, default=recording.RESULTS, help="directory to write")


class Judge(GpuRun):
    """Times the plans of group after group and judges the model by each.

    Parameters
    ----------
    args : argparse.Namespace
        With what `add_arguments` adds.
    subject_of : callable
        Reads the subject of a stored group.
    """

    without_gpu = "--from"

    def __init__(self, args: argparse.Namespace, subject_of: SubjectOf) -> None:
        from relax_fusion.hardware.target import device_of, make_target

        what = "Median time in ms by plan; CUDA graph replays through the VM, L2 flushed by "
        what += "reading, launch included. Plans of a group were timed in one run, in turn."
        super().__init__(args, {"what": what})
        self.target = make_target(args.target)
        self.dev = device_of(self.target)
        earlier = judgement.load(args.resume, subject_of) if args.resume else []
        self.groups = {g.name: g for g in earlier if g.subject.dtype == args.dtype and g.plans}
        self.judgements: dict[str, judgement.Judgement] = {}

    def add(self, group: Group, measure: Callable[[], None]) -> None:
        """Measure a group, and write what there is; what fails is part of the group."""
        try:
            measure()
        except DeviceLostError:
            raise
        except Exception as err:
            group.failed.append({"plan": "all", "why": sentence(err)})
            self.check_device(err)
        self.torch.cuda.empty_cache()
        self.groups[group.name] = group
        self.say(group)
        self.write()

    def time(
        self,
        group: Group,
        functions: Mapping[Any, Callable[[], Callable[[], Any]]],
        right: Callable[[Any], str],
    ) -> None:
        """Check and time the plans of a group.

        Parameters
        ----------
        group : Group
            Gets the times.
        functions : mapping of TilePlan to callable
            Makes the call of a plan.
        right : callable
            Says what is wrong with a result; nothing if it is right.
        """
        calls = {}
        for plan, function in functions.items():
            try:
                call = self.timing.Call(function())
                why = right(call.checked_result())
            except Exception as err:
                group.failed.append(kept(plan, sentence(err)))
                self.check_device(err)
                continue
            if why:
                group.wrong.append(kept(plan, why))
            else:
                calls[plan] = call
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
            if group.name not in self.judgements:
                self.judgements[group.name] = judgement.judge(group, self.dev)
        return [(group, self.judgements[group.name]) for group in groups]

    def write(self) -> None:
        """Write what there is so far."""
        groups = list(self.groups.values())
        write(self.script, self.record, groups, self.judged(), self.args.results)

    def finish(self) -> int:
        """Say how the model fares; return the exit status."""
        if self.late():
            print(f"stopped after {self.elapsed():.0f} s; complete it with --resume")
        self.write()
        if self.judged():
            print(report.summary(self.judged()))
        bad = [g for g in self.groups.values() if g.wrong or g.failed]
        for g in bad:
            print(f"{g.name}: {len(g.wrong)} plans wrong, {len(g.failed)} failed")
        return int(bool(bad))


def kept(plan: Any, why: str) -> dict[str, Any]:
    """Return what is stored of a plan that has no time."""
    return {"plan": plan_words(plan), "why": why}


def write(
    script: str,
    facts: dict[str, Any],
    groups: list[Group],
    judged: judgement.Judged,
    directory: Path,
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
    recording.write(f"{script}{kind}", record, text, directory)


def judge_stored(script: str, args: argparse.Namespace, subject_of: SubjectOf) -> int:
    """Judge the timings of a file with the model as it is now, and write that.

    Date, machine and versions stay those of the timings; what the model of then reached is kept.
    """
    from relax_fusion.hardware.target import device_of, make_target

    path: Path = args.stored
    groups = judgement.load(path, subject_of)
    facts = json.loads(path.read_text(encoding="utf-8"))
    judged = judgement.judge_all(groups, device_of(make_target(args.target)))
    if not judged:
        raise SystemExit(f"{path} holds no timings")
    if "overall" in facts:
        facts.setdefault("overall_when_timed", facts["overall"])
    if args.note:
        facts["note"] = args.note
    write(script, facts, groups, judged, args.results)
    print(report.summary(judged))
    return 0


def function_of(
    machines: dict[int, Any], executable: Any, name: str, tensors: Iterable[Any]
) -> Callable[[], Any]:
    """Return the call of a function of a module on tensors of torch."""
    import tvm
    from tvm import relax

    args = [tvm.runtime.from_dlpack(t) for t in tensors]
    if id(executable) not in machines:  # to make one takes a C compiler
        machines[id(executable)] = relax.VirtualMachine(executable, args[0].device)
    function = machines[id(executable)][name]
    return lambda: function(*args)
