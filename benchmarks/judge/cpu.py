"""How well does the estimator choose CPU plans? Times a sample of candidates beside its prices.

    python scripts/calibrate_cpu.py [--sample 10] [--seed 0] [--out benchmarks/results]

For each workload and number of rows: the plan that the estimator takes, its regret (its time over
the best measured time, less one), and the rank correlation of predicted and measured times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm.runtime import tensor

from benchmarks.cpu_timing import pin_threads, use_all_cores
from relax_fusion.compute import build_prim_func
from relax_fusion.dlight_rules.contraction import ContractionRule
from relax_fusion.estimator import candidates, predict
from relax_fusion.hardware import DeviceSpec
from relax_fusion.hardware.target import device_of, host_target
from relax_fusion.tile_plan import PlanTable, TilePlan
from relax_fusion.workload import DynamicDim, GatedFFN, Norm, NormMatmul, Projection

RMS, ROWS = Norm("rms", 1e-5), DynamicDim("rows")
SIZES = (1, 4, 16, 64, 256)
WORKLOADS: dict[str, NormMatmul | GatedFFN] = {
    "norm_qkv": NormMatmul(ROWS, 1536, (Projection(3072, "nk"),), RMS, "float32", "float32"),
    "norm_gated": GatedFFN(ROWS, 1024, 3072, "nk", True, True, "silu", RMS, "float32", "float32"),
    "o_proj": NormMatmul(
        ROWS, 2048, (Projection(2048, "nk", ("residual",)),), None, "float32", "float32"
    ),
    "down": NormMatmul(
        ROWS, 4096, (Projection(1024, "nk", ("residual",)),), None, "float32", "float32"
    ),
    "norm_qkv_kn": NormMatmul(ROWS, 768, (Projection(2304, "kn"),), RMS, "float32", "float32"),
}
SLOWEST = 4
"""A plan that takes this many times as long as the best is not timed again."""


@dataclass(frozen=True)
class Point:
    """One plan at one number of rows."""

    work: str
    rows: int
    plan: TilePlan
    predicted_s: float
    measured_s: float


def compiled(work: NormMatmul | GatedFFN, plan: TilePlan) -> tvm.runtime.Module:
    """Return the kernel of `work` under `plan`."""
    func = build_prim_func(work, PlanTable.single(plan), gpu=False)
    schedule = ContractionRule().apply(func, host_target(), False)
    return tvm.compile(schedule.mod, target=host_target()).jit()


def arguments(
    func: tvm.tirx.PrimFunc, rows: int, rng: np.random.Generator
) -> list[tvm.runtime.Tensor]:
    """Return inputs (and outputs, which are overwritten) for the parameters of `func`."""
    shapes = [
        [d if isinstance(d, int) else None for d in map(_fixed, p.ty.shape)] for p in func.params
    ]
    return [
        tensor(rng.standard_normal([rows if d is None else d for d in shape], np.float32))
        for shape in shapes
    ]


def _fixed(dim: tvm.tirx.Expr) -> int | None:
    return int(dim) if isinstance(dim, tvm.tirx.IntImm) else None


def sample(
    work: NormMatmul | GatedFFN, dev: DeviceSpec, count: int, rng: random.Random
) -> list[TilePlan]:
    """Return the plans that the estimator takes, its runners-up and some at random."""
    found = list(candidates(work, dev))
    wanted: dict[TilePlan, None] = {}
    for rows in SIZES:
        ranked = sorted(found, key=lambda plan: predict(work, plan, dev, rows).seconds)
        wanted.update(dict.fromkeys(ranked[:2]))
    wanted.update(dict.fromkeys(rng.sample(found, min(count, len(found)))))
    return list(wanted)


def measure(name: str, plans: list[TilePlan], dev: DeviceSpec, rounds: int) -> list[Point]:
    """Time `plans` at every size, in turn, round after round, and keep the least of each.

    Whatever else runs on the machine slows down a stretch of time, which is then one round of
    many plans and not every run of one plan.
    """
    work = WORKLOADS[name]
    kernels = [compiled(work, plan) for plan in plans]
    func = build_prim_func(work, PlanTable.single(plans[0]), gpu=False)
    points: list[Point] = []
    for rows in SIZES:
        args = arguments(func, rows, np.random.default_rng(rows))
        kernels[0]["main"](*args)  # starts the threads
        pin_threads()
        best = [float("inf")] * len(plans)
        for number in range(rounds):
            print(f"{name}, {rows} rows: round {number + 1}", end="\r", file=sys.stderr)
            for index, kernel in enumerate(kernels):
                if best[index] < SLOWEST * min(best) or not number:
                    timer = kernel.time_evaluator("main", tvm.cpu(), number=1, repeat=3)
                    best[index] = min(best[index], *timer(*args).results)
        for plan, seconds in zip(plans, best, strict=True):
            predicted = predict(work, plan, dev, rows).seconds
            points.append(Point(name, rows, plan, predicted, seconds))
    return points


def ranks(values: list[float]) -> np.ndarray:
    """Return the rank of each value; times seldom tie."""
    return np.argsort(np.argsort(values)).astype(float)


def summary(points: list[Point], name: str, rows: int) -> dict[str, object]:
    """Return regret and correlation of one workload at one number of rows."""
    here = [p for p in points if p.work == name and p.rows == rows]
    chosen = min(here, key=lambda p: p.predicted_s)
    best = min(here, key=lambda p: p.measured_s)
    work = WORKLOADS[name]
    correlation = np.corrcoef(
        ranks([p.predicted_s for p in here]), ranks([p.measured_s for p in here])
    )[0, 1]
    return {
        "workload": name,
        "rows": rows,
        "plans": len(here),
        "chosen": tile(chosen.plan),
        "best": tile(best.plan),
        "chosen_ms": chosen.measured_s * 1e3,
        "best_ms": best.measured_s * 1e3,
        "predicted_ms": chosen.predicted_s * 1e3,
        "gflops": work.flops(rows=rows) / chosen.measured_s * 1e-9,
        "regret": chosen.measured_s / best.measured_s - 1,
        "rank_correlation": float(correlation),
    }


def tile(plan: TilePlan) -> str:
    """Return the numbers of a CPU plan that vary."""
    numbers = f"{plan.block_m}x{plan.block_n} reg {plan.reg_m}x{plan.reg_n} lanes {plan.lanes}"
    return f"{plan.family} {numbers}".lstrip()


def markdown(environment: dict[str, object], table: list[dict[str, object]]) -> str:
    """Return the report."""
    head = list(table[0])
    lines = [
        "# Choice of CPU plans: predicted and measured",
        "",
        *(f"- {key}: {value}" for key, value in environment.items()),
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in table:
        cells = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cpu_name() -> str:
    """Return what the processor calls itself."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=10, help="random plans per workload")
    parser.add_argument("--rounds", type=int, default=8, help="times that each plan is timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="cpu_calibration")
    args = parser.parse_args()
    use_all_cores()
    dev, rng = device_of(host_target()), random.Random(args.seed)
    points: list[Point] = []
    for name in args.workload or WORKLOADS:
        plans = sample(WORKLOADS[name], dev, args.sample, rng)
        points += measure(name, plans, dev, args.rounds)
    table = [summary(points, n, r) for n in args.workload or WORKLOADS for r in SIZES]
    environment: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": dev.sm_count,
        "vector bytes": dev.vector_bytes,
        "tvm": tvm.__version__,
        "python": platform.python_version(),
        "mean regret": float(np.mean([row["regret"] for row in table])),  # type: ignore[arg-type]
        "mean rank correlation": float(
            np.mean([row["rank_correlation"] for row in table])  # type: ignore[arg-type]
        ),
    }
    text = markdown(environment, table)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.md").write_text(text)
    data = {"environment": environment, "summary": table, "points": [asdict(p) for p in points]}
    (args.out / f"{args.name}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
