"""The analytical estimator: which tiles a workload should run with, and whether fusing pays.

    registry of families: options, violations -> price; search; choose

Pure functions of a `Workload`, a `DeviceSpec` and a `TilePlan`; nothing is measured or compiled.
"""

from .baseline import predict_unfused
from .choose import Choice, RangePrediction, choose, saved_s
from .family import Breaks, KernelFamily, Launches, Offer
from .prediction import Footprint, Prediction, Price, Step, format_seconds
from .registry import candidates, footprint, predict, register_family, violations
from .shape import AttentionSize, Problem, Size

__all__ = [
    "AttentionSize",
    "Breaks",
    "Choice",
    "Footprint",
    "KernelFamily",
    "Launches",
    "Offer",
    "Prediction",
    "Price",
    "Problem",
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
