"""Static sizes made smaller, so that a large chain is checked in little time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from tvm import relax

from ..matching.pattern import is_call
from ..workload import Attention, DynamicDim, Packed, Workload, per_rows
from .region import Region
from .sizes import WHOLE, Shrink, Sizes

SMALL = 2**14
"""Nothing is made smaller where the largest tensor has no more elements."""

MOST_ELEMENTS = 2**23
"""A tensor that is computed has no more elements."""

MOST_FLOPS = 2**31
"""A matmul that is computed takes no more floating-point operations."""

RATIOS = ((64, 64), (32, 32), (16, 16), (32, 8), (16, 4), (64, 8))
"""From which size on sizes are divided, and by how much."""

_LARGE = 4096
"""A size of so many elements or more that no ratio divides is replaced on its own."""

_PRODUCTS = ("relax.matmul", "relax.nn.attention", "relax.nn.attention_bias")

_NOT_SIZES = frozenset({"window"})
"""Numbers of a workload that are no sizes."""


def shrinks(region: Region) -> Iterator[Shrink]:
    """Yield maps of static sizes, the smallest first, the identity last.

    Sizes of constants stay, and so do lengths of an attention: masks by position compare them with
    numbers of the graph.
    """
    statics = region.statics
    if _largest(region, WHOLE) <= SMALL:
        yield WHOLE
        return
    work = region.match.workload
    lengths: set[int] = set()
    if isinstance(work, Attention):
        lengths = {n for n in (work.q_len, work.kv_len) if isinstance(n, int)}
    kept = frozenset(region.pinned | lengths)
    for least, ratio in RATIOS:
        odd = [n for n in statics if n >= _LARGE and n % ratio and n not in kept]
        yield Shrink(least, ratio, kept, tuple((n, 61) for n in odd[:1]))
    yield WHOLE


def _largest(region: Region, shrink: Shrink) -> int:
    """Return the elements of the largest tensor where every symbolic size is 8, if it can be."""
    every = (Sizes(dict.fromkeys(region.symbols, size), shrink) for size in (8, 12, 5))
    sizes = next(filter(partial(possible, region), every), None)
    return max(map(math.prod, _shapes(region, sizes)), default=0) if sizes else 0


def _shapes(region: Region, sizes: Sizes) -> Iterator[tuple[int, ...]]:
    for var in (*region.leaves, *region.values):
        if isinstance(var.ty, relax.TensorType) and isinstance(var.ty.shape, relax.ShapeExpr):
            yield sizes.shape(var.ty.shape.values)


def possible(region: Region, sizes: Sizes) -> bool:
    """Tell whether no tensor has a negative size, as one of ``n - 4`` rows where n is 3."""
    try:
        return all(size >= 0 for shape in _shapes(region, sizes) for size in shape)
    except ZeroDivisionError:
        return False


def affordable(region: Region, sizes: Sizes) -> bool:
    """Tell whether a region can be computed, and in little time."""
    if not possible(region, sizes):
        return False
    if any(math.prod(shape) > MOST_ELEMENTS for shape in _shapes(region, sizes)):
        return False
    for var, value in region.bindings:
        shapes = [e.ty.shape for e in (value.args[0], var)] if is_call(value, *_PRODUCTS) else []
        if not shapes or not all(isinstance(s, relax.ShapeExpr) for s in shapes):
            continue
        left, made = (sizes.shape(s.values) for s in shapes)
        if is_call(value, "relax.matmul"):
            flops = math.prod(made) * left[-1]
        else:
            scores = math.prod(made[:-1]) * sizes.of(value.args[1].ty.shape.values[1])
            flops = scores * left[-1] if scores <= MOST_ELEMENTS else MOST_FLOPS + 1
        if flops > MOST_FLOPS:
            return False
    return True


def shrunk(work: Workload, shrink: Shrink) -> Workload:
    """Return a workload whose static sizes are as `shrink` leaves them."""
    return work if shrink == WHOLE else _shrunk(work, shrink)


def _shrunk(value: Any, shrink: Shrink) -> Any:
    if isinstance(value, bool | DynamicDim | Packed):
        return value
    if isinstance(value, int):
        return shrink.of(value)
    if isinstance(value, str):  # a step of rows in turn
        name, rows = per_rows(value)
        return f"{name}:{shrink.of(rows)}" if rows else value
    if isinstance(value, tuple):
        return tuple(_shrunk(v, shrink) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        sizes = [f.name for f in fields(value) if f.init and f.name not in _NOT_SIZES]
        return replace(value, **{n: _shrunk(getattr(value, n), shrink) for n in sizes})
    return value
