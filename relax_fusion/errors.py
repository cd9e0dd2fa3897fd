"""What can go wrong, as types.

A :class:`Decline` is an answer, not an exception: a pass that meets a chain it cannot or should not
fuse records one and leaves the module alone.  The exceptions are for bad input by a user (a plan
that does not fit, a target nobody knows) and for broken promises inside the library.

The sentence of a decline stands at the guard that refused, in `matching`, `passes`, `estimator` or
`dlight_rules`: look for its ``Reason``.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from enum import Enum


class Reason(str, Enum):
    """Why a chain was not fused.  The values are stable: reports and tests name them."""

    LEAKED = "leaked intermediate"
    MULTI_USE = "intermediate used more than once"
    AXIS = "wrong axis"
    LAYOUT = "unsupported layout"
    SHAPE = "unsupported shape"
    DTYPE = "unsupported dtype"
    SIDE_EFFECT = "impure call in the chain"
    VDEVICE = "operands on different virtual devices"
    ATTRIBUTE = "unsupported attribute"
    MATERIALISED = "weight would be materialised"
    NOT_PROFITABLE = "fusing does not pay"
    CYCLE = "kernel would depend on itself"
    OVERWRITTEN = "operand overwritten in place"
    OVERLAP = "binding belongs to another kernel"
    NO_PLAN = "no tile plan fits the device"
    SCHEDULE = "no schedule of this form"
    MISMATCH = "kernel would compute something else"


@dataclass(frozen=True)
class Decline:
    """A typed "no, because".

    Parameters
    ----------
    reason : Reason
        The class of refusal.
    detail : str
        One sentence that names the value that was met and what would have been accepted.
    fused_s, unfused_s : float, optional
        Predicted seconds with and without fusing, where the estimator was asked.
    """

    reason: Reason
    detail: str
    fused_s: float | None = None
    unfused_s: float | None = None

    def __str__(self) -> str:
        """Render as ``reason: detail``."""
        return f"{self.reason.value}: {self.detail}"


class RelaxFusionError(Exception):
    """Base class of every error that this library raises on purpose."""


class TilePlanError(RelaxFusionError, ValueError):
    """A tile plan that a user gave does not fit its workload or device."""


class TargetError(RelaxFusionError, ValueError):
    """A target that the library cannot describe."""


class GraphError(RelaxFusionError, ValueError):
    """A block graph that says what cannot be said, or inputs that do not fit it."""


class TilingError(RelaxFusionError, ValueError):
    """A block graph that cannot be tiled, or a tiling expression that does not fit its loops."""


class LoweringError(RelaxFusionError, RuntimeError):
    """A workload reached code generation in a form that it cannot express."""


class DatabaseError(RelaxFusionError, ValueError):
    """A tuning database that cannot be read or written, or a line that is no measurement."""


class TuningError(RelaxFusionError, RuntimeError):
    """Kernels cannot be measured on the device that was asked for."""


class EquivalenceError(RelaxFusionError, RuntimeError):
    """A kernel that would compute something else than what it replaces."""


class SchedulingError(RelaxFusionError, RuntimeError):
    """A PrimFunc for a GPU that no rule schedules, and that cannot run on the host."""


class PipelineError(RelaxFusionError, ValueError):
    """An argument of the pipeline has a value that it cannot take."""


class ModuleTypeError(RelaxFusionError, TypeError):
    """What was given as a module is none."""


class KernelError(RelaxFusionError, ValueError):
    """A Triton kernel, its arguments, its options and its device do not fit together."""


class QuantizationError(RelaxFusionError, ValueError):
    """A format of weights that nobody knows, or an array that cannot be stored in one."""


class ModelFileError(RelaxFusionError, ValueError):
    """A file that cannot be imported as a model."""


class VersionError(RelaxFusionError, RuntimeError):
    """A package of a version that the library does not know."""


class MissingPackageError(RelaxFusionError, ImportError):
    """What was asked for needs a package that is not installed."""


class ModelError(RelaxFusionError, ValueError):
    """Something about a model, its files or its inputs is wrong; the message says what to do."""


class ConfigError(ModelError):
    """A ``config.json`` is missing, unreadable, or lacks a field that the architecture needs."""


class UnknownArchitectureError(ConfigError):
    """The configuration names an architecture that this library does not build."""


class UnsupportedFeatureError(ConfigError):
    """The architecture is known, but a setting of this configuration is not implemented."""


class WeightsError(ModelError):
    """A checkpoint does not hold what the model needs."""


class MissingTensorError(WeightsError):
    """A tensor that the model needs is in none of the checkpoint's files."""


class TensorShapeError(WeightsError):
    """A tensor of the checkpoint has another shape than the configuration implies."""


class CheckpointFileError(WeightsError):
    """A checkpoint file is missing, truncated or not a safetensors file."""


class InputError(ModelError):
    """The tokens given to a running model do not fit it."""


class ContextOverflowError(InputError):
    """More tokens were given than the key/value cache has room for."""


_BETWEEN = ("relax_fusion", "tvm", "tvm_ffi", "torch", "contextlib")
"""The packages between what warns and the line that a user wrote."""


def warn(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn at the nearest line of the caller's that is of no package that called this one."""
    frame, level = sys._getframe(1), 2
    # code that torch.fx writes is of no module
    while frame.f_back and frame.f_globals.get("__name__", "torch").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)
