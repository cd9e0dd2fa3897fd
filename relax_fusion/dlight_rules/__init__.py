"""Schedule rules: ours for what the passes emit, and safe ones for everything else."""

from .apply import ScheduleKernels
from .attention import AttentionRule
from .contraction import ContractionRule
from .foreign.rules import CPUSpatialRule, ForeignMatmulRule, ScalarMatmulRule
from .host_code import SingleThreadRule
from .matmul_chain import MatmulChainRule
from .norms import NormRule

__all__ = [
    "AttentionRule",
    "CPUSpatialRule",
    "ContractionRule",
    "ForeignMatmulRule",
    "MatmulChainRule",
    "NormRule",
    "ScalarMatmulRule",
    "ScheduleKernels",
    "SingleThreadRule",
]
