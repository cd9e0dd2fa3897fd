"""Would trees that learn from times beat the formula?  Its errors and choices with and without.

    pip install 'relax-fusion[dev]'           # it needs scikit-learn
    python -m benchmarks judge learned
    python -m benchmarks judge learned --database times.jsonl --target llvm   # times of `tune`

Gradient-boosted trees correct the logarithm of a price, by the terms that the formula makes it of:
the parts of memory, L2, arithmetic, waiting and launching, waves, how full the last one is,
occupancy, and the tile.  They are trained on the kept times of all workloads but some, and judged
on these (group k-fold), so that no workload is in both.  No GPU is needed.  The library has none of
this: it would only use what beats the formula in both, error and choice.
"""

from __future__ import annotations

import json
import math
import statistics
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.judge import judgement
from benchmarks.judge.attention import JudgeAttention
from benchmarks.judge.cpu import WORKLOADS
from benchmarks.judge.recorded import DATA, h200, records
from benchmarks.report import Entry
from benchmarks.runner import read
from benchmarks.suite import Suite, done
from relax_fusion.estimator import Prediction, Problem
from relax_fusion.estimator.database import Database, size_from_json, target_fields, workload_key
from relax_fusion.estimator.families.matmuls import TilePrice, launch_of
from relax_fusion.estimator.gpu_cost import price, resident_blocks
from relax_fusion.estimator.prediction import Price
from relax_fusion.estimator.registry import option_of, plan_of
from relax_fusion.estimator.shape import Size
from relax_fusion.hardware import DeviceSpec, generic_cpu
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.workload.json import from_json

RESULTS = Path(__file__).parents[1] / "results"
FOLDS = 5
NEAR = 1.3
"""Errors are those of plans up to so many times as long as the fastest of their group."""

TREES: dict[str, Any] = {
    "max_iter": 200,
    "learning_rate": 0.05,
    "max_leaf_nodes": 8,
    "min_samples_leaf": 20,
    "l2_regularization": 50,
    "early_stopping": False,
    "random_state": 0,
}

TERMS = (
    *("log price", "memory", "L2", "arithmetic", "waiting", "launch", "log blocks", "waves"),
    *("fill", "blocks held", "log bytes", "log flops", "threads", "registers", "log shared"),
    *("log rows", "block m", "block n", "block k", "stages", "parts of k", "warps", "family"),
)


class Case(NamedTuple):
    """A time, and what the formula says of it.

    Parameters
    ----------
    workload, group : str
        What is left out together, and what is compared: one workload at one size in one run.
    terms : tuple of float
        `TERMS`, without the family.
    family : str
        Of the plan.
    priced_s, seconds : float
        By the formula, and measured.
    """

    workload: str
    group: str
    terms: tuple[float, ...]
    family: str
    priced_s: float
    seconds: float


def terms(found: Price, plan: Any, size: Size, dev: DeviceSpec) -> tuple[float, ...]:
    """Return what a price is made of."""
    told: Prediction = found.at(size)
    rows = size if isinstance(size, int) else size.q_len
    parts, blocks, held = _parts(found, told, rows, dev)
    slots = dev.sm_count * held
    foot = found.foot
    return (
        *(math.log(told.seconds), *(part / told.seconds for part in parts)),
        *(dev.launch_s / told.seconds, math.log(max(blocks, 1)), told.waves),
        *(blocks / (math.ceil(blocks / slots) * slots) if blocks else 0.0, held),
        *(math.log(max(told.dram_bytes, 1)), math.log(max(told.flops, 1)), foot.threads),
        *(foot.registers_per_thread, math.log1p(foot.smem_bytes), math.log(rows)),
        *(plan.block_m, plan.block_n, plan.block_k, plan.num_stages, plan.split_k),
        plan.num_warps,
    )


