"""The block graph: what a chain computes, as axes, tensors and statements.

A statement, `Block`, is ``out[at] = combine over reduced axes of value``; the statements in order
are the chain.  Everything else that is known of a chain follows from its graph: the order of its
operands (`Graph.inputs`, `Graph.outputs`), the numbers (:mod:`.reference`), the work and the bytes
(:mod:`.roofline`).  How it is executed (tiles, rescaling, order of loops) is no part of it.

A graph has no ragged axes: the size of an axis is a number or one dimension.  A coordinate is an
affine function of axes, of a weight of experts within the part that a tensor names (`Lookup`).
`GraphBuilder` writes graphs down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from ..errors import GraphError
from .dims import Dim, DynamicDim
from .dtypes import STORED_BYTES
from .formats import Operand, Packed
from .values import At, Axis, Expr, reads, touched

_T = TypeVar("_T")

Role = Literal["in", "out", "inout", "scalar"]
Combine = Literal["", "sum", "max"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph."""

    name: str
    """Its name, which is that of its operand."""
    shape: tuple[Dim, ...]
    dtype: str
    """Of its elements; of what they decode to where they are packed."""
    format: Packed | None = None
    """How the elements are stored; None: one after the other."""
    rounds: bool = False
    """Whether every kernel rounds it to its dtype.  Where False, what reads it may see more
    precision (an output is always stored in its dtype)."""

    def operands(self) -> tuple[Operand, ...]:
        """Return what is handed to a kernel for it: one array, or those of its format."""
        if self.format is None:
            return (Operand(self.name, self.shape, self.dtype),)
        return self.format.operands(self.name, self.shape)


@dataclass(frozen=True)
class Band:
    """A mask by position: ``least <= column - row <= most`` is seen (None: no limit).

    The limits are values of sizes and constants.
    """

    column: str
    row: str
    least: Expr | None = None
    most: Expr | None = None

    def __str__(self) -> str:
        low = "" if self.least is None else f"{self.least} <= "
        high = "" if self.most is None else f" <= {self.most}"
        return f"{low}{self.column} - {self.row}{high}"


@dataclass(frozen=True)
class Block:
    """A statement: ``out[at] = combine over reduced axes of value``.

    `out`: the tensor that it makes, or a part of it.
    `at`: which element.
    `axes`, `reduced`: the loops, and those that are combined.
    `value`: an element.
    `combine`: what is done over `reduced`.
    `start`: a further element that is combined first.
    `band`: elements outside are left out.
    `where`: elements for which it is false are left out.  Of none, the sum is 0, the maximum minus
    infinity.
    """

    out: str
    at: tuple[At, ...]
    axes: tuple[Axis, ...]
    value: Expr
    reduced: tuple[Axis, ...] = ()
    combine: Combine = ""
    start: Expr | None = None
    band: Band | None = None
    where: Expr | None = None

    def __str__(self) -> str:
        left = f"{self.out}[{', '.join(map(str, self.at))}]"
        over = ", ".join(a.name for a in self.reduced)
        how = f"{self.combine} {over}: " if self.combine else ""
        first = "" if self.start is None else f"{self.start}; "
        hidden = [str(c) for c in (self.band, self.where) if c is not None]
        return f"{left} = {how}{first}{self.value}{' where ' * bool(hidden)}{', '.join(hidden)}"

    def values(self) -> Iterator[Expr]:
        """Yield the values that it computes."""
        limits = (self.band.least, self.band.most) if self.band else ()
        yield from (e for e in (self.value, self.start, self.where, *limits) if e is not None)


@dataclass(frozen=True)
class Slot:
    """A parameter of a kernel: a tensor that it reads, writes or changes, or a size as a number."""

    name: str
    role: Role
    dim: Dim | None = None


