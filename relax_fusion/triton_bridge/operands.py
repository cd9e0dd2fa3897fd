"""The operands of a contraction, read from the parameters of its PrimFunc."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx

from ..estimator.families.triton_matmul.tiles import kernel_steps, launches
from ..estimator.prediction import ceil_div
from ..launch.arguments import Out, Workspace
from ..workload import (
    ACTIVATIONS,
    Adapter,
    DynamicDim,
    GatedFFN,
    NormMatmul,
    Packed,
    Projection,
    Rope,
    Step,
    Workload,
    operand_names,
    per_rows,
)
from ..workload.formats import ALL, E2M1, EXPONENT
from .kernels.products import Form, Tensors


@dataclass(frozen=True)
class Angles:
    """The cosines and sines by which a product's features are rotated."""

    rope: Rope
    cos: Any
    sin: Any

    @property
    def pairs(self) -> tuple[int, ...]:
        """Which pairs turn, as `turned_pairs` of the kernels has it."""
        rope = self.rope
        return rope.features, rope.period or 0, rope.head_dim, rope.width, rope.columns

    @property
    def positions(self) -> Any:
        """The rows of both where they repeat themselves, as an argument."""
        dynamic = isinstance(self.rope.positions, DynamicDim)
        rows = self.cos.ty.shape.values[0]
        return tirx.Cast("int32", rows) if dynamic else self.rope.positions


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter beside a product's weight, and its A and B."""

    form: Adapter
    a: Any
    b: Any


@dataclass(frozen=True)
class Product:
    """One matmul, or a gated pair of them, and where it reads and writes.

    `half` is the distance between the features of a pair, where they are paired: to be rotated, or
    as those of other products of the same launch are.  Packed weights have scales.
    """

    weight: Any
    n: int
    layout: str
    out: Out | Workspace
    up: Any = None
    bias: Any = None
    up_bias: Any = None
    activation: str = "none"
    steps: str = ""
    operands: tuple[Any, ...] = ()
    merged: str = "no"
    angles: Angles | None = None
    half: int = 0
    adapter: AdapterWeights | None = None
    packed: Packed | None = None
    scale: Any = None
    up_scale: Any = None

    @property
    def weights(self) -> list[Any]:
        """The tensors of its weights."""
        tensors = (self.weight, self.up, self.scale, self.up_scale)
        return [tensor for tensor in tensors if tensor is not None]

    def form(self, step: int) -> Form:
        """Return what a kernel is compiled for, whose tiles have `step` columns."""
        return Form(
            ceil_div(self.n, step),
            self.n,
            self.layout,
            gated=self.up is not None,
            merged=self.merged,
            has_bias=self.bias is not None,
            activation=self.activation,
            steps=self.steps,
            half=self.half,
            rotated=self.angles.pairs if self.angles else None,
            **words_of(self.packed),
        )

    def tensors(self, parts: Any = None) -> Tensors:
        """Return its arguments."""
        turns = self.angles
        return Tensors(
            w=self.weight,
            up=self.up,
            bias=self.bias,
            up_bias=self.up_bias,
            out=self.out,
            parts=parts,
            cos=turns and turns.cos,
            sin=turns and turns.sin,
            positions=turns and turns.positions,
            operands=self.operands or None,
            scale=self.scale,
            up_scale=self.up_scale,
        )


@dataclass(frozen=True)
class Operands:
    """What a contraction reads and writes; None for what its workload does not have.

    `total` and `normed` are the outputs for the sum in front of the norm and for the norm,
    `launches` the products, those together that one launch computes, `first` gamma of a norm in
    front of the sum.
    """

    x: Any
    residual: Any
    gamma: Any
    beta: Any
    total: Out | None
    normed: Out | None
    launches: tuple[tuple[Product, ...], ...]
    first: Any = None


