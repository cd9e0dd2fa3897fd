"""The chains of `cases` in PyTorch: tensors, operators, float64 reference, peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.suites.matmul.cases import EPS, ROPE, Chain
from benchmarks.torch_compile import compiled

COLUMNS_AT_ONCE = 8192  # of a weight in float64


def normalised(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], gamma, EPS)


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def qkv(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return normalised(x, gamma) @ w.T


def turned(product: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Turn the heads of q and k; lane i pairs with lane i + half."""
    heads = product.unflatten(-1, (-1, cos.shape[-1]))
    count = (product.shape[-1] + x.shape[-1]) // 2 // cos.shape[-1]
    qk, v = heads[:, :count], heads[:, count:]
    other = torch.cat([-qk.chunk(2, -1)[1], qk.chunk(2, -1)[0]], dim=-1)
    qk = (qk * cos[:, None] + other * sin[:, None]).to(product.dtype)
    return torch.cat([qk, v], dim=1).flatten(1)


def qkv_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    return turned(qkv(x, gamma, w), x, cos, sin)


def gate_up(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gated(normalised(x, gamma) @ w.T)


def ffn(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x + gate_up(x, gamma, w) @ down.T


def added(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return residual + x @ w.T


FUNCTIONS = {
    "qkv": qkv,
    "qkv_rope": qkv_rope,
    "gate_up": gate_up,
    "ffn": ffn,
    "out": added,
    "down": added,
}


class Weights:
    """The parameters of a chain, by name.

    Parameters
    ----------
    chain : Chain
        Their shapes.
    dtype : {"float16", "bfloat16"}
        Of every tensor.
    device : str
        Where they are.
    """

    def __init__(self, chain: Chain, dtype: str, device: str) -> None:
        self.chain, self.dtype, self.device = chain, getattr(torch, dtype), device
        torch.manual_seed(0)
        self.by_name: dict[str, torch.Tensor] = {}
        for name, shape in chain.weights.items():
            drawn = torch.randn(shape, device=device)
            drawn = 1 + 0.1 * drawn if len(shape) == 1 else drawn.mul_(shape[1] ** -0.5)
            self.by_name[name] = drawn.to(self.dtype)


class Problem:
    """Inputs of a chain at one number of rows, and what is to come of them."""

    def __init__(self, weights: Weights, rows: int) -> None:
        self.weights, self.chain, self.rows = weights, weights.chain, rows
        torch.manual_seed(rows)
        self.inputs = {
            name: torch.randn(rows, features, device=weights.device).to(
                torch.float32 if name in ROPE else weights.dtype
            )
            for name, features in self.chain.inputs.items()
        }

    @property
    def args(self) -> list[torch.Tensor]:
        """Inputs, then parameters, in the order of the functions."""
        return [*self.inputs.values(), *self.weights.by_name.values()]

    def eager(self) -> torch.Tensor:
        """Compute the chain, an operator at a time."""
        return FUNCTIONS[self.chain.case](*self.args)

    def compiled(self) -> Callable[[], torch.Tensor]:
        """Return the chain under torch.compile, tuned for these sizes."""
        function = compiled(FUNCTIONS[self.chain.case])
        args = self.args
        function(*args)
        return lambda: function(*args)

    def bare(self) -> Callable[[], torch.Tensor]:
        """Return the matmuls alone, which PyTorch gives to cuBLAS."""
        p, x = self.weights.by_name, self.inputs["x"]
        x = normalised(x, p["gamma"]) if "gamma" in p else x
        if self.chain.case != "ffn":
            return lambda: x @ p["w"].T
        between = gated(x @ p["w"].T)

        def both() -> torch.Tensor:
            x @ p["w"].T
            return between @ p["down"].T

        return both

    def reference(self) -> torch.Tensor:
        """Return the result of the chain in float64, no intermediate rounded."""
        p = self.weights.by_name
        x = self.inputs["x"].double()
        if "gamma" in p:
            x = normalised(x, p["gamma"].double())
        product = matmul64(x, p["w"])
        if self.chain.case == "qkv_rope":
            product = turned(product, x, *(self.inputs[name].double() for name in ROPE))
        if self.chain.case in ("gate_up", "ffn"):
            product = gated(product)
        if self.chain.case == "ffn":
            return self.inputs["x"].double() + matmul64(product, p["down"])
        residual = self.inputs.get("residual")
        return product if residual is None else residual.double() + product


def matmul64(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``x @ w.T`` in float64, of a weight that is widened a part at a time."""
    return torch.cat([x @ part.double().T for part in w.split(COLUMNS_AT_ONCE)], dim=-1)
