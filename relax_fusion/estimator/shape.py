"""What families are asked about: a workload on a device, its sizes, and one view of matmuls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

from ..hardware import DeviceSpec
from ..workload import (
    DTYPE_BYTES,
    Attention,
    Chain,
    DynamicDim,
    GatedFFN,
    NormMatmul,
    Packed,
    Projection,
    Workload,
)
from ..workload.chain import BATCH
from ..workload.dims import part_of, size_text
from ..workload.operators import ACTIVATIONS
from ..workload.roofline import slots_of

W = TypeVar("W", bound=Any)


class AttentionSize(NamedTuple):
    """The sizes of an attention that can be dynamic."""

    batch: int
    q_len: int
    kv_len: int


Size = int | AttentionSize
"""Rows of a `NormMatmul` or `GatedFFN`, or the sizes of an `Attention`."""


PRICED_BATCH = 8
"""Matrices of a batch whose size is only known at run time."""

_MANY = 2**20
"""Rows beyond which no operand is read in part."""


@dataclass(frozen=True)
class MatmulShape:
    """What the estimator needs of a `NormMatmul` or `GatedFFN`."""

    k: int
    """Reduced elements."""
    n_parts: tuple[int, ...]
    """Columns of each projection that are tiled, one projection after the other."""
    contiguous: tuple[int, ...]
    """Columns that lie side by side in each weight: all, or of a rotated one those up to the other
    feature of a pair."""
    parts: int
    """Accumulators of a tile column: 2 for a gate and an up, and for a pair that is rotated."""
    layouts: frozenset[str]
    """Layouts of the weights."""
    dtype: str
    """Of x and the weights."""
    in_bytes: int
    out_bytes: int
    """Bytes of one element of x and the weights, and of the results."""
    weight_bytes: int
    """All weights, biases and norm parameters."""
    x_row_bytes: int
    out_row_bytes: int
    side_row_bytes: int
    """Bytes per row: of x (with the residual that is added to it), of the results, and of what else
    is read or written per row (epilogue residuals, the sum and the norm as outputs)."""
    row_flops: float
    """Floating-point operations of the matmuls for each row."""
    norm: str
    """How x is normalised: "rms", "layer", "none" where a residual is added only, or not at all."""
    rotated: bool
    """Whether pairs of features are turned that are not neighbours."""
    allow_tf32: bool
    unpacked_bytes: int = 0
    """All weights that are packed, as elements of `dtype`; 0 where none is."""
    packed: Packed | None = None
    """How the first weight is stored, where it is packed."""
    slots: int = 0
    """Instructions of a GPU's thread for the activations of an element, the most of any projection;
    where a gate is, beside those of silu."""
    row_slots: int = 0
    """Those of all activations of a row."""
    normed_first: bool = False
    """Whether x is normalised before a residual is added."""
    head_columns: int = 0
    """Columns of those projections whose heads are normalised."""

    @property
    def stored_bytes(self) -> float:
        """Bytes of an element of a weight as it is stored, with its part of a scale."""
        if self.packed is None:
            return self.in_bytes
        shared = self.packed.group if self.packed.group > 0 else self.k
        return self.packed.bits / 8 + self.in_bytes / shared

    @property
    def has_norm(self) -> bool:
        """Whether x is normalised."""
        return bool(self.norm)

    @property
    def paired(self) -> bool:
        """Whether a tile has two accumulators in kernels that pair features or products."""
        return self.parts == 2 or self.rotated

    @property
    def n(self) -> int:
        """Output columns."""
        return sum(self.n_parts)

    @property
    def row_bytes(self) -> int:
        """Bytes per row of all that is read or written for each."""
        return self.x_row_bytes + self.out_row_bytes + self.side_row_bytes

    def flops(self, rows: int) -> float:
        """Floating-point operations of the matmuls at `rows` rows."""
        return rows * self.row_flops


@lru_cache(maxsize=256)
def matmul_shape(work: NormMatmul | GatedFFN, pairs: bool = True) -> MatmulShape:
    """Return the common view of `work`.

    `pairs`: whether the kernel accumulates the two features of a rotated pair as two parts of a
    column, as TIR does (a projection beside it that is not rotated is priced alike), or as columns.
    """
    # Counted by the graph at two numbers of rows: what is read for each, and what is read once.
    # Angles that rows of several sequences share, and a scale for each sequence, are in neither.
    free = work if isinstance(work.rows, DynamicDim) else replace(work, rows=DynamicDim("rows"))
    none = {name: 0 for name in free.graph.dims if not name.startswith("columns")}
    one, two = (free.bytes(**{**none, "rows": _MANY + n}) for n in (0, 1))
    each_row = {n for n in one if not any(part_of(size_text(d)) for d in free.graph[n].shape)}
    row = {name: two[name] - one[name] for name in one if name in each_row}
    shared = {name for name, each in row.items() if each == 0 and name[:3] in ("cos", "sin")}
    if isinstance(work, GatedFFN):
        n_parts: tuple[int, ...] = (work.n,)
        contiguous, parts, layouts = n_parts, 2, frozenset({work.layout})
    else:
        parts = 2 if pairs and any(p.pairs for p in work.outputs) else 1
        n_parts = tuple(-(-p.columns // parts) for p in work.outputs)
        runs = ((p, p.pairs if pairs or _apart(p) else None) for p in work.outputs)
        contiguous = tuple(rope.distance if rope else p.columns for p, rope in runs)
        layouts = frozenset(p.layout for p in work.outputs)
    weights = work.outputs if isinstance(work, NormMatmul) else (work,)
    packed = next((w.packed for w in weights if w.packed is not None), None)
    unpacked = sum(n_parts) * parts * work.k * DTYPE_BYTES[work.dtype]
    x_row = sum(row[name] for name in ("x", "residual") if name in row)
    out_row = sum(each for name, each in row.items() if name.startswith("out"))
    return MatmulShape(
        k=work.k,
        n_parts=n_parts,
        contiguous=contiguous,
        parts=parts,
        layouts=layouts,
        dtype=work.dtype,
        in_bytes=DTYPE_BYTES[work.dtype],
        out_bytes=DTYPE_BYTES[work.out_dtype],
        weight_bytes=sum(one[n] - _MANY * row[n] for n in row if n not in shared),
        x_row_bytes=x_row,
        out_row_bytes=out_row,
        side_row_bytes=sum(row.values()) - x_row - out_row,
        row_flops=free.flops(rows=1),
        norm=work.norm.kind if work.norm is not None else "",
        normed_first=work.norm is not None and work.norm.first is not None,
        rotated=isinstance(work, NormMatmul) and any(map(_apart, work.outputs)),
        allow_tf32=work.allow_tf32,
        unpacked_bytes=unpacked if packed else 0,
        packed=packed,
        slots=_slots(work),
        row_slots=_row_slots(work),
        head_columns=work.head_columns,
    )


def _slots(work: NormMatmul | GatedFFN) -> int:
    if isinstance(work, GatedFFN):
        return max(0, slots_of(work.activation) - slots_of("silu"))
    return max(map(_own_slots, work.outputs))


def _row_slots(work: NormMatmul | GatedFFN) -> int:
    if isinstance(work, GatedFFN):
        return work.n * slots_of(work.activation)
    return sum(p.columns * _own_slots(p) for p in work.outputs)


def _own_slots(projection: Projection) -> int:
    return sum(slots_of(str(step)) for step in projection.epilogue if step in ACTIVATIONS)


def _apart(projection: Projection) -> bool:
    """Tell whether pairs of features are rotated that do not lie side by side."""
    return projection.pairs is not None and projection.pairs.distance > 1


def attention_size(work: Attention, size: Size) -> AttentionSize:
    """Return `size` as an `AttentionSize`, with the static sizes of `work` in their places.

    Raises `TypeError` if `size` is a number: it does not say which of three sizes it is.
    """
    if isinstance(size, int):
        raise TypeError(f"an Attention is priced at an AttentionSize, not at {size!r}")
    return AttentionSize(
        work.batch if isinstance(work.batch, int) else size.batch,
        work.q_len if isinstance(work.q_len, int) else size.q_len,
        work.kv_len if isinstance(work.kv_len, int) else size.kv_len,
    )


def attention_qo_bytes(work: Attention, size: AttentionSize) -> int:
    """Return the bytes of the query, the result, the bias and the mask."""
    moved = work.bytes(**size._asdict())
    return sum(moved.get(name, 0) for name in ("q", "out", "bias", "mask"))


def rows_at(size: Size) -> int:
    """Return the rows at which a matmul workload is priced.

    Raises `TypeError` if `size` is that of an attention.
    """
    if not isinstance(size, int):
        raise TypeError(f"a matmul workload is priced at a number of rows, not at {size!r}")
    return size


def rows_of(work: Workload, size: Size) -> int:
    """Return the rows that tiles of `block_m` cover: query rows for an `Attention`."""
    return attention_size(work, size).q_len if isinstance(work, Attention) else rows_at(size)


def sizes_of(work: Workload, size: Size) -> dict[str, int]:
    """Return `size` by the names that a workload's graph has for its dimensions."""
    if isinstance(work, Attention):
        return attention_size(work, size)._asdict()
    if isinstance(work, Chain):
        rows = rows_of(work, size)
        return {d: PRICED_BATCH if d.startswith(BATCH) else rows for d in work.graph.dims}
    return {"rows": rows_of(work, size), "batch": PRICED_BATCH}


