"""Our pipeline in the place of the one that MLC-LLM registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.relax.pipeline import PIPELINE_MAP

from ..errors import PipelineError
from ..options import make_options
from .package import LIBRARIES, NAME, available, load, options
from .phases import make_pipeline

ANY = "h200"
"""A target that takes every choice, to check their values before one is known."""

CHOICES = (
    *("backend", "plans", "disable", "always_fuse", "allow_tf32", "validate", "report"),
    "progress",
)
"""Arguments of our pipeline that MLC-LLM's lacks."""

_before: dict[str, Any] = {}
"""What `install` replaced, the pipeline and the method that settles the options, and where."""


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
        If a choice has another name, or a value that it cannot take on any target.
    """
    for name in choices:
        if name not in CHOICES:
            raise PipelineError(f"install has no choice {name!r}; it takes {', '.join(CHOICES)}")
    make_options(ANY, dict(choices))
    passes, flags = load(), options()
    if not _before:
        _before.update(pipeline=PIPELINE_MAP[NAME], flags=flags, update=flags.update)
    PIPELINE_MAP[NAME] = partial(make_pipeline, passes, choices)
    flags.update = _settling(_before["update"])


def uninstall() -> None:
    """Give MLC-LLM its own pipeline back; nothing happens if it has it.

    TVM keeps the names that it lacked: MLC-LLM, which is imported, goes on using them.
    """
    if _before:
        PIPELINE_MAP[NAME] = _before["pipeline"]
        _before["flags"].update = _before["update"]
        _before.clear()


def _settling(update: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """Return MLC-LLM's method that settles its options, which then drops absent libraries.

    Models ask for some of them while they are exported, long before the pipeline.
    """

    def settle(self: Any, target: Any, quantization: Any) -> None:
        update(self, target, quantization)
        for option in LIBRARIES:
            setattr(self, option, available(option, getattr(self, option)))

    return settle
