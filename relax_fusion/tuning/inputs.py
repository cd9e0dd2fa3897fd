"""Inputs that kernels are measured with: random numbers of usual sizes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from ..estimator.shape import Size, sizes_of
from ..workload import Attention, ExpertMatmul, Operand, Workload
from ..workload.dims import PRICED_COLUMNS, part_of
from ..workload.formats import EXPONENT
from ..workload.graph import Graph
from ..workload.reference import numpy_dtype
from ..workload.values import reads

PATTERN = 1_048_573
"""Random numbers that are drawn for a large tensor, which repeats them.  It is a prime, so that no
row or tile is the same as another."""


def dims_at(work: Workload, size: Size) -> dict[str, int]:
    """Return the values of all dynamic dimensions of a graph.

    Those that plans are not chosen by follow from the others: a cache is as long as its keys, and
    the angles of a rotation are those of one sequence.
    """
    known = sizes_of(work, size)
    usual = {"kv_capacity": known.get("kv_len", 1), "columns": PRICED_COLUMNS}
    usual["positions"] = rows = known.get("rows", 1)
    usual |= {d: -(-rows // each) for d in work.graph.dims if (each := part_of(d))}
    return {
        n: known.get(n, usual.get(n, usual.get(n.rstrip("0123456789"), 1))) for n in work.graph.dims
    }


def draw(work: Workload, operand: Operand, sizes: Mapping[str, int]) -> Any:
    """Return what a kernel is given for an operand: an array, or for a scalar a number."""
    if operand.shape is None:
        slot = next(s for s in work.graph.slots if s.name == operand.name)
        return slot.dim if isinstance(slot.dim, int) or slot.dim is None else sizes[slot.dim.name]
    shape = tuple(d if isinstance(d, int) else sizes[d.name] for d in operand.shape or ())
    count = prod(shape)
    rng = np.random.default_rng([ord(letter) for letter in operand.name])
    if isinstance(work, ExpertMatmul) and operand.name == "ids":  # as likely as a run found them
        with np.errstate(divide="ignore"):  # of experts that every row goes to
            rates = -np.log1p(-np.minimum(work.shares, 1.0))
            waits = rng.exponential(size=(shape[0], work.experts)) / rates
        return waits.argsort(axis=-1)[:, : work.chosen].astype(operand.dtype)
    values = _values(work.graph, operand, min(count, PATTERN), rng)
    return np.resize(values.astype(numpy_dtype(operand.dtype)), shape)


def _values(graph: Graph, operand: Operand, count: int, rng: np.random.Generator) -> Any:
    name = operand.name
    packed = {o.name: t for t in graph.tensors if t.format for o in t.operands()}.get(name)
    if operand.dtype == "bool":
        return rng.random(count) < 0.6
    if packed is not None and name != packed.name and packed.format is not None:  # scales
        scales = rng.uniform(0.5, 1.5, count) * _scale(graph, packed.name) / 2**packed.format.bits
        return np.log2(scales) + 127 if packed.format.scale_dtype == EXPONENT else scales
    if numpy_dtype(operand.dtype).kind in "iu":
        info = np.iinfo(operand.dtype)
        return rng.integers(info.min, info.max, count, operand.dtype, endpoint=True)
    if name[:3] in ("cos", "sin"):
        return rng.uniform(-1, 1, count)
    return rng.standard_normal(count, "float32") * _scale(graph, name)


def _scale(graph: Graph, name: str) -> float:
    """Return by what a weight is scaled so that sums over it are near 1; 1 for other operands."""
    readers = [b for b in graph.blocks if any(r.tensor == name for r in reads(b.value))]
    sums = [b for b in readers if b.combine == "sum" and name.startswith("w")]
    return prod(a.size for b in sums[:1] for a in b.reduced if isinstance(a.size, int)) ** -0.5


def allowed_error(work: Workload) -> float:
    """Return how far results of right kernels may be apart, as a part of the largest one.

    Each may round what is between its steps to the workload's dtype, and sums in another order err
    by some roundings of float32 for the root of their length.
    """
    if numpy_dtype(work.dtype).kind in "iu":
        return 0.0
    steps = [_eps(work.dtype), _eps(work.out_dtype)]
    if not isinstance(work, Attention) and getattr(work, "allow_tf32", False):
        steps.append(2.0**-10)
    lengths = [a.size for b in work.graph.blocks for a in b.reduced if isinstance(a.size, int)]
    return 8 * max(steps) + 8 * _eps("float32") * max(lengths, default=1) ** 0.5


def _eps(dtype: str) -> float:
    kind = numpy_dtype(dtype)
    return float(ml_dtypes.finfo(kind).eps) if kind.kind not in "iu" else 0.0
