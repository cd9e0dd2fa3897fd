"""Which of the kernels that passes propose are made: the set that saves the most time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tvm import relax

from ..errors import Decline
from ..estimator import Choice
from ..matching.effects import free_vars
from ..matching.pattern import BlockView, Match
from ..matching.rebuild import hidden
from ..workload import Attention, Chain, ExpertMatmul, NormMatmul

MOST_EXACT = 12
"""The most rivals among which every set is looked at; among more, the best are taken in turn."""

Gain = tuple[int, float, int, float]
"""Plans of the user's that are followed, seconds that are saved, bindings that are computed, and
seconds less those that are lost."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A kernel that a pass would put in the place of bindings."""

    pattern: str
    """Name of the pass."""
    rank: int
    """Its place among the passes: of two kernels that save as much, the first pass's is made."""
    place: int
    """Index of the binding at which the chain was found."""
    at: relax.Var
    match: Match
    """What is replaced, and by what."""
    inside: frozenset[int]
    hidden: frozenset[int]
    reads: frozenset[int]
    """Indices of the bindings that the kernel computes, of those among them that are not there any
    more, and of those that it reads."""
    choice: Choice | None = None
    """The plans of the kernel; None until the estimator was asked."""
    saved_s: float = 0.0
    """Seconds that the kernel is predicted to save."""
    is_planned: bool = False
    """Whether the user gave a plan for this workload."""

    @property
    def gain(self) -> Gain:
        """What taking it adds; one that does not pay and is made all the same saves nothing."""
        return int(self.is_planned), max(self.saved_s, 0.0), len(self.inside), self.saved_s

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands among others that are as good."""
        return self.rank, self.place

    @staticmethod
    def of(pattern: str, rank: int, place: int, match: Match, view: BlockView) -> Proposal:
        """Return the proposal of a match in a block, which has no price yet."""
        inside, gone = (
            frozenset(view.index[v] for v in of) for of in (match.covers, hidden(match))
        )
        read = (v for arg in match.args for v in free_vars(arg.expr))
        reads = frozenset(view.index[v] for v in read if v in view.index)
        at = view.bindings[place].var
        return Proposal(pattern, rank, place, at, match, inside, gone, reads)

    def is_apart_from(self, other: Proposal) -> bool:
        """Tell whether both can be made: neither computes, or hides, what the other needs."""
        return (
            self.inside.isdisjoint(other.inside)
            and self.hidden.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.hidden)
        )

    @property
    def is_chain(self) -> bool:
        """Whether it is more than a norm with matmuls and their steps, or than experts with theirs.

        Those do with fewer matmuls or steps as well, and are proposed anew where some are taken.
        """
        work = self.match.workload
        return not isinstance(work, NormMatmul | ExpertMatmul) or work.is_adapted

    @property
    def is_generated(self) -> bool:
        """Whether its kernel is written for it alone, and not by a pattern's author."""
        return isinstance(self.match.workload, Chain)

    def yields_to(self, other: Proposal) -> bool:
        """Tell whether another proposal, if it pays, pays more than this one, whatever the prices.

        A kernel is compared with what would be made of its parts otherwise: matmuls with norms and
        steps.  A pattern's kernel is made rather than a generated one of the same or a part.  What
        a generated one is compared with has transpositions that kernels of attention do without:
        one that meets attention does not compete.
        """
        if self.is_generated and isinstance(other.match.workload, Attention):
            return not self.inside.isdisjoint(other.inside)
        if not self.inside <= other.inside:
            return False
        return not self.is_chain or (self.is_generated and not other.is_generated)


@dataclass(frozen=True)
class Selection:
    """What became of proposals."""

    taken: list[Proposal] = field(default_factory=list)
    """Those that are made."""
    lost: list[tuple[Proposal, Proposal]] = field(default_factory=list)
    """Those that save less than others, each with the one that has most of its bindings."""
    left: list[Proposal] = field(default_factory=list)
    """All others that were not declined: what passes may propose otherwise, once those are made."""
    declined: list[tuple[Proposal, Decline]] = field(default_factory=list)
    """What the estimator has no plan for, or says not to make."""


