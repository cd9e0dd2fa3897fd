"""One view of the matmul workloads, and the size at which a workload is priced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..workload import DTYPE_BYTES, Attention, GatedFFN, NormMatmul, Workload


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
        Columns of each projection, tiled one after the other.
    parts : int
        Weight columns that make one output column (gate and up: 2).
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
    parts: int
    layouts: frozenset[str]
    dtype: str
    in_bytes: int
    weight_bytes: int
    x_row_bytes: int
    out_row_bytes: int
    side_row_bytes: int
    has_norm: bool

    @property
    def n(self) -> int:
        """Output columns."""
        return sum(self.n_parts)

    def flops(self, rows: int) -> float:
        """Floating-point operations of the matmuls at `rows` rows."""
        return 2.0 * rows * self.k * self.n * self.parts


@lru_cache(maxsize=256)
def matmul_shape(work: NormMatmul | GatedFFN) -> MatmulShape:
    """Return the common view of `work`."""
    b = DTYPE_BYTES[work.dtype]
    norm = work.norm
    x_row = work.k * b * (2 if norm and norm.residual else 1)
    side = work.k * b * (int(norm.returns_sum) + int(norm.returns_norm)) if norm else 0
    gamma = 0 if norm is None else work.k * b * (2 if norm.beta else 1)
    if isinstance(work, GatedFFN):
        n_parts: tuple[int, ...] = (work.n,)
        parts, layouts = 2, frozenset({work.layout})
        bias = 2 * work.n * b if work.bias else 0
    else:
        n_parts, parts = tuple(p.n for p in work.outputs), 1
        layouts = frozenset(p.layout for p in work.outputs)
        bias = sum(p.n * b * p.epilogue.count("bias") for p in work.outputs)
        side += sum(p.n * b * p.epilogue.count("residual") for p in work.outputs)
    return MatmulShape(
        k=work.k,
        n_parts=n_parts,
        parts=parts,
        layouts=layouts,
        dtype=work.dtype,
        in_bytes=b,
        weight_bytes=work.k * sum(n_parts) * parts * b + bias + gamma,
        x_row_bytes=x_row,
        out_row_bytes=sum(n_parts) * DTYPE_BYTES[work.out_dtype],
        side_row_bytes=side,
        has_norm=norm is not None,
    )


def attention_size(work: Attention, size: Size) -> AttentionSize:
    """Return `size` as an `AttentionSize`, with the static sizes of `work` in their places.

    Raises
    ------
    TypeError
        If `size` is a number: it does not say which of three sizes it is.
    """
    if isinstance(size, int):
        raise TypeError(f"an Attention is priced at an AttentionSize, not at {size!r}")
    dims = zip((work.batch, work.q_len, work.kv_len), size, strict=True)
    return AttentionSize(*(d if isinstance(d, int) else s for d, s in dims))


def rows_of(work: Workload, size: Size) -> int:
    """Return the rows that tiles of `block_m` cover: query rows for an `Attention`."""
    return attention_size(work, size).q_len if isinstance(work, Attention) else _int_rows(size)


def _int_rows(size: Size) -> int:
    if not isinstance(size, int):
        raise TypeError(f"a matmul workload is priced at a number of rows, not at {size!r}")
    return size
