"""What is lost without a family of kernels: the best plan of each, timed on an NVIDIA GPU.

    python -m benchmarks judge families --models llama3.1-8b --seconds 500
    python -m benchmarks judge families --dtype int8_t --rows 1024 4096
    python -m benchmarks judge families --from DATE-judge_families.json    # the tables, no GPU

For each chain of a model and each number of rows, every family's own price chooses its best plan
for symbolic rows; it is left out if that is 3 times the least price of all.  Results are compared
with float64, and the plans are timed in turn.  The tables say how often a family wins, and what the
others lose where it is left out.  Several processes can
run at once, for other models: they compile side by side, and measure one at a time.
"""

from __future__ import annotations

import fcntl
import statistics
import tempfile
from argparse import ArgumentParser
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.judge.matmul import operands
from benchmarks.recording import markdown_table
from benchmarks.report import Entry
from benchmarks.runner import conclude, read
from benchmarks.suite import Suite
from benchmarks.suites.matmul.cases import DTYPES, Chain
from benchmarks.suites.matmul.models import MODELS
from benchmarks.suites.matmul.subject import ChainAt, range_uppers

CHOSEN = ("llama3.1-8b", "llama3.2-1b", "qwen2.5-7b", "bert-base", "qwen2.5-0.5b", "llama3.1-70b")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 777, 1024, 2048, 3000, 4096)
CASES = ("qkv", "gate_up", "up", "out", "down")
CUBLAS = "cuBLAS"
"""The bare matmul, which is timed beside the families."""

HOPELESS = 3.0
"""A plan of so many times the least price is not timed."""

LOCK = Path(tempfile.gettempdir()) / "relax_fusion-measuring"
"""The file that a process locks while it measures."""

Cell = Mapping[str, float]
"""The times of one chain at one number of rows, by family."""


