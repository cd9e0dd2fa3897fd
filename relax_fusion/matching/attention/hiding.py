"""Which masks are read as hidden keys: those of minus infinity, and numbers that do the same.

A number below `FAR` does in every row that sees another key, and counts as minus infinity in others
where a mask is by position or boolean.  Any other number has to be proved to leave no weight: every
row sees another key, and the difference of their scores is beyond float32's exponential.  Where it
is not, numbers are added and compared as the graph says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

from tvm import relax

from ...errors import Reason
from ..bounds import FAR, Bounds, Interval, plus, times
from ..operators import MOVEMENTS
from ..pattern import Refused
from .aligned import Grid
from .bands import Sight, rows_see, sight_of
from .chain import AttentionChain
from .masks import Parts, parts_of
from .scores import Addend, Clamp, Condition, Most, Shift, Step

LARGEST_SCORE = 1e29
"""Scores, biases of tables, ALiBi and sinks are within it where nothing narrower is proved."""
_UNDERFLOW = 104.0
"""The exponential of a score so far below the largest is zero in float32."""

Reading = list[tuple[Step, Parts]]


def read(chain: AttentionChain, grid: Grid) -> Reading:
    """Read the steps of an attention's scores, each by itself, without those that do nothing.

    Raises `Refused` if scores are held back, or replaced by a number, and no kernel does that.
    """
    found, track = _followed(chain, replace(grid, finite=True, addends={}))
    if track.clamps or not _is_zero(chain, grid, found, track):
        found, track = _followed(chain, grid)
    detail = None
    for clamp in track.clamps:
        if not _is_far(clamp):
            ends = " and ".join(f"{end:g}" for end in (clamp.low, clamp.high) if math.isfinite(end))
            detail = f"scores are held back at {ends}, and may lie beyond"
    if track.filler is not None:
        detail = f"masked scores become {track.filler:g}, which others may lie below"
    if detail is not None:
        raise Refused(Reason.ATTRIBUTE, detail)
    return [(step, p) for step, p in found if not isinstance(step, Clamp) or step in track.clamps]


@dataclass(frozen=True)
class _Track:
    """What is known of scores: between what those of visible keys lie, and below what hidden ones.

    `clamps` change them, as far as is known; `filler` is a number that replaces some, and is not
    below all others.
    """

    least: float
    largest: float
    hidden: float = -math.inf
    clamps: tuple[Clamp, ...] = ()
    filler: float | None = None


def _followed(chain: AttentionChain, grid: Grid) -> tuple[Reading, _Track]:
    found = [(step, parts_of(grid, step)) for step in chain.scores.steps]
    scores, bounds = chain.scores, Bounds(grid.view)
    ends = times(bounds.of(scores.expr), scores.scale)
    if scores.softcap is not None:
        ends = -scores.softcap, scores.softcap
    track = _Track(max(ends[0], -LARGEST_SCORE), min(ends[1], LARGEST_SCORE))
    for step, parts in found:
        track = _after(track, step, parts, bounds)
    return found, track


def _after(track: _Track, step: Step, parts: Parts, bounds: Bounds) -> _Track:
    ends = least, largest = track.least, track.largest
    hidden = max(track.hidden, parts.hidden)
    biases = [times(_ends(at.at.expr, bounds), factor) for at, factor in parts.biases]
    if isinstance(step, Shift):
        low, high = plus(ends, (-largest, -least))
        return replace(track, least=min(low, least), largest=high, hidden=_raised(hidden, -least))
    if isinstance(step, Addend):
        biases += [(-LARGEST_SCORE, LARGEST_SCORE)] * len(parts.slopes)
        low, high = reduce(plus, biases, (0.0, 0.0))
        mine = _raised(parts.hidden, plus(ends, (0.0, max(high, 0.0)))[1])
        hidden = max(_raised(track.hidden, high), mine)
        least, largest = plus(ends, (low, high))
        return replace(track, least=least, largest=largest, hidden=hidden)
    if isinstance(step, Condition):
        fillers = [filler for *_, filler in parts.fills]
        for filler in fillers:
            if not (filler <= FAR or filler <= least):
                track = replace(track, filler=filler)
        return replace(track, least=min([least, *fillers]), hidden=hidden)
    if isinstance(step, Most):
        biases.append((parts.most, parts.most))
        if not parts.biases and largest > parts.most:
            track = replace(track, clamps=(*track.clamps, Clamp(-math.inf, parts.most, 1.0)))
        least, largest = min(least, *(b[0] for b in biases)), min(largest, *(b[1] for b in biases))
        return replace(track, least=least, largest=largest, hidden=hidden)
    low, high = step.ends
    if low > least or high < largest:
        track = replace(track, clamps=(*track.clamps, step))
    hidden = max(hidden, low) if hidden > -math.inf else hidden
    return replace(track, least=max(least, low), largest=min(largest, high), hidden=hidden)


def _ends(bias: relax.Expr, bounds: Bounds) -> Interval:
    """Return between which numbers a bias lies; one by a table of weights is part of a score."""
    low, high = bounds.of(bias)
    source = bias
    while (call := bounds.view.call(source, *MOVEMENTS, "relax.astype")) is not None:
        source = call.args[0]
    if bounds.view.call(source, "relax.take") is None:
        return low, high
    return max(low, -LARGEST_SCORE), min(high, LARGEST_SCORE)


def _raised(hidden: float, by: float) -> float:
    """Return a bound of hidden scores plus a number; minus infinity hides whatever is added."""
    return hidden if hidden == -math.inf else hidden + by


def _is_far(clamp: Clamp) -> bool:
    """Tell whether a clamp holds back no score, but numbers of masks."""
    return clamp.ends[0] <= FAR and clamp.ends[1] >= -FAR


def _is_zero(chain: AttentionChain, grid: Grid, found: Reading, track: _Track) -> bool:
    """Tell whether the weight of every hidden key is zero, in rows that see others.

    Of numbers that are not `FAR` below, rows that see no other key have to be ruled out, too.
    """
    least = track.least if chain.sinks is None else -LARGEST_SCORE
    if track.hidden == -math.inf or not track.hidden < least - _UNDERFLOW:
        return track.hidden == -math.inf
    if track.hidden <= FAR or chain.sinks is not None:
        return True
    parts: Parts | None = Parts()
    for _, more in found:
        parts = parts.and_also(more) if parts is not None else None
    sight = None if parts is None else sight_of(parts.band, *grid.sizes[2:])
    if parts is None or sight is None or parts.seen or parts.counts:
        return False
    said = Sight(chain.causal, chain.window)
    return all(rows_see(each, *grid.sizes[2:]) for each in (said, sight))