def _parts(
    found: Price, told: Prediction, rows: int, dev: DeviceSpec
) -> tuple[list[float], float, int]:
    """Return seconds of memory, L2, arithmetic and waiting, blocks, and how many a core holds."""
    if isinstance(found, TilePrice):
        columns = found.columns
        own = [launch_of(found.tile, columns.shape, c, dev, rows) for c in columns.launches]
        times = [price(launch, found.rates, dev) for launch in own]
        each = [float(sum(getattr(t, n) for t in times)) for n in ("dram", "l2", "compute")]
        each.append(float(sum(t.latency for t in times)))
        return each, float(sum(launch.blocks for launch in own)), int(own[0].residents)
    held = resident_blocks(found.foot, dev) if dev.kind == "gpu" else 1
    memory = told.dram_bytes / dev.dram_bytes_per_s
    rate = dev.tensor_float16_flops_per_s or dev.fma_float32_flops_per_s
    return [memory, 0.0, told.flops / rate, 0.0], float(told.waves * dev.sm_count * held), held


def matmuls() -> list[Case]:
    """Return the kept times of matmuls on an H200."""
    dev, found = h200(), []
    for e in records():
        own = e.family.price(e.plan, Problem(e.work, dev))
        behind = own.tile.late_s * (e.rows == 1) if isinstance(own, TilePrice) else 0.0
        together = e.source == "families"
        group = f"{e.source} {e.group} {'' if together else type(e.family).__name__}"
        priced = own.at(e.rows).seconds - behind
        told = terms(own, e.plan, e.rows, dev)
        found.append(Case(repr(e.work), group, told, e.kind, priced, 1e-6 * e.us))
    return found


def attentions() -> list[Case]:
    """Return the kept times of attention on an H200."""
    found, dev = [], h200()
    for stored in read(DATA / "2026-11-21-judge_attention.json")["cases"]:
        group = judgement.from_json(stored, JudgeAttention.subject_of)
        work, size = group.subject.work(), group.subject.size
        for plan, ms in zip(group.plans, group.ms, strict=True):
            option = option_of(plan, Problem(work, dev))
            told, priced = terms(option.price, plan, size, dev), option.price.at(size).seconds
            found.append(Case(repr(work), group.name, told, plan.family, priced, 1e-3 * ms))
    return found


def on_cpu() -> list[Case]:
    """Return the kept times of matmuls on two cores of Zen 5."""
    found, dev = [], generic_cpu(2, 64)
    for point in json.loads((RESULTS / "cpu_calibration.json").read_text("utf-8"))["points"]:
        work, rows = WORKLOADS[point["work"]], point["rows"]
        fields = {k: v for k, v in point["plan"].items() if k not in ("backend", "split_m")}
        fields["family"] = fields["family"] or "cpu_tiles"  # as it is called since
        option = option_of(plan_of(fields), Problem(work, dev))
        told, priced = terms(option.price, option.plan, rows, dev), option.price.at(rows).seconds
        name = f"{point['work']} {rows}"
        found.append(
            Case(point["work"], name, told, option.plan.family, priced, point["measured_s"])
        )
    return found


def tuned(path: Path, target: str) -> list[Case]:
    """Return the times that `relax-fusion tune` measured on a device."""
    wanted = make_target(target)
    dev, fields, found = device_of(wanted), target_fields(str(wanted)), []
    for line in Database(path).lines():
        size = size_from_json(line.size)
        if line.target != fields or size is None:
            continue
        work = from_json(json.dumps(line.workload))
        option = option_of(plan_of(line.plan), Problem(work, dev))
        told, priced = terms(option.price, option.plan, size, dev), option.price.at(size).seconds
        name = workload_key(line.workload)
        found.append(Case(name, f"{name} {size}", told, option.plan.family, priced, line.seconds))
    return found


SETS = {"h200 matmuls": matmuls, "h200 attention": attentions, "cpu matmuls": on_cpu}


