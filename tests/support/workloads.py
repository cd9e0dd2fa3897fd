"""Inputs and shapes of any workload, by the operands of its graph; neither needs a GPU or TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from relax_fusion.workload import Operand, Workload
from relax_fusion.workload.formats import EXPONENT
from relax_fusion.workload.graph import Graph, Tensor
from relax_fusion.workload.reference import Rounding, kept, numpy_dtype, rounded
from relax_fusion.workload.values import reads

Arrays = dict[str, np.ndarray]


def shape_of(operand: Operand, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return tuple(d if isinstance(d, int) else sizes[d.name] for d in operand.shape or ())


def inputs(work: Workload, sizes: Mapping[str, int] | None = None, seed: int = 7) -> Arrays:
    """Return the tensors that a kernel reads, in order, of such sizes that results are near 1.

    Parameters
    ----------
    work : Workload
        What is computed.
    sizes : mapping of str to int, optional
        Values of the dynamic dimensions, by their names in the graph.
    seed : int
        Of the random numbers.
    """
    rng = np.random.default_rng(seed)
    operands = [o for o in work.graph.inputs if o.shape is not None]
    return {o.name: _drawn(work.graph, o, shape_of(o, sizes or {}), rng) for o in operands}


def results(work: Workload, sizes: Mapping[str, int] | None = None) -> list[tuple]:
    """Return shape and dtype of every result, in order."""
    return [(shape_of(o, sizes or {}), o.dtype) for o in work.graph.outputs]


def rounding(*names: str) -> Rounding:
    """Return what rounds these tensors to their dtypes, beside those that every kernel rounds."""

    def apply(values: np.ndarray, tensor: Tensor) -> np.ndarray:
        return (rounded if tensor.name in names else kept)(values, tensor)

    return apply


def _drawn(
    graph: Graph, operand: Operand, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    name = operand.name
    packed = {o.name: t for t in graph.tensors if t.format for o in t.operands()}.get(name)
    if packed is not None and name == packed.name:
        return rng.integers(0, np.iinfo(operand.dtype).max, shape, operand.dtype, endpoint=True)
    if packed is not None and packed.format is not None:  # scales
        values = rng.uniform(0.5, 1.5, shape) * _depth(graph, packed.name) ** -0.5
        values = values / 2 ** (packed.format.bits - 1)
        if packed.format.scale_dtype == EXPONENT:
            values = np.log2(values) + 127
        return values.astype(numpy_dtype(operand.dtype))
    if operand.dtype == "bool":
        return rng.random(shape) < 0.6
    if operand.dtype.startswith("int"):
        return rng.integers(0, 9, shape, operand.dtype)
    if name[:3] in ("cos", "sin"):
        values = np.cos(rng.uniform(0, 2 * np.pi, shape))
    else:
        special = {"gamma": (0.1, 1.0), "beta": (0.1, 0.0), "x": (1.0, 0.25)}
        scale, shift = special.get(name, (_depth(graph, name) ** -0.5, 0.0))
        values = rng.standard_normal(shape) * scale + shift
    return values.astype(numpy_dtype(operand.dtype))


def _depth(graph: Graph, name: str) -> int:
    """Return how many products with the weight called `name` are summed; 1 for other operands."""
    if name[0] != "w":
        return 1
    readers = (b for b in graph.blocks if any(r.tensor == name for r in reads(b.value)))
    return prod(a.size for a in next(readers).reduced if isinstance(a.size, int))


Edit = Callable[[Arrays], None]
