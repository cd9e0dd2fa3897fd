"""Which sizes of a dynamic dimension get a plan of their own, and at which ones that is priced."""

from __future__ import annotations

from collections.abc import Iterable

from ..workload import Attention, Dim, DynamicDim, Workload
from .family import Breaks
from .shape import AttentionSize, Size


def together(every: Iterable[Breaks]) -> Breaks:
    """Return the union of where the best plans of several families may change."""
    every = list(every)
    uppers = sorted({upper for breaks in every for upper in breaks.uppers})
    batches = max((breaks.batches for breaks in every), key=len)
    return Breaks(tuple(uppers), max(breaks.open_size for breaks in every), batches)


def ranges(work: Workload, breaks: Breaks) -> list[tuple[int | None, list[Size]]]:
    """Return the ranges of the dynamic dimension as (last size or None, sizes to price, rising)."""
    if not isinstance(work, Attention):
        return [(upper, list(sizes)) for upper, sizes in _dim_ranges(work.rows, breaks)]
    # A table has plans by query positions only, and what suits one sequence best may leave a large
    # batch with half its speed
    batches = dict.fromkeys(_at_bound(work.batch, b) for b in breaks.batches)
    found: list[tuple[int | None, list[Size]]] = []
    for upper, lengths in _dim_ranges(work.q_len, breaks):
        sizes: list[tuple[int, int]] = []
        # Several batches fill the device as differently as lengths within a range do
        for q_len in lengths if len(batches) == 1 else sorted({lengths[0], lengths[-1]}):
            # Keys are at least as many as queries in every known use: a cache only adds to them.
            kv_len = max(_at_bound(work.kv_len, breaks.open_size), q_len)
            if not isinstance(work.kv_len, DynamicDim):
                kv_len = work.kv_len
            elif work.kv_len == work.q_len:
                kv_len = q_len
            sizes.append((q_len, kv_len))
        # One sequence comes last: it is what predictions tell of
        found.append((upper, [AttentionSize(b, *size) for b in batches for size in sizes]))
    return found


def _dim_ranges(dim: Dim, breaks: Breaks) -> list[tuple[int | None, list[int]]]:
    if isinstance(dim, int):
        return [(None, [dim])]
    bound = dim.upper
    closed = [u for u in breaks.uppers if bound is None or u < bound]
    most = breaks.open_size
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