def held_out(cases: Sequence[Case]) -> tuple[Any, dict[str, float]]:
    """Return corrected seconds, each by trees that know nothing of its workload; and what matters.

    That is by how much the error grows where one term has the values of other cases.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    works, kinds = (sorted({getattr(c, n) for c in cases}) for n in ("workload", "family"))
    rng = np.random.default_rng(0)
    order = {work: place for place, work in enumerate(rng.permutation(works))}
    folds = np.array([order[c.workload] % min(FOLDS, len(works)) for c in cases])
    known = np.array([(*c.terms, kinds.index(c.family)) for c in cases], float)
    priced, seconds = (np.array([getattr(c, n) for c in cases]) for n in ("priced_s", "seconds"))
    wanted, corrected = np.log(seconds / priced), np.empty(len(cases))
    grows: dict[str, list[float]] = defaultdict(list)
    for fold in range(folds.max() + 1):
        mine = folds == fold
        trees = HistGradientBoostingRegressor(**TREES, categorical_features=[len(TERMS) - 1])
        trees.fit(known[~mine], wanted[~mine])
        corrected[mine] = trees.predict(known[mine])
        error = np.abs(corrected[mine] - wanted[mine]).mean()
        for place, name in enumerate(TERMS):
            mixed = known[mine].copy()
            mixed[:, place] = rng.permutation(mixed[:, place])
            grows[name].append(np.abs(trees.predict(mixed) - wanted[mine]).mean() - error)
    return priced * np.exp(corrected), {n: statistics.fmean(v) for n, v in grows.items()}


def fares(cases: Sequence[Case], seconds: Sequence[float]) -> dict[str, float]:
    """Return how prices fare: errors of plans near the fastest, and what choices lose."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, priced in zip(cases, seconds, strict=True):
        groups[case.group].append((priced, case.seconds))
    best = {name: min(s for _, s in some) for name, some in groups.items()}
    losses = [min(some)[1] / best[name] - 1 for name, some in groups.items() if len(some) > 1]
    near = [
        abs(math.log(priced / s))
        for name, some in groups.items()
        for priced, s in some
        if s < NEAR * best[name]
    ]
    return {
        "error": statistics.fmean(near),
        "regret": statistics.fmean(losses),
        "worst": max(losses),
    }


class JudgeLearned(Suite):
    """Kept times, by device and kind of workload."""

    name, has_target = "judge_learned", False
    cases = tuple(SETS)
    head = (
        *("times", "number", "workloads", "error: formula", "learned", "regret: formula"),
        *("learned", "worst: formula", "learned", "beats it", "what it goes by"),
    )

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--database", type=Path, help="judge the times of `tune` in a file")
        parser.add_argument("--target", default="llvm", help="of the database (default llvm)")

    def items(self) -> Iterable[tuple[str]]:
        return [("database",)] if self.args.database is not None else super().items()

    def measured(self, item: tuple[str]) -> Entry:
        """Judge the formula and its correction on the times of one kind."""
        path = self.args.database
        cases = tuned(path, self.args.target) if path is not None else SETS[item[0]]()
        if len({case.workload for case in cases}) < 2:
            raise ValueError("there are times of fewer than two workloads")
        corrected, matters = held_out(cases)
        return {
            "times": len(cases),
            "workloads": len({c.workload for c in cases}),
            "formula": fares(cases, [c.priced_s for c in cases]),
            "learned": fares(cases, corrected),
            "matters": matters,
        }

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return "error" not in entry

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        both = [entry["formula"], entry["learned"]]
        numbers = (f"{each[name]:.2%}" for name in ("error", "regret", "worst") for each in both)
        matters = sorted(entry["matters"], key=lambda name: -entry["matters"][name])[:3]
        beats = "yes" if beats_formula(entry) else "no"
        counts = str(entry["times"]), str(entry["workloads"])
        return entry["case"], *counts, *numbers, beats, ", ".join(matters)

    def intro(self, record: Entry) -> str:
        beaten = [e["case"] for e in done(record) if beats_formula(e)]
        told = f"It beats the formula on {', '.join(beaten) or 'none'} of {len(done(record))}."
        return (
            f"Errors are means of logarithms, of plans up to {NEAR} times the fastest; regret is "
            f"what the choice loses. Each workload by trees of the others ({FOLDS} folds). {told}"
        )


def beats_formula(entry: Entry) -> bool:
    """Tell whether the correction is better in all that counts, by a tenth in the error."""
    formula, learned = entry["formula"], entry["learned"]
    better = all(learned[name] <= formula[name] for name in ("regret", "worst"))
    return better and learned["error"] < 0.9 * formula["error"]
