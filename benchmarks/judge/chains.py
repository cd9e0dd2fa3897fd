"""The estimator's plans of chains against measurement on an NVIDIA GPU, random chains among them.

    python -m benchmarks judge chains --random 16 --seed 7 --seconds 300
    python -m benchmarks judge chains --from DATE-judge_chains.json   # today's model, no GPU;
                                                 # writes under the date of the timings

Of each chain, what is chosen, the ten next by prediction and plans drawn from all that fit are
compiled, compared with each other, captured into CUDA graphs and timed in turn, L2 flushed before
each sample.  Times include the launch.  The exit status is 1 if a plan gave a wrong result or none.
"""

from __future__ import annotations

import json
import random
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tvm.target import Target

from benchmarks import building
from benchmarks.judge.judgement import spearman
from benchmarks.report import Entry
from benchmarks.runner import conclude, read
from benchmarks.suite import done
from benchmarks.suites.chains.suite import Job, OfChains, exported
from relax_fusion.errors import Decline
from relax_fusion.estimator import candidates, choose, predict
from relax_fusion.estimator.families.generated.space import plans, variants
from relax_fusion.estimator.registry import plan_of, violations
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.tuning.device import compiled
from relax_fusion.tuning.inputs import allowed_error, draw
from relax_fusion.workload import Workload
from relax_fusion.workload.json import from_json, to_json

TOP = 10
"""Plans beside the choice that are timed in any case: those predicted to be fastest."""

MEASURED = 8
"""Plans of which tuning would take the fastest."""

SIZE = 1
"""Asked for where all sizes are static."""


@cache
def workload_of(name: str, target: str) -> Workload | None:
    """Return what the pipeline makes of a chain that it can make one kernel of; else None."""
    options = Job("fused", name, target).options()
    report = building.decided(exported(name)[1], target, **options)
    works = [d.workload for d in report.decisions if d.fused and d.workload is not None]
    return works[0] if len(works) == 1 else None


def selected(work: Workload, dev: DeviceSpec, most: int, seed: str) -> list[TilePlan]:
    """Return the plans to time: the choice, the first by prediction, and random ones."""
    found = sorted(candidates(work, dev, "triton"), key=seconds_by(work, dev))
    kept = list(dict.fromkeys([chosen(work, dev), *found[:TOP]]))
    chance, every = random.Random(seed), list(plans(work.graph))
    chance.shuffle(every)
    drawn = (chance.choice(list(variants(plan, dev))) for plan in every)
    fitting = (p for p in drawn if p not in kept and not violations(p, work, dev))
    return [*kept, *islice(fitting, max(0, most - len(kept)))]


def chosen(work: Workload, dev: DeviceSpec) -> TilePlan:
    """Return the plan that the estimator chooses."""
    choice = choose(work, dev, always=True)
    if isinstance(choice, Decline):
        raise ValueError(f"the estimator declines: {choice.detail}")
    return choice.plans.plan_for(SIZE)


def seconds_by(work: Workload, dev: DeviceSpec) -> Any:
    """Return what prices a plan."""
    return lambda plan: predict(work, plan, dev, SIZE).seconds


def judged(entry: Entry, work: Workload, dev: DeviceSpec) -> Entry:
    """Return how the model of now fares by the times of an entry.

    Returns
    -------
    dict
        ``predicted_us`` of each plan; ``regret`` of the choice, or where that was not timed, of the
        slowest of the plans predicted to be fastest; ``regret_measured``, of the fastest of the
        first eight; and the rank ``correlation``.
    """
    plans = [{k: v for k, v in plan.items() if k != "backend"} for plan in entry["plans"]]
    timed = [(plan_of(plan), us) for plan, us in zip(plans, entry["plan_us"], strict=True)]
    choice = chosen(work, dev)
    predicted = [1e6 * seconds_by(work, dev)(plan) for plan, _ in timed]
    order = sorted(range(len(timed)), key=lambda i: (predicted[i], -timed[i][1]))
    best = min(us for _, us in timed)
    known = dict(timed)
    first = known.get(choice, timed[order[0]][1])
    measured = min([first, *(timed[i][1] for i in order[:MEASURED])])
    return {
        "predicted_us": [round(us, 2) for us in predicted],
        "is_choice_timed": choice in known,
        "regret": first / best - 1,
        "regret_measured": measured / best - 1,
        "correlation": spearman(predicted, [us for _, us in timed]),
    }


