"""Which sizes of a dynamic dimension get a plan of their own, and at which ones that is priced."""

from __future__ import annotations

from collections.abc import Iterable

from ..tile_plan import TilePlan
from ..workload import Attention, Dim, DynamicDim, Workload
from . import mma
from .shape import AttentionSize, Size

RANGE_UPPERS = {
    "tir": (1, 16, 64, 256),
    "tensor": (1, 8, 16, 32, 64, 128, 256, 384, 512, 896, 1024),
    "triton": (1, 16, 32, 64, 128, 256, 384, 512, 768, 896, 1024),
}
"""Upper ends of the ranges of a dynamic dimension, by back end ("tensor": of TIR, where it has
plans for tensor cores): decoding, small and large batches of it, short prompts; longer ones follow
in an open range.  Tensor cores have more regimes, and tiles of 128 rows: the ranges that end at 512
and 1024, which are usual, have one number of them."""

ATTENTION_RANGE_UPPERS = {
    "tir": (1, 16, 64, 256),
    "tensor": (1, 16, 64, 256, 512, 1024),
    "triton": (1, 16, 64, 256, 512, 1024),
}
"""The same for the query positions of an attention."""

OPEN_RANGE_SIZE = {"tir": 1024, "tensor": 4096, "triton": 4096}
"""Where the open range is priced: a usual prompt, and past the point where more rows change the
choice.  A static size, or a bound, is priced at itself."""

ATTENTION_BATCHES = {"tir": (1,), "tensor": (32, 8, 1), "triton": (32, 8, 1)}
"""Batches at which an attention of dynamic batch is priced.  A table has plans by query positions
only, and what suits one sequence best may leave a large batch with half its speed."""


def regime(plans: Iterable[TilePlan]) -> str:
    """Return the key of `RANGE_UPPERS` for tables of such plans."""
    plans = list(plans)
    tensor = any(plan.family in mma.FAMILIES for plan in plans)
    return "tensor" if tensor else plans[0].backend


def ranges(work: Workload, backend: str) -> list[tuple[int | None, list[Size]]]:
    """Return the ranges of the dynamic dimension as (last size or None, sizes to price, rising)."""
    if not isinstance(work, Attention):
        by_rows = _dim_ranges(work.rows, RANGE_UPPERS[backend], backend)
        return [(upper, list(sizes)) for upper, sizes in by_rows]
    batches = dict.fromkeys(_at_bound(work.batch, b) for b in ATTENTION_BATCHES[backend])
    found: list[tuple[int | None, list[Size]]] = []
    for upper, lengths in _dim_ranges(work.q_len, ATTENTION_RANGE_UPPERS[backend], backend):
        sizes: list[tuple[int, int]] = []
        # Several batches fill the device as differently as lengths within a range do
        for q_len in lengths if len(batches) == 1 else sorted({lengths[0], lengths[-1]}):
            # Keys are at least as many as queries in every known use: a cache only adds to them.
            kv_len = max(_at_bound(work.kv_len, OPEN_RANGE_SIZE[backend]), q_len)
            if not isinstance(work.kv_len, DynamicDim):
                kv_len = work.kv_len
            elif work.kv_len == work.q_len:
                kv_len = q_len
            sizes.append((q_len, kv_len))
        # One sequence comes last: it is what predictions tell of
        found.append((upper, [AttentionSize(b, *size) for b in batches for size in sizes]))
    return found


def _dim_ranges(
    dim: Dim, uppers: tuple[int, ...], backend: str
) -> list[tuple[int | None, list[int]]]:
    if isinstance(dim, int):
        return [(None, [dim])]
    bound = dim.upper
    closed = [u for u in uppers if bound is None or u < bound]
    most = OPEN_RANGE_SIZE[backend]
    last = most if bound is None else min(bound, most)
    lower, found = 0, []
    for upper in [*closed, None]:
        end = last if upper is None else upper
        sizes = _inside(lower + 1, max(end, lower + 1))
        # The open range goes on beyond its last size: its first does not count as much as that
        found.append((upper, sizes[-2:] if upper is None else sizes))
        lower = end
    return found


def _inside(first: int, last: int) -> list[int]:
    """Return the sizes at which a range is priced: both ends, and of a wide one the middle.

    That is the geometric one of the bounds, which are powers of two, so that it fills tiles.
    """
    lower = max(first - 1, 1)
    middle = max(first, round((lower * last) ** 0.5)) if last > 2 * lower else first
    return sorted({first, middle, last})


def _at_bound(dim: Dim, default: int) -> int:
    """Return a size of `dim` to price at: itself, or `default` clipped by its bound."""
    if isinstance(dim, int):
        return dim
    return default if dim.upper is None else min(dim.upper, default)
