"""Coordinates and values of a block graph: what a statement reads, and what it computes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import GraphError
from .dims import Dim, size_text
from .operators import OPERATORS


@dataclass(frozen=True)
class At:
    """One coordinate: ``(sum of axis * stride + start) // div % mod``."""

    terms: tuple[tuple[str, int], ...] = ()
    """Axes and their strides."""
    start: int = 0
    div: int = 1
    """Added to the sum, and what that is divided by, rounded down."""
    mod: Dim | None = None
    """What the quotient wraps around at."""

    def __add__(self, other: Axis | At | int) -> At:
        """Return the sum of two coordinates without `div` and `mod`."""
        more = at(other)
        if (self.div, self.mod, more.div, more.mod) != (1, None, 1, None):
            raise GraphError(f"coordinate {self} + {more}: only sums of axes can be added")
        return At(self.terms + more.terms, self.start + more.start)

    def __str__(self) -> str:
        parts = [a if s == 1 else f"{s}*{a}" for a, s in self.terms]
        parts += [str(self.start)] if self.start or not parts else []
        text = " + ".join(parts).replace("+ -", "- ")
        if self.div != 1:
            text = f"({text})//{self.div}"
        return text if self.mod is None else f"({text})%{size_text(self.mod)}"


@dataclass(frozen=True)
class Lookup(At):
    """A coordinate in one of `count` equal parts of a dimension, which a tensor names by number.

    It is ``number * stride`` and the sum of axes.  A number of no part counts as the nearest one's.
    """

    number: Read | None = None
    """The element that says which part."""
    count: int = 1
    stride: int = 1
    """How many parts there are, and how long one is."""

    def __str__(self) -> str:
        inside = super().__str__()
        part = f"{self.number}" if self.stride == 1 else f"{self.stride}*{self.number}"
        return part if inside == "0" else f"{part} + {inside}"


@dataclass(frozen=True)
class Axis:
    """A loop of a graph: its name and its size."""

    name: str
    size: Dim

    def __mul__(self, stride: int) -> At:
        return At(((self.name, stride),))

    def __add__(self, other: Axis | At | int) -> At:
        return at(self) + other

    def __mod__(self, size: Dim) -> At:
        """Return the coordinate that wraps around at `size`."""
        return At(((self.name, 1),), mod=size)


def at(place: Axis | At | int) -> At:
    """Return a place as a coordinate.

    Raises `GraphError` if it is none: a value of a tensor, for example, would be a gather.
    """
    if isinstance(place, At):
        return place
    if isinstance(place, Axis):
        return At(((place.name, 1),))
    if isinstance(place, int):
        return At(start=place)
    raise GraphError(f"{place} is no coordinate; must be an axis, a sum of axes or a number")


class Expr:
    """A value: a `Read`, an `AxisValue`, a `Size`, a `Const` or an `Op` of values."""

    def __add__(self, other: Expr | float) -> Op:
        return Op("add", (self, expr(other)))

    def __sub__(self, other: Expr | float) -> Op:
        return Op("subtract", (self, expr(other)))

    def __mul__(self, other: Expr | float) -> Op:
        return Op("multiply", (self, expr(other)))

    def __truediv__(self, other: Expr | float) -> Op:
        return Op("divide", (self, expr(other)))


@dataclass(frozen=True)
class Read(Expr):
    """An element of a tensor."""

    tensor: str
    at: tuple[At, ...]

    def __str__(self) -> str:
        return f"{self.tensor}[{', '.join(map(str, self.at))}]"


@dataclass(frozen=True)
class AxisValue(Expr):
    """The value of an axis, as a number."""

    axis: str

    def __str__(self) -> str:
        return self.axis


@dataclass(frozen=True)
class Size(Expr):
    """The value of a dimension, as a number."""

    dim: Dim

    def __str__(self) -> str:
        return size_text(self.dim)


@dataclass(frozen=True)
class Const(Expr):
    """A number."""

    value: float

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Op(Expr):
    """An operator of `OPERATORS` applied to values."""

    name: str
    args: tuple[Expr, ...]

    def __post_init__(self) -> None:
        known = OPERATORS.get(self.name)
        if known is None:
            raise GraphError(f"no operator {self.name!r}; there are {', '.join(OPERATORS)}")
        if len(self.args) != known.arity:
            raise GraphError(f"{self.name} has {len(self.args)} operands; must have {known.arity}")

    def __str__(self) -> str:
        return OPERATORS[self.name].text.format(*(self._part(a) for a in self.args))

    @property
    def formula(self) -> Expr | None:
        """The value in other operators; None for one that each back end has a function of."""
        known = OPERATORS[self.name].formula
        return None if known is None else known(_Applied(), *self.args)

    def _part(self, arg: Expr) -> str:
        """Return an operand, in brackets where the formula needs them."""
        infix = isinstance(arg, Op) and not OPERATORS[arg.name].text.endswith(")")
        loose = infix and not (self.name == "add" or OPERATORS[self.name].text.endswith(")"))
        return f"({arg})" if loose else str(arg)


def expr(value: Expr | float) -> Expr:
    """Return a number as a value; values stay what they are."""
    return value if isinstance(value, Expr) else Const(float(value))


def apply(name: str, *args: Expr | float) -> Op:
    """Return an operator of `OPERATORS` applied to values."""
    return Op(name, tuple(map(expr, args)))


class _Applied:
    """Applies operators that are asked for by name."""

    def __getattr__(self, name: str) -> Callable[..., Op]:
        """Return what applies an operator."""
        return partial(apply, name)


def parts(value: Expr) -> Iterator[Expr]:
    """Yield a value and all values that it is computed from."""
    yield value
    for arg in value.args if isinstance(value, Op) else ():
        yield from parts(arg)


def axes_in(value: Expr) -> Iterator[str]:
    """Yield the axes that a value depends on."""
    for part in parts(value):
        if isinstance(part, AxisValue):
            yield part.axis
        elif isinstance(part, Read):
            yield from (axis for place in part.at for axis, _ in place.terms)


def reads(value: Expr) -> Iterator[Read]:
    """Yield the elements that a value is computed from, but for those that say which others."""
    return (part for part in parts(value) if isinstance(part, Read))


def touched(value: Expr) -> Iterator[Read]:
    """Yield the elements that are read for a value, with those that say which others."""
    for read in reads(value):
        yield read
        yield from (at.number for at in read.at if isinstance(at, Lookup) and at.number)