class JudgeFamilies(Suite):
    """The chains of models that are one workload, at several numbers of rows."""

    name, device = "judge_families", "gpu"
    key = ("model", "case", "rows")
    cases, dtypes = CASES, DTYPES
    plain: ClassVar = {"dtype": "float16", "quantization": ""}

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--models", nargs="+", default=list(CHOSEN), choices=[*MODELS])
        add("--rows", type=int, nargs="+", default=list(ROWS))
        add("--quantization", default="", help="how weights are stored, such as q4f16_1")
        add("--from", dest="stored", type=Path, metavar="JSON", help="write its tables again")

    def without_a_run(self) -> int | None:
        if self.args.stored is None:
            return None
        conclude(self, read(self.args.stored))
        return 0

    # --- what is measured ------------------------------------------------------------------

    def begin(self) -> None:
        from benchmarks import plans
        from relax_fusion.hardware.target import device_of, make_target

        self.modules, self.dev = plans, device_of(make_target(self.args.target))
        self.chain: Chain | None = None

    def items(self) -> Iterator[ChainAt]:
        for model in self.args.models:
            for case in self.args.cases:
                if case != ("gate_up" if MODELS[model].biases else "up"):
                    chain = Chain(case, model, self.args.quantization)
                    yield from (ChainAt(chain, rows, self.args.dtype) for rows in self.args.rows)

    def facts(self, item: ChainAt) -> Entry:
        return {"model": item.chain.size, "case": item.chain.case, "rows": item.rows}

    def measured(self, item: ChainAt) -> Entry:
        """Check and time the best plan of each family."""
        if item.chain != self.chain:
            self.chain = item.chain
            self._compile(item)
        best = self.best[item.rows]
        with alone():
            return {"predicted_us": {name: us for name, (_, us) in best.items()}} | self._time(item)

    def _compile(self, item: ChainAt) -> None:
        """Compile the best plans for all numbers of rows of a chain in one module."""
        from benchmarks.suites.matmul.peers import Weights

        work, uppers = item.work(symbolic=True), range_uppers(item, self.dev)
        self.best = best_plans(work, self.args.rows, self.dev)
        ranges: dict[Any, list[int | None]] = {}
        for rows, plans in self.best.items():
            upper = next(u for u in uppers if u is None or rows <= u)
            for plan, _ in plans.values():
                ranges.setdefault(plan, []).append(upper)
        self.compiled, self.failed = self.modules.compile_plans(work, ranges, self.args.target)
        self.weights = Weights(item.chain, self.args.dtype, self.session.timing.DEVICE)

    def _time(self, item: ChainAt) -> Entry:
        from benchmarks.suites.matmul.peers import Problem

        timing, problem = self.session.timing, Problem(self.weights, item.rows)
        reference, tensors = problem.reference(), operands(problem)
        allowed = timing.allowed_error(timing.error_of(problem.eager(), reference), item.dtype)
        plans = {family: plan for family, (plan, _) in self.best[item.rows].items()}
        failed = {family: self.failed[p] for family, p in plans.items() if p in self.failed}

        def contender(name: str) -> Callable[[], Any]:
            if name == CUBLAS:
                return problem.bare()
            built, function = self.compiled[plans[name]]
            return built.call(function, tensors)

        def check(name: str, call: Any) -> None:
            error = timing.error_of(call.checked_result(), reference) if name != CUBLAS else 0.0
            if not error <= allowed:
                raise ArithmeticError(f"error {error:.2e}, allowed {allowed:.1e}")

        names = [CUBLAS, *(family for family in plans if family not in failed)]
        calls, others = self.session.captured(names, contender, check)
        return {"us": self.session.times(calls)["us"], "failed": failed | others}

    # --- what is said ----------------------------------------------------------------------

    def is_complete(self, entry: Entry, item: Any) -> bool:
        return bool(entry.get("us"))

    def is_bad(self, entry: Entry) -> bool:
        return "error" in entry or bool(entry["failed"])

    def line(self, entry: Entry, record: Entry) -> str:
        if "error" in entry:
            return super().line(entry, record)
        times = sorted(entry["us"].items(), key=lambda item: item[1])
        told = ", ".join(f"{family} {us:.1f}" for family, us in times)
        bad = "".join(f"; {name}: {why[:80]}" for name, why in entry["failed"].items())
        return f"{entry['model']} {entry['case']} {entry['rows']}: {told} us{bad}"

    def markdown(self, record: Entry) -> str:
        """Return the tables by measured times, and by predicted ones."""
        entries = [e for e in record["cases"] if e.get("us")]
        measured = [{n: us for n, us in e["us"].items() if n != CUBLAS} for e in entries]
        names = [f"{e['model']} {e['case']} {e['rows']}" for e in entries]
        parts = [f"{record['gpu']}, {record['dtype']}, {len(entries)} cells, launches included."]
        for what, cells in (
            ("Measured", measured),
            ("By price", [e["predicted_us"] for e in entries]),
        ):
            parts.append(f"## {what}\n\n" + table(cells, names))
        return "\n\n".join(parts)


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process measures."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def best_plans(work: Any, rows: Sequence[int], dev: Any) -> dict[int, dict[str, tuple[Any, float]]]:
    """Return for each number of rows the best plan of every family, and its price in us."""
    from relax_fusion.estimator import Problem
    from relax_fusion.estimator.registry import options

    kinds, problem = defaultdict(list), Problem(work, dev)
    every = {o.plan: o for backend in ("auto", "tir") for o in options(problem, backend)}
    for option in every.values():
        kinds[option.family, option.plan.family].append(option)
    found: dict[int, dict[str, tuple[Any, float]]] = {r: {} for r in rows}
    for (family, kind), some in kinds.items():
        asked = np.ones((len(rows), len(some)), bool)
        prices = [option.price for option in some]
        seconds = np.asarray(prices[0].seconds(prices, rows, asked), float)
        seconds = np.where(seconds > 0, seconds, np.inf)
        for r, prices in zip(rows, seconds, strict=True):
            at = int(np.argmin(prices))
            if np.isfinite(prices[at]):
                name = f"{type(family).__name__} {kind or ''}".strip()
                found[r][name] = some[at].plan, 1e6 * float(prices[at])
    for r, best in found.items():
        limit = HOPELESS * min((us for _, us in best.values()), default=0.0)
        found[r] = {name: (plan, us) for name, (plan, us) in best.items() if us <= limit}
    return found


def lost(cells: Sequence[Cell], without: Callable[[str], bool]) -> list[float]:
    """Return how many times as long the best of the others takes, for each cell that has others."""
    found = []
    for cell in cells:
        rest = [us for family, us in cell.items() if not without(family)]
        if rest:
            found.append(min(rest) / min(cell.values()))
    return found


def table(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Return the table of what is lost without each family, and without all of a kind."""
    wins = Counter(min(cell, key=cell.__getitem__) for cell in cells)
    families = sorted({family for cell in cells for family in cell})
    groups = {f: {f} for f in families}
    groups |= {f"all of {c}": {f for f in families if f.startswith(c)} for c in _classes(families)}
    rows: list[tuple[str, ...]] = [
        ("family", "wins", "mean loss without it", "worst", "at", "cells of its own")
    ]
    for label, gone in groups.items():
        served = [n for n, cell in zip(names, cells, strict=True) if {*cell} - gone]
        losses = lost(cells, gone.__contains__)
        if not losses:
            continue
        worst = max(range(len(losses)), key=losses.__getitem__)
        mean = statistics.geometric_mean(losses)
        count = sum(wins[f] for f in gone)
        only = len(cells) - len(losses)
        numbers = [str(count), f"{100 * (mean - 1):.1f} %", f"{losses[worst]:.2f}", served[worst]]
        rows.append((label, *numbers, str(only or "")))
    return markdown_table(rows)


def _classes(families: Sequence[str]) -> list[str]:
    """Return the classes that have several families."""
    counts = Counter(family.split()[0] for family in families)
    return [name for name, count in counts.items() if count > 1]
