"""One look at a block: what passes propose there, what is taken of it, and what is in the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tvm import relax
from tvm.target import Target

from ..equivalence import Checker, Mismatch
from ..errors import Decline, EquivalenceError, Reason
from ..estimator import choose, saved_s
from ..hardware import DeviceSpec
from ..matching.pattern import BlockView, Match, Refused
from ..matching.rebuild import order, overwritten
from ..matching.shapes import elsewhere
from ..transforms.running import enter
from ..workload import GatedFFN, NormMatmul
from .options import FuseOptions
from .record import Record
from .selection import Proposal, Selection, select

if TYPE_CHECKING:
    from .driver import FusingPass

Form = tuple[str, str, str]
"""A pass, the results of a chain and the key of its workload."""


@dataclass(frozen=True)
class Setting:
    """What all rounds have in common."""

    passes: dict[str, FusingPass]
    """Who proposes, by name; of two that save as much, the first takes."""
    options: FuseOptions
    """What the user said."""
    target: Target
    device: DeviceSpec
    """What kernels are for."""
    checker: Checker = field(default_factory=Checker)
    """Interprets matches, if `options` ask for it."""


class Round:
    """What becomes of one block when some passes are asked.

    `setting`: passes and options.
    `view`: the block, of which no binding is taken yet.
    `record`: gets what is declined.
    `failed`: forms that turned out to be wrong when they were to be made; more may be added.
    `again`: the passes of which something is left to be asked, when kernels are made of what was
    taken.
    """

    def __init__(self, setting: Setting, view: BlockView, record: Record, failed: set[Form]):
        self.setting, self.view, self.record, self.failed = setting, view, record, failed
        self.again: set[str] = set()

    def taken(self, asked: set[str]) -> list[tuple[Proposal, str]]:
        """Return what is to be made now, each with what is told of its validation."""
        found = select(self._matches(asked), self._priced)
        self._decline_best(found)
        for loser, winner in found.lost:
            self.record.lost(loser, winner)
        if not self.view.is_dataflow:
            self._decline_impure(found.taken)
            return []
        made = list(self._valid(self._in_order(found.taken)))
        inside = {i for proposal, _ in made for i in proposal.inside}
        left = [*found.left, *(loser for loser, _ in found.lost)]
        self.again |= {p.pattern for p in left if not p.inside <= inside}
        at_once = [m for m in made if not self.setting.passes[m[0].pattern].reads_results]
        if at_once and len(at_once) < len(made):
            self.again |= {p.pattern for p, _ in made} - {p.pattern for p, _ in at_once}
            return at_once
        return made

    # --- proposals ---------------------------------------------------------------------------

    def _matches(self, asked: set[str]) -> Iterator[Proposal]:
        """Yield what passes would take, the estimator not asked yet."""
        for rank, (name, one) in enumerate(self.setting.passes.items()):
            if name not in asked:
                continue
            for place, binding in enumerate(self.view.bindings):
                if isinstance(binding.value, relax.Var):
                    continue  # another name of a tensor shares its memory: it is no chain
                for match in self._matched(one, name, binding.var):
                    if (name, match.where, match.workload.key) in self.failed:
                        continue
                    yield Proposal.of(name, rank, place, match, self.view)

    def _matched(self, one: FusingPass, name: str, var: relax.Var) -> Sequence[Match]:
        try:
            found = one.match(self.view, var)
        except Refused as refusal:
            self.record.refused(name, var, refusal.decline)
            return ()
        except Exception:
            enter(name)
            raise
        return [found] if isinstance(found, Match) else found or ()

    def _priced(self, proposal: Proposal) -> Proposal | Decline:
        """Ask the estimator about a proposal."""
        setting, match, name = self.setting, self._permitted(proposal.match), proposal.pattern
        work, options = match.workload, setting.options
        plans = options.plans.get(work.key) or options.plans.get(name)
        if work.key in options.disable and plans is None:
            return Decline(Reason.SCHEDULE, f"the workload {work.key} is disabled")
        tensors = [a.expr for a in match.args] + [o.var for o in match.outs]
        abroad = elsewhere(tensors, setting.target)
        if abroad is not None or not self.view.is_dataflow:
            return abroad or replace(proposal, match=match)
        how = {"always": options.always_fuse, "backend": options.backend}
        choice = choose(work, setting.device, plans=plans, measured=options.measured, **how)
        if isinstance(choice, Decline):
            return choice
        try:
            saved = setting.passes[name].saved_s(match, choice)
        except Refused as refusal:
            return refusal.decline
        is_planned = work.key in options.plans
        return replace(proposal, match=match, choice=choice, saved_s=saved, is_planned=is_planned)

    def _permitted(self, match: Match) -> Match:
        """Say in a workload what the user allows."""
        work = match.workload
        if not self.setting.options.allow_tf32 or not isinstance(work, NormMatmul | GatedFFN):
            return match
        if work.dtype != "float32":
            return match
        return replace(match, workload=replace(work, allow_tf32=True))

    # --- what is in the way --------------------------------------------------------------------

    def _in_order(self, taken: Sequence[Proposal]) -> Iterator[Proposal]:
        """Yield what reads none of its own results, and can be ordered with what is in front."""
        view, kept = self.view, list[Match]()
        together = order(view, [p.match for p in taken]) is not None
        for proposal in taken:
            match = proposal.match
            if _reads_itself(view, match) or (not together and order(view, [*kept, match]) is None):
                detail = overwritten(view, match)
                reason = Reason.CYCLE if detail is None else Reason.OVERWRITTEN
                detail = detail or "the kernel would need a result that depends on its own"
                self._fail(proposal, Decline(reason, detail))
                continue
            view.take(match)
            kept.append(match)
            yield proposal

    def _valid(self, taken: Iterator[Proposal]) -> Iterator[tuple[Proposal, str]]:
        """Yield what computes what it replaces, with what is told of that."""
        for proposal in taken:
            found = self._validation(proposal)
            if isinstance(found, Decline):
                self._fail(proposal, found)
            else:
                yield proposal, found

    def _validation(self, proposal: Proposal) -> str | Decline:
        """Say whether a match was checked, or refuse it."""
        match, how = proposal.match, self.setting.options.validate
        if not how:
            return ""
        found = self.setting.checker.check(self.view, match)
        if not isinstance(found, Mismatch):
            return "checked" if found is None else f"not checked: {found.detail}"
        if how == "strict":
            where = f"{proposal.pattern} of {match.where} in {self.record.function}"
            raise EquivalenceError(f"{where} would compute something else: {found.detail}")
        return Decline(Reason.MISMATCH, found.detail)

    # --- declines ------------------------------------------------------------------------------

    def _fail(self, proposal: Proposal, decline: Decline) -> None:
        """Decline what was to be made; who would take a part of it is asked again."""
        match = proposal.match
        self.failed.add((proposal.pattern, match.where, match.workload.key))
        self.again.update(self.setting.passes)
        self.record.declined(proposal, decline)

    def _decline_best(self, found: Selection) -> None:
        """Tell of each chain that is declined in all of its forms why the best of them is.

        So is told why a kernel does not normalise the heads that it makes.  What the user has
        switched off is told in any case.
        """
        best: dict[tuple[int, int], tuple[Proposal, Decline]] = {}
        forms = {p.order for p in (*found.taken, *(loser for loser, _ in found.lost))}
        for proposal, decline in found.declined:
            if decline.reason is Reason.SCHEDULE:
                self.record.declined(proposal, decline)
                continue
            known = best.get(proposal.order)
            if proposal.order in forms:
                if proposal.match.workload.head_columns:
                    self.record.left_apart(proposal, decline)
                continue
            if known is None or saved_s(decline) > saved_s(known[1]):
                best[proposal.order] = proposal, decline
        for proposal, decline in best.values():
            self.record.declined(proposal, decline)

    def _decline_impure(self, live: Sequence[Proposal]) -> None:
        detail = "the chain is not in a dataflow block, where calls may have side effects"
        for proposal in live:
            self.record.declined(proposal, Decline(Reason.SIDE_EFFECT, detail))


def _reads_itself(view: BlockView, match: Match) -> bool:
    """Tell whether an input of a kernel is computed from one of its own results."""
    inside = set(match.covers)
    tensors = (a.expr for a in match.args if isinstance(a.expr.ty, relax.TensorType))
    return any(view.depends_on(expr, inside) for expr in tensors)