def read_operands(work: NormMatmul | GatedFFN, inputs: Sequence[ir.Expr]) -> Operands:
    """Give inputs and outputs, in the order of ``work.graph``, their parts in a kernel."""
    given = named_operands(work, inputs)
    together: tuple[tuple[Product, ...], ...]
    if isinstance(work, GatedFFN):
        together = ((_gated(work, given),),)
    else:
        products = list(_products(work, given))
        together = tuple(_alike([products[i] for i in indices]) for indices in launches(work))
    return Operands(
        given["x"],
        residual=given.get("residual"),
        gamma=given.get("gamma"),
        beta=given.get("beta"),
        total=given.get("x_sum"),
        normed=given.get("x_norm"),
        launches=together,
        first=given.get("gamma_first"),
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
            *(given[f"w{index}"], p.columns, p.layout, given[f"out{index}"]),
            bias=first,
            steps=" ".join(_spelled(steps)),
            operands=tuple(given[name] for name in names),
            angles=Angles(p.rope, given[f"cos{index}"], given[f"sin{index}"]) if p.rope else None,
            half=p.rope.distance if p.rope else 0,
            adapter=_adapter(p, given, index),
            packed=p.packed,
            scale=given.get(f"w{index}_scale"),
        )


def _adapter(p: Projection, given: Mapping[str, Any], index: int) -> AdapterWeights | None:
    if p.adapter is None:
        return None
    return AdapterWeights(p.adapter, given[f"w{index}_a"], given[f"w{index}_b"])


def _spelled(steps: Sequence[Step]) -> Iterator[str]:
    """Yield each step as the kernels have it: its kind, and its number, or which operand it has."""
    count = 0
    for step in steps:
        if isinstance(step, float):
            yield f"times:{step!r}"
        elif step in ACTIVATIONS:
            yield step
        else:
            kind, rows = per_rows(step)
            some, all_rows = ("period", "whole") if kind == "residual" else ("each", "row")
            along = f"{some}:{rows}" if rows else all_rows
            yield f"{_KINDS[kind]}:{count}:{along}"
            count += 1


_KINDS = {"bias": "add", "scale": "multiply", "residual": "add"}


def _alike(products: Sequence[Product]) -> tuple[Product, ...]:
    """Return products of one launch, all of which pair features if one does that lie apart."""
    half = max(p.half for p in products)
    return tuple(replace(p, half=half) if half > 1 else p for p in products)


def _gated(work: GatedFFN, given: Mapping[str, Any]) -> Product:
    """Return both weights and biases, which may be the halves of one tensor each."""
    merged = ("gate_first" if work.gate_first else "up_first") if work.merged else "no"
    gate, up = (0, 0) if work.merged else (0, 1) if work.gate_first else (1, 0)
    return Product(
        *(given[f"w{gate}"], work.n, work.layout, given["out0"]),
        up=given[f"w{up}"],
        bias=given.get(f"bias{gate}"),
        up_bias=given.get(f"bias{up}"),
        activation=work.activation,
        merged=merged,
        packed=work.packed,
        scale=given.get(f"w{gate}_scale"),
        up_scale=None if work.merged else given.get(f"w{up}_scale"),
    )


def words_of(packed: Packed | None) -> dict[str, Any]:
    """Return the fields of a form that are about packed weights.

    Narrow words are read together where groups allow it.
    """
    if packed is None:
        return {}
    whole, signed = 32 // packed.bits, packed.number == "int8"
    together = packed.group == ALL or packed.group % whole == 0
    return {
        "bits": packed.bits,
        "fields": whole if together else packed.fields,
        "group": packed.group,
        "zero": (packed.zero or 0) + 128 * signed,
        "number": "e2m1" if packed.number == E2M1 else packed.number,
        "exponents": packed.scale_dtype == EXPONENT,
    }


def given_or(value: Any, otherwise: Any) -> Any:
    """Return `value`, or `otherwise` where it is None."""
    return otherwise if value is None else value
