"""From the plans of a range of sizes to the branches of a PrimFunc."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..errors import KernelError
from ..launch.branches import Branch, Candidates, Launch
from .attention_call import Case
from .compile import Made
from .steps import AnyStep

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range:
    """A condition, and the launches of each plan where it is the first of several that holds.

    Parameters
    ----------
    when : PrimExpr or True
        The condition.
    ways : list of (str, list of Case)
        By the keys of plans.  Where there are several, the library measures them; all have the same
        outputs, and none reads what the one before it wrote.
    """

    when: Any
    ways: Sequence[tuple[str, Sequence[Case]]]

    @property
    def steps(self) -> Iterator[AnyStep]:
        """All launches."""
        return (step for _, way in self.ways for _, steps in way for step in steps)


def cases_of(
    name: str, found: Range, made: Iterator[tuple[Made, Sequence[Any]]]
) -> list[Branch] | list[Candidates]:
    """Return the branches of a range.

    A plan that does not compile is left out, with a warning, where there are others.

    Parameters
    ----------
    name : str
        Of the function, for the warning.
    found : Range
        Conditions and launches.
    made : iterator of (CompiledKernel or KernelError, sequence)
        The kernel and the arguments of each launch, of which those of `found` are taken.

    Raises
    ------
    KernelError
        If no plan compiles.
    """
    ways: list[list[Branch]] = []
    errors: list[tuple[str, KernelError]] = []
    for plan, cases in found.ways:
        branches: list[Branch] = []
        wrong = len(errors)
        for when, steps in cases:
            launches = []
            for step, (kernel, args) in zip(steps, made, strict=False):
                if isinstance(kernel, KernelError):
                    errors.append((plan, kernel))
                else:
                    launches.append(Launch(kernel, step.grid, args))
            branches.append(Branch(when, launches))
        if len(errors) == wrong:
            ways.append(branches)
    if not ways:
        raise errors[0][1]
    for plan, error in errors:
        _LOG.warning("%s: plan %s is not among those that are measured: %s", name, plan, error)
    if len(ways) > 1:
        return [Candidates(found.when, ways)]
    return [Branch(both(found.when, b.when), b.launches) for b in ways[0]]


def both(first: Any, second: Any) -> Any:
    """Return the conjunction of two conditions, each an expression or True."""
    if first is True or second is True:
        return second if first is True else first
    return tirx.And(first, second)
