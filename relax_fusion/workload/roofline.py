"""The least that a kernel of a block graph has to do: operations, and bytes that are read once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import GraphError
from .dims import Dim
from .dtypes import STORED_BYTES
from .formats import ALL
from .graph import Block, Graph, Tensor
from .operators import OPERATORS
from .values import At, Axis, Const, Expr, Lookup, Op, Read, Size, axes_in, parts, reads, touched

Sizes = Mapping[str, int]


def matmul_flops(graph: Graph, sizes: Sizes, visible: bool = False) -> float:
    """Return the floating-point operations of the contractions: two a product.

    A contraction is a sum of products of elements that have different axes.

    `graph`: what is computed.
    `sizes`: sizes of the dynamic dimensions, by name.
    `visible`: whether what a mask by position hides is left out.
    """
    share = _visible(graph, sizes) if visible else 1.0
    return share * sum(flops_by_product(graph, sizes).values())


def flops_by_product(graph: Graph, sizes: Sizes) -> dict[str, float]:
    """Return the floating-point operations of each contraction, by the name of its result."""
    return {b.out: 2.0 * _places(b, sizes) for b in graph.blocks if is_contraction(b)}


def flops(graph: Graph, sizes: Sizes) -> float:
    """Return all floating-point operations: those of values, and one for each that is combined."""
    each = ((b, operations(b.value) + bool(b.combine)) for b in graph.blocks)
    return sum(float(count) * _places(b, sizes) for b, count in each)


def is_contraction(block: Block) -> bool:
    """Tell whether a statement sums products of elements that have different axes."""
    value = block.value
    if block.combine != "sum" or not isinstance(value, Op) or value.name != "multiply":
        return False
    first, second = ({a for r in reads(v) for c in r.at for a, _ in c.terms} for v in value.args)
    return bool(first - second) and bool(second - first)


def distinct_bytes(graph: Graph, sizes: Sizes) -> dict[str, int]:
    """Return the bytes of each operand that are read or written, by slot; scalars are left out.

    Of a tensor that is read in part, as the prefix of a cache, the part counts: the box around its
    elements.
    """
    found = {}
    for slot in graph.slots:
        if slot.role != "scalar":
            tensor = graph[slot.name]
            count = _touched(graph, tensor, sizes)
            both = 2 if slot.role == "inout" else 1
            found[slot.name] = both * _stored(tensor, count, sizes)
    return found


def _stored(tensor: Tensor, elements: int, sizes: Sizes) -> int:
    """Return the bytes of so many elements of a tensor."""
    form = tensor.format
    if form is None:
        return elements * STORED_BYTES[tensor.dtype]
    words = math.ceil(elements / form.fields) * STORED_BYTES[form.word]
    if not form.scale_dtype:
        return words
    along, across = (
        group if group != ALL else max(1, size_at(tensor.shape[axis], sizes))
        for axis, group in ((form.axis, form.group), (form.other, form.lines))
    )
    groups = math.ceil(elements / (along * across))
    zeros = 0 if form.zero is not None else math.ceil(groups / form.fields)
    return words + groups * STORED_BYTES[form.scale_dtype] + zeros * STORED_BYTES[form.word]


def _touched(graph: Graph, tensor: Tensor, sizes: Sizes) -> int:
    """Return how many elements of a tensor the statements touch.

    That is the size of a box around them, with what strides leave out along an axis left out.
    """
    boxes = []
    for block in graph.blocks:
        loops = {a.name: a for a in (*block.axes, *block.reduced)}
        places = [r.at for v in block.values() for r in touched(v) if r.tensor == tensor.name]
        places += [block.at] if block.out == tensor.name else []
        boxes += [[_interval(c, loops, sizes) for c in place] for place in places]
    total = 1
    for sides in zip(*boxes, strict=True):
        reached = [side for side in sides if side is not None]
        if not reached:
            return 0
        first, last = min(low for low, _, _ in reached), max(high for _, high, _ in reached)
        step = math.gcd(*(n for low, _, step in reached for n in (step, low - first)))
        total *= (last - first) // max(1, step) + 1
    return total if boxes else 0


def _interval(at: At, loops: Mapping[str, Axis], sizes: Sizes) -> tuple[int, int, int] | None:
    """Return first and last value of a coordinate and what divides their distances; None: none."""
    low = high = at.start
    step = 0
    for name, stride in at.terms:
        length = size_at(loops[name].size, sizes)
        if length == 0:
            return None
        low, high = low + min(0, stride * (length - 1)), high + max(0, stride * (length - 1))
        step = math.gcd(step, stride if length > 1 else 0)
    if isinstance(at, Lookup):  # any of the parts
        return low, high + (at.count - 1) * at.stride, 1
    low, high = low // at.div, high // at.div
    if at.mod is None:
        return low, high, step if at.div == 1 else 1
    most = min(high, size_at(at.mod, sizes) - 1)
    return (0, most, 1) if most >= 0 else None


def _visible(graph: Graph, sizes: Sizes) -> float:
    """Return the part of rows and columns that the masks by position leave."""
    masked = ((b.band, b) for b in graph.blocks if b.band is not None)
    band, block = next(masked, (None, None))
    if band is None or block is None:
        return 1.0
    lengths = {a.name: size_at(a.size, sizes) for a in (*block.axes, *block.reduced)}
    rows, columns = lengths[band.row], lengths[band.column]
    least = -rows if band.least is None else _number(band.least, sizes, columns)
    most = columns if band.most is None else _number(band.most, sizes, columns)
    seen = (min(columns - 1, r + most) - max(0, r + least) + 1 for r in range(rows))
    return sum(max(0, n) for n in seen) / max(1, rows * columns)


def _number(value: Expr, sizes: Sizes, columns: int) -> int:
    """Return the limit of a band: sums of sizes and numbers, of which a tensor tells `columns`."""
    if isinstance(value, Read):
        return columns
    if isinstance(value, Size):
        return size_at(value.dim, sizes)
    if isinstance(value, Const):
        return int(value.value)
    assert isinstance(value, Op), value
    first, second = (_number(a, sizes, columns) for a in value.args)
    if value.name == "minimum":
        return min(first, second)
    return first - second if value.name == "subtract" else first + second


def _places(block: Block, sizes: Sizes) -> int:
    return math.prod(size_at(a.size, sizes) for a in (*block.axes, *block.reduced))


def operations(value: Expr) -> int:
    """Return the floating-point operations of one element."""
    return sum(_own_operations(part) for part in parts(value) if isinstance(part, Op))


def _own_operations(value: Op) -> int:
    """Return the operations of an operator beside those of its operands."""
    known = OPERATORS[value.name]
    formula = Op(value.name, (Const(0.0),) * known.arity).formula
    return known.flops or (0 if formula is None else operations(formula))


def instructions(value: Expr) -> dict[frozenset[str], int]:
    """Return the instructions of a GPU's thread, by the axes that they are done along."""
    found: dict[frozenset[str], int] = {}
    for part in parts(value):
        if isinstance(part, Op):
            axes = frozenset(axes_in(part))
            found[axes] = found.get(axes, 0) + slots_of(part.name)
    return found


def slots_of(name: str) -> int:
    """Return the instructions of an operator; of a formula, those of all its parts."""
    known = OPERATORS[name]
    formula = Op(name, (Const(0.0),) * known.arity).formula
    if formula is None:
        return known.slots
    return sum(slots_of(part.name) for part in parts(formula) if isinstance(part, Op))


def size_at(dim: Dim, sizes: Sizes) -> int:
    """Return the size of a dimension.

    Raises `GraphError` if it is dynamic and has no size in `sizes`.
    """
    if isinstance(dim, int):
        return dim
    if dim.name not in sizes:
        raise GraphError(f"the size of {dim.name} is missing; there are {', '.join(sizes)}")
    return sizes[dim.name]
