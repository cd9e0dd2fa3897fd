"""The matmuls of a workload's graph, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..report.item import Kind, Product
from ..report.sizes import Extent, times
from ..workload import Attention, Chain, DynamicDim, Packed, Workload
from ..workload.dims import Dim
from ..workload.formats import ALL
from ..workload.graph import Block
from ..workload.roofline import is_contraction
from ..workload.values import Axis, Op, reads


def kind_of(work: Workload) -> Kind:
    """Say what a fused chain is."""
    if isinstance(work, Attention):
        return "attention"
    return "chain" if isinstance(work, Chain) else "matmul"


def products_of(work: Workload, dims: Mapping[str, Extent]) -> tuple[Product, ...]:
    """Return the matmuls of a workload, in order; of an attention those of each query head.

    `dims` tells what the dynamic dimensions of its graph are in the function.
    """
    graph = work.graph
    if isinstance(work, Attention):
        rows, keys, batch = (_extent(work.ranged[n], dims) for n in ("rows", "keys", "batch"))
        heads = times(batch, work.q_heads)
        scores = Product(rows, keys, work.head_dim, heads)
        return (scores, Product(rows, work.v_dim, keys, heads))
    return tuple(_product(block, dims) for block in graph.blocks if is_contraction(block))


def _product(block: Block, dims: Mapping[str, Extent]) -> Product:
    """Sort the axes of a contraction by which of its two factors has them."""
    value = block.value
    assert isinstance(value, Op), "a contraction multiplies"
    first, second = (
        {name for read in reads(factor) for at in read.at for name, _ in at.terms}
        for factor in value.args
    )
    rows = [a for a in block.axes if a.name in first - second]
    columns = [a for a in block.axes if a.name in second - first]
    batch = [a for a in block.axes if a not in rows and a not in columns]
    m, n, k, each = (_size(axes, dims) for axes in (rows, columns, block.reduced, batch))
    return Product(m, n, k, each)


def _size(axes: Iterable[Axis], dims: Mapping[str, Extent]) -> Extent:
    return times(*(_extent(axis.size, dims) for axis in axes))


def _extent(size: Dim, dims: Mapping[str, Extent]) -> Extent:
    return dims.get(size.name, size.name) if isinstance(size, DynamicDim) else size


def storage_of(work: Workload) -> str:
    """Say how the weights of a fused chain are stored."""
    if isinstance(work, Attention):
        return ""
    graph = work.graph
    weights = {operand.name for operand in graph.weights}
    read = {r.tensor for b in graph.blocks if is_contraction(b) for r in reads(b.value)} & weights
    tensors = (t for t in graph.tensors if t.name in read)
    return ", ".join(dict.fromkeys(format_text(t.format, t.dtype) for t in tensors))


def format_text(form: Packed | None, dtype: str) -> str:
    """Return a format in words: ``4 bits in uint32, float16 scales of 32``."""
    if form is None:
        return dtype
    stored = form.word if form.fields == 1 else f"{form.bits} bits in {form.word}"
    if not form.scale_dtype:
        return stored
    group = "all" if form.group == ALL else str(form.group)
    lines = "" if form.lines == 1 else f" x {'all' if form.lines == ALL else form.lines}"
    zeros = ", with zeros" if form.zero is None else ""
    return f"{stored}, {form.scale_dtype} scales of {group}{lines}{zeros}"
