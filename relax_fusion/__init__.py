"""Fused transformer kernels as TVM Relax passes.

Importing the package registers the pipeline ``relax_fusion``::

    import relax_fusion
    from tvm import relax

    pipeline = relax.get_pipeline("relax_fusion", target="h200")
"""

from .entry import build, partition
from .errors import (
    DatabaseError,
    Decline,
    EquivalenceError,
    KernelError,
    LoweringError,
    PipelineError,
    QuantizationError,
    Reason,
    RelaxFusionError,
    SchedulingError,
    TargetError,
    TilePlanError,
    TuningError,
)
from .estimator import KernelFamily, register_family
from .estimator.tile_plan import Box, PlanTable, TilePlan
from .hardware import DEVICES, DeviceSpec, device
from .hardware.target import host_target, make_target
from .options import PipelineOptions
from .passes import (
    PATTERNS,
    FuseAdapters,
    FuseAttentionChain,
    FuseChains,
    FuseGatedFFN,
    FuseMatmulChain,
    FuseMatmulEpilogue,
    FuseProjections,
    FuseRMSNormMatmul,
    register_pass,
)
from .passes.driver import FusingPass
from .passes.options import FuseOptions
from .pipeline import relax_fusion_pipeline
from .quantization import QUANTIZATIONS, Quantization, dequantize, quantize
from .report import Report
from .report.decision import Decision
from .transforms.fuse_dequantize import FuseDequantize
from .triton_bridge import OUT, EmbedTritonKernels, call_tir_extern
from .tuning import Tuning, tune
from .workload import (
    Adapter,
    Attention,
    DynamicDim,
    GatedFFN,
    MatmulChain,
    Norm,
    NormMatmul,
    Projection,
)

__version__ = "0.1.0"

__all__ = [
    "DEVICES",
    "OUT",
    "PATTERNS",
    "QUANTIZATIONS",
    "Adapter",
    "Attention",
    "Box",
    "DatabaseError",
    "Decision",
    "Decline",
    "DeviceSpec",
    "DynamicDim",
    "EmbedTritonKernels",
    "EquivalenceError",
    "FuseAdapters",
    "FuseAttentionChain",
    "FuseChains",
    "FuseDequantize",
    "FuseGatedFFN",
    "FuseMatmulChain",
    "FuseMatmulEpilogue",
    "FuseOptions",
    "FuseProjections",
    "FuseRMSNormMatmul",
    "FusingPass",
    "GatedFFN",
    "KernelError",
    "KernelFamily",
    "LoweringError",
    "MatmulChain",
    "Norm",
    "NormMatmul",
    "PipelineError",
    "PipelineOptions",
    "PlanTable",
    "Projection",
    "Quantization",
    "QuantizationError",
    "Reason",
    "RelaxFusionError",
    "Report",
    "SchedulingError",
    "TargetError",
    "TilePlan",
    "TilePlanError",
    "Tuning",
    "TuningError",
    "build",
    "call_tir_extern",
    "dequantize",
    "device",
    "host_target",
    "make_target",
    "partition",
    "quantize",
    "register_family",
    "register_pass",
    "relax_fusion_pipeline",
    "tune",
]
