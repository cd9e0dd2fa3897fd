"""Does the estimator know which generated kernels fit? Compiles a sample of plans; needs no GPU.

    python -m benchmarks judge feasibility [--kernels 500] [--seed 0] [--target h200]

Plans of chains with names and of random ones are drawn whether or not their shared memory is
estimated to fit, every other one from those of half to one and a half times the limit, and compiled
for the target.  The estimate is right if a block of the target may have what the compiler took, and
the estimate says so, or neither.
"""

from __future__ import annotations

import os
import random
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import triton
from triton.errors import TritonError

from benchmarks.judge.chains import workload_of
from benchmarks.report import Entry
from benchmarks.sessions import sentence
from benchmarks.suite import Suite, done
from benchmarks.suites.chains.cases import NAMED, sampled
from relax_fusion.estimator.families.generated.memory import footprint
from relax_fusion.estimator.families.generated.plan import GeneratedPlan, launches
from relax_fusion.estimator.families.generated.space import plans, variants
from relax_fusion.estimator.registry import violations
from relax_fusion.hardware.nvidia import capability_of
from relax_fusion.hardware.target import device_of, make_target
from relax_fusion.triton_bridge.generated import KernelText, Means, function_of, kernel_text
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.specialize import triton_dtype
from relax_fusion.tuning.device import FOREIGN_ERRORS
from relax_fusion.workload.graph import Graph

MEMORY = "of shared memory"
"""In the violation of a plan that needs too much of it."""

NEAR = 0.5, 1.5
"""Parts of the limit by which every other plan is drawn."""

PER_CHAIN = 10
"""Kernels of a chain."""


@dataclass(frozen=True)
class Item:
    """A kernel: the first launch of a plan of a chain."""

    case: str
    number: int
    plan: GeneratedPlan
    target: str

    @property
    def estimated(self) -> int:
        """Bytes of shared memory by the estimate."""
        return footprint(self._launched).smem_bytes

    @property
    def _launched(self) -> Any:
        work = workload_of(self.case, self.target)
        assert work is not None
        return launches(work.graph, self.plan)[0]

    def compiled(self) -> int:
        """Return the bytes that the compiler takes."""
        launched = self._launched
        kernel = kernel_text(
            launched.graph, launched.schedule, means=Means(tensor_maps=bool(self.plan.tensor_maps))
        )
        capability = capability_of(device_of(make_target(self.target)).arch)
        options = KernelOptions(num_warps=launched.warps, num_stages=launched.stages)
        source = source_of(launched.graph, kernel, capability, options)
        built = triton.compile(
            source.ast(), target=source.gpu_target, options=source.options.for_triton()
        )
        return int(built.metadata.shared)


def source_of(
    graph: Graph, kernel: KernelText, capability: int, options: KernelOptions
) -> KernelSource:
    """Return what is compiled of a generated kernel, its operands aligned."""
    function, types = function_of(kernel), {}
    for name, operand in zip(function.arg_names, kernel.operands, strict=False):
        dtype = triton_dtype(graph[operand.tensor].dtype, name)
        types[name] = f"tensordesc<{dtype}{list(operand.box)}>" if operand.box else f"*{dtype}"
    aligned = frozenset(name for name, kind in types.items() if kind.startswith("*"))
    types |= {f"{name}_size": "i32" for name in kernel.sizes}
    return KernelSource(function, types, {}, aligned, capability, options)


def compiled(item: Item) -> int | str:
    """Return the bytes of a kernel, or why it does not compile."""
    try:
        return item.compiled()
    except (*FOREIGN_ERRORS, TritonError, AssertionError) as err:
        return sentence(err)


def drawn(case: str, target: str, count: int, seed: int) -> list[Item]:
    """Return plans of a chain that nothing but their shared memory could speak against."""
    work, dev = workload_of(case, target), device_of(make_target(target))
    if work is None:
        return []
    draw, every = random.Random(f"{case} {seed}"), list(plans(work.graph))
    draw.shuffle(every)
    chosen = (draw.choice(list(variants(plan, dev))) for plan in every)
    found = list[Item]()
    for plan in chosen:
        if len(found) == count:
            break
        if all(MEMORY in why for why in violations(plan, work, dev)):
            item = Item(case, len(found), plan, target)
            part = item.estimated / dev.smem_per_block_bytes
            if len(found) % 2 == 0 or NEAR[0] < part < NEAR[1]:
                found.append(item)
    return found


class JudgeFeasibility(Suite):
    """Random plans of random chains."""

    name = "judge_feasibility"
    key = ("case", "number")
    head = ("chain", "plan", "estimated, KiB", "compiled, KiB", "fits", "right")

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        parser.add_argument("--kernels", type=int, default=500)
        parser.add_argument("--seed", type=int, default=0, help="of random chains and plans")

    def items(self) -> list[Item]:
        args, found = self.args, list[Item]()
        cases = [*NAMED, *sampled(args.kernels, args.seed)]
        random.Random(args.seed).shuffle(cases)
        for case in cases:
            left = args.kernels - len(found)
            found += drawn(case, args.target, min(left, PER_CHAIN), args.seed)
            if len(found) == args.kernels:
                break
        return found

    def facts(self, item: Item) -> Entry:
        return {"case": item.case, "number": item.number}

    def is_complete(self, entry: Entry, item: Item) -> bool:
        return "error" not in entry

    def prepare(self, items: Sequence[Item]) -> None:
        workers = len(os.sched_getaffinity(0))
        self.pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.bytes = {item: self.pool.submit(compiled, item) for item in items}

    def measured(self, item: Item) -> Entry:
        made = self.bytes.pop(item).result()
        if not self.bytes:
            self.pool.shutdown()
        if isinstance(made, str):
            raise ValueError(made)
        limit = device_of(make_target(self.args.target)).smem_per_block_bytes
        plan = item.plan
        text = f"{plan.text}, {plan.num_warps} warps, {plan.num_stages} stages"
        return {
            "plan": text + ", tensor maps" * plan.tensor_maps,
            "estimated": item.estimated,
            "compiled": made,
            "fits": made <= limit,
            "right": (made <= limit) == (item.estimated <= limit),
        }

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        sizes = (f"{entry[name] / 1024:.1f}" for name in ("estimated", "compiled"))
        says = ("yes" if entry[name] else "no" for name in ("fits", "right"))
        return entry["case"], entry["plan"], *sizes, *says

    def intro(self, record: Entry) -> str:
        return f"{record['target']}\n\n{self.summary(record)}"

    def summary(self, record: Entry) -> str:
        found = done(record)
        right, fits = (sum(e[name] for e in found) for name in ("right", "fits"))
        passed = [e for e in found if e["fits"] == e["right"]]
        lost = sum(e["fits"] and not e["right"] for e in found)
        return (
            f"- {right} of {len(found)} estimates are right ({right / max(1, len(found)):.1%})\n"
            f"- {len(passed)} are let pass, of which {sum(e['fits'] for e in passed)} fit; "
            f"of {fits} that fit, {lost} are refused"
        )
