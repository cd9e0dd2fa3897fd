"""The chains of `cases` as Relax modules, compiled by our pipeline and run by TVM's VM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.relax.frontend import nn

from benchmarks.building import Built, compiled, compiled_by_tvm
from benchmarks.suites.matmul.cases import EPS, Chain

WAYS = {
    "ours": (),
    "tir": (),
    "unfused": ("FuseRMSNormMatmul", "FuseGatedFFN"),
}
"""The passes that each contender of ours does without."""


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
        One of `WAYS`, or "tvm".
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

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.chain.size} {self.chain.case} {self.way} rows {self.rows}"


@dataclass
class Compiled:
    """What a job gives: the module, its function, and the order of its parameters."""

    built: Built
    function: str
    parameters: list[str]

    def kernels(self, rows: int) -> list[str]:
        """Say what was fused, with the plans for `rows` rows, and what was not."""
        said = []
        for d in self.built.report.decisions:
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
        return self.built.call(self.function, tensors + [weights[n] for n in self.parameters])


def build(job: Job) -> Compiled:
    """Compile a chain."""
    module = Module(job.chain)
    module.to(job.dtype)
    function = "added" if "residual" in job.chain.inputs else "main"
    spec = {
        name: nn.spec.Tensor([1, "rows" if job.rows is None else job.rows, features], job.dtype)
        for name, features in job.chain.inputs.items()
    }
    mod, params = module.export_tvm(spec={function: spec})
    names = [name.removesuffix(".weight") for name, _ in params]
    if job.way == "tvm":
        return Compiled(compiled_by_tvm(mod, job.target), function, names)
    backend = "tir" if job.way == "tir" else "auto"
    built = compiled(mod, job.target, disable=WAYS[job.way], backend=backend)
    return Compiled(built, function, names)
