"""Sizes as text: what an expression of names comes to, and ranges of values for names."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import PipelineError
from ..validation import shown

Extent = int | str
"""A size: a number, or an expression of names such as ``"batch * seq_len"``."""

Values = Mapping[str, int]

_T = TypeVar("_T")

BATCHES = ("batch", "batch_size")
"""These are the names of sizes that count sequences."""

MOST_POINTS = 512
"""At most this many combinations of sizes are counted for one function."""

_LONGEST = 10_000
"""An expression that is read has at most this many characters."""

_DAMAGE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Python's parser raises one of these of a text that is no expression, or is nested too deeply."""

_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: dict[str, Callable[..., int]] = {
    "min": min,
    "max": max,
    "Cast": lambda _, value: value,
    **{name: lambda value: value for name in ("int32", "int64")},
    "Div": lambda a, b: int(a / b),
    "if_then_else": lambda c, a, b: a if c else b,
}


def value_of(extent: Extent, values: Values) -> int | None:
    """Return what a size, as TVM prints it, comes to; None where it names one that is not known."""
    if isinstance(extent, int):
        return extent
    try:
        return int(_value(_parsed(extent).body, values))
    except (*_DAMAGE, LookupError, TypeError, ArithmeticError):
        return None


def values_of(extents: Iterable[Extent], values: Values) -> list[int] | None:
    """Return what sizes come to; None where one of them is not known."""
    return all_known([value_of(extent, values) for extent in extents])


def all_known(found: Sequence[_T | None]) -> list[_T] | None:
    """Return what was found; None where one of it was not."""
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _parsed(extent: str) -> ast.Expression:
    """Parse an expression, which may be a stranger's."""
    if len(extent) > _LONGEST:
        raise ValueError(f"it has {len(extent)} characters, at most {_LONGEST} are read")
    return ast.parse(extent, mode="eval")


def _value(node: ast.expr, values: Values) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value  # a text could be repeated until memory ends
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        right = _value(node.comparators[0], values)
        return _COMPARE[type(node.ops[0])](_value(node.left, values), right)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        return _CALLS[name](*(_value(arg, values) for arg in node.args))
    raise ValueError(ast.unparse(node))


def names_in(extent: Extent) -> frozenset[str]:
    """Return the names of sizes in an expression."""
    if isinstance(extent, int):
        return frozenset()
    try:
        nodes = ast.walk(_parsed(extent))
    except _DAMAGE:
        return frozenset()
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(names - {"T", *_CALLS})


def renamed(extent: Extent, sizes: Mapping[str, Extent]) -> Extent:
    """Return a size, as TVM prints it, with other sizes in the place of names, all at once.

    Names that `sizes` has not stay.
    """
    if isinstance(extent, int) or not names_in(extent) & sizes.keys():
        return extent
    try:
        found = ast.unparse(_Renaming(sizes).visit(_parsed(extent)))
    except _DAMAGE:
        return extent
    number = value_of(found, {})
    return found if number is None else number


class _Renaming(ast.NodeTransformer):
    """Puts sizes in the place of names; functions are no sizes."""

    def __init__(self, sizes: Mapping[str, Extent]):
        self._sizes = sizes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(str(self._sizes.get(node.id, node.id)), mode="eval").body

    def visit_Call(self, node: ast.Call) -> ast.expr:
        return ast.Call(node.func, [self.visit(arg) for arg in node.args], [])


def times(*extents: Extent) -> Extent:
    """Return a product of sizes; what is 1 is left out."""
    number, names = 1, []
    for extent in extents:
        if isinstance(extent, int):
            number *= extent
        else:
            names.append(extent if extent.isidentifier() else f"({extent})")
    if not names or number == 0:
        return number
    if len(names) == 1 and number == 1:
        return names[0].removeprefix("(").removesuffix(")") if "(" not in names[0][1:] else names[0]
    return " * ".join([*names, *([str(number)] if number != 1 else [])])


@dataclass(frozen=True)
class SizeRange:
    """Values of one size: from `first` to `last`, both included."""

    first: int
    last: int

    @property
    def values(self) -> tuple[int, ...]:
        """Both ends, and the powers of two between them."""
        powers = (1 << n for n in range(self.last.bit_length()))
        between = [p for p in powers if self.first < p < self.last]
        return tuple(dict.fromkeys((self.first, *between, self.last)))

    def __str__(self) -> str:
        """Render as ``16..1024``, one value as it is."""
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


def grid(ranges: Mapping[str, SizeRange]) -> list[dict[str, int]]:
    """Return every combination of the values of ranges.

    Raises `PipelineError` if there are more than `MOST_POINTS`.
    """
    every = itertools.product(*(each.values for each in ranges.values()))
    points = list(itertools.islice(every, MOST_POINTS + 1))
    if len(points) > MOST_POINTS:
        told = ", ".join(f"{name} {each}" for name, each in ranges.items())
        raise PipelineError(
            f"the ranges ({shown(told)}) have more than {MOST_POINTS} combinations; give fewer "
            "ranges, or single values"
        )
    return [dict(zip(ranges, values, strict=True)) for values in points]


def sizes_text(values: Mapping[str, object]) -> str:
    """Return sizes as ``batch = 1, seq_len = 512``."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())
