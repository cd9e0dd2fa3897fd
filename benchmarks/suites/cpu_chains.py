"""The chains that `benchmarks.suites.cpu` times: as modules for TVM, and as calls of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tvm import ir
from tvm.relax.frontend import nn

from relax_fusion.workload import DynamicDim, NormMatmul, Projection

EPS = 1e-5


@dataclass(frozen=True)
class Chain:
    """A norm, a matmul and what follows it, of one width of model.

    Parameters
    ----------
    model : str
        Whose widths these are.
    name : {"norm_qkv", "norm_gated", "norm_gelu", "residual"}
        What is computed.
    k, n : int
        Width of x, and of the result.
    """

    model: str
    name: str
    k: int
    n: int

    @property
    def label(self) -> str:
        return f"{self.name} {self.k}->{self.n}"

    @property
    def has_bias(self) -> bool:
        """GPT-2 has, and LayerNorm where LLaMA has RMSNorm."""
        return self.model == "gpt2"

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.name == "norm_gated" else self.n

    def flops(self, rows: int) -> float:
        return self._matmul("float32").flops(rows=rows)

    def weight_bytes(self, dtype: str) -> int:
        return self._matmul(dtype).bytes(rows=1)["w0"]

    def _matmul(self, dtype: str) -> NormMatmul:
        projection = Projection(self.weight_rows, "nk")
        return NormMatmul(DynamicDim("rows"), self.k, (projection,), None, dtype, dtype)


CHAINS = (
    Chain("llama-3.2-1b", "norm_qkv", 2048, 3072),
    Chain("llama-3.2-1b", "norm_gated", 2048, 8192),
    Chain("llama-3.2-1b", "residual", 2048, 2048),
    Chain("llama-3.2-1b", "residual", 8192, 2048),
    Chain("gpt2", "norm_qkv", 768, 2304),
    Chain("gpt2", "norm_gelu", 768, 3072),
    Chain("gpt2", "residual", 768, 768),
    Chain("gpt2", "residual", 3072, 768),
    Chain("llama-3.1-8b", "norm_qkv", 4096, 6144),
    Chain("llama-3.1-8b", "norm_gated", 4096, 14336),
    Chain("llama-3.1-8b", "residual", 14336, 4096),
)


class Module(nn.Module):
    """A chain in TVM's front end."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        if chain.name != "residual":
            layer = nn.LayerNorm(chain.k, eps=EPS)
            self.norm = layer if chain.has_bias else nn.RMSNorm(chain.k, -1, EPS, bias=False)
        self.linear = nn.Linear(chain.k, chain.weight_rows, bias=chain.has_bias)

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None = None) -> nn.Tensor:
        y = self.linear(self.norm(x) if self.chain.name != "residual" else x)
        if residual is not None:
            return residual + y
        if self.chain.name == "norm_gelu":
            return nn.op.gelu(y, approximate="tanh")
        if self.chain.name == "norm_gated":
            gate, up = nn.op.split(y, 2, axis=-1)
            return nn.op.silu(gate) * up
        return y


def module_of(chain: Chain, dtype: str) -> tuple[ir.IRModule, list[str]]:
    """Return a chain as Relax, for any number of rows, and the names of its parameters."""
    module = Module(chain)
    module.to(dtype)
    spec = {"x": nn.spec.Tensor(["rows", chain.k], dtype)}
    if chain.name == "residual":
        spec["residual"] = nn.spec.Tensor(["rows", chain.n], dtype)
    mod, params = module.export_tvm(spec={"forward": spec})
    return mod, [name for name, _ in params]


def inputs_of(chain: Chain, rows: int, dtype: str) -> dict[str, torch.Tensor]:
    """Return x, the residual and the parameters, by their names in the module."""
    draw = torch.Generator().manual_seed(chain.k + chain.n)
    made = {"x": torch.randn(rows, chain.k, generator=draw)}
    if chain.name == "residual":
        made["residual"] = torch.randn(rows, chain.n, generator=draw)
    else:
        made["norm.weight"] = 1 + 0.1 * torch.randn(chain.k, generator=draw)
        if chain.has_bias:
            made["norm.bias"] = 0.1 * torch.randn(chain.k, generator=draw)
    weight = torch.randn(chain.weight_rows, chain.k, generator=draw) * chain.k**-0.5
    made["linear.weight"] = weight
    if chain.has_bias:
        made["linear.bias"] = torch.randn(chain.n, generator=draw)
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in made.items()}


def torch_call(chain: Chain, given: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the chain in eager torch, whose matmuls are oneDNN's and MKL's."""
    x, weight, bias = given["x"], given["linear.weight"], given.get("linear.bias")
    gamma, beta = given.get("norm.weight"), given.get("norm.bias")

    def call() -> torch.Tensor:
        with torch.no_grad():
            if chain.name == "residual":
                return given["residual"] + F.linear(x, weight, bias)
            width = (chain.k,)
            rows = F.layer_norm(x, width, gamma, beta, EPS) if chain.has_bias else None
            rows = F.rms_norm(x, width, gamma, EPS) if rows is None else rows
            y = F.linear(rows, weight, bias)
            if chain.name == "norm_gelu":
                return F.gelu(y, approximate="tanh")
            if chain.name == "norm_gated":
                gate, up = y.chunk(2, -1)
                return F.silu(gate) * up
            return y

    return call


def error_of(result: np.ndarray, exact: torch.Tensor) -> float:
    """Return the largest error of a result."""
    return float((torch.from_numpy(result.astype(np.float64)) - exact).abs().max())


def chains(models: list[str]) -> Iterator[Chain]:
    """Yield the chains of `models`."""
    return (chain for chain in CHAINS if chain.model in models)
