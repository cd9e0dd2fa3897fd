"""What a PrimFunc launches, and where: branches, candidates among which the library measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .kernel import CompiledKernel


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, one to three numbers of programs, and its run-time arguments."""

    kernel: CompiledKernel
    grid: Sequence[Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Branch:
    """Launches that run one after the other where `when` holds (the last branch: in any case)."""

    when: Any
    launches: Sequence[Launch]


@dataclass(frozen=True)
class Candidates:
    """Several ways to compute the same where `when` holds; the library measures which to run.

    Parameters
    ----------
    when : PrimExpr or True
        As of a `Branch`.
    ways : sequence of sequence of Branch
        Of each way the branches, of which the first whose condition holds is run; the last one's is
        True.  The first way is run where nothing can be measured.  What one writes none reads, or
        only behind a launch of its own that has written it, so that they may run any number of
        times.
    """

    when: Any
    ways: Sequence[Sequence[Branch]]


Case = Branch | Candidates


def every_branch(cases: Sequence[Case]) -> Iterator[Branch]:
    """Yield the branches, those of candidates among them."""
    for case in cases:
        if isinstance(case, Branch):
            yield case
        else:
            for way in case.ways:
                yield from way


def every_launch(cases: Sequence[Case]) -> list[Launch]:
    """Return the launches of all branches."""
    return [launch for branch in every_branch(cases) for launch in branch.launches]
