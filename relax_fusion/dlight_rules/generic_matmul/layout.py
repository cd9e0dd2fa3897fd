"""Where matrices lie inside of tensors of more dimensions, and numbers of several digits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tvm import tirx

from ...matching.expressions import is_number, variables_of
from ...tvm_ir import Analyzer, TensorLoad, structural_equal

Vars = tuple[tirx.Var, ...]
Extents = Mapping[tirx.Var, tirx.Expr]


@dataclass(frozen=True)
class View:
    """A matrix inside a parameter: element (i, j) lies at ``offset + i * stride + j``.

    `offset` may contain batch variables.
    """

    source: tirx.Var
    offset: tirx.Expr
    stride: tirx.Expr


def product(sizes: Sequence[tirx.Expr]) -> tirx.Expr:
    """Multiply sizes as int64; 1 if there is none."""
    constants = [int(s) for s in sizes if isinstance(s, tirx.IntImm)]
    result: tirx.Expr = tirx.IntImm("int64", prod(constants))
    unknown = [s.astype("int64") for s in sizes if not isinstance(s, tirx.IntImm)]
    for size in unknown:
        result = size if is_number(result, 1) else result * size
    return result


def flat(digits: Sequence[tuple[tirx.Expr, tirx.Expr]]) -> tirx.Expr:
    """Return the number whose digits, in a system of mixed bases, are ``(digit, base)``."""
    result: tirx.Expr = tirx.IntImm("int64", 0)
    for digit, base in digits:
        result = result * base.astype("int64") + digit.astype("int64")
    return Analyzer().simplify(result)


def matrix_in(value: tirx.Expr, major: Vars, minor: Vars, extents: Extents) -> View | None:
    """Return `value` as a matrix of rows `major` and columns `minor` in memory, if it is one."""
    if not isinstance(value, TensorLoad):
        return None
    source, indices = value.source, list(value.indices)
    if source.ty.strides or not minor or not _ends_with(source, indices, minor, extents):
        return None
    strides: list[tirx.Expr] = [tirx.IntImm("int64", 1)]
    for size in reversed(list(source.ty.shape)[1:]):
        strides.insert(0, product([strides[0], size]))
    own = {v: s for v, s in zip(indices, strides, strict=True) if isinstance(v, tirx.Var)}
    inner = _step(extents, minor, own)
    outer = _step(extents, major, own) if major else product([extents[v] for v in minor])
    if inner is None or outer is None or not is_number(inner, 1):
        return None
    matrix = set(major) | set(minor)
    rest = [(i, s) for i, s in zip(indices, strides, strict=True) if i not in matrix]
    if any(variables_of(i) & matrix for i, _ in rest):
        return None
    offset: tirx.Expr = tirx.IntImm("int64", 0)
    for index, stride in rest:
        offset = offset + index.astype("int64") * stride
    return View(source, Analyzer().simplify(offset), outer)


def _ends_with(
    source: tirx.Var, indices: Sequence[tirx.Expr], minor: Vars, extents: Extents
) -> bool:
    """Tell whether a tensor ends with the axes `minor`, each of them read whole.

    Then every distance in it is a multiple of what they take together, and lines are aligned as
    that is.  Those of a longer axis, read in part, need not be.
    """
    dims = list(zip(indices, source.ty.shape, strict=True))
    sizes = {v: size for v, size in dims if isinstance(v, tirx.Var)}
    while dims and is_number(dims[-1][1], 1) and not dims[-1][0].same_as(minor[-1]):
        dims.pop()
    if not dims or not dims[-1][0].same_as(minor[-1]):
        return False
    return all(v in sizes and structural_equal(sizes[v], extents[v]) for v in minor)


def _step(extents: Extents, which: Vars, strides: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr | None:
    """Return the distance of neighbours along `which`, counted as one axis; None if it varies."""
    if any(v not in strides for v in which):
        return None
    step = strides[which[-1]]
    analyzer = Analyzer()
    for outer, inner in pairwise(which):
        spanned = product([extents[inner], strides[inner]])
        if not analyzer.can_prove_equal(strides[outer], spanned):
            return None
    return step


def unravel(extents: Extents, which: Vars, index: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
    """Return the value of each of `which` at a position along all of them."""
    values: dict[tirx.Var, tirx.Expr] = {}
    for var in reversed(which[1:]):
        extent = extents[var].astype("int64")
        values[var], index = index % extent, index // extent
    if which:
        values[which[0]] = index
    return values
