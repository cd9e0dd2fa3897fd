"""A chain at a small size: its tensors, its result in float64, and the arguments of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from relax_fusion.triton_bridge.kernels.products import Form, Tensors

EPS = 1e-5
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ACTIVATIONS = {
    "none": lambda v: v,
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu": lambda v: 0.5 * v * (1 + np.vectorize(math.erf)(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "quick_gelu": lambda v: v / (1 + np.exp(-1.702 * v)),
    "relu": lambda v: np.maximum(v, 0),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
    "tanh": np.tanh,
}


def normalise(x: np.ndarray, norm: str, gamma: np.ndarray, beta: np.ndarray | None) -> np.ndarray:
    """Return the norm of rows in float64."""
    if norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    if norm != "none":
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * gamma
    return x if beta is None else x + beta


def spelled(step: str | float) -> str:
    """Return a step as the kernels have it."""
    if isinstance(step, float):
        return f"times:{step!r}"
    return {"residual": "add:0:whole", "scale": "multiply:1:row"}.get(step, step)


@dataclass(frozen=True)
class Case:
    """One chain; the names are those of the kernels' parameters.

    `steps` follow the bias, or the product of a gated pair, whose gate has `activation`.  With
    `head_dim`, the first `rotated` features (of each `period`) are rotated by angles of dtype
    `angles`; row i has those of row ``i % positions`` (0: of row i).
    """

    rows: int = 3
    n: int = 24
    k: int = 40
    layout: str = "nk"
    norm: str = "none"
    beta: bool = False
    gated: bool = False
    merged: str = "no"
    bias: bool = False
    activation: str = "none"
    steps: tuple[str | float, ...] = ()
    dtype: str = "float16"
    head_dim: int = 0
    rotated: int = 0
    positions: int = 0
    angles: str = "float32"
    width: int = 0
    period: int = 0
    neighbours: bool = False
    by_pair: bool = False

    def tensors(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Return values (exact in the dtype) and dtypes of every tensor."""
        rng = np.random.default_rng(7)
        shape = (self.n, self.k) if self.layout == "nk" else (self.k, self.n)
        values = {
            # A mean far from zero: a variance by E[x^2] - E[x]^2 would show.
            "x": rng.standard_normal((self.rows, self.k)) + 3,
            "gamma": 1 + 0.3 * rng.standard_normal(self.k),
            "beta": 0.3 * rng.standard_normal(self.k),
            "w": rng.standard_normal(shape) * 0.2,
            "up": rng.standard_normal(shape) * 0.2,
            "bias": rng.standard_normal(self.n),
            "up_bias": rng.standard_normal(self.n),
            "residual": rng.standard_normal((self.rows, self.n)),
            "scale": rng.standard_normal(self.n),
        }
        exact = {n: v.astype(DTYPES[self.dtype]).astype(np.float64) for n, v in values.items()}
        dtypes = dict.fromkeys((*exact, "out", "y"), self.dtype)
        halves = ("w", "up") if self.merged == "gate_first" else ("up", "w")
        axis = 0 if self.layout == "nk" else 1
        exact["both"] = np.concatenate([exact[h] for h in halves], axis)
        both = [exact[{"w": "bias", "up": "up_bias"}[h]] for h in halves]
        exact["both_bias"] = np.concatenate(both)
        dtypes |= {"both": self.dtype, "both_bias": self.dtype}
        if self.head_dim:
            turns = rng.uniform(0, 2 * np.pi, (self.positions or self.rows, self.columns))
            for name, angle in (("cos", np.cos(turns)), ("sin", np.sin(turns))):
                exact[name] = angle.astype(self.angles).astype(np.float64)
                dtypes[name] = self.angles
        exact["out"] = np.full((self.rows, self.n), np.nan)
        exact["y"] = np.full((self.rows, self.k), np.nan)
        exact["workspace"] = np.full(1 << 16, np.nan)
        return exact, {**dtypes, "workspace": "float32"}

    def reference(self, t: dict[str, np.ndarray]) -> np.ndarray:
        """Return the result in float64."""
        beta = t["beta"] if self.beta else None
        x = normalise(t["x"], self.norm, t["gamma"], beta)
        products = [x @ (w.T if self.layout == "nk" else w) for w in (t["w"], t["up"])]
        if self.bias:
            products = [p + b for p, b in zip(products, (t["bias"], t["up_bias"]), strict=True)]
        out = products[0]
        if self.gated:
            out = ACTIVATIONS[self.activation](out) * products[1]
        for step in self.steps:
            if isinstance(step, float) or step == "scale":
                out = out * (step if isinstance(step, float) else t["scale"])
            else:
                out = out + t["residual"] if step == "residual" else ACTIVATIONS[step](out)
        return self.turned(out, t) if self.head_dim else out

    def turned(self, x: np.ndarray, t: dict[str, np.ndarray]) -> np.ndarray:
        """Rotate pairs of features, one after the other."""
        row, width = np.arange(self.rows) % (self.positions or self.rows), self.columns
        out, pairs = x.copy(), (self.width or self.head_dim) // 2
        period = self.period or self.n
        for head in range(0, self.n, self.head_dim):
            for j in range(pairs) if head % period < self.rotated else ():
                a, b = (2 * j, 2 * j + 1) if self.neighbours else (j, j + pairs)
                for own, other, sign in ((a, b, -1), (b, a, 1)):
                    lane = j if width == pairs else own
                    cos, sin = t["cos"][row, lane], t["sin"][row, lane]
                    out[:, head + own] = x[:, head + own] * cos + sign * x[:, head + other] * sin
        return out

    @property
    def columns(self) -> int:
        """Columns of the angles."""
        return (self.width or self.head_dim) // (2 if self.by_pair else 1)

    def product(self, step: int, split: int = 1) -> dict[str, Any]:
        """Return the tensors, by name, and the form of the one product, in tiles of `step`."""
        merged, turned = self.merged != "no", self.head_dim > 0
        width = self.width or self.head_dim
        half = 1 if self.neighbours else width // 2
        pairs = (self.rotated, self.period, self.head_dim, width, self.columns)
        tensors = Tensors(
            w="both" if merged else "w",
            up=("both" if merged else "up") if self.gated else None,
            bias=("both_bias" if merged else "bias") if self.bias else None,
            up_bias=("both_bias" if merged else "up_bias") if self.bias and self.gated else None,
            operand0="residual",
            operand1="scale",
            operand2=None,
            out="out",
            parts="workspace" if split > 1 else None,
            cos="cos" if turned else None,
            sin="sin" if turned else None,
            positions=self.positions or None,
        )
        form = Form(
            *(-(-self.n // step), self.n, self.layout, self.gated, self.merged, self.bias),
            *(self.activation, " ".join(map(spelled, self.steps)), half, pairs if turned else None),
        )
        return {"p0": tensors, "F0": form}

    def check(self, result: dict[str, np.ndarray], tensors: dict[str, np.ndarray]) -> None:
        """Compare with float64: the result rounds once, and float32 sums are far finer.

        An operand that is rounded on the way (gamma times a weight, the normalised x) costs one
        rounding of each product, so the bound has the norm of the row beside the element.
        """
        want = self.reference(tensors)
        step = 2.0**-11 if self.dtype == "float16" else 2.0**-8
        scale = np.abs(want) + np.sqrt((want * want).mean(-1, keepdims=True))
        assert np.all(np.abs(result["out"] - want) <= 3 * step * scale + step)


EPILOGUES = [  # in float16: the interpreter has no bfloat16 matmul
    Case(),
    Case(bias=True, steps=("silu", "residual")),
    Case(bias=True, steps=("residual", "gelu")),
    Case(steps=("gelu_tanh",), n=32, k=64),
    Case(steps=("relu",), layout="kn"),
    Case(bias=True, steps=(0.5, "scale", "residual", "residual"), n=32),
    Case(steps=(0.1, "tanh", 10.0), n=32),
    Case(gated=True, activation="silu"),
    Case(gated=True, activation="silu", merged="gate_first", bias=True),
    Case(gated=True, activation="silu", merged="up_first", layout="kn", n=32),
    Case(gated=True, activation="gelu", bias=True, steps=("residual",), layout="kn"),
]

ROTATIONS = [
    Case(rows=5, n=48, head_dim=16, rotated=48),
    Case(rows=5, n=64, head_dim=16, rotated=32, positions=3, bias=True),
    Case(rows=5, n=64, head_dim=16, rotated=48, positions=1, layout="kn", angles="float16"),
    Case(rows=5, n=48, head_dim=8, rotated=32),
    Case(rows=5, n=96, head_dim=32, rotated=64, width=16),
    Case(rows=5, n=96, head_dim=16, rotated=32, period=48, bias=True),
]
ODD_HEADS = [  # which no copied tile holds
    Case(rows=3, n=36, head_dim=12, rotated=24, bias=True),
    Case(rows=3, n=64, head_dim=64, rotated=64),
    Case(rows=3, n=96, head_dim=16, rotated=32, period=48, width=8, by_pair=True),
    Case(rows=3, n=48, head_dim=16, rotated=32, neighbours=True, bias=True),
    Case(rows=3, n=48, head_dim=16, rotated=16, neighbours=True, width=12, by_pair=True),
    Case(rows=3, n=60, head_dim=10, rotated=20, neighbours=True, width=6, period=30, layout="kn"),
]
