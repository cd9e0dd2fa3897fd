"""The chains of `cases` as Relax modules, compiled by our pipeline and run by TVM's VM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import ir
from tvm.relax.frontend import nn

from benchmarks.building import Built, compiled, compiled_by_tvm
from benchmarks.suites.matmul.cases import EPS, ROPE, Chain
from relax_fusion.models.rope import Angles

WAYS = {
    "ours": (),
    "tir": (),
    "mixed": (),
    "unfused": ("FuseRMSNormMatmul", "FuseGatedFFN"),
}
"""The passes that each contender of ours does without."""


class Module(nn.Module):
    """One chain; parameters have the names of `Chain.weights`."""

    def __init__(self, chain: Chain) -> None:
        shapes, size = chain.weights, chain.widths
        self.case, self.heads = chain.case, (size.hidden + size.qkv) // 2 // size.head  # of q and k
        self.w, self.down = (
            nn.Linear(*shapes[name][::-1], bias=size.biases) if name in shapes else None
            for name in ("w", "down")
        )
        if "gamma" in shapes:
            (k,) = shapes["gamma"]
            rms = not size.biases
            self.gamma = nn.RMSNorm(k, -1, EPS, bias=False) if rms else nn.LayerNorm(k, eps=EPS)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        product = self.w(self.gamma(x))
        if self.case == "qkv":
            return product
        if self.case == "up":
            return nn.op.gelu(product, approximate="tanh")
        gate, up = nn.op.split(product, 2, axis=-1)
        between = nn.op.silu(gate) * up
        return between if self.case == "gate_up" else x + self.down(between)

    def turned(self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor) -> nn.Tensor:
        return Angles(cos, sin).turn_first(self.w(self.gamma(x)), self.heads)

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

    def predicted_s(self) -> tuple[float, float]:
        """Return what the estimator expects of the first chain, fused and not."""
        report = self.built.report
        if report.fused:
            predicted = report.fused[0].predictions[0]
            return predicted.fused.seconds, predicted.unfused.seconds
        decline = report.declined[0].decline
        return decline.fused_s, decline.unfused_s

    def call(self, inputs: dict[str, Any], weights: dict[str, Any]) -> Callable[[], Any]:
        """Return the call of the module on tensors of torch, whose memory it shares."""
        tensors = [t.unsqueeze(1 if n in ROPE else 0) for n, t in inputs.items()]
        return self.built.call(self.function, tensors + [weights[n] for n in self.parameters])


def exported(job: Job) -> tuple[ir.IRModule, str, list[str]]:
    """Return a chain as a module, its function, and the names of that one's parameters."""
    module = Module(job.chain)
    module.to(job.dtype)
    function = {"qkv_rope": "turned", "out": "added", "down": "added"}.get(job.chain.case, "main")
    rows = "rows" if job.rows is None else job.rows
    spec = {
        name: nn.spec.Tensor([rows, 1, features], "float32")
        if name in ROPE
        else nn.spec.Tensor([1, rows, features], job.dtype)
        for name, features in job.chain.inputs.items()
    }
    mod, params = module.export_tvm(spec={function: spec})
    biases = {"gamma.bias": "beta", "w.bias": "b"}
    names = [biases.get(name, name.removesuffix(".weight")) for name, _ in params]
    return mod, function, names


def build(job: Job) -> Compiled:
    """Compile a chain."""
    mod, function, names = exported(job)
    if job.way == "tvm":
        return Compiled(compiled_by_tvm(mod, job.target), function, names)
    backend = job.way if job.way in ("tir", "mixed") else "auto"
    built = compiled(mod, job.target, disable=WAYS[job.way], backend=backend)
    return Compiled(built, function, names)
