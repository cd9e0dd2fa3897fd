"""One view of the matmul workloads, and the size at which a workload is priced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..workload import DTYPE_BYTES, Attention, GatedFFN, NormMatmul, Rope, Workload


class AttentionSize(NamedTuple):
    """The sizes of an attention that can be dynamic."""

    batch: int
    q_len: int
    kv_len: int


Size = int | AttentionSize
"""Rows of a `NormMatmul` or `GatedFFN`, or the sizes of an `Attention`."""


@dataclass(frozen=True)
class MatmulShape:
    """What the estimator needs of a `NormMatmul` or `GatedFFN`.

    Parameters
    ----------
    k : int
        Reduced elements.
    n_parts : tuple of int
        Columns of each projection that are tiled, one projection after the other.
    contiguous : tuple of int
        Columns that lie side by side in each weight: all, or half a head of a rotated one.
    parts : int
        Accumulators of a tile column: 2 for a gate and an up, and for a pair that is rotated.
    layouts : frozenset of str
        Layouts of the weights.
    dtype : str
        Of x and the weights.
    in_bytes : int
        Bytes of one element of x and the weights.
    weight_bytes : int
        All weights, biases and norm parameters.
    x_row_bytes, out_row_bytes, side_row_bytes : int
        Bytes per row: of x (with the residual that is added to it), of the results, and of what
        else is read or written per row (epilogue residuals, the sum and the norm as outputs).
    """

    k: int
    n_parts: tuple[int, ...]
    contiguous: tuple[int, ...]
    parts: int
    layouts: frozenset[str]
    dtype: str
    in_bytes: int
    weight_bytes: int
    x_row_bytes: int
    out_row_bytes: int
    side_row_bytes: int
    has_norm: bool
    rotated: bool
    allow_tf32: bool

    @property
    def paired(self) -> bool:
        """Whether a tile has two accumulators in kernels that pair features or products."""
        return self.parts == 2 or self.rotated

    @property
    def n(self) -> int:
        """Output columns."""
        return sum(self.n_parts)

    def flops(self, rows: int) -> float:
        """Floating-point operations of the matmuls at `rows` rows."""
        return 2.0 * rows * self.k * self.n * self.parts


@lru_cache(maxsize=256)
def matmul_shape(work: NormMatmul | GatedFFN, pairs: bool = True) -> MatmulShape:
    """Return the common view of `work`.

    Parameters
    ----------
    pairs : bool
        Whether the kernel accumulates the two features of a rotated pair as two parts of a column,
        as TIR does (a projection beside it that is not rotated is priced alike), or as columns.
    """
    b = DTYPE_BYTES[work.dtype]
    norm = work.norm
    x_row = work.k * b * (2 if norm and norm.residual else 1)
    side = work.k * b * (int(norm.returns_sum) + int(norm.returns_norm)) if norm else 0
    gamma = 0 if norm is None else work.k * b * (2 if norm.beta else 1)
    if isinstance(work, GatedFFN):
        n_parts: tuple[int, ...] = (work.n,)
        contiguous = n_parts
        parts, layouts = 2, frozenset({work.layout})
        bias = 2 * work.n * b if work.bias else 0
    else:
        parts = 2 if pairs and any(p.rope for p in work.outputs) else 1
        n_parts = tuple(-(-p.n // parts) for p in work.outputs)
        contiguous = tuple(p.rope.half if p.rope else p.n for p in work.outputs)
        layouts = frozenset(p.layout for p in work.outputs)
        bias = sum(p.n * b * p.epilogue.count("bias") for p in work.outputs)
        side += sum(p.n * b * p.epilogue.count("residual") for p in work.outputs)
        side += sum(_angle_bytes(p.rope) for p in work.outputs)
    columns = work.n if isinstance(work, GatedFFN) else sum(p.n for p in work.outputs)
    return MatmulShape(
        k=work.k,
        n_parts=n_parts,
        contiguous=contiguous,
        parts=parts,
        layouts=layouts,
        dtype=work.dtype,
        in_bytes=b,
        weight_bytes=work.k * sum(n_parts) * parts * b + bias + gamma,
        x_row_bytes=x_row,
        out_row_bytes=columns * DTYPE_BYTES[work.out_dtype],
        side_row_bytes=side,
        has_norm=norm is not None,
        rotated=isinstance(work, NormMatmul) and any(p.rope for p in work.outputs),
        allow_tf32=work.allow_tf32,
    )


def _angle_bytes(rope: Rope | None) -> int:
    """Return the bytes of cosines and sines per row; rows of several sequences share them."""
    if rope is None or rope.positions is not None:
        return 0
    return 2 * rope.head_dim * DTYPE_BYTES[rope.dtype]


def attention_size(work: Attention, size: Size) -> AttentionSize:
    """Return `size` as an `AttentionSize`, with the static sizes of `work` in their places.

    Raises
    ------
    TypeError
        If `size` is a number: it does not say which of three sizes it is.
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
    rows = size.batch * work.q_heads * size.q_len
    moved = rows * work.head_dim * DTYPE_BYTES[work.dtype]
    moved += rows * work.v_dim * DTYPE_BYTES[work.out_dtype]
    full = (size.batch, work.q_heads, size.q_len, size.kv_len)
    for dims, each in ((work.bias_dims, DTYPE_BYTES[work.bias_dtype]), (work.mask_dims, 1)):
        if dims is not None:
            sizes = zip(full, dims, strict=True)
            moved += each * math.prod(n for n, is_full in sizes if is_full)
    return moved


def rows_of(work: Workload, size: Size) -> int:
    """Return the rows that tiles of `block_m` cover: query rows for an `Attention`."""
    return attention_size(work, size).q_len if isinstance(work, Attention) else _int_rows(size)


def _int_rows(size: Size) -> int:
    if not isinstance(size, int):
        raise TypeError(f"a matmul workload is priced at a number of rows, not at {size!r}")
    return size


def dtypes_of(work: Workload) -> set[str]:
    """Return the element types of the tensors that a kernel reads and writes."""
    found = {work.dtype, work.out_dtype}
    if isinstance(work, Attention):
        found |= {t for t in (work.alibi, work.sinks) if t}
        found |= {work.bias_dtype} if work.bias_dims else set()
        found |= {"bool"} if work.mask_dims else set()
    elif isinstance(work, NormMatmul):
        found |= {p.rope.dtype for p in work.outputs if p.rope}
    return found