def select(
    proposals: Iterable[Proposal], priced: Callable[[Proposal], Proposal | Decline]
) -> Selection:
    """Take the proposals that save the most time together, each binding at most once.

    Chains come first, by weighted set packing, exactly among up to `MOST_EXACT` rivals; among more,
    those that save the most are taken first.  Matmuls with norms and steps, which chains are
    compared with, take what is left.  What two of them could take is a step or a cast: the one in
    front takes it.

    `proposals`: without a price.
    `priced`: returns a proposal with its price, or why it is declined.
    """
    ordered = sorted(proposals, key=lambda p: (p.is_generated, -len(p.inside), *p.order))
    found = Selection()
    chains = _live([p for p in ordered if p.is_chain], priced, found)
    for rivals in _rivals(chains):
        exact = len(rivals) <= MOST_EXACT
        _settle(rivals, _best(rivals)[1] if exact else _greedy(rivals), found)
    matmuls = _live([p for p in ordered if not p.is_chain], priced, found)
    for rivals in _rivals(matmuls):
        _settle(rivals, _apart(sorted(rivals, key=lambda p: p.place)), found)
    found.taken.sort(key=lambda p: p.place)
    return found


def _settle(rivals: Sequence[Proposal], taken: list[Proposal], found: Selection) -> None:
    """Note which of some rivals are taken, and which lost to them."""
    found.taken.extend(taken)
    for loser in rivals:
        if loser not in taken:
            others = [p for p in taken if not p.is_apart_from(loser)]
            found.lost.append((loser, max(others, key=lambda p: len(p.inside & loser.inside))))


def _live(
    proposals: Sequence[Proposal],
    priced: Callable[[Proposal], Proposal | Decline],
    found: Selection,
) -> list[Proposal]:
    """Return what may be made beside what is taken, with its price, larger ones first."""
    live: list[Proposal] = []
    at: dict[int, list[Proposal]] = {}
    inside, hidden, reads = (
        {index for taken in found.taken for index in getattr(taken, name)}
        for name in ("inside", "hidden", "reads")
    )
    for proposal in proposals:
        met = (other for index in proposal.inside for other in at.get(index, ()))
        is_free = (
            proposal.inside.isdisjoint(inside)
            and proposal.hidden.isdisjoint(reads)
            and proposal.reads.isdisjoint(hidden)
        )
        if any(map(proposal.yields_to, met)):
            found.left.append(proposal)
            continue
        answer = priced(proposal) if is_free else proposal
        if isinstance(answer, Decline):
            found.declined.append((proposal, answer))
            continue
        (live if is_free else found.left).append(answer)
        for index in answer.inside:  # parts of what may be proposed otherwise wait for that
            at.setdefault(index, []).append(answer)
    return live


def _rivals(proposals: Sequence[Proposal]) -> list[list[Proposal]]:
    """Return groups of proposals; those of two groups can be made together."""
    hidden = {index for p in proposals for index in p.hidden}
    groups: dict[int, list[Proposal]] = {}
    group_of: dict[int, int] = {}
    for number, proposal in enumerate(proposals):
        claimed = proposal.inside | proposal.reads & hidden
        joined = sorted({group_of[index] for index in claimed if index in group_of})
        groups[number] = [p for g in joined for p in groups.pop(g)] + [proposal]
        for index, group in group_of.items() if joined else ():
            group_of[index] = number if group in joined else group
        group_of.update(dict.fromkeys(claimed, number))
    return [sorted(group, key=lambda p: p.order) for group in groups.values()]


def _best(rivals: Sequence[Proposal]) -> tuple[Gain, list[Proposal]]:
    """Return the best set, and what it gains; of sets that are as good, that of the first."""
    if not rivals:
        return (0, 0.0, 0, 0.0), []
    first, *others = rivals
    apart = [p for p in others if p.is_apart_from(first)]
    gain, taken = _best(apart)
    best = _sum(first.gain, gain), [first, *taken]
    if len(apart) < len(others):
        without = _best(others)
        best = without if without[0] > best[0] else best
    return best


def _sum(one: Gain, other: Gain) -> Gain:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


def _greedy(rivals: Sequence[Proposal]) -> list[Proposal]:
    """Take the proposals with the largest gains, as far as they can be made together."""
    return _apart(sorted(rivals, key=lambda p: p.gain, reverse=True))


def _apart(proposals: Iterable[Proposal]) -> list[Proposal]:
    """Take proposals in order, as far as they can be made together."""
    taken: list[Proposal] = []
    for proposal in proposals:
        if all(proposal.is_apart_from(p) for p in taken):
            taken.append(proposal)
    return taken
