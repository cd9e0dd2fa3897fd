"""Which sizes get plans of their own, and at which ones these are priced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from ..errors import TilePlanError
from ..workload import Attention, Dim, DynamicDim, Workload, extent
from .family import Breaks
from .shape import AttentionSize, Size, box_sizes
from .tile_plan import Box, PlanTable, TilePlan

T = TypeVar("T")

BEYOND = 4
"""Where batches and keys are priced that are more than any break: that many times the last one."""


def served(work: Workload, table: PlanTable) -> list[tuple[dict[str, int], TilePlan]]:
    """Return the plans that `work` can come to, each with the bounds of its dynamic dimensions.

    The bounds have the names of the graph.  The first that hold decide; the last are none.

    Raises `TilePlanError` if a box bounds what `work` does not have, as the keys of a matmul.
    """
    check_boxes(work, table)
    found: list[tuple[dict[str, int], TilePlan]] = []
    for box, plan in table.boxes:
        bounds: dict[str, int] = {}
        sizes = {name: work.ranged[name] for name in box.bounds}
        if any(isinstance(dim, int) and dim > box.bounds[name] for name, dim in sizes.items()):
            continue
        for name, dim in sizes.items():
            if isinstance(dim, DynamicDim):
                bounds[dim.name] = min(box.bounds[name], bounds.get(dim.name, box.bounds[name]))
        found.append((bounds, plan))
        if not bounds:
            break
    return found


def check_boxes(work: Workload, table: PlanTable) -> None:
    """Refuse a box that bounds what `work` does not have, as the keys of a matmul.

    Raises `TilePlanError`; the message has the box, and what there is to bound.
    """
    for box, _ in table.boxes:
        for name in box.bounds:
            if name not in work.ranged:
                has = f"{type(work).__name__} has {' and '.join(work.ranged)}"
                raise TilePlanError(f"plan table: {box} bounds {name}, {has}")


class Range(NamedTuple):
    """A range of rows (query positions), and the boxes of other sizes within it."""

    upper: int | None
    """Its last size; None for the open one."""
    cells: list[tuple[Box, list[Size]]]
    """The first box that holds a size is the one it is in; at which sizes that is priced."""
    told: Size
    """What predictions tell of: the last size, of one sequence and a usual number of keys."""

    @staticmethod
    def of(rows: int) -> Range:
        """Return the range of one number of rows."""
        return Range(rows, [(Box(rows), [rows])], rows)


def together(every: Iterable[Breaks]) -> Breaks:
    """Return the union of where the best plans of several families may change."""
    every = list(every)
    uppers, batches, keys, finer = (
        tuple(sorted({upper for breaks in every for upper in getattr(breaks, name)}))
        for name in ("uppers", "batches", "keys", "finer")
    )
    return Breaks(uppers, max(breaks.open_size for breaks in every), batches, keys, finer)


def ranges(work: Workload, breaks: Breaks) -> list[Range]:
    """Return the ranges of the dynamic dimensions, rising."""
    if not isinstance(work, Attention):
        return [
            Range(upper, [(Box(upper), list(sizes))], sizes[-1])
            for upper, sizes in _dim_ranges(work.rows, breaks.uppers, breaks.open_size)
        ]
    batches = _dim_ranges(work.batch, breaks.batches, BEYOND * breaks.batches[-1])
    return [
        _range(work, breaks, (upper, lengths), batches)
        for upper, lengths in _dim_ranges(work.q_len, breaks.uppers, breaks.open_size)
    ]


def by_box(every: Sequence[Range], times: Mapping[Size, T]) -> dict[Box, dict[Size, T]]:
    """Return what is known at some sizes by the box that serves them."""
    boxes = [box for found in every for box, _ in found.cells]
    inside: dict[Box, dict[Size, T]] = {}
    for size, known in times.items():
        box = next(box for box in boxes if box.holds(**box_sizes(size)))
        inside.setdefault(box, {})[size] = known
    return inside


def _range(
    work: Attention,
    breaks: Breaks,
    rows: tuple[int | None, list[int]],
    batches: list[tuple[int | None, list[int]]],
) -> Range:
    """Return a range of query positions, with a cell for each range of keys and of the batch."""
    upper, lengths = rows
    # Keys are at least as many as queries in every known use: a cache only adds to them
    least, usual = lengths[-1], max(breaks.open_size, lengths[-1])
    own = isinstance(work.kv_len, DynamicDim) and work.kv_len != work.q_len
    uppers = [n for n in breaks.keys if n >= least] if own else []
    keys = _dim_ranges(work.kv_len, uppers, max(BEYOND * breaks.keys[-1], usual) if own else usual)

    def at(batch: int, q_len: int, kv_len: int) -> Size:
        kv_len = max(kv_len, q_len) if own else kv_len
        return AttentionSize(batch, q_len, q_len if work.kv_len == work.q_len else kv_len)

    cells = []
    for batch_upper, inside in batches:
        for keys_upper, counts in keys:
            # Many sequences of few keys, and few of many, are what a plan must be good for
            corners = [(inside[0], least, counts[-1]), (inside[-1], lengths[0], counts[0])]
            if len(keys) * len(batches) == 1:
                corners = [(inside[0], n, counts[-1]) for n in lengths]
            sizes = list(dict.fromkeys(at(*corner) for corner in corners))
            cells.append((Box(upper, keys_upper, batch_upper), sizes))
    (_, several), *_ = batches
    return Range(upper, cells, at(several[0], least, extent(work.kv_len, usual)))


def _dim_ranges(dim: Dim, uppers: Iterable[int], most: int) -> list[tuple[int | None, list[int]]]:
    """Return ranges of a dimension as (last size or None, sizes to price, rising)."""
    if isinstance(dim, int):
        return [(None, [dim])]
    bound = dim.upper
    closed = [u for u in uppers if bound is None or u < bound]
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
