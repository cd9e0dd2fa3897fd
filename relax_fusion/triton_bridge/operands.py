"""The operands of a contraction, read from the parameters of its PrimFunc."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from ..estimator.families.triton_matmul.tiles import kernel_steps
from ..launch.arguments import Out
from ..workload import (
    ACTIVATIONS,
    DynamicDim,
    GatedFFN,
    NormMatmul,
    Rope,
    Step,
    Workload,
    operand_names,
)


@dataclass(frozen=True)
class Angles:
    """The cosines and sines by which a product's features are rotated."""

    rope: Rope
    cos: Any
    sin: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """The run-time arguments of a rotation."""
        positions: Any = self.rope.positions
        if isinstance(positions, DynamicDim):
            positions = tirx.Cast("int32", self.cos.ty.shape.values[0])
        return {"cos_ptr": self.cos, "sin_ptr": self.sin, "positions": positions}

    @property
    def constants(self) -> dict[str, Any]:
        """The constexprs of a rotation."""
        return {"HALF": self.rope.half, "ROTATED": self.rope.features}


@dataclass(frozen=True)
class Product:
    """One matmul, or a gated pair of them, and where it reads and writes."""

    weight: Any
    n: int
    layout: str
    out: Out
    up: Any = None
    bias: Any = None
    up_bias: Any = None
    activation: str = "none"
    steps: str = ""
    operands: tuple[Any, ...] = ()
    merged: str = "no"
    angles: Angles | None = None

    @property
    def paired(self) -> bool:
        """Whether a kernel with two accumulators needs both for one tile of columns."""
        return self.up is not None or self.angles is not None

    @property
    def tiled_columns(self) -> int:
        """Columns that such a kernel cuts into tiles: of rotated heads, the first half."""
        return self.n // 2 if self.angles else self.n

    @property
    def constants(self) -> dict[str, Any]:
        """The constexprs that every family has, and those of a rotation, where there is one."""
        return {
            "N": self.n,
            "LAYOUT": self.layout,
            "GATED": self.up is not None,
            "HAS_BIAS": self.bias is not None,
            "ACTIVATION": self.activation,
            "STEPS": self.steps,
            "MERGED": self.merged,
            **(self.angles.constants if self.angles else {}),
        }

    def pointers(self, unused: Any) -> dict[str, Any]:
        """Return the arguments behind the weights; `unused` for pointers that are switched off."""
        found = {
            "bias_ptr": self.bias,
            "up_bias_ptr": self.up_bias,
            "operands": _pointers(self.operands) if self.operands else None,
        }
        return {
            **{name: unused if v is None else v for name, v in found.items()},
            "out_ptr": self.out,
            **(self.angles.arguments if self.angles else {}),
        }


@dataclass(frozen=True)
class Operands:
    """What a contraction reads and writes; None for what its workload does not have.

    `total` and `normed` are the outputs for the sum in front of the norm and for the norm.
    """

    x: Any
    residual: Any
    gamma: Any
    beta: Any
    total: Out | None
    normed: Out | None
    products: tuple[Product, ...]


def read_operands(work: NormMatmul | GatedFFN, inputs: Sequence[ir.Expr]) -> Operands:
    """Give inputs and outputs, in the order of ``work.graph``, their parts in a kernel."""
    given = named_operands(work, inputs)
    products: Iterable[Product]
    products = [_gated(work, given)] if isinstance(work, GatedFFN) else _products(work, given)
    return Operands(
        given["x"],
        residual=given.get("residual"),
        gamma=given.get("gamma"),
        beta=given.get("beta"),
        total=given.get("x_sum"),
        normed=given.get("x_norm"),
        products=tuple(products),
    )


def named_operands(work: Workload, inputs: Sequence[ir.Expr]) -> dict[str, Any]:
    """Return inputs and outputs by the names that the graph has for them."""
    graph = work.graph
    found: dict[str, Any] = dict(zip((o.name for o in graph.inputs), inputs, strict=True))
    return found | {o.name: Out(index) for index, o in enumerate(graph.outputs)}


def _products(work: NormMatmul, given: Mapping[str, Any]) -> Iterator[Product]:
    for index, p in enumerate(work.outputs):
        steps = kernel_steps(p.epilogue)
        names = operand_names(p.epilogue, index)
        first = given[names.pop(0)] if steps is not p.epilogue else None
        yield Product(
            *(given[f"w{index}"], p.n, p.layout, given[f"out{index}"]),
            bias=first,
            steps=" ".join(_spelled(steps)),
            operands=tuple(given[name] for name in names),
            angles=Angles(p.rope, given[f"cos{index}"], given[f"sin{index}"]) if p.rope else None,
        )


def _spelled(steps: Sequence[Step]) -> Iterator[str]:
    """Yield each step as the kernels have it: its kind, and its number, or which operand it has."""
    count = 0
    for step in steps:
        if isinstance(step, float):
            yield f"times:{step!r}"
        elif step in ACTIVATIONS:
            yield step
        else:
            yield f"{_KINDS[step]}:{count}:{'whole' if step == 'residual' else 'row'}"
            count += 1


_KINDS = {"bias": "add", "scale": "multiply", "residual": "add"}


def _pointers(operands: Sequence[Any]) -> Any:
    """Return operands as a named tuple, which a kernel takes for one parameter."""
    return namedtuple("Operands", [f"operand{i}" for i in range(len(operands))])(*operands)


def _gated(work: GatedFFN, given: Mapping[str, Any]) -> Product:
    """Return both weights and biases, which may be the halves of one tensor each."""
    merged = ("gate_first" if work.gate_first else "up_first") if work.merged else "no"
    up = 0 if work.merged else 1
    return Product(
        *(given["w0"], work.n, work.layout, given["out0"]),
        up=given[f"w{up}"],
        bias=given.get("bias0"),
        up_bias=given.get(f"bias{up}"),
        activation=work.activation,
        merged=merged,
    )
