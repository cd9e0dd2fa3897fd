"""Our pipeline in the place of the one that MLC-LLM registers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.relax.pipeline import PIPELINE_MAP

from ..errors import PipelineError
from .libraries import LIBRARIES, available
from .package import load
from .phases import make_pipeline

NAME = "mlc_llm"
"""The name under which MLC-LLM asks for its pipeline."""

CHOICES = (
    *("backend", "plans", "disable", "always_fuse", "allow_tf32", "validate", "report"),
    "progress",
)
"""Arguments of our pipeline that MLC-LLM's lacks."""

_before: dict[str, Any] = {}
"""What `install` replaced: the pipeline, and the method that settles the options."""


def install(**choices: Any) -> None:
    """Let MLC-LLM compile with our phases.

    Its own passes still attach what its engine calls, and its metadata.  Again is harmless: the
    last choices hold.  Call it before MLC-LLM is imported, which TVM 0.27 needs, or after.

    Parameters
    ----------
    **choices
        Fields of `relax_fusion.PipelineOptions` that MLC-LLM does not set: ``backend``, ``plans``,
        ``disable``, ``always_fuse``, ``allow_tf32``, ``validate``, ``report``, ``progress``.

    Raises
    ------
    MissingPackageError
        If ``mlc_llm`` cannot be imported.
    VersionError
        If TVM or MLC-LLM is of a version that is not known.
    PipelineError
        If a choice has another name.
    """
    for name in choices:
        if name not in CHOICES:
            raise PipelineError(f"install has no choice {name!r}; it takes {', '.join(CHOICES)}")
    passes = load()
    flags = _flags()
    if not _before:
        _before.update(pipeline=PIPELINE_MAP[NAME], update=flags.update)
    PIPELINE_MAP[NAME] = partial(make_pipeline, passes, choices)
    flags.update = _settling(_before["update"])


def uninstall() -> None:
    """Give MLC-LLM its own pipeline back; nothing happens if it has it."""
    if _before:
        PIPELINE_MAP[NAME] = _before["pipeline"]
        _flags().update = _before["update"]
        _before.clear()


def _flags() -> Any:
    """Return the class of MLC-LLM's options of optimisation."""
    return importlib.import_module("mlc_llm.interface.compiler_flags").OptimizationFlags


def _settling(update: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return MLC-LLM's method that settles its options, which then drops absent libraries.

    Models ask for some of them while they are exported, long before the pipeline.
    """

    def settle(self: Any, target: Any, quantization: Any) -> None:
        update(self, target, quantization)
        for option in LIBRARIES:
            setattr(self, option, available(option, getattr(self, option)))

    return settle
