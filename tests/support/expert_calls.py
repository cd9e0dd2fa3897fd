"""Matmuls by experts for the kernels of Triton's bridge: forms, operands, and what they compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import relax, tirx

from relax_fusion.estimator.families.triton_experts import ExpertPlan
from relax_fusion.launch.arguments import OUT
from relax_fusion.quantization import MXFP4
from relax_fusion.triton_bridge.experts import ExpertCall
from relax_fusion.triton_bridge.kernels.experts import ExpertForm, ExpertTensors
from relax_fusion.triton_bridge.launches import Step
from relax_fusion.workload import DynamicDim, ExpertMatmul, Gate, Packed

from .interpreted import Interpreter
from .launches import Values, launch_of, sorted_pairs

PAIRS = ExpertPlan(1, 16, 32, num_stages=1, num_warps=4, unroll=2, family="expert_pairs")
TILES = ExpertPlan(16, 64, 32, num_stages=2, num_warps=4, family="expert_tiles")
TALL = replace(TILES, block_m=64, block_n=32)
MAPPED = replace(TALL, tensor_map=1)


@dataclass(frozen=True)
class ExpertCase:
    """A matmul by experts, with or without biases, shares by which pairs are added, a residual."""

    form: ExpertForm
    bias: bool = False
    share: bool = False
    residual: bool = False
    dtype: str = "float16"
    ids_dtype: str = "int64"

    @property
    def columns(self) -> int:
        """The columns of a weight."""
        return self.form.n * (1 if self.form.gate == "none" else 2)

    def shapes(self, tokens: Any) -> dict[str, tuple[Any, ...]]:
        """Return the sizes of the operands that there are, and of the result."""
        f = self.form
        both = (f.experts * self.columns, f.k), (f.experts * f.k, self.columns)
        every = {
            "x": (tokens, f.chosen, f.k) if f.each else (tokens, f.k),
            "ids": (tokens, f.chosen),
            "w": both[f.layout == "kn"],
            "bias": (f.experts, self.columns) if self.bias else None,
            "share": (tokens, f.chosen) if self.share else None,
            "residual": (tokens, f.n) if self.residual else None,
            "out": (tokens, f.n) if self.share else (tokens, f.chosen, f.n),
        }
        return {name: shape for name, shape in every.items() if shape is not None}

    def call(self, tokens: Any, dependent: bool = False) -> ExpertCall:
        """Return the call, of variables of Relax."""
        dtypes = {"ids": self.ids_dtype}
        given: dict[str, Any] = {
            name: relax.Var(name, relax.TensorType(shape, dtypes.get(name, self.dtype)))
            for name, shape in self.shapes(tokens).items()
        }
        every = {name: given.get(name) for name in ExpertTensors._fields} | {"out": OUT}
        return ExpertCall(self.form, ExpertTensors(**every), tokens, self.dtype, dependent)

    def out_type(self, tokens: Any) -> relax.TensorType:
        """Return the type of the result."""
        return relax.TensorType(self.shapes(tokens)["out"], self.dtype)

    def inputs(self, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Return operands as they are stored; some numbers are of no expert."""
        random, made = np.random.default_rng(seed), {}
        for name, shape in self.shapes(tokens).items():
            if name == "ids":
                made[name] = random.integers(-1, self.form.experts + 1, shape)
            elif name != "out":
                scale = self.form.k**-0.5 if name == "w" else 1.0
                made[name] = (random.standard_normal(shape) * scale).astype(np.float16)
        return made

    def exact(self, given: dict[str, np.ndarray]) -> np.ndarray:
        """Return the result in float64."""
        f, of = self.form, {n: a.astype(np.float64) for n, a in given.items()}
        ids = np.clip(given["ids"], 0, f.experts - 1)
        weight = of["w"].reshape(f.experts, -1, of["w"].shape[1])
        weight = weight if f.layout == "nk" else weight.transpose(0, 2, 1)
        x = of["x"] if f.each else np.repeat(of["x"][:, None], f.chosen, 1)
        y = np.einsum("tcnk,tck->tcn", weight[ids], x)
        y = y + of["bias"][ids] if self.bias else y
        if f.gate != "none":
            halves = (y[..., : f.n], y[..., f.n :])
            gate, up = halves if f.gate == "halves" else (y[..., ::2], y[..., 1::2])
            gate, up = (gate, up) if f.gate_first else (up, gate)
            gate = gate if f.gate_bounds is None else np.clip(gate, *f.gate_bounds)
            up = up if f.up_bounds is None else np.clip(up, *f.up_bounds)
            y = gate / (1 + np.exp(-(f.sharpness or 1.0) * gate)) * (up + f.offset)
        elif f.activation == "relu":
            y = np.maximum(y, 0)
        if self.share:
            y = (y * of["share"][..., None]).sum(1)
        return y + of["residual"] if self.residual else y

    def computed(
        self, interpreter: Interpreter, plan: ExpertPlan, given: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Return the result of the launches of a plan, whose grids are those of any tokens."""
        tokens = tirx.Var("n", "int64")
        call = self.call(tokens)
        variables = [v for v in call.tensors if isinstance(v, relax.Var)]
        values = Values(variables, [given[v.name] for v in variables])
        shape = [values(d) for d in self.out_type(tokens).shape]
        tensors = {n: a.astype("float64") for n, a in given.items()} | {"out": np.full(shape, 77.0)}
        dtypes = {n: self.ids_dtype if n == "ids" else self.dtype for n in tensors}
        names = {name: name for name in tensors}
        steps = steps_of(call, plan, None)
        launches = [launch_of(s, values, tensors, dtypes, names, ["out"]) for s in steps]
        return np.asarray(interpreter(tensors, dtypes, launches)["out"])


def steps_of(call: ExpertCall, plan: ExpertPlan, most: int | None) -> list[Step]:
    """Return the launches of a plan, that which sorts pairs among them."""
    ids, experts = call.tensors.ids, call.form.experts
    order, steps = sorted_pairs(plan, ids, experts, most, call.dependent)
    return [*steps, *replace(call, order=order).steps(plan, {}, most)]


GPT_OSS = {"sharpness": 1.702, "gate_bounds": (-9e9, 7.0), "up_bounds": (-7.0, 7.0), "offset": 1.0}


def up(experts: int, chosen: int, k: int, n: int, layout: str, **others: Any) -> ExpertForm:
    """Return the form of a gated product of tokens."""
    gate = {"gate": "halves", "activation": "silu", **others}
    return ExpertForm(experts, chosen, n, k, layout, False, **gate)


def down(experts: int, chosen: int, k: int, n: int, layout: str) -> ExpertForm:
    """Return the form of a product of pairs."""
    return ExpertForm(experts, chosen, n, k, layout, True)


MODELS = {
    "qwen3-30b": ExpertCase(up(128, 8, 2048, 768, "nk"), dtype="bfloat16"),
    "qwen3-30b-down": ExpertCase(
        down(128, 8, 768, 2048, "nk"), share=True, residual=True, dtype="bfloat16"
    ),
    "mixtral": ExpertCase(up(8, 2, 4096, 14336, "nk")),
    "mixtral-down": ExpertCase(down(8, 2, 14336, 4096, "nk"), share=True),
    "gpt-oss": ExpertCase(up(32, 4, 2880, 2880, "kn", gate="pairs", **GPT_OSS), bias=True),
    "gpt-oss-down": ExpertCase(down(32, 4, 2880, 2880, "kn"), bias=True, share=True),
}

WORK = ExpertMatmul(DynamicDim("rows"), 5, 2, 72, 24, "nk", "float16", "float16", bias=True)
CLIPPED = Gate("gelu", True, False, None, (-1.0, 0.5), (-0.5, 1.0), 0.5)
WORKS = {
    "gelu": replace(WORK, activation="gelu_tanh", layout="kn"),
    "clipped": replace(WORK, gate=CLIPPED),
    "sharp": replace(WORK, gate=Gate(sharpness=1.7, offset=1.0), ids_dtype="int32"),
    "summed": replace(WORK, each=True, share="float32", residual=True),
    "gated sum": replace(WORK, gate=Gate(), share="float16"),
    "words": replace(WORK, gate=CLIPPED, packed=Packed(4, 32, 7)),
    "bytes": replace(WORK, gate=Gate(), packed=Packed(8, 16, 127)),
    "summed words": replace(
        WORK, each=True, share="float32", residual=True, packed=Packed(4, 32, 7)
    ),
    "mxfp4": replace(WORK, gate=Gate(), packed=MXFP4),
}
