"""One piece of work of a model: a fused kernel, or a matmul or attention that was left.

What a fused kernel multiplies, and how its weights are stored, is read off its workload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import InstanceOf

from ..errors import GraphError, PipelineError
from ..validation import read_json, shown
from ..workload import Attention, Chain, DynamicDim, Packed, Workload
from ..workload.dims import Dim
from ..workload.dtypes import stored_bytes
from ..workload.formats import ALL, E2M1
from ..workload.graph import Block
from ..workload.roofline import is_contraction
from ..workload.values import Op, reads
from .sizes import Extent, Values, all_known, names_in, times, values_of

Kind = Literal["matmul", "attention", "chain", "convolution", "collective", "call"]
Status = Literal["fused", "left", "outside"]

_Axis = TypeVar("_Axis")


@dataclass(frozen=True)
class Product:
    """A matmul ``[m, k] x [k, n]``, as often as `batch` says."""

    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1

    @staticmethod
    def of(
        axes: Sequence[_Axis],
        reduced: Sequence[_Axis],
        factors: tuple[Collection[_Axis], Collection[_Axis]],
        size: Callable[[Sequence[_Axis]], Extent],
    ) -> Product:
        """Return a product, whose axes are sorted by which of its factors has them."""
        first, second = factors
        rows = [a for a in axes if a in first and a not in second]
        columns = [a for a in axes if a in second and a not in first]
        batch = [a for a in axes if a not in rows and a not in columns]
        return Product(size(rows), size(columns), size(reduced), size(batch))

    def flops(self, values: Values) -> float | None:
        """Return two operations for each product of numbers; None where a size is not known."""
        sizes = values_of((self.batch, self.m, self.n, self.k), values)
        return None if sizes is None else 2.0 * math.prod(sizes)


@dataclass(frozen=True)
class Array:
    """A tensor that is read or written: its sizes and its element type as it is stored."""

    shape: tuple[Extent, ...]
    dtype: str

    def bytes(self, values: Values) -> int | None:
        """Return its size in memory; None where a size is not known."""
        sizes = values_of(self.shape, values)
        return None if sizes is None else math.prod(sizes) * stored_bytes(self.dtype)


@dataclass(frozen=True)
class Item:
    """What one kernel, or one operator that was left, multiplies."""

    function: str
    """The phase: ``prefill`` and ``decode`` of a decoder, or the function's name."""
    kind: Kind
    """What it is; a "chain" has several matmuls in a row; a "collective" is between workers, of the
    array that one receives; a "call" is of a function outside of the module, whose work is not
    known."""
    chain: str
    """How it is written: the steps of a fused chain, or the operator."""
    status: Status
    """Whether it is in a kernel of ours, was left, or is no part of the module."""
    dtype: str
    """Of what is multiplied."""
    storage: str = ""
    """How weights are stored: their dtype, or the format of packed ones; empty where there is no
    weight."""
    products: tuple[Product, ...] = ()
    """Its matmuls; of an attention scores and values.  Empty where they are not known."""
    arrays: tuple[Array, ...] = ()
    """What it reads and writes; of a fused chain `work` says that."""
    where: str = ""
    """The first variable that it defines."""
    kernel: str = ""
    reason: str = ""
    """Of a fused chain the kernel; of another why it was left."""
    count: int = 1
    """How often one call of the function does it."""
    dims: tuple[tuple[str, Extent], ...] = ()
    """The workload's dynamic dimensions: the name in its graph, and what it is in the function."""
    note: str = ""
    """What a reader of the numbers should know."""
    work: Annotated[Workload | None, InstanceOf()] = None
    """What the kernel of a fused chain computes; that of its decision."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the symbolic sizes that it depends on."""
        sizes = [s for p in self.products for s in (p.m, p.n, p.k, p.batch)]
        sizes += [s for a in self.arrays for s in a.shape]
        sizes += [s for _, s in self.dims]
        return frozenset().union(*map(names_in, sizes))

    def sizes(self, values: Values) -> dict[str, int] | None:
        """Return the workload's dimensions at some sizes; None where one is not known."""
        found = values_of([size for _, size in self.dims], values)
        return None if found is None else dict(zip((n for n, _ in self.dims), found, strict=True))

    def _check_dims(self) -> None:
        """Refuse a workload whose dynamic dimensions are not all known."""
        ranged = self.work.ranged.values() if self.work is not None else ()
        names = {size if isinstance(size, int) else size.name for size in ranged}
        missing = [n for n in names if isinstance(n, str) and n not in dict(self.dims)]
        if missing:
            raise PipelineError(f"dims of {self.chain} has no {shown(sorted(missing)[0])}")

    def flops(self, values: Values) -> float | None:
        """Return the floating-point operations of its matmuls; None where they are not known.

        Those of keys that a causal attention hides are among them, unlike on the page of a report.

        `values`: symbolic sizes of the function by name.
        """
        if self.work is not None:
            sizes = self.sizes(values)
            return None if sizes is None else _tried(lambda w, s: w.flops(**s), self.work, sizes)
        if self.kind == "collective":
            return 0.0
        known = all_known([p.flops(values) for p in self.products])
        return sum(known) if known else None

    def bytes(self, values: Values) -> float | None:
        """Return the bytes that it reads and writes, each once; None where they are not known."""
        if self.work is not None:
            sizes = self.sizes(values)
            if sizes is None:
                return None
            return _tried(lambda w, s: float(sum(w.bytes(**s).values())), self.work, sizes)
        known = all_known([a.bytes(values) for a in self.arrays])
        return float(sum(known)) if known else None

    @cached_property
    def key(self) -> Item:
        """The item without its place and count: equal for equal work."""
        return replace(self, where="", count=1)

    def to_record(self) -> dict[str, Any]:
        """Return the fields in lists, dictionaries and what JSON has, but for `work`."""
        record = asdict(replace(self, work=None))
        del record["work"]
        return record

    @staticmethod
    def from_record(record: Mapping[str, Any], works: Mapping[str, Workload]) -> Item:
        """Return the item of what `to_record` made, with what its kernel computes.

        Raises `TypeError` or `PipelineError` if it is none.
        """
        made: Item = read_json(Item, json.dumps(record), PipelineError, "an item")
        made = replace(made, work=works.get(made.kernel))
        made._check_dims()
        return made


def _tried(count: Any, work: Workload, sizes: dict[str, int]) -> float | None:
    """Return what a workload counts; None where its graph needs a size that nobody gave."""
    try:
        return float(count(work, sizes))
    except GraphError:
        return None


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
    """Return the product of a contraction."""
    value = block.value
    assert isinstance(value, Op), "a contraction multiplies"
    first, second = (
        {name for read in reads(factor) for at in read.at for name, _ in at.terms}
        for factor in value.args
    )
    sizes = {a.name: _extent(a.size, dims) for a in (*block.axes, *block.reduced)}
    axes, reduced = ([a.name for a in each] for each in (block.axes, block.reduced))
    return Product.of(
        axes, reduced, (first, second), lambda names: times(*(sizes[n] for n in names))
    )


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
    stored = f"{form.number} in {form.word}" if form.number == E2M1 else stored
    if not form.scale_dtype:
        return stored
    group = "all" if form.group == ALL else str(form.group)
    lines = "" if form.lines == 1 else f" x {'all' if form.lines == ALL else form.lines}"
    zeros = ", with zeros" if form.zero is None else ""
    return f"{stored}, {form.scale_dtype} scales of {group}{lines}{zeros}"
