"""Formulas as rules are written in, read from text: ``x @ A + x @ B``.

Names of one lower-case letter are tensors, ``c`` and ``d`` constants of one element, capitals
constant tensors.  What a reduction is over has a name behind its operator: ``sum[r](x)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

NUMBERS = ("c", "d")
"""Names of constants of one element."""

_SYMBOLS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.Pow: "power",
    ast.MatMult: "matmul",
    ast.USub: "negative",
}


@dataclass(frozen=True)
class Term:
    """An operator of terms, a name, or a number."""

    op: str = ""  # the operator of Relax without ``relax.``; empty for a name or a number
    args: tuple[Term, ...] = ()  # what it is applied to
    name: str = ""  # the name; of an operator, that of its attributes
    value: float | None = None  # the number

    @property
    def is_number(self) -> bool:
        """Whether this is known as a number when compiling."""
        if self.op:
            return all(arg.is_number for arg in self.args)
        return self.value is not None or self.name in NUMBERS

    @property
    def is_constant(self) -> bool:
        """Whether this is known when compiling."""
        if self.op:
            return all(arg.is_constant for arg in self.args)
        return self.is_number or self.name.isupper()

    def parts(self) -> Iterator[Term]:
        """Yield the term and all that it is made of, outer ones first."""
        yield self
        for arg in self.args:
            yield from arg.parts()


@cache
def formula(text: str) -> Term:
    """Read a formula."""
    return _read(ast.parse(text, mode="eval").body)


def _read(node: ast.expr) -> Term:
    if isinstance(node, ast.Constant):
        return Term(value=float(node.value))  # type: ignore[arg-type]  # formulas have numbers only
    if isinstance(node, ast.Name):
        return Term(name=node.id)
    if isinstance(node, ast.BinOp):
        return Term(_SYMBOLS[type(node.op)], (_read(node.left), _read(node.right)))
    if isinstance(node, ast.UnaryOp):
        return Term(_SYMBOLS[type(node.op)], (_read(node.operand),))
    assert isinstance(node, ast.Call), ast.dump(node)
    function, args = node.func, tuple(map(_read, node.args))
    if isinstance(function, ast.Subscript):
        return Term(ast.unparse(function.value), args, ast.unparse(function.slice))
    return Term(ast.unparse(function), args)
