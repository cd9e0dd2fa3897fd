"""Inputs for a region: ordinary ones, and difficult ones on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tvm import ir, relax

from ..workload import Attention, ExpertMatmul, GatedFFN, NormMatmul, Workload
from ..workload.formats import EXPONENT
from .interpreter import stored
from .operators import Array, Uninterpreted
from .region import Region, is_number, is_size
from .sizes import Sizes

KINDS = (
    *("ordinary", "nothing hidden", "all hidden", "zeros", "not a number", "hidden by a bias"),
    *("large scores", "as small as an epsilon"),
)
"""What inputs can be; those but the first are only tried where an operand can be so."""

LENGTHS = (3, 5, 8, 7, 11, 4, 6, 9)
"""Sizes of dynamic dimensions, no two the same, some odd."""

_NARROW = {"float16": 2051, "bfloat16": 259, "int8": 130, "uint8": 258}
"""A dtype has the positions of so many elements, and not of one more, exactly."""


def kinds(region: Region) -> list[str]:
    """Return the kinds of inputs that differ from the ordinary for a workload's operands."""
    operands = {o.name: o.dtype for o in region.match.workload.graph.inputs}
    wanted = ["ordinary", "zeros", "not a number"]
    if "mask" in operands:
        wanted += ["nothing hidden", "all hidden"]
    if isinstance(region.match.workload, Attention):
        wanted += ["large scores", *(["hidden by a bias"] if "bias" in operands else [])]
    if _epsilon(region.match.workload):
        wanted.append("as small as an epsilon")
    return [kind for kind in KINDS if kind in wanted]


def make(region: Region, sizes: Sizes, kind: str, seed: int) -> dict[relax.Var, Any]:
    """Return values of the leaves of a region.

    Numbers are of unit size, weights smaller so that sums over them are, too.
    """
    rng = np.random.default_rng(seed)
    names = dict(operand_of(region))
    values = {}
    for leaf in region.leaves:
        if not is_size(leaf):
            values[leaf] = _value(rng, leaf.ty, sizes, names.get(leaf, ""))
    work = region.match.workload
    for leaf in (v for v, name in names.items() if name == "ids"):
        experts = sizes.of(work.experts) if isinstance(work, ExpertMatmul) else 1
        values[leaf] = rng.integers(0, experts, values[leaf].shape)
    first = next((v for v, name in names.items() if name in ("x", "q")), None)
    for leaf, name in names.items():
        if kind == "nothing hidden" and name == "mask":
            values[leaf] = np.ones_like(values[leaf])
        elif kind == "all hidden" and name == "mask":
            values[leaf] = np.zeros_like(values[leaf])
        elif kind == "hidden by a bias" and name == "bias":
            chosen = rng.random(values[leaf].shape)
            values[leaf] = np.where(chosen > 0.7, -60000.0, values[leaf])
            if not _hides(region.match.workload):  # by numbers that are larger
                values[leaf] = np.where(chosen < 0.3, -np.inf, values[leaf])
        elif kind == "as small as an epsilon" and name in ("x", "residual"):
            values[leaf] = values[leaf] * _epsilon(region.match.workload) ** 0.5
    if first is not None and values[first].dtype.kind == "f" and values[first].size:
        row = (0,) * (values[first].ndim - 1)
        if kind == "zeros":
            values[first][row] = 0.0
        elif kind == "not a number":
            values[first][row][0] = np.nan
    return values


def _epsilon(work: Workload) -> float:
    """Return the epsilon of a norm: beside rows of its size only, it makes a difference."""
    norm = work.norm if isinstance(work, NormMatmul | GatedFFN) else None
    return norm.eps if norm is not None and 0 < norm.eps < np.inf else 0.0


def _hides(work: Workload) -> bool:
    """Tell whether an attention hides keys by their position."""
    return isinstance(work, Attention) and (work.causal != "none" or work.window is not None)


def operand_of(region: Region) -> Iterator[tuple[relax.Var, str]]:
    """Yield the leaves that are operands of the kernel themselves, with their names."""
    named = zip(region.match.args, region.match.workload.graph.inputs, strict=True)
    for arg, operand in named:
        if isinstance(arg.expr, ir.Var) and not is_number(arg.expr) and arg.expr in region.leaves:
            yield arg.expr, operand.name


def _value(rng: np.random.Generator, ty: ir.Type, sizes: Sizes, name: str) -> Any:
    if isinstance(ty, relax.TupleType):
        return tuple(_value(rng, t, sizes, name) for t in ty.fields)
    if isinstance(ty, relax.ShapeType):
        return sizes.shape(ty.values)
    if not isinstance(ty.shape, relax.ShapeExpr):
        raise Uninterpreted(f"an operand of type {ty}")
    return _array(rng, sizes.shape(ty.shape.values), str(ty.dtype), name)


def _array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, name: str) -> Array:
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if dtype == EXPONENT and name.endswith("_scale"):  # of powers of 2 near 1
        return rng.integers(123, 130, shape, dtype)
    if dtype.startswith("uint") and name.startswith("w"):  # words of packed weights
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if "int" in dtype:
        return stored(rng.integers(0 if dtype[0] == "u" else -3, 4, shape), dtype, rounds=False)
    values = rng.standard_normal(shape)
    if name.startswith("w") and len(shape) > 1:
        values /= np.sqrt(max(shape[-2:], default=1) or 1)
    return stored(values, dtype, rounds=True)


def assignments(region: Region, bounds: dict[str, int]) -> Iterator[dict[ir.Var, int]]:
    """Yield values of the symbolic sizes, the most telling first."""
    symbols = list(dict.fromkeys(region.symbols))
    if not symbols:
        yield {}
        return
    seen: list[dict[ir.Var, int]] = []
    for sizes in _candidates(len(symbols), telling(region)):
        found = {
            var: min(size, bounds.get(var.name, size))
            for var, size in zip(symbols, sizes, strict=True)
        }
        if found not in seen:
            seen.append(found)
            yield found


def _candidates(count: int, lengths: Sequence[int]) -> Iterator[list[int]]:
    several = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    yield several
    yield several[::-1]
    yield [1] * count
    for length in lengths:
        yield [length] * count
        for at in range(min(count, 4)):
            yield [*several[:at], length, *several[at + 1 :]]
    yield [2] * count
    yield [12] * count
    rng = np.random.default_rng(count)
    for _ in range(6):
        yield [int(n) for n in rng.permutation(several)]


def telling(region: Region) -> list[int]:
    """Return lengths that cross the edge of a window, or what a dtype counts exactly.

    A check at shorter ones would say nothing.  Lengths that are static have been crossed or not.
    """
    work = region.match.workload
    if not isinstance(work, Attention):
        return []
    if isinstance(work.q_len, int) and isinstance(work.kv_len, int):
        return []
    found = [] if work.window is None else [work.window + 2, work.window]
    types = [v.ty for v in region.exact if isinstance(v.ty, relax.TensorType)]
    dtypes = {str(t.dtype) for t in types if t.ndim > 0}
    found += [length for dtype, length in _NARROW.items() if dtype in dtypes]
    return sorted(set(found))
