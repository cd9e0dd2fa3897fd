"""A few plans that serve all sizes: which of them serves which, in steps finer than ranges.

Kernels of matmuls compute whole tiles, and multiprocessors whole waves of them, so the best plan
changes back and forth as rows grow.  A plan is a kernel to compile; to run it for many small ranges
costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

import numpy as np

from ..hardware import DeviceSpec
from ..workload import Attention, DynamicDim, Workload
from .prediction import ceil_div
from .priced import Asked, Priced, price
from .ranges import Range
from .registry import Option
from .tile_plan import Box

ALLOWED_LOSS = 0.03
"""Part of the best time that the pool may lose at a size that is looked at, for fewer kernels."""

KEPT_LOSS = 0.01
"""Part of the best time of the pool that a size may lose for the plan of its range, or that of the
sizes in front of it, to serve it."""

FEW, PARTS = 8, 256
"""Up to so many rows each number has its own small range; above, a part of the power of two."""

MOST_COUNTED = 2.0
"""Times the best time, beyond which it does not matter by how much a plan is slower."""


def finer(
    work: Workload,
    dev: DeviceSpec,
    every: Sequence[Range],
    asked: Sequence[Asked],
    chosen: Sequence[Option],
    steps: Sequence[int],
) -> list[list[tuple[Box, Option]]]:
    """Return options of a pool for the small ranges inside of each range; nothing for other ranges.

    Parameters
    ----------
    every : sequence of Range
        All ranges.
    asked : sequence of Asked
        Of each range the options that may serve it; none where it is to stay as it is.
    chosen : sequence of Option
        Of each range the option that is best for all of it.  It serves where it loses little.
    steps : sequence of int
        Sizes at which the plans of the pool are chosen (`Breaks.finer`), each with the next one.
    """
    if isinstance(work, Attention) or not isinstance(work.rows, DynamicDim) or not steps:
        return [[] for _ in every]
    offered = [[o for o in options if o.family.breaks.finer] for options, _ in asked]
    spans = _spans(every, work.rows.upper or steps[-1])
    points = [_both_ends(*span, steps) for span in spans]
    own = {id(o.plan) for o, some in zip(chosen, offered, strict=True) if some}
    pool = _cover(price(work, dev, list(_where(offered, points))), own)
    offered = [[o for o in some if id(o.plan) in pool] for some in offered]
    cuts = [_cuts(*span) for span in spans]
    priced = price(work, dev, list(_where(offered, [[*chain(*some)] for some in cuts])))
    each = zip(priced, cuts, chosen, strict=True)
    found = [_served(*one) if one[0].options else [] for one in each]
    if found[-1]:
        found[-1][-1] = (Box(), found[-1][-1][1])
    return found


def _spans(every: Sequence[Range], last: int) -> list[tuple[int, int]]:
    """Return the first size of each range, and the last that is looked at."""
    firsts = [1, *(each.upper + 1 for each in every if each.upper)]
    return [(n, each.upper or max(last, n)) for n, each in zip(firsts, every, strict=True)]


def _where(offered: Sequence[list[Option]], sizes: Sequence[list[int]]) -> Iterator[Asked]:
    """Yield options with the sizes at which to price them: none where there are no options."""
    for options, some in zip(offered, sizes, strict=True):
        yield options, some if options else []


def _both_ends(first: int, last: int, steps: Sequence[int]) -> list[int]:
    """Return the ends of a range, and each step within it with the size behind it."""
    inside = [size for step in steps for size in (step, step + 1) if first <= size <= last]
    return sorted({first, *inside, last})


def _cuts(first: int, last: int) -> list[tuple[int, int]]:
    """Return the first and last sizes of small ranges: multiples of 8, of more for large sizes.

    All kernels have tiles of a multiple of 8 rows.
    """
    found = []
    while first <= last:
        step = 1 if first <= FEW else max(8, (1 << first.bit_length()) // PARTS)
        end = min(last, ceil_div(first, step) * step)
        found.append((first, end))
        first = end + 1
    return found


def _served(
    priced: Priced, cuts: Sequence[tuple[int, int]], chosen: Option
) -> list[tuple[Box, Option]]:
    """Return an option for each small range, neighbours with the same one merged."""
    found: list[tuple[Box, Option]] = []
    worst = np.maximum(priced.losses_at[::2], priced.losses_at[1::2])  # of both ends
    serves = worst <= worst.min(axis=1, keepdims=True) + KEPT_LOSS
    own = last = next(i for i, o in enumerate(priced.options) if o.plan is chosen.plan)
    for (_, upper), enough, best in zip(cuts, serves, worst.argmin(axis=1), strict=True):
        if not enough[last]:
            last = own if enough[own] else best
        option = priced.options[last]
        if found and found[-1][1] is option:
            found.pop()
        found.append((Box(upper), option))
    return found


def _cover(priced: Sequence[Priced], pool: set[int]) -> set[int]:
    """Return plans by their ids, as few as are found, of which each size has one that is near best.

    One after the other, that which is near enough at the most sizes; of equals, the nearest.
    """
    every = list(dict.fromkeys(id(o.plan) for own in priced for o in own.options))
    column = {key: i for i, key in enumerate(every)}
    parts = []
    for own in priced:
        parts.append(np.full((len(own.sizes), len(every)), inf))
        parts[-1][:, [column[id(o.plan)] for o in own.options]] = own.losses_at
    loss = np.concatenate(parts)
    fits = loss <= 1 + ALLOWED_LOSS
    left = ~fits[:, [column[key] for key in pool if key in column]].any(axis=1)
    while left.any():
        serves = fits[left].sum(axis=0)
        total = np.minimum(loss[left], MOST_COUNTED).sum(axis=0)
        taken = int(np.lexsort((total, -serves))[0])
        pool = {*pool, every[taken]}
        left &= ~fits[:, taken]
    return pool