class JudgeChains(OfChains):
    """Chains that are one kernel, at fixed sizes."""

    name = "judge_chains"
    head = ("chain", "plans", "best, us", "chosen", "regret", "of eight", "correlation")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        super().options(parser)
        parser.add_argument("--most", type=int, default=40, help="plans to time of a chain")
        parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="judge again")

    def without_a_run(self) -> int | None:
        """Judge the timings of a file with the model as it is now, and write that."""
        if self.args.stored is None:
            return None
        record = read(self.args.stored)
        dev = device_of(make_target(record["target"]))
        for entry in done(record):
            entry |= judged(entry, from_json(json.dumps(entry["workload"])), dev)
        conclude(self, record)
        return 0

    def items(self) -> list[str]:
        named = super().items()
        found = [name for name in named if workload_of(name, self.args.target) is not None]
        for name in dict.fromkeys(named).keys() - found:
            print(f"left out: {name}, which is more than one kernel")
        return found

    def is_complete(self, entry: Entry, item: str) -> bool:
        return bool(entry.get("plans"))

    def measured(self, item: str) -> Entry:
        """Check and time the plans of a chain."""
        target = make_target(self.args.target)
        work, dev = workload_of(item, self.args.target), device_of(target)
        assert work is not None
        wanted = selected(work, dev, self.args.most, item)
        calls, wrong = self._calls(work, wanted, target)
        samples = self.session.sampler.sample_ms({p: c.launch for p, c in calls.items()})
        entry = {
            "workload": json.loads(to_json(work)),
            "plans": [plan.to_attr() for plan in samples],
            "plan_us": [round(1e3 * statistics.median(s), 3) for s in samples.values()],
            "wrong": [f"{plan.text}: {why}" for plan, why in wrong.items()],
        }
        return entry | judged(entry, work, dev)

    def _calls(
        self, work: Workload, wanted: Sequence[TilePlan], target: Target
    ) -> tuple[dict[TilePlan, Any], dict[TilePlan, str]]:
        """Return the plans that are right as calls, and what is wrong with others."""
        timing = self.session.timing
        made, wrong = compiled(work, {plan: PlanTable.single(plan) for plan in wanted}, target)
        arrays = (
            torch.from_numpy(draw(work, o, {}).astype("float32")).to(
                timing.DEVICE, getattr(torch, o.dtype)
            )
            for o in work.graph.inputs
        )
        tensors, results = list(arrays), dict[TilePlan, torch.Tensor]()
        loaded = [(building.Built(each, building.Report()), names) for each, names in made]
        functions = {plan: (built, name) for built, n in loaded for plan, name in n.items()}

        def contender(plan: TilePlan) -> Callable[[], Any]:
            built, name = functions[plan]
            return built.call(name, tensors)

        def check(plan: TilePlan, call: Any) -> None:
            results[plan] = timing.as_torch(call.checked_result()).double()

        calls, failed = self.session.captured(functions, contender, check)
        wrong |= failed
        middle = torch.stack(list(results.values())).median(0).values
        for plan in list(calls):
            error = timing.error_of(results[plan], middle)
            if not error <= allowed_error(work):
                wrong[plan] = f"error {error:.1e}, allowed {allowed_error(work):.1e}"
                del calls[plan]
        return calls, wrong

    def is_bad(self, entry: Entry) -> bool:
        return "error" in entry or bool(entry["wrong"])

    def intro(self, record: Entry) -> str:
        said = f"{record['gpu']}; medians of CUDA graph replays, L2 flushed before each."
        return f"{said}\n\n{self.summary(record)}"

    def summary(self, record: Entry) -> str:
        found = done(record)
        if not found:
            return "nothing was timed"
        ranks = [e["correlation"] for e in found]
        lines = [f"- {len(found)} chains, {sum(len(e['plans']) for e in found)} kernels"]
        for name, what in (("regret", "chosen"), ("regret_measured", "fastest of eight")):
            all_of = [e[name] for e in found]
            lines.append(
                f"- {what}: regret mean {statistics.fmean(all_of):.1%}, largest {max(all_of):.1%}"
            )
        lines.append(
            f"- rank correlation: mean {statistics.fmean(ranks):.3f}, least {min(ranks):.3f}"
        )
        return "\n".join(lines)

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        best = min(entry["plan_us"])
        return (
            entry["case"],
            str(len(entry["plans"])),
            f"{best:.2f}",
            f"{best * (1 + entry['regret']):.2f}" + ("" if entry["is_choice_timed"] else " (next)"),
            *(f"{entry[name]:.1%}" for name in ("regret", "regret_measured")),
            f"{entry['correlation']:.3f}",
        )
