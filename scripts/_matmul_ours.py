"""The chains of `_matmul_cases` as Relax modules, compiled by our pipeline and run by TVM's VM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import tvm
from _matmul_cases import EPS, Chain
from tvm import relax
from tvm.relax.frontend import nn

from relax_fusion import PATTERNS, Report, make_target

WAYS = {
    "ours": (),
    "unfused": ("FuseRMSNormMatmul", "FuseGatedFFN"),
    "tvm": tuple(PATTERNS),
}
"""The passes that each contender does without."""


class Module(nn.Module):
    """One chain; parameters have the names of `Chain.weights`."""

    def __init__(self, chain: Chain) -> None:
        shapes = chain.weights
        linear = {k: nn.Linear(s[1], s[0], bias=False) for k, s in shapes.items() if len(s) == 2}
        self.case = chain.case
        self.w, self.down = linear["w"], linear.get("down")
        hidden = shapes.get("gamma")
        self.gamma = nn.RMSNorm(hidden[0], -1, EPS, bias=False) if hidden else None

    def main(self, x: nn.Tensor) -> nn.Tensor:
        product = self.w(self.gamma(x))
        if self.case == "qkv":
            return product
        gate, up = nn.op.split(product, 2, axis=-1)
        between = nn.op.silu(gate) * up
        return between if self.case == "gate_up" else x + self.down(between)

    def added(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return residual + self.w(x)


@dataclass(frozen=True)
class Job:
    """One compilation.

    Parameters
    ----------
    chain : Chain
        What to compile.
    way : str
        One of `WAYS`.
    rows : int, optional
        None: symbolic.
    dtype, target : str
        Of all tensors; a device that `make_target` knows.
    """

    chain: Chain
    way: str
    rows: int | None
    dtype: str
    target: str


@dataclass
class Compiled:
    """What a job gives: an executable, the order of its parameters, and what was decided."""

    executable: tvm.runtime.Executable
    function: str
    parameters: list[str]
    report: Report
    machines: dict[str, relax.VirtualMachine] = field(default_factory=dict)

    def kernels(self, rows: int) -> list[str]:
        """Say what was fused, with the plans for `rows` rows, and what was not."""
        said = []
        for d in self.report.decisions:
            plan = d.plans.plan_for(rows) if d.fused and d.plans is not None else None
            if plan is None:
                said.append(f"{d.pattern} declined: {d.decline}")
            else:
                tile = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
                rest = f"warps {plan.num_warps} stages {plan.num_stages} split {plan.split_k}"
                said.append(f"{d.pattern} {plan.family or plan.backend} {tile} {rest}")
        return said

    def call(self, inputs: dict[str, Any], weights: dict[str, Any]) -> Callable[[], Any]:
        """Return the call of the module on tensors of torch, whose memory it shares."""
        tensors = [t.view(1, *t.shape) for t in inputs.values()]
        tensors += [weights[name] for name in self.parameters]
        args = [tvm.runtime.from_dlpack(t) for t in tensors]
        device = args[0].device
        if str(device) not in self.machines:  # to make one takes a C compiler
            self.machines[str(device)] = relax.VirtualMachine(self.executable, device)
        main = self.machines[str(device)][self.function]
        return lambda: main(*args)


def build(job: Job) -> Compiled:
    """Compile a chain; kernels that are in the cache are taken from it."""
    module = Module(job.chain)
    module.to(job.dtype)
    function = "added" if "residual" in job.chain.inputs else "main"
    spec = {
        name: nn.spec.Tensor([1, "rows" if job.rows is None else job.rows, features], job.dtype)
        for name, features in job.chain.inputs.items()
    }
    mod, params = module.export_tvm(spec={function: spec})
    target, report = make_target(job.target), Report()
    pipeline = relax.get_pipeline(
        "relax_fusion", target=target, report=report, disable=WAYS[job.way]
    )
    # The benchmark captures calls itself
    with tvm.transform.PassContext(opt_level=3, config={"relax.backend.use_cuda_graph": False}):
        executable = tvm.compile(mod, target=target, relax_pipeline=pipeline)
    names = [name.removesuffix(".weight") for name, _ in params]
    return Compiled(executable, function, names, report)


def fill_cache(jobs: Iterable[Job]) -> list[str]:
    """Compile jobs in processes for the sake of the kernels' cache; return what failed."""
    jobs = list(jobs)
    workers = min(len(jobs), max(1, len(os.sched_getaffinity(0)) // 2))
    if not jobs:
        return []
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            said = list(pool.map(_try_to_build, jobs))
    except (OSError, BrokenProcessPool) as err:
        return [f"in parallel: {err}; each will be compiled when it is needed"]
    return [sentence for sentence in said if sentence]


def _try_to_build(job: Job) -> str:
    try:
        build(job)
    except Exception as err:
        name = f"{job.chain.size} {job.chain.case} {job.way} rows {job.rows}"
        return f"{name}: {type(err).__name__}: {str(err)[:300]}"
    return ""
