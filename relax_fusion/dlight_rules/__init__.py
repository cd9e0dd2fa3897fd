"""Schedule rules: ours for what the passes emit, and safe ones for everything else."""

from .apply import ScheduleKernels
from .copies import CopyRule
from .fused import FusedRule
from .generic_matmul.rules import CPUSpatialRule, GenericMatmulRule, ScalarMatmulRule
from .host_code import SingleThreadRule
from .joined import JoinedRule
from .norms import NormRule, RowSumRule
from .numbers import NumbersRule
from .reductions import ReductionRule, WindowRule

__all__ = [
    "CPUSpatialRule",
    "CopyRule",
    "FusedRule",
    "GenericMatmulRule",
    "JoinedRule",
    "NormRule",
    "NumbersRule",
    "ReductionRule",
    "RowSumRule",
    "ScalarMatmulRule",
    "ScheduleKernels",
    "SingleThreadRule",
    "WindowRule",
]
