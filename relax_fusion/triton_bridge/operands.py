"""The operands of a contraction, read from the parameters of its PrimFunc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, tirx

from ..errors import LoweringError
from ..estimator.families.triton_matmul.tiles import split_epilogue
from ..launch.arguments import Out
from ..workload import DynamicDim, GatedFFN, NormMatmul, Rope, Workload, operand_name


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
        rope = self.rope
        turned = (rope.features, rope.period or 0, rope.head_dim, rope.width, rope.columns)
        return {"HALF": rope.distance, "ROTATED": turned}


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
    def rotated(self) -> bool:
        """Whether pairs of features are turned that are not neighbours."""
        return self.angles is not None and self.angles.rope.distance > 1

    @property
    def paired(self) -> bool:
        """Whether a kernel with two accumulators needs both for one tile of columns."""
        return self.up is not None or self.rotated

    @property
    def tiled_columns(self) -> int:
        """Columns that such a kernel cuts into tiles: of rotated heads, the first half."""
        return self.n // 2 if self.rotated else self.n

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
    """Give inputs and outputs, in the order of ``work.graph``, their parts in a kernel.

    Raises
    ------
    LoweringError
        If an epilogue has an order that the kernels lack.
    """
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
        extra = {s: given.get(operand_name(s, index, at)) for at, s in enumerate(p.epilogue)}
        steps = split_epilogue(p.epilogue)
        if steps is None:
            raise LoweringError(f"no Triton kernel has the epilogue {', '.join(p.epilogue)}")
        yield Product(
            *(given[f"w{index}"], p.n, p.layout, given[f"out{index}"]),
            bias=extra.get("bias"),
            residual=extra.get("residual"),
            activation=steps[0],
            residual_place=steps[1],
            angles=Angles(p.rope, given[f"cos{index}"], given[f"sin{index}"]) if p.rope else None,
        )


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
