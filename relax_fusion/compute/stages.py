"""What the stages of a contraction are made of: operands, padding, and the steps behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from tvm import te, tirx

from ..estimator.families.cpu_dots import COUNTS, Word, word_of
from ..estimator.families.cpu_tiles import PANELS
from ..estimator.families.words import FAMILY as WORDS
from ..estimator.families.words import WordVectors
from ..estimator.tile_plan import TilePlan
from ..workload import ACTIVATIONS, Graph, Operand, Step, WeightLayout, operand_name, per_rows
from .activations import ACCUMULATE, activate
from .packed import unpacked

Size: TypeAlias = tirx.Expr | int

Edges = Literal["clamp", "zero", "none"]
"""How rows and columns beyond the last are filled, where there are such."""

Element = Callable[..., tirx.Expr]
"""A function of the indices of an element: (batch,) row and column."""

Reader = Callable[..., tirx.Expr]
"""The element of a weight: a function of part, column and k, and as `Column` has it."""

Column = Callable[..., tirx.Expr]
"""The element of a weight: a function of column and k, and the number of an operand, if it is asked
for what that operand of a packed weight holds there."""


class Stages:
    """The parameters of a PrimFunc, as a workload's graph has them, and the stages in between.

    `graph`: what is computed.
    `unpacked_as`: the dtype in which packed weights are unpacked; by default that of the tensor.
    """

    def __init__(self, graph: Graph, unpacked_as: str | None = None):
        self._graph = graph
        self._unpacked_as = unpacked_as
        self._sizes = {name: tirx.Var(name, "int64") for name in graph.dims}
        self._inputs = {o.name: self._placeholder(o) for o in graph.inputs}
        self._outputs: dict[str, te.Tensor] = {}
        self._laid: list[te.Tensor] = []

    def _placeholder(self, operand: Operand) -> te.Tensor:
        shape = [d if isinstance(d, int) else self._sizes[d.name] for d in operand.shape or ()]
        return te.placeholder(int64(shape), operand.dtype, operand.name)

    def __contains__(self, name: str) -> bool:
        return name in self._inputs

    def __getitem__(self, name: str) -> te.Tensor:
        return self._inputs[name]

    def size(self, name: str, axis: int) -> Size:
        """Return a size of a tensor of the graph."""
        dim = self._graph[name].shape[axis]
        return dim if isinstance(dim, int) else self._sizes[dim.name]

    def weight(self, name: str, layout: WeightLayout) -> Column:
        """Return what reads an input as a weight, by column and k, unpacked where it is packed.

        With the number of one of the operands that it is stored as, it reads that, as it is.
        """
        tensor = self._graph[name]
        stored = [self._inputs[o.name] for o in tensor.operands()]
        form = tensor.format

        def element(j: tirx.Expr, k: tirx.Expr, *operand: int) -> tirx.Expr:
            at = (j, k) if layout == "nk" else (k, j)
            if operand:
                return stored[operand[0]](*at)
            dtype = self._unpacked_as or tensor.dtype
            return stored[0](*at) if form is None else unpacked(form, stored, at, dtype)

        return element

    def laid(self, name: str, shape: Sequence[Size], dtype: str) -> te.Tensor:
        """Add an input that takes the place of weights, which are no inputs then."""
        self._laid.append(te.placeholder(int64(shape), dtype, name))
        return self._laid[-1]

    def give(self, name: str, tensor: te.Tensor) -> None:
        """Add an output; other names are intermediates."""
        self._outputs[name] = tensor

    def func(self) -> tirx.PrimFunc:
        """Return the function, its parameters in the graph's order; what is laid out comes last."""
        gone = {o.name for o in self._graph.weights} if self._laid else set()
        inputs = [tensor for name, tensor in self._inputs.items() if name not in gone]
        outputs = [self._outputs[o.name] for o in self._graph.outputs]
        return te.create_prim_func([*inputs, *self._laid, *outputs])


@dataclass(frozen=True)
class Padding:
    """How far accumulators are rounded up: multiples of rows and of columns, 1 for not at all.

    `panels` tells that weights are repacked into panels of so many columns, and x into tiles of so
    many rows; `words` that weights are unpacked by vectors of words; `dot` which neighbours both
    have in a word.  `laid` adds an operand, which is a weight that is in panels already; `added`
    is added to the sums of each row, and `rounded` (`compute.rounded_rows`) tells of its bytes.
    """

    rows: int
    columns: int
    panels: bool = False
    words: WordVectors | None = None
    dot: Word | None = None
    laid: Callable[[str, Sequence[Size], str], te.Tensor] | None = None
    added: te.Tensor | None = None
    rounded: Any = None

    @staticmethod
    def of(plan: TilePlan, edges: Edges, dtype: str, words: WordVectors | None = None) -> Padding:
        """Return the padding under which `plan` tiles without a remainder."""
        if edges == "none":
            return Padding(1, 1)
        if plan.family in (PANELS, *COUNTS):
            return Padding(plan.reg_m, plan.reg_n, True, words, word_of(plan.family, dtype))
        if plan.family == WORDS:
            return Padding(plan.block_m, plan.block_n, words=words)
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


def stack_parts(
    layout: WeightLayout, sizes: tuple[int, Size, int], weight: Reader, name: str
) -> Reader:
    """Put all parts into one tensor ``[parts, n, k]``, so that a tile of them is one small box.

    In a merged weight the tiles of gate and up lie n rows apart, those of rotated pairs half a
    head, and a schedule that stages them in shared memory would stage everything between them.

    `sizes` are the number of parts, their columns, and k.
    """
    parts, n, k = sizes
    if layout == "nk":
        both = te.compute(int64((parts, n, k)), lambda p, j, r: weight(p, j, r), name)
        return lambda p, j, r: both(p, j, r)
    both = te.compute(int64((parts, k, n)), lambda p, r, j: weight(p, j, r), name)
    return lambda p, j, r: both(p, r, j)


def stepped(stages: Stages, which: int, steps: Sequence[Step], value: Element) -> Element:
    """Return the element after the steps behind matmul number `which`."""
    for position, step in enumerate(steps):
        operand = None
        if isinstance(step, str) and step not in ACTIVATIONS:
            operand = stages[operand_name(step, which, position)]
        value = partial(_after, value, step, operand)
    return value


def _after(value: Element, step: Step, operand: te.Tensor | None, *at: tirx.Expr) -> tirx.Expr:
    """Return an element after a step; an operand of fewer axes has the last ones."""
    before = value(*at)
    if isinstance(step, float):
        return before * tirx.const(step, ACCUMULATE)
    if operand is None:
        return activate(step, before)
    kind, rows = per_rows(step)
    place = at[len(at) - len(operand.shape) :]
    if rows:
        place = (at[0] % rows if kind == "residual" else at[0] // rows, *at[1:])
    term = operand(*place).astype(ACCUMULATE)
    return before * term if kind == "scale" else before + term
