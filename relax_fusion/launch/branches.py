"""What a PrimFunc launches, and where: branches."""

from __future__ import annotations

from collections.abc import Sequence
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


def every_launch(branches: Sequence[Branch]) -> list[Launch]:
    """Return the launches of all branches."""
    return [launch for branch in branches for launch in branch.launches]
