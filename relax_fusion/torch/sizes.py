"""Sizes, dtypes and strides of PyTorch's tensors, as Relax has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
from tvm import relax, tirx

from ..canonical.rewriter import LOWER, UPPER


class Refusal(Exception):
    """An operator, a size or a dtype has no form in Relax; the message says why."""


@dataclass
class Sizes:
    """The symbolic sizes of a graph, by their symbols."""

    known: dict[sympy.Symbol, tirx.Var] = field(default_factory=dict)

    def var(self, symbol: sympy.Symbol) -> tirx.Var:
        """Return the variable of a symbol."""
        return self.known.setdefault(symbol, tirx.Var(f"s{len(self.known)}", "int64"))

    def expr(self, size: Any) -> Any:
        """Return a size as an expression of TIR, or as the integer that it is."""
        if isinstance(size, torch.SymInt):
            size = size.node.expr
        return self._of(size) if isinstance(size, sympy.Basic) else int(size)

    def _of(self, expr: sympy.Basic) -> Any:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            return self.var(expr)
        operands = [self._of(arg) for arg in expr.args]
        if isinstance(expr, sympy.Add):
            return sum(operands[1:], operands[0])
        if isinstance(expr, sympy.Mul):
            return math.prod(operands[1:], start=operands[0])
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return math.prod([operands[0]] * (int(expr.exp) - 1), start=operands[0])
        if isinstance(expr, FloorDiv | CleanDiv):
            return tirx.floordiv(_int64(operands[0]), _int64(operands[1]))
        if isinstance(expr, Mod | PythonMod):
            return tirx.floormod(_int64(operands[0]), _int64(operands[1]))
        raise Refusal(f"the size {expr} has no form in TIR")


def _int64(value: Any) -> tirx.Expr:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def dtype_name(dtype: torch.dtype) -> str:
    """Return TVM's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def tensor_type(value: torch.Tensor, order: tuple[int, ...], sizes: Sizes) -> relax.Type:
    """Return the type of a tensor whose dimensions are in another order."""
    shape = [sizes.expr(value.shape[axis]) for axis in order]
    return relax.TensorType(shape, dtype_name(value.dtype))


def loose_sizes(
    arguments: Sequence[Node], params: Sequence[relax.Var], sizes: Sizes
) -> tuple[tuple[int, ...], list[relax.Var]]:
    """Return the sizes that must be passed, as no tensor has them, and the parameter for them."""
    bound = {dim for var in params for dim in var.ty.shape.values if isinstance(dim, tirx.Var)}
    found = []
    for n, node in enumerate(arguments):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        symbol = value.node.expr
        if isinstance(symbol, sympy.Symbol) and (var := sizes.var(symbol)) not in bound:
            found.append((n, var))
            bound.add(var)
    if not found:
        return (), []
    shape = relax.Var("sizes", relax.ShapeType([var for _, var in found]))
    return tuple(n for n, _ in found), [shape]


def bounds(
    arguments: Sequence[Node], sizes: Sizes, ranges: Mapping[sympy.Symbol, Any]
) -> dict[str, Any]:
    """Return the attributes that tell the ranges of symbolic sizes, as far as they are known."""
    env = next(
        (
            size.node.shape_env
            for node in arguments
            for value in (node.meta.get("val"),)
            for size in (value.shape if isinstance(value, torch.Tensor) else [value])
            if isinstance(size, torch.SymInt)
        ),
        None,
    )
    if env is None:
        return {}
    lower, upper = {}, {}
    for symbol, var in sizes.known.items():
        known = ranges.get(symbol) or env.bound_sympy(symbol)
        lower[var.name] = max(int(known.lower), 0)
        if known.upper.is_Integer and int(known.upper) < 2**31:
            upper[var.name] = int(known.upper)
    return {LOWER: lower, **({UPPER: upper} if upper else {})}
