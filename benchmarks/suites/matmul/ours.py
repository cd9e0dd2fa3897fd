"""The chains of `cases` as Relax modules, compiled by our pipeline and run by TVM's VM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import ir
from tvm.relax.frontend import nn

from benchmarks.building import Built, compiled, compiled_as_mlc, compiled_by_tvm
from benchmarks.suites.matmul.cases import ROPE, Chain
from relax_fusion.models.layers import OffsetRMSNorm, activation, quantized
from relax_fusion.models.rope import Angles
from relax_fusion.quantization import quantization
from relax_fusion.workload import Norm

STORED = ("q_weight", "q_scale")
"""Parameters of a layer whose weight is quantised."""

WAYS = {
    "ours": (),
    "tir": (),
    "triton": (),
    "separate": (),
    "unfused": ("FuseRMSNormMatmul", "FuseGatedFFN"),
}
"""The passes that each contender of ours does without."""

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}
"""Names that `relax_fusion.models.layers.activation` knows, by those of `Size`."""


class Conv1D(nn.Module):
    """A linear layer whose weight lies as ``[k, n]``, as in GPT-2."""

    def __init__(self, k: int, n: int, bias: bool) -> None:
        self.weight = nn.Parameter((k, n))
        self.bias = nn.Parameter((n,)) if bias else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        product = nn.op.matmul(x, self.weight)
        return product if self.bias is None else product + self.bias


class Module(nn.Module):
    """One chain; parameters have the names of `Chain.weights`.

    Separate ones have weights called ``w.0`` and so on, and of q, k and v as many results.
    """

    def __init__(self, chain: Chain, separate: bool) -> None:
        shapes, size = chain.weights, chain.widths
        self.case, self.head, self.activation = chain.case, size.head, ACTIVATIONS[size.activation]
        self.separate = separate
        parts = chain.parts if separate else shapes["w"][:1]
        k = shapes["w"][1]
        linear = Conv1D if size.layout == "kn" else nn.Linear
        self.w = nn.ModuleList([linear(k, n, bias=chain.biased) for n in parts])
        self.turned_features = (size.hidden + size.qkv) // 2  # of q and k
        self.down = nn.Linear(*shapes["down"][::-1], bias=False) if "down" in shapes else None
        self.gamma = None if chain.norm is None else norm_layer(chain.norm, k)

    def main(self, x: nn.Tensor) -> nn.Tensor | tuple[nn.Tensor, ...]:
        normed = x if self.gamma is None else self.gamma(x)
        products = tuple(w(normed) for w in self.w)
        if self.case in ("qkv", "plain"):
            return products if self.separate else products[0]
        if self.case == "up":
            return activation(self.activation, products[0])
        gate, up = products if self.separate else nn.op.split(products[0], 2, axis=-1)
        between = activation(self.activation, gate) * up
        return between if self.case == "gate_up" else x + self.down(between)

    def turned(
        self, x: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor
    ) -> nn.Tensor | tuple[nn.Tensor, ...]:
        normed, turn = self.gamma(x), Angles(cos, sin).turn_first
        products = [w(normed) for w in self.w]
        if not self.separate:
            return turn(products[0], self.turned_features // self.head)
        q, k, v = products
        return (*(turn(p, int(p.shape[-1]) // self.head) for p in (q, k)), v)

    def added(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return residual + self.w[0](x)


def norm_layer(norm: Norm, width: int) -> nn.Module:
    """Return a norm as a layer; its parameters are ``weight`` and perhaps ``bias``."""
    if norm.kind == "layer":
        return nn.LayerNorm(width, eps=norm.eps)
    if norm.unit_offset:
        return OffsetRMSNorm(width, norm.eps)
    return nn.RMSNorm(width, -1, norm.eps, bias=False)


@dataclass(frozen=True)
class Job:
    """One compilation.

    Parameters
    ----------
    chain : Chain
        What to compile.
    way : str
        One of `WAYS`, "tvm", or "mlc".
    rows : int, optional
        None: symbolic.
    dtype, target : str
        Of all tensors; a device that `make_target` knows.
    at : int
        The number of rows that it is timed with, for who asks.
    """

    chain: Chain
    way: str
    rows: int | None
    dtype: str
    target: str
    at: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.chain.size} {self.chain.case} {self.way} rows {self.rows}"


@dataclass
class Compiled:
    """What a job gives: the module, its function, the order of its parameters, the chain."""

    built: Built
    function: str
    parameters: list[str]
    chain: Chain

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
                said.append(f"{d.pattern} {plan.family} {tile} {rest}")
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
        held = {**weights, **_parts("w", weights, self.chain), **_parts("b", weights, self.chain)}
        if self.chain.widths.layout == "kn":
            held["w"] = held["w"].T
        return self.built.call(self.function, tensors + [held[n] for n in self.parameters])


def _parts(name: str, weights: dict[str, Any], chain: Chain) -> dict[str, Any]:
    """Return the parts of a weight or bias, which lie one behind the other."""
    parts = weights[name].split(chain.parts) if name in weights else ()
    return {f"{name}.{index}": part for index, part in enumerate(parts)}


def exported(job: Job) -> tuple[ir.IRModule, str, list[str]]:
    """Return a chain as a module, its function, and the names of that one's parameters."""
    separate = job.way == "separate"
    module = Module(job.chain, separate)
    module.to(job.dtype)
    if job.chain.quantization:
        module = quantized(module, quantization(job.chain.quantization))
    function = {"qkv_rope": "turned", "out": "added", "down": "added"}.get(job.chain.case, "main")
    rows = "rows" if job.rows is None else job.rows
    spec = {
        name: nn.spec.Tensor([rows, 1, features], "float32")
        if name in ROPE
        else nn.spec.Tensor([1, rows, features], job.dtype)
        for name, features in job.chain.inputs.items()
    }
    mod, params = module.export_tvm(spec={function: spec})
    return mod, function, [_name(name, separate) for name, _ in params]


def _name(parameter: str, separate: bool) -> str:
    """Return the name that a weight or bias has in `Chain.weights`, or its part there."""
    owner, _, kind = parameter.rpartition(".")
    name, _, index = owner.partition(".")
    if kind == "bias":
        name = {"gamma": "beta", "w": "b"}[name]
    if kind in STORED:
        name = f"{name}.{kind}"
    return f"{name}.{index}" if separate and index else name


def build(job: Job) -> Compiled:
    """Compile a chain."""
    mod, function, names = exported(job)
    if job.way == "mlc":
        return Compiled(compiled_as_mlc(mod, job.target, job.at), function, names, job.chain)
    if job.way == "tvm":
        return Compiled(compiled_by_tvm(mod, job.target), function, names, job.chain)
    backend = job.way if job.way in ("tir", "triton") else "auto"
    built = compiled(mod, job.target, disable=WAYS[job.way], backend=backend)
    return Compiled(built, function, names, job.chain)
