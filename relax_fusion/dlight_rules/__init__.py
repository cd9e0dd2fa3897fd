"""Schedule rules: ours for what the passes emit, and safe ones for everything else."""

from .apply import ScheduleKernels
from .fused import AttentionRule, ChainRule, ContractionRule
from .generic_matmul.rules import CPUSpatialRule, GenericMatmulRule, ScalarMatmulRule
from .host_code import SingleThreadRule
from .norms import NormRule, RowSumRule

ForeignMatmulRule = GenericMatmulRule
"""The name that `GenericMatmulRule` had before."""

__all__ = [
    "AttentionRule",
    "CPUSpatialRule",
    "ChainRule",
    "ContractionRule",
    "ForeignMatmulRule",
    "GenericMatmulRule",
    "NormRule",
    "RowSumRule",
    "ScalarMatmulRule",
    "ScheduleKernels",
    "SingleThreadRule",
]
