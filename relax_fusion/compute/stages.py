"""What the stages of a contraction are made of: operands, padding, and the accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tvm import te, tirx

from ..estimator.families.panels import FAMILY as PANELS
from ..estimator.tile_plan import TilePlan
from ..workload import (
    ACTIVATIONS,
    INTEGER_DTYPES,
    Graph,
    Operand,
    Step,
    WeightLayout,
    operand_name,
)
from .activations import ACCUMULATE, activate
from .packed import unpacked

Size: TypeAlias = tirx.Expr | int

Edges = Literal["clamp", "zero", "none"]
"""How rows and columns beyond the last are filled, where there are such."""

Element = Callable[..., tirx.Expr]
"""A function of the indices of an element: (batch,) row and column."""

Reader = Callable[[tirx.Expr, tirx.Expr, tirx.Expr], tirx.Expr]
"""The element of a weight: a function of part, column and k."""

Column = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
"""The element of a weight: a function of column and k."""


class Stages:
    """The parameters of a PrimFunc, as a workload's graph has them, and the stages in between.

    Parameters
    ----------
    graph : Graph
        What is computed.
    """

    def __init__(self, graph: Graph):
        self._graph = graph
        self._sizes = {name: tirx.Var(name, "int64") for name in graph.dims}
        self._inputs = {o.name: self._placeholder(o) for o in graph.inputs}
        self._outputs: dict[str, te.Tensor] = {}

    def _placeholder(self, operand: Operand) -> te.Tensor:
        shape = [d if isinstance(d, int) else self._sizes[d.name] for d in operand.shape or ()]
        return te.placeholder(int64(shape), operand.dtype, operand.name)

    def __contains__(self, name: str) -> bool:
        """Tell whether there is an input called `name`."""
        return name in self._inputs

    def __getitem__(self, name: str) -> te.Tensor:
        """Return an input."""
        return self._inputs[name]

    def size(self, name: str, axis: int) -> Size:
        """Return a size of a tensor of the graph."""
        dim = self._graph[name].shape[axis]
        return dim if isinstance(dim, int) else self._sizes[dim.name]

    def weight(self, name: str, layout: WeightLayout) -> Column:
        """Return what reads an input as a weight, unpacked where it is packed."""
        tensor = self._graph[name]
        stored = [self._inputs[o.name] for o in tensor.operands()]
        form = tensor.format

        def element(j: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
            at = (j, k) if layout == "nk" else (k, j)
            return stored[0](*at) if form is None else unpacked(form, stored, at, tensor.dtype)

        return element

    def give(self, name: str, tensor: te.Tensor) -> None:
        """Add an output; other names are intermediates."""
        self._outputs[name] = tensor

    def func(self) -> tirx.PrimFunc:
        """Return the function, its parameters in the graph's order."""
        outputs = [self._outputs[o.name] for o in self._graph.outputs]
        return te.create_prim_func([*self._inputs.values(), *outputs])


@dataclass(frozen=True)
class Padding:
    """How far accumulators are rounded up: multiples of rows and of columns, 1 for not at all.

    `panels` tells that weights are repacked into panels of so many columns, and x into tiles of so
    many rows.
    """

    rows: int
    columns: int
    panels: bool = False

    @staticmethod
    def of(plan: TilePlan, edges: Edges) -> Padding:
        """Return the padding under which `plan` tiles without a remainder."""
        if edges == "none":
            return Padding(1, 1)
        if plan.family == PANELS:
            return Padding(plan.reg_m, plan.reg_n, panels=True)
        return Padding(plan.block_m, 1 if edges == "zero" else plan.block_n)


def int64(shape: Sequence[Size]) -> tuple[tirx.Expr, ...]:
    """Give every dimension Relax's index type, which the kernel's callers have."""
    return tuple(tirx.IntImm("int64", d) if isinstance(d, int) else d for d in shape)


def round_up(size: Size, multiple: int) -> Size:
    """Return the least multiple that is not below `size`."""
    return (size + (multiple - 1)) // multiple * multiple if multiple > 1 else size


def clamped(index: tirx.Expr, size: Size, multiple: int) -> tirx.Expr:
    """Return `index`, kept below `size` where rounding up to a multiple let it grow."""
    exact = multiple == 1 or (isinstance(size, int) and size % multiple == 0)
    return index if exact else te.min(index, size - 1)


def as_stored(value: tirx.Expr, dtype: str) -> tirx.Expr:
    """Return a float32 value rounded as a tensor of `dtype` rounds it, in float32.

    TVM 0.27 keeps bfloat16 as float32 within a function for a CPU, and drops the cast: the bits are
    rounded here, to the nearest, ties to even.  NaN stays NaN, whichever of its bits are set.
    """
    if dtype != "bfloat16":
        return value.astype(dtype).astype(ACCUMULATE)
    bits = tirx.reinterpret("uint32", value)
    odd = (bits >> tirx.const(16, "uint32")) & tirx.const(1, "uint32")
    near = bits + tirx.const(0x7FFF, "uint32") + odd
    quiet = bits | tirx.const(0x400000, "uint32")
    size = bits & tirx.const(0x7FFFFFFF, "uint32")
    kept = tirx.Select(size > tirx.const(0x7F800000, "uint32"), quiet, near)
    return tirx.reinterpret(ACCUMULATE, kept & tirx.const(0xFFFF0000, "uint32"))


