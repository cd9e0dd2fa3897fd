"""The analytical estimator: which tiles a workload should run with, and whether fusing pays.

    registry of families: candidates -> footprint, violations -> steps -> predict; choose

Pure functions of a `Workload`, a `DeviceSpec` and a `TilePlan`; nothing is measured or compiled.
"""

from .baseline import predict_unfused
from .choose import Choice, RangePrediction, choose, saved_s
from .family import Breaks, KernelFamily
from .prediction import Prediction, format_seconds
from .registry import candidates, footprint, predict, register_family, violations
from .shape import AttentionSize, Size
from .steps import Footprint, Step

__all__ = [
    "AttentionSize",
    "Breaks",
    "Choice",
    "Footprint",
    "KernelFamily",
    "Prediction",
    "RangePrediction",
    "Size",
    "Step",
    "candidates",
    "choose",
    "footprint",
    "format_seconds",
    "predict",
    "predict_unfused",
    "register_family",
    "saved_s",
    "violations",
]