@dataclass(frozen=True)
class Graph:
    """What a chain computes.

    Raises `GraphError` if a name is used twice or not made, or a rank does not fit.
    """

    tensors: tuple[Tensor, ...]
    """Operands, intermediates and results."""
    blocks: tuple[Block, ...]
    """The statements, in order."""
    slots: tuple[Slot, ...]
    """The parameters of a kernel, in order: inputs (and scalars) before outputs."""
    _by_name: dict[str, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {t.name: t for t in self.tensors}
        if len(by_name) < len(self.tensors):
            raise GraphError(f"tensor {_twice([t.name for t in self.tensors])!r} is declared twice")
        object.__setattr__(self, "_by_name", by_name)
        known = {s.name for s in self.slots if s.role in ("in", "inout")}
        slots = [s.name for s in self.slots if s.role != "out"]
        if len(set(slots)) < len(slots):
            raise GraphError(f"operand {_twice(slots)!r} is declared twice")
        for tensor in self.tensors:
            if tensor.dtype not in STORED_BYTES:
                dtypes = ", ".join(STORED_BYTES)
                raise GraphError(f"{tensor.name} is {tensor.dtype!r}; must be of {dtypes}")
        for block in self.blocks:
            self._check(block, known)
            known.add(block.out)
        unmade = [s.name for s in self.slots if s.role == "out" and s.name not in known]
        if unmade:
            raise GraphError(f"output {unmade[0]!r} is made by no statement")

    def __hash__(self) -> int:
        """Hash the fields once: the estimator looks graphs up for every plan."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.blocks, self.slots))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hash: that of text differs between processes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def _check(self, block: Block, known: set[str]) -> None:
        names = [a.name for a in (*block.axes, *block.reduced)]
        axes = set(names)
        if len(axes) < len(names):
            raise GraphError(f"{block.out}: two axes are called {_twice(names)!r}")
        if bool(block.reduced) != bool(block.combine):
            raise GraphError(f"{block.out}: reduced axes need a combination, and only they do")
        places = [(block.out, block.at)]
        for read in (r for value in block.values() for r in touched(value)):
            if read.tensor not in known:
                raise GraphError(f"{block.out}: {read.tensor!r} is read before it is made")
            places.append((read.tensor, read.at))
        for name, coordinates in places:
            rank = len(self[name].shape)
            if len(coordinates) != rank:
                raise GraphError(f"{name} has rank {rank}, not {len(coordinates)} coordinates")
            strange = [a for c in coordinates for a, _ in c.terms if a not in axes]
            if strange:
                raise GraphError(f"{block.out}: {name} is read along {strange[0]!r}, no axis of it")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._by_name:
            raise GraphError(f"no tensor {name!r}; there are {', '.join(self._by_name)}")
        return self._by_name[name]

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """What a kernel is handed, in order; scalars have the dtype int64 and no shape."""
        found: list[Operand] = []
        for slot in self.slots:
            if slot.role == "scalar":
                found.append(Operand(slot.name, None, "int64"))
            elif slot.role != "out":
                found += self[slot.name].operands()
        return tuple(found)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """What a kernel returns, in order; tensors that it changes in place among them."""
        roles = ("out", "inout")
        return tuple(o for s in self.slots if s.role in roles for o in self[s.name].operands())

    @property
    def weights(self) -> frozenset[Operand]:
        """Inputs that a sum multiplies each of its rows by."""
        given = {s.name for s in self.slots if s.role == "in"}
        sums = [(b.axes[0].name, r) for b in self.blocks if b.combine for r in reads(b.value)]
        names = {
            read.tensor
            for row, read in sums
            if read.tensor in given and all(row != axis for at in read.at for axis, _ in at.terms)
        }
        return frozenset(o for name in names for o in self[name].operands())

    @property
    def dims(self) -> tuple[str, ...]:
        """The names of the dynamic dimensions of its operands."""
        sizes = [d for o in (*self.inputs, *self.outputs) for d in o.shape or ()]
        sizes += [s.dim for s in self.slots if s.dim is not None]
        return tuple(dict.fromkeys(d.name for d in sizes if isinstance(d, DynamicDim)))

    def __str__(self) -> str:
        heads = [f"{b}".split(" = ", 1) for b in self.blocks]
        types = [self[b.out].dtype for b in self.blocks]
        left = max((len(h) for h, _ in heads), default=0)
        width = max(map(len, types), default=0)
        rows = zip(heads, types, strict=True)
        return "\n".join(f"{h:{left}}  {t:{width}} = {v}" for (h, v), t in rows)


def _twice(names: Sequence[str]) -> str:
    return next(n for n in names if names.count(n) > 1)


def in_order(operands: Sequence[Operand], given: Mapping[str, _T]) -> tuple[_T, ...]:
    """Return what is given for operands, in their order.

    Raises `GraphError` if there is none for one of them, or one for none of them.
    """
    names = [o.name for o in operands]
    if set(names) != set(given):
        raise GraphError(f"operands are {', '.join(given)}; must be {', '.join(names)}")
    return tuple(given[name] for name in names)
