"""The fusing passes, one file per pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from tvm import ir
from tvm.ir.transform import Pass

from ..errors import PipelineError, warn
from ..report.decision import Decision
from ..transforms.modules import module_pass
from ..validation import shown
from ..workload import ExpertMatmul
from ..workload.expert_load import ExpertLoad
from .adapter import FuseAdapters
from .attention import FuseAttentionChain
from .chains import FuseChains
from .driver import fuse
from .experts import FuseExperts
from .gated_ffn import FuseGatedFFN
from .matmul import FuseMatmulEpilogue
from .norm_matmul import FuseRMSNormMatmul
from .options import FuseOptions
from .projections import FuseProjections

PATTERNS: dict[str, Callable[[FuseOptions], Any]] = {
    "FuseAdapters": FuseAdapters,
    "FuseChains": FuseChains,
    "FuseExperts": FuseExperts,
    "FuseGatedFFN": FuseGatedFFN,
    "FuseRMSNormMatmul": FuseRMSNormMatmul,
    "FuseAttentionChain": FuseAttentionChain,
    "FuseProjections": FuseProjections,
    "FuseMatmulEpilogue": FuseMatmulEpilogue,
}
"""Every pass by name, longer chains first.

All propose together what the pipeline fuses.  Where two kernels save as much, that of the pass in
front is made, and what a pass declines is not told where one in front of it took it."""


@module_pass
class FusePatterns:
    """Fuse what the passes of `PATTERNS` propose, as saves the most time in all.

    Parameters
    ----------
    options : FuseOptions
        What the passes are told; those that it disables are not asked.
    """

    options: FuseOptions

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        options = self.options
        decisions: list[Decision] = []
        options = replace(options, decisions=decisions)
        makers = [make for name, make in PATTERNS.items() if name not in options.disable]
        made = fuse(mod, [make(options) for make in makers], options)
        if self.options.decisions is not None:
            self.options.decisions.extend(decisions)
        if options.expert_load is not None:
            _check_counted(options.expert_load, decisions)
        return made


def _check_counted(load: ExpertLoad, decisions: Iterable[Decision]) -> None:
    """Warn of counts that are of no layer of experts that was found."""
    works = [d.workload for d in decisions if isinstance(d.workload, ExpertMatmul)]
    kinds = sorted({(work.experts, work.chosen) for work in works})
    if (load.experts, load.chosen) not in kinds:
        found = " and ".join(f"{experts} experts, {chosen} for a row" for experts, chosen in kinds)
        told = f"expert_load counts rows of {load.experts} experts, {load.chosen} for a row"
        warn(f"{told}; nothing is chosen by it: layers have {found or 'no experts'}")


def register_pass(made: Callable[[FuseOptions], Any], before: str = "FuseAttentionChain") -> None:
    """Add a pass of another package to the pipeline.

    Parameters
    ----------
    made : type
        A subclass of `FusingPass` that `module_pass` decorated.
    before : str
        The pass in front of which it stands: where both save as much, `made` takes.

    Raises
    ------
    PipelineError
        If it is no pass, its name is taken, or there is no pass `before`.
    """
    if not (isinstance(made, type) and issubclass(made, Pass)):
        raise PipelineError(f"pass is {shown(made)}; must be a class that module_pass decorated")
    name, names = made.__name__, list(PATTERNS)
    if name in names:
        raise PipelineError(f"pass {name}: there is one of this name already")
    if before not in names:
        raise PipelineError(
            f"pass {name}: before is {shown(before)}; must be of {', '.join(names)}"
        )
    PATTERNS[name] = made
    for later in names[names.index(before) :]:
        PATTERNS[later] = PATTERNS.pop(later)


__all__ = [
    "PATTERNS",
    "FuseAdapters",
    "FuseAttentionChain",
    "FuseChains",
    "FuseExperts",
    "FuseGatedFFN",
    "FuseMatmulEpilogue",
    "FusePatterns",
    "FuseProjections",
    "FuseRMSNormMatmul",
    "register_pass",
]