def box_sizes(size: Size) -> dict[str, int]:
    """Return a size as what plans are chosen by, under the names of a `Box`."""
    if isinstance(size, int):
        return {"rows": size}
    return {"rows": size.q_len, "keys": size.kv_len, "batch": size.batch}


def tiled_rows(work: Workload, size: Size) -> int:
    """Return the rows that tiles cover: in attention, of all query heads that share keys."""
    rows = rows_of(work, size)
    return rows * (work.q_heads // work.kv_heads) if isinstance(work, Attention) else rows


@lru_cache(maxsize=256)
def dtypes_of(work: Workload) -> frozenset[str]:
    """Return the element types of the tensors that a kernel reads and writes."""
    operands = (*work.graph.inputs, *work.graph.outputs)
    return frozenset(o.dtype for o in operands if o.shape is not None)


def most_rows(work: Workload, upper: int | None) -> int | None:
    """Return the largest size of a range that ends at `upper`, None if nothing bounds it."""
    dim = work.ranged["rows"]
    bound = dim if isinstance(dim, int) else dim.upper
    known = [size for size in (upper, bound) if size is not None]
    return min(known, default=None)


@dataclass(frozen=True)
class Problem(Generic[W]):
    """A workload on a device: what families are asked about."""

    work: W
    """What is computed."""
    dev: DeviceSpec
    """Where."""
    most: int | None = None
    """Rows, or query positions, up to which a plan is asked to serve; by default, what it can."""

    def is_plain(self, kind: str, *classes: type) -> bool:
        """Tell whether the device is of a kind, and the workload of a class, without adapters."""
        alike = self.dev.kind == kind and isinstance(self.work, classes)
        return alike and not self.work.is_adapted

    @cached_property
    def shape(self) -> MatmulShape:
        """The view of a matmul in which features that turn together are parts of a column."""
        return matmul_shape(self.work)

    @cached_property
    def columns(self) -> MatmulShape:
        """The view of a matmul in which they are columns of their own."""
        return matmul_shape(self.work, pairs=False)

    def at(self, size: Size) -> Size:
        """Return a size with what the workload knows; of a matmul, it must be a number of rows."""
        is_attention = isinstance(self.work, Attention)
        return attention_size(self.work, size) if is_attention else rows_at(size)