def weight_at(layout: WeightLayout, w: te.Tensor, j: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
    """Return the weight of column j at position k of the reduction."""
    return w(j, k) if layout == "nk" else w(k, j)


def accumulate(
    data: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> te.Tensor:
    """Add the reduction ``acc[p, i, j] = sum_k data[i, k] * weight(p, j, k)``."""
    if padding.panels:
        return _accumulate_packed(data, weight, sizes, name, padding)
    parts, n = sizes
    rows, k = data.shape
    r = te.reduce_axis((0, k), "k")
    total = "int32" if data.dtype in INTEGER_DTYPES else ACCUMULATE

    def product(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        row, column = clamped(i, rows, padding.rows), clamped(j, n, padding.columns)
        x, w = data(row, r), weight(p, column, r)
        return te.sum(x.astype(total) * w.astype(total), axis=r)

    shape = (parts, round_up(rows, padding.rows), round_up(n, padding.columns))
    return te.compute(int64(shape), product, name)


def tiles_of(x: te.Tensor, height: int) -> te.Tensor:
    """Add x in tiles of `height` rows, ``[tiles, k, height]``, in float32.

    A tile is read forwards for every panel of columns.  The last row is repeated up to its end.
    """
    rows, k = x.shape
    return te.compute(
        int64((round_up(rows, height) // height, k, height)),
        lambda tile, r, i: x(clamped(tile * height + i, rows, height), r).astype(ACCUMULATE),
        "x_tiles",
    )


def panels_of(
    weight: Reader, sizes: tuple[int, Size, tirx.Expr], width: int, name: str
) -> te.Tensor:
    """Add the weights of ``sizes`` (parts, n, k) in panels, ``[panels, k, parts, width]``, float32.

    A panel is read once from the weight, whatever the layout and dtype of that, and then forwards
    for every tile of rows.  The last column is repeated up to its end.
    """
    parts, n, k = sizes

    def element(panel: tirx.Expr, r: tirx.Expr, p: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        return weight(p, clamped(panel * width + j, n, width), r).astype(ACCUMULATE)

    return te.compute(int64((round_up(n, width) // width, k, parts, width)), element, name)


def _accumulate_packed(
    tiles: te.Tensor, weight: Reader, sizes: tuple[int, Size], name: str, padding: Padding
) -> te.Tensor:
    """Add the same reduction over tiles of x and panels of the weight."""
    parts, n = sizes
    height, width = padding.rows, padding.columns
    count, k, _ = tiles.shape
    panels = panels_of(weight, (parts, n, k), width, name.replace("acc", "w_panels"))
    r = te.reduce_axis((0, k), "k")

    def product(p: tirx.Expr, i: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        x, w = tiles(i // height, r, i % height), panels(j // width, r, p, j % width)
        return te.sum(x * w, axis=r)

    return te.compute(int64((parts, count * height, round_up(n, width))), product, name)


def stack_parts(
    layout: WeightLayout, sizes: tuple[int, Size, int], weight: Reader, name: str
) -> Reader:
    """Put all parts into one tensor ``[parts, n, k]``, so that a tile of them is one small box.

    In a merged weight the tiles of gate and up lie n rows apart, those of rotated pairs half a
    head, and a schedule that stages them in shared memory would stage everything between them.

    Parameters
    ----------
    sizes : tuple of int, Size and int
        Parts, their columns, and k.
    """
    parts, n, k = sizes
    if layout == "nk":
        both = te.compute(int64((parts, n, k)), lambda p, j, r: weight(p, j, r), name)
        return lambda p, j, r: both(p, j, r)
    both = te.compute(int64((parts, k, n)), lambda p, r, j: weight(p, j, r), name)
    return lambda p, j, r: both(p, r, j)


def stepped(
    stages: Stages,
    which: int,
    steps: Sequence[Step],
    value: Element,
    columns: Size,
    width: int = 1,
) -> Element:
    """Return the element after the steps behind matmul number `which`.

    Columns beyond the last of `columns`, up to a multiple of `width`, have the last one's operands.
    """
    for position, step in enumerate(steps):
        if isinstance(step, float) or step in ACTIVATIONS:
            value = _scaled(value, step) if isinstance(step, float) else _active(value, step)
            continue
        operand = stages[operand_name(step, which, position)]
        if step == "residual":
            term = lambda *at, t=operand: t(*at[len(at) - len(t.shape) :])  # noqa: E731
        else:
            term = lambda *at, t=operand: t(clamped(at[-1], columns, width))  # noqa: E731
        value = (_product if step == "scale" else _sum)(value, term)
    return value


def _sum(value: Element, term: Element) -> Element:
    return lambda *at: value(*at) + term(*at).astype(ACCUMULATE)


def _product(value: Element, factor: Element) -> Element:
    return lambda *at: value(*at) * factor(*at).astype(ACCUMULATE)


def _scaled(value: Element, factor: float) -> Element:
    return lambda *at: value(*at) * tirx.const(factor, ACCUMULATE)


def _active(value: Element, name: str) -> Element:
    return lambda *at: activate(name, value(*at))
