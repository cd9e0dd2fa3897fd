"""The fusing passes, one file per pattern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.ir.transform import Pass

from ..errors import PipelineError
from ..validation import shown
from .adapter import FuseAdapters
from .attention import FuseAttentionChain
from .chains import FuseChains
from .gated_ffn import FuseGatedFFN
from .matmul import FuseMatmulEpilogue
from .matmul_chain import FuseMatmulChain
from .norm_matmul import FuseRMSNormMatmul
from .options import FuseOptions
from .projections import FuseProjections

PATTERNS: dict[str, Callable[[FuseOptions], Any]] = {
    "FuseAdapters": FuseAdapters,
    "FuseChains": FuseChains,
    "FuseMatmulChain": FuseMatmulChain,
    "FuseGatedFFN": FuseGatedFFN,
    "FuseRMSNormMatmul": FuseRMSNormMatmul,
    "FuseAttentionChain": FuseAttentionChain,
    "FuseProjections": FuseProjections,
    "FuseMatmulEpilogue": FuseMatmulEpilogue,
}
"""Every pass by name, in the order in which the pipeline runs them: longer chains first.

Attention comes behind the projections that rotate its queries and keys: what is left between them
only moves elements, which it reads where they are."""


def register_pass(made: Callable[[FuseOptions], Any], before: str = "FuseAttentionChain") -> None:
    """Add a pass of another package to the pipeline.

    Parameters
    ----------
    made : type
        A subclass of `FusingPass`, decorated with ``tvm.transform.module_pass``.
    before : str
        The pass in front of which it runs: one that would take a part of its chains.

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
    "FuseGatedFFN",
    "FuseMatmulChain",
    "FuseMatmulEpilogue",
    "FuseProjections",
    "FuseRMSNormMatmul",
    "register_pass",
]
