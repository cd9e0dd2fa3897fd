"""How the elements of a PrimFunc's result follow from those that it reads, proved from its body."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod

from tvm import ir, tirx

from ..matching.expressions import (
    different,
    found_in,
    is_if_then_else,
    is_number,
    loads_of,
    substitute,
    variables_of,
    without_offset,
)
from ..matching.stages import Stage, is_view, read_stages
from ..transforms.modules import OPAQUE
from ..tvm_ir import Analyzer, SBlockRealize, TensorLoad

SYMBOLIC_SIZE = 64
"""What a size counts as that only the run knows."""

_SLOW = {"exp", "exp2", "exp10", "log", "log2", "log1p", "pow", "tanh", "sigmoid", "erf", "sin"}
_SLOW |= {"cos", "tan", "sqrt", "rsqrt", "sinh", "cosh", "asin", "acos", "atan"}
SLOW_SLOTS, SLOTS = 16, 2
"""Cycles of a lane that a function such as exp takes, and other arithmetic, casts among it: from
apache/tvm issue 20342, where exp, a product and a difference took 21 on an RTX A6000."""


class Kind(IntEnum):
    """A mapping of elements, from the one that constrains a kernel least.

    ``ONE_TO_ONE``: same place; ``REORGANISE``: same order in memory; ``SHUFFLE``: each element at
    most once, at any place; ``ONE_TO_MANY``: an element is read for several of the result;
    ``MANY_TO_MANY``: an element of the result is made of several.
    """

    ONE_TO_ONE = 0
    REORGANISE = 1
    SHUFFLE = 2
    ONE_TO_MANY = 3
    MANY_TO_MANY = 4


@dataclass(frozen=True)
class Edge:
    """How a PrimFunc reads one of its parameters."""

    kind: Kind
    """From its elements to those of the result."""
    repeats: float
    """How often each of its elements is read, different places counted."""
    loads: int
    """How often code names it, if all stages are put into one another."""
    is_summed: bool
    """Whether a sum is in between; otherwise it is only read behind all sums."""
    is_spread: bool = False
    """Whether each element is read for a whole row of the result, along the last axis."""


@dataclass(frozen=True)
class Operator:
    """What a PrimFunc does, as far as joining it with others goes."""

    kind: Kind
    """The kind of its edges that constrains most."""
    edges: Sequence[Edge]
    """One for each tensor that it reads, in the order of parameters."""
    slots: float
    """Cycles of a lane that its arithmetic takes."""
    multiplies: bool
    """Whether it sums products of which each factor is read several times."""
    moves_rows: bool = False
    """Whether it moves whole rows, as a slice or a transpose of leading axes does."""
    width: int = 0
    """Of a sum along the last axis, how many elements that has; 0 if that is not known."""


def operator_of(func: tirx.PrimFunc, inputs: int) -> Operator | None:
    """Return what a PrimFunc does that reads its first `inputs` parameters, None if unknown.

    Where its body is of another form than the legaliser's, TVM's annotation is believed.
    """
    if not isinstance(func.body, SBlockRealize):
        return None
    pattern = int((func.attrs or {}).get("op_pattern", OPAQUE))
    stages = read_stages(func)
    tensors = [p for p in func.params if tirx.is_buffer_var(p)]
    given = [p for p in func.params[:inputs] if tirx.is_buffer_var(p)]
    if stages is None:
        return _annotated(pattern, tensors, len(given))
    made = _Reading(func, stages, set(tensors[len(given) :]))
    if not {s.buffer for s in stages} >= set(tensors[len(given) :]):
        return None
    edges = [made.edge(p) for p in given]
    sums = [s for s in stages if s.reduced]
    kind = Kind.MANY_TO_MANY if sums else max((e.kind for e in edges), default=Kind.ONE_TO_ONE)
    slots = sum(_slots(s.value) * _count(s.extents.values()) for s in stages)
    moves = kind is Kind.SHUFFLE and len(stages) == 1 and _moves_rows(stages[0])
    width = _width(sums[0]) if len(sums) == 1 else 0
    return Operator(kind, edges, slots, any(map(_multiplies, sums)), moves, width)


def elements(shape: Iterable[tirx.Expr]) -> float:
    """Return how many elements a tensor has, symbolic sizes counted as `SYMBOLIC_SIZE`."""
    return _count(shape)


class _Reading:
    """Follows parameters of one PrimFunc through its stages to its results."""

    def __init__(self, func: tirx.PrimFunc, stages: Sequence[Stage], results: set[tirx.Var]):
        self.edges: dict[tirx.Var, Edge] = {
            r: Edge(Kind.ONE_TO_ONE, 1.0, 1, False) for r in results
        }
        self.is_reshape = len(stages) == 1 and is_view(func)
        for stage in reversed(stages):
            behind = self.edges.get(stage.buffer)
            if behind is not None:
                self._read(stage, behind)

    def edge(self, tensor: tirx.Var) -> Edge:
        """Return how a parameter is read; one that is not read counts as read in place."""
        return self.edges.get(tensor, Edge(Kind.ONE_TO_ONE, 0.0, 0, False))

    def _read(self, stage: Stage, behind: Edge) -> None:
        loads = [v for v in loads_of(stage.value) if not v.source.same_as(stage.buffer)]
        for source in dict.fromkeys(load.source for load in loads):
            own = [load for load in loads if load.source.same_as(source)]
            places = different(own)
            repeats = sum(_repeats(stage, load) for load in places)
            kind = max(self._kind(stage, load, repeats) for load in places)
            edge = Edge(
                max(kind, behind.kind),
                repeats * (1.0 if stage.reduced else behind.repeats),
                len(own) * behind.loads,
                bool(stage.reduced) or behind.is_summed,
                behind.kind is Kind.ONE_TO_ONE and all(_is_spread(stage, load) for load in places),
            )
            other = self.edges.get(source)
            self.edges[source] = edge if other is None else _both(edge, other)

    def _kind(self, stage: Stage, load: TensorLoad, repeats: float) -> Kind:
        if stage.reduced:
            return Kind.MANY_TO_MANY
        if self.is_reshape:
            indices, shape = load.indices, load.source.ty.shape
            return Kind.ONE_TO_ONE if _same(stage, indices, shape) else Kind.REORGANISE
        if _same(stage, load.indices, load.source.ty.shape):
            return Kind.ONE_TO_ONE
        looked_up = any(loads_of(index) for index in load.indices)
        return Kind.ONE_TO_MANY if looked_up or repeats > 1 else Kind.SHUFFLE


def _both(a: Edge, b: Edge) -> Edge:
    """Return how two stages together read a tensor."""
    summed = a.is_summed or b.is_summed
    return Edge(max(a.kind, b.kind), a.repeats + b.repeats, a.loads + b.loads, summed)


def _same(stage: Stage, indices: Sequence[tirx.Expr], shape: Sequence[tirx.Expr]) -> bool:
    """Tell whether a load is at the place of the result, axes of one element left aside."""
    wide = [i for i, size in zip(indices, shape, strict=True) if not is_number(size, 1)]
    own = [v for v in stage.spatial if not is_number(stage.extents[v], 1)]
    sizes = [s for s in shape if not is_number(s, 1)]
    return len(wide) == len(own) and all(
        i.same_as(v) and Analyzer().can_prove_equal(stage.extents[v], s)
        for i, v, s in zip(wide, own, sizes, strict=True)
    )


def _repeats(stage: Stage, load: TensorLoad) -> float:
    """Return how often a load of a stage reads an element, on average.

    Of what a condition chooses, no element is read more often than once.
    """
    ratio = _count(stage.extents.values()) / max(_count(load.source.ty.shape), 1.0)
    return min(ratio, 1.0) if _is_chosen(stage.value, load) else ratio


def _is_chosen(value: tirx.Expr, load: TensorLoad) -> bool:
    """Tell whether places decide if a value reads an element, as of a part of a concatenation."""
    for call in found_in(value, ir.Call):
        if is_if_then_else(call):
            condition, *sides = call.args
            if not loads_of(condition) and any(
                load.same_as(found) for side in sides for found in loads_of(side)
            ):
                return True
    return False


def _count(sizes: Iterable[tirx.Expr]) -> float:
    found = list(sizes)
    known = [int(s) for s in found if isinstance(s, tirx.IntImm)]
    return float(prod(known)) * prod(_guess(s) for s in found if not isinstance(s, tirx.IntImm))


def _guess(size: tirx.Expr) -> float:
    numbers = {v: tirx.const(SYMBOLIC_SIZE, str(v.ty.dtype)) for v in variables_of(size)}
    value = Analyzer().simplify(substitute(size, numbers))
    return float(max(int(value), 1)) if isinstance(value, tirx.IntImm) else float(SYMBOLIC_SIZE)


def _slots(value: tirx.Expr) -> float:
    """Return the cycles of a lane that computing a value takes."""
    if isinstance(value, TensorLoad | tirx.IntImm | tirx.FloatImm):
        return 0.0
    names = [getattr(c.op, "name", "").rpartition(".")[2] for c in found_in(value, ir.Call)]
    binary = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Cast, tirx.Select)
    plain = sum(len(found_in(value, kind)) for kind in binary)
    return SLOTS * plain + sum(SLOW_SLOTS if name in _SLOW else SLOTS for name in names)


def _is_spread(stage: Stage, load: TensorLoad) -> bool:
    """Tell whether a load is at the place of the result, but for its last axis."""
    own = [v for v in stage.spatial if not is_number(stage.extents[v], 1)]
    return bool(own) and not stage.reduced and _is_at(load, own[:-1])


def _width(stage: Stage) -> int:
    """Return how many elements a sum takes of each row of memory, 0 if it takes others."""
    loads = [v for v in loads_of(stage.value) if not v.source.same_as(stage.buffer)]
    own = [v for v in (*stage.spatial, *stage.reduced) if not is_number(stage.extents[v], 1)]
    size = stage.extents[stage.reduced[0]] if len(stage.reduced) == 1 else None
    rows = all(_is_at(load, own) for load in loads)
    return int(size) if rows and loads and isinstance(size, tirx.IntImm) else 0


def _is_at(load: TensorLoad, own: Sequence[tirx.Var]) -> bool:
    """Tell whether a load is at the place of these variables, axes of one element left aside."""
    shape = load.source.ty.shape
    wide = [i for i, size in zip(load.indices, shape, strict=True) if not is_number(size, 1)]
    return len(wide) == len(own) and all(i.same_as(v) for i, v in zip(wide, own, strict=True))


def _moves_rows(stage: Stage) -> bool:
    """Tell whether each row of the result, along the last axis, is one of what is read."""
    load = stage.value
    if not isinstance(load, TensorLoad) or not stage.spatial:
        return False
    own, places = stage.spatial[-1], [without_offset(index) for index in load.indices]
    whole = Analyzer().can_prove_equal(stage.extents[own], load.source.ty.shape[-1])
    plain = all(isinstance(place, tirx.Var | tirx.IntImm) for place in places)
    return whole and plain and load.indices[-1].same_as(own)


def _multiplies(stage: Stage) -> bool:
    """Tell whether a sum is one of products whose factors are read again for other elements."""
    own = [v for v in loads_of(stage.value) if not v.source.same_as(stage.buffer)]
    wide = {v for v in stage.spatial if not is_number(stage.extents[v], 1)}
    return len(different(own)) > 1 and any(
        not wide <= set[tirx.Var]().union(*map(variables_of, load.indices)) for load in own
    )


_ANNOTATED: Mapping[int, Kind] = {
    0: Kind.ONE_TO_ONE,
    1: Kind.ONE_TO_MANY,
    2: Kind.SHUFFLE,
    3: Kind.MANY_TO_MANY,
    4: Kind.MANY_TO_MANY,
}
"""By TVM's OpPatternKind."""


def _annotated(pattern: int, tensors: Sequence[tirx.Var], inputs: int) -> Operator | None:
    """Return an operator of which no more is known than TVM's annotation."""
    kind = _ANNOTATED.get(pattern)
    if kind is None or inputs == len(tensors):
        return None
    made = max(_count(t.ty.shape) for t in tensors[inputs:])
    sizes = [max(_count(t.ty.shape), 1.0) for t in tensors[:inputs]]
    summed = kind is Kind.MANY_TO_MANY
    edges = [Edge(kind, max(made / size, 1.0), 2, summed) for size in sizes]
    return Operator(kind, edges, SLOW_SLOTS * made, summed)
