"""The operands of a contraction, read from the parameters of its PrimFunc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from ..errors import LoweringError
from ..estimator.triton import split_epilogue
from ..workload import DynamicDim, GatedFFN, NormMatmul, Rope
from .arguments import Out


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
    residual: Any = None
    activation: str = "none"
    residual_place: str = "none"
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
            "RESIDUAL": self.residual_place,
            "MERGED": self.merged,
            **(self.angles.constants if self.angles else {}),
        }

    def pointers(self, unused: Any) -> dict[str, Any]:
        """Return the arguments behind the weights; `unused` for pointers that are switched off."""
        found = {
            "bias_ptr": self.bias,
            "up_bias_ptr": self.up_bias,
            "residual_ptr": self.residual,
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
    """Assign inputs, in the order of `contraction_prim_func`, and count the outputs.

    Raises
    ------
    LoweringError
        If an epilogue has an order that the kernels lack.
    """
    given = iter(inputs)
    norm = work.norm
    x = next(given)
    residual = next(given) if norm and norm.residual else None
    gamma = next(given) if norm else None
    beta = next(given) if norm and norm.beta else None
    outs = map(Out, range(2 + len(inputs)))
    total = next(outs) if norm and norm.returns_sum else None
    normed = next(outs) if norm and norm.returns_norm else None
    products: Iterable[Product]
    if isinstance(work, GatedFFN):
        products = [_gated(work, given, next(outs))]
    else:
        products = _products(work, given, outs)
    return Operands(x, residual, gamma, beta, total, normed, tuple(products))


def _products(work: NormMatmul, given: Iterator[Any], outs: Iterator[Out]) -> Iterator[Product]:
    for p in work.outputs:
        weight = next(given)
        extra = {step: next(given) for step in p.epilogue if step in ("bias", "residual")}
        steps = split_epilogue(p.epilogue)
        if steps is None:
            raise LoweringError(f"no Triton kernel has the epilogue {', '.join(p.epilogue)}")
        yield Product(
            *(weight, p.n, p.layout, next(outs), None, extra.get("bias"), None),
            residual=extra.get("residual"),
            activation=steps[0],
            residual_place=steps[1],
            angles=Angles(p.rope, next(given), next(given)) if p.rope else None,
        )


def _gated(work: GatedFFN, given: Iterator[Any], out: Out) -> Product:
    """Read both weights and biases, which may be the halves of one tensor each."""
    pairs = []
    for _ in range(1 + work.bias):
        first = next(given)
        pairs.append((first, first if work.merged else next(given)))
    (gate, up), (bias, up_bias) = [*pairs, (None, None)][:2]
    merged = ("gate_first" if work.gate_first else "up_first") if work.merged else "no"
    return Product(
        *(gate, work.n, work.layout, out, up, bias, up_bias),
        activation=work.activation,
        merged=merged,
    )
