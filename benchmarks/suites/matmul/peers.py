"""The chains of `cases` in PyTorch: tensors, operators, float64 reference, peers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.suites.matmul.cases import EPS, ROPE, Chain
from benchmarks.suites.matmul.models import Size
from relax_fusion.quantization import dequantize, quantization
from relax_fusion.studio.bench.torch_peers import TUNED, under_compile
from relax_fusion.workload.reference import numpy_dtype

COLUMNS_AT_ONCE = 8192  # of a weight in float64


Tensor = torch.Tensor


def normalised(size: Size, x: Tensor, gamma: Tensor, beta: Tensor | None = None) -> Tensor:
    if beta is not None:
        return F.layer_norm(x, x.shape[-1:], gamma, beta, EPS)
    if not size.unit_offset:
        return F.rms_norm(x, x.shape[-1:], gamma, EPS)
    wide = torch.promote_types(x.dtype, torch.float32)  # as Gemma's is, rounded at the end
    return F.rms_norm(x.to(wide), x.shape[-1:], 1 + gamma.to(wide), EPS).to(x.dtype)


def activated(size: Size, x: Tensor) -> Tensor:
    if size.activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if size.activation == "gelu_tanh" else "none")


def gated(size: Size, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return activated(size, gate) * up


def turned(product: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """Turn the heads of q and k; lane i pairs with lane i + half."""
    heads = product.unflatten(-1, (-1, cos.shape[-1]))
    count = (product.shape[-1] + x.shape[-1]) // 2 // cos.shape[-1]
    qk, v = heads[:, :count], heads[:, count:]
    other = torch.cat([-qk.chunk(2, -1)[1], qk.chunk(2, -1)[0]], dim=-1)
    qk = (qk * cos[:, None] + other * sin[:, None]).to(product.dtype)
    return torch.cat([qk, v], dim=1).flatten(1)


def plain(size: Size, x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def qkv(
    size: Size,
    x: Tensor,
    gamma: Tensor,
    w: Tensor,
    beta: Tensor | None = None,
    b: Tensor | None = None,
) -> Tensor:
    return F.linear(normalised(size, x, gamma, beta), w, b)


def qkv_rope(size: Size, x: Tensor, cos: Tensor, sin: Tensor, **weights: Tensor) -> Tensor:
    return turned(qkv(size, x, **weights), x, cos, sin)


def gate_up(size: Size, **given: Tensor) -> Tensor:
    return gated(size, qkv(size, **given))


def up(size: Size, **given: Tensor) -> Tensor:
    return activated(size, qkv(size, **given))


def ffn(size: Size, x: Tensor, down: Tensor, **given: Tensor) -> Tensor:
    return x + F.linear(gate_up(size, x=x, **given), down)


def added(size: Size, x: Tensor, residual: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return residual + F.linear(x, w, b)


FUNCTIONS = {
    "qkv": qkv,
    "qkv_rope": qkv_rope,
    "gate_up": gate_up,
    "up": up,
    "ffn": ffn,
    "out": added,
    "down": added,
    "plain": plain,
}


class Weights:
    """The parameters of a chain, by name; of each weight its features come first, however it lies.

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
        self.by_name: dict[str, Tensor] = {}
        for name, shape in chain.weights.items():
            drawn = torch.randn(shape, device=device)
            drawn = drawn.mul_(0.1 if len(shape) == 1 else shape[1] ** -0.5)
            drawn = 1 + drawn if name == "gamma" and not chain.widths.unit_offset else drawn
            self.by_name[name] = drawn.to(self.dtype)
        if chain.widths.layout == "kn":
            self.by_name["w"] = self.by_name["w"].T.contiguous().T
        for name in ("w", "down") if chain.quantization else ():
            if name in self.by_name:
                self._quantize(name)

    def _quantize(self, name: str) -> None:
        """Put random words and scales beside a weight, which becomes what they stand for."""
        n, k = self.by_name[name].shape
        form, rng = quantization(self.chain.quantization).packed, np.random.default_rng(n)
        words, scales = form.operands(name, form.along((n, n), k))
        codes = rng.integers(0, 2**32, words.shape, words.dtype)
        factors = rng.standard_normal(scales.shape).astype(numpy_dtype(scales.dtype))
        factors *= factors.dtype.type(k**-0.5 / form.zero)
        whole = dequantize(codes, factors, self.chain.quantization, k)
        named = {name: whole, f"{name}.q_weight": codes, f"{name}.q_scale": factors}
        for key, array in named.items():
            self.by_name[key] = torch.from_numpy(array).to(self.device)


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
    def operands(self) -> dict[str, Tensor]:
        """Inputs and parameters, weights as PyTorch takes them."""
        whole = {name: w for name, w in self.weights.by_name.items() if "." not in name}
        return {**self.inputs, **whole}

    @property
    def function(self) -> Callable[..., Tensor]:
        """What computes the chain of its operands."""
        return partial(FUNCTIONS[self.chain.case], self.chain.widths)

    def eager(self) -> Tensor:
        """Compute the chain, an operator at a time."""
        return self.function(**self.operands)

    def compiled(self) -> Callable[[], Tensor]:
        """Return the chain under torch.compile, tuned for these sizes."""
        function, given = under_compile(self.function, TUNED, dynamic=False), self.operands
        function(**given)
        return lambda: function(**given)

    def first(self, rows: int) -> Problem:
        """Return the problem of the first rows."""
        part = copy(self)
        part.inputs = {name: tensor[:rows] for name, tensor in self.inputs.items()}
        return part

    def bare(self) -> Callable[[], Tensor]:
        """Return the matmuls alone, which PyTorch gives to cuBLAS."""
        p, x, size = self.weights.by_name, self.inputs["x"], self.chain.widths
        x = normalised(size, x, p["gamma"], p.get("beta")) if "gamma" in p else x
        if self.chain.case != "ffn":
            return lambda: x @ p["w"].T
        between = gated(size, x @ p["w"].T)

        def both() -> Tensor:
            x @ p["w"].T
            return between @ p["down"].T

        return both

    def reference(self) -> torch.Tensor:
        """Return the result of the chain in float64, no intermediate rounded."""
        p, size = self.weights.by_name, self.chain.widths
        x = self.inputs["x"].double()
        if "gamma" in p:
            x = normalised(size, x, *(p[name].double() for name in ("gamma", "beta") if name in p))
        product = matmul64(x, p["w"])
        product = product + p["b"].double() if "b" in p else product
        if self.chain.case == "qkv_rope":
            product = turned(
                product, self.inputs["x"], *(self.inputs[name].double() for name in ROPE)
            )
        if self.chain.case == "up":
            product = activated(size, product)
        if self.chain.case in ("gate_up", "ffn"):
            product = gated(size, product)
        if self.chain.case == "ffn":
            return self.inputs["x"].double() + matmul64(product, p["down"])
        residual = self.inputs.get("residual")
        return product if residual is None else residual.double() + product


def matmul64(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w.T`` in float64, of a weight that is widened a part at a time."""
    return torch.cat([x @ part.double().T for part in w.split(COLUMNS_AT_ONCE)], dim=-1)
