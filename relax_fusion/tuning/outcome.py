"""What tuning found out: plans by price and by measurement, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..estimator import Size, format_seconds
from ..estimator.choose import size_text
from ..estimator.tile_plan import TilePlan
from ..report.tables import table

MOST_TOLD = 5
"""Plans that went wrong of which the text tells."""


@dataclass(frozen=True)
class Outcome:
    """The plans of a workload at one size.

    Parameters
    ----------
    chain : str
        The pass that found it, and how it is written.
    key : str
        Of the workload.
    calls : int
        How often the module calls it.
    size : Size
        Where the times are from.
    priced, fastest : TilePlan
        The plan of the best price, and the one of the least time.
    priced_s, fastest_s : float
        Their measured seconds.
    """

    chain: str
    key: str
    calls: int
    size: Size
    priced: TilePlan
    fastest: TilePlan
    priced_s: float
    fastest_s: float

    @property
    def gain(self) -> float:
        """How many times as fast the fastest plan is."""
        return self.priced_s / self.fastest_s


@dataclass
class Tuning:
    """What `tune` did.

    Parameters
    ----------
    outcomes : list of Outcome
        One for each range of sizes of each workload that has times, those of earlier runs included.
    measurements : int
        How many were added to the database.
    wrong : list of str
        Plans that computed something else, or could not be run, and why.  They have no times.
    left : list of str
        Workloads for which the time did not suffice.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    measurements: int = 0
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def nothing(self) -> str:
        """Why no plan has a time; empty if one has."""
        if self.outcomes:
            return ""
        if self.wrong:
            return f"no plan has a time: {self.wrong[0]}"
        return "no time was left to measure a plan" if self.left else "no chain is fused"

    def text(self) -> str:
        """Return the gains as a table, and what went wrong."""
        rows: list[tuple[str, ...]] = [
            ("chain", "workload", "calls", "size", "by price", "time", "fastest", "time", "gain")
        ]
        for o in self.outcomes:
            times = format_seconds(o.priced_s), format_seconds(o.fastest_s)
            same = o.priced == o.fastest
            found = ("the same", "", "") if same else (o.fastest.text, times[1], f"{o.gain:.2f}x")
            size = size_text(o.size)
            rows.append((o.chain, o.key, str(o.calls), size, o.priced.text, times[0], *found))
        parts = [table(rows) if self.outcomes else "nothing was measured"]
        parts += [f"not recorded: {sentence}" for sentence in self.wrong[:MOST_TOLD]]
        if len(self.wrong) > MOST_TOLD:
            parts.append(f"not recorded: {len(self.wrong) - MOST_TOLD} more (--json lists them)")
        parts += [f"no time was left for {name}" for name in self.left]
        return "\n".join(parts)
