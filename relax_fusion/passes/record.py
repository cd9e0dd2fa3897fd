"""What is told of the chains of one function: kernels that are made, and proposals that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax

from ..errors import Decline, Reason
from ..estimator.prediction import format_seconds
from ..matching.bindings import Identity
from ..matching.pattern import Match
from ..report.decision import Decision
from ..workload import Chain
from .selection import Proposal


@dataclass(frozen=True)
class _Entry:
    """A decision, where it stands, and what it is about."""

    rank: int
    place: int
    """The number of the pass, and of the binding at which it found the chain."""
    about: tuple[relax.Var, ...]
    """Results of a chain that is declined."""
    decision: Decision
    """What is told."""


class Record:
    """The decisions about one function, round by round.

    `func`: the function before anything is fused.
    `passes`: names of the passes, in the order in which they are told.
    """

    def __init__(self, function: str, func: relax.Function, passes: Sequence[str]):
        self.function, self._func = function, func
        self._ranks = {name: rank for rank, name in enumerate(passes)}
        variables = (b.var for block in func.body.blocks for b in block.bindings)
        self._places = {hash(var): place for place, var in enumerate(variables)}
        self._entries: dict[tuple[str, str, str], _Entry] = {}
        self._made: dict[Identity, int] = {}

    def refused(self, pattern: str, at: relax.Var, decline: Decline) -> None:
        """Note why a pass takes nothing at a binding."""
        self._tell(pattern, at, decline, (at,))

    def declined(self, proposal: Proposal, decline: Decline) -> None:
        """Note why what a pass proposed is not made."""
        about = tuple(out.var for out in proposal.match.outs)
        self._tell(proposal.pattern, proposal.at, decline, about, proposal.match)

    def left_apart(self, proposal: Proposal, decline: Decline) -> None:
        """Note why a kernel is made in a form that takes less along than was proposed."""
        match = proposal.match
        chain = tuple(v.name for v in match.covers)
        told = Decision(
            proposal.pattern, "", self.function, match.where, decline=decline, chain=chain
        )
        self._enter(proposal.at, (), told)

    def lost(self, loser: Proposal, winner: Proposal) -> None:
        """Note to which kernel bindings went that a pass proposed to take."""
        if loser.order == winner.order:
            return  # another form of the same chain
        wanted, inside = loser.match.covers, {*winner.match.covers}
        var = next((v for v in wanted if v in inside), winner.match.covers[0])
        detail = f"{var.name} is computed by the kernel of {winner.match.where}"
        more = winner.saved_s - loser.saved_s
        if more > 0:
            detail += f": {winner.pattern} saves {format_seconds(more)} more"
        decline = Decline(Reason.OVERLAP, detail)
        self._tell(loser.pattern, loser.at, decline, (loser.at,), loser.match)

    def made(self, proposal: Proposal, kernel: str, validation: str) -> None:
        """Note a kernel that is made, and what it leaves alone beside it."""
        match, choice = proposal.match, proposal.choice
        assert choice is not None, "only what was priced is made"
        for var in match.covers:
            self._made[hash(var)] = proposal.rank
        decision = Decision(
            proposal.pattern,
            match.spelling,
            self.function,
            match.where,
            kernel,
            match.workload,
            choice.plans,
            choice.predictions,
            None,
            validation,
            tuple(v.name for v in match.covers),
        )
        self._enter(proposal.at, (), decision)
        for where, decline in match.declined:
            told = Decision(proposal.pattern, "", self.function, where, decline=decline)
            self._enter(proposal.at, (), told)

    def decisions(self) -> list[Decision]:
        """Return what is told, by pass and place.

        Of a chain that a pass declines, nothing is told if a pass in front of it took the results.
        """
        told = [e for e in self._entries.values() if not self._is_taken(e)]
        return [e.decision for e in sorted(told, key=lambda e: (e.rank, e.place))]

    def _is_taken(self, entry: _Entry) -> bool:
        ranks = [self._made.get(hash(var)) for var in entry.about]
        return any(rank is not None and rank <= entry.rank for rank in ranks)

    def _tell(
        self,
        pattern: str,
        at: relax.Var,
        decline: Decline,
        about: tuple[relax.Var, ...],
        match: Match | None = None,
    ) -> None:
        """Note why a chain with some results is left alone, which was found at a binding.

        A generated one is told by that: it says nothing of the operators inside of it.
        """
        where, chain = at.name, (at.name,)
        if match is not None and not isinstance(match.workload, Chain):
            where, chain = match.where, tuple(v.name for v in match.covers)
        decision = Decision(
            pattern,
            match.spelling if match is not None else "",
            self.function,
            where,
            workload=match.workload if match is not None else None,
            decline=decline,
            chain=chain,
        )
        self._enter(at, about, decision)

    def _enter(self, at: relax.Var, about: tuple[relax.Var, ...], decision: Decision) -> None:
        place = self._places.get(hash(at), len(self._places))
        entry = _Entry(self._ranks[decision.pattern], place, about, decision)
        key = decision.pattern, decision.where, str(decision.decline)
        self._entries.setdefault(key, entry)
