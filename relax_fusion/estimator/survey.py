"""What the estimator looked at for a workload: plans with prices, and plans that cannot run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware import DeviceSpec
from ..workload import Workload
from ..workload.checks import check_workload, without_zeros
from .family import Backend
from .launch_limits import launchable
from .priced import asked_in, price
from .ranges import ranges, together
from .registry import Option, looked_at
from .shape import Size
from .tile_plan import TilePlan


@dataclass(frozen=True)
class Rivals:
    """The plans that were compared in one range of rows.

    Parameters
    ----------
    upper : int, optional
        Last size of the range, None for the open one.
    size : Size
        The size at which the seconds are.
    ranked : tuple of (Option, float)
        Plans with the seconds that are predicted of them, the fastest first.
    unfit : int
        Plans that can run, but were not compared here: tiles taller than the rows, for instance.
    """

    upper: int | None
    size: Size
    ranked: tuple[tuple[Option, float], ...]
    unfit: int


@dataclass(frozen=True)
class Refused:
    """Plans of one family that cannot run, for reasons that differ in their numbers alone.

    Parameters
    ----------
    family : str
        Its class.
    rule : str
        The reason, with the numbers of the first of them.
    plans : tuple of TilePlan
        The plans.
    """

    family: str
    rule: str
    plans: tuple[TilePlan, ...]


@dataclass(frozen=True)
class Survey:
    """What there was to choose from.

    Parameters
    ----------
    rivals : tuple of Rivals
        One for each range of rows.
    refused : tuple of Refused
        What cannot run, the most frequent reason first.
    passed_over : tuple of (str, str)
        Families of which no plan was looked at, each with the reason.
    """

    rivals: tuple[Rivals, ...]
    refused: tuple[Refused, ...]
    passed_over: tuple[tuple[str, str], ...]


def survey(work: Workload, dev: DeviceSpec, backend: Backend) -> Survey:
    """Return what `choose` has to choose from, by the same rules and prices.

    Parameters
    ----------
    backend : {"auto", "tir", "triton"}
        As for `choose`.

    Raises
    ------
    GraphError
        If `work` has a size or a name that no kernel can have.
    """
    check_workload(work)
    work = without_zeros(work)
    found: list[Option] = []
    refused: dict[tuple[str, str], tuple[str, list[TilePlan]]] = {}
    passed_over: dict[tuple[str, str], None] = {}
    for family, plan, why in looked_at(work, dev, backend):
        name = type(family).__name__
        if plan is None:
            passed_over[name, why] = None
        elif not why:
            found.append(Option(family, plan))
        else:
            rule = re.sub(r"\d[\d,.]*", "#", why)
            refused.setdefault((name, rule), (why, []))[1].append(plan)
    reasons = [Refused(name, why, tuple(plans)) for (name, _), (why, plans) in refused.items()]
    reasons.sort(key=lambda r: -len(r.plans))
    rivals = _rivals(found, work, dev) if found else ()
    return Survey(tuple(rivals), tuple(reasons), tuple(passed_over))


def _rivals(found: Sequence[Option], work: Workload, dev: DeviceSpec) -> list[Rivals]:
    """Return what is compared in each range."""
    every = ranges(work, together({option.family.breaks for option in found}))
    asked = []
    for each in every:
        usable = launchable(found, work, each.upper)
        cells = [sizes for _, sizes in each.cells]
        asked.append((asked_in(usable, work, dev, cells, each.told)[0], [each.told]))
    compared = []
    for each, column in zip(every, price(work, dev, asked), strict=True):
        seconds = [float(s) for s in column.seconds[0]]
        ranked = sorted(zip(column.options, seconds, strict=True), key=lambda pair: pair[1])
        unfit = len(found) - len(ranked)
        compared.append(Rivals(each.upper, each.told, tuple(ranked), unfit))
    return compared
