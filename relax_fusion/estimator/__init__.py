"""The analytical estimator: which tiles a workload should run with, and whether fusing pays.

    candidates -> footprint, violations -> predict -> choose

Pure functions of a `Workload`, a `DeviceSpec` and a `TilePlan`; nothing is measured or compiled.
"""

from .candidates import candidates
from .choose import Choice, RangePrediction, choose
from .cost import predict, predict_unfused
from .footprint import Footprint, footprint
from .prediction import Prediction, format_seconds
from .shape import AttentionSize, Size
from .violations import violations

__all__ = [
    "AttentionSize",
    "Choice",
    "Footprint",
    "Prediction",
    "RangePrediction",
    "Size",
    "candidates",
    "choose",
    "footprint",
    "format_seconds",
    "predict",
    "predict_unfused",
    "violations",
]
