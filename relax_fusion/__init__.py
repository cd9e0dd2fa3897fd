"""Fused transformer kernels as TVM Relax passes.

Importing the package registers the pipeline ``relax_fusion``::

    import relax_fusion
    from tvm import relax

    pipeline = relax.get_pipeline("relax_fusion", target="h200")

TVM, Triton and the parts of the package are imported when something of theirs is asked for.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .registration import register_pipeline

if TYPE_CHECKING:  # read below as well: what is imported here is the public API
    from .entry import build as build
    from .entry import partition as partition
    from .errors import DatabaseError as DatabaseError
    from .errors import Decline as Decline
    from .errors import EquivalenceError as EquivalenceError
    from .errors import KernelError as KernelError
    from .errors import LoweringError as LoweringError
    from .errors import ModuleTypeError as ModuleTypeError
    from .errors import PipelineError as PipelineError
    from .errors import QuantizationError as QuantizationError
    from .errors import Reason as Reason
    from .errors import RelaxFusionError as RelaxFusionError
    from .errors import SchedulingError as SchedulingError
    from .errors import TargetError as TargetError
    from .errors import TilePlanError as TilePlanError
    from .errors import TuningError as TuningError
    from .estimator import KernelFamily as KernelFamily
    from .estimator import register_family as register_family
    from .estimator.tile_plan import Box as Box
    from .estimator.tile_plan import PlanTable as PlanTable
    from .estimator.tile_plan import TilePlan as TilePlan
    from .hardware import DEVICES as DEVICES
    from .hardware import DeviceSpec as DeviceSpec
    from .hardware import device as device
    from .hardware.target import host_target as host_target
    from .hardware.target import make_target as make_target
    from .options import PipelineOptions as PipelineOptions
    from .passes import PATTERNS as PATTERNS
    from .passes import FuseAdapters as FuseAdapters
    from .passes import FuseAttentionChain as FuseAttentionChain
    from .passes import FuseChains as FuseChains
    from .passes import FuseExperts as FuseExperts
    from .passes import FuseGatedFFN as FuseGatedFFN
    from .passes import FuseMatmulEpilogue as FuseMatmulEpilogue
    from .passes import FusePatterns as FusePatterns
    from .passes import FuseProjections as FuseProjections
    from .passes import FuseRMSNormMatmul as FuseRMSNormMatmul
    from .passes import register_pass as register_pass
    from .passes.driver import FusingPass as FusingPass
    from .passes.options import FuseOptions as FuseOptions
    from .pipeline import relax_fusion_pipeline as relax_fusion_pipeline
    from .quantization import QUANTIZATIONS as QUANTIZATIONS
    from .quantization import Quantization as Quantization
    from .quantization import dequantize as dequantize
    from .quantization import quantize as quantize
    from .report import Report as Report
    from .report.decision import Decision as Decision
    from .transforms.fuse_dequantize import FuseDequantize as FuseDequantize
    from .transforms.modules import module_pass as module_pass
    from .transforms.routing import RouteExperts as RouteExperts
    from .triton_bridge import OUT as OUT
    from .triton_bridge import EmbedTritonKernels as EmbedTritonKernels
    from .triton_bridge import call_tir_extern as call_tir_extern
    from .tuning import Tuning as Tuning
    from .tuning import tune as tune
    from .workload import Adapter as Adapter
    from .workload import Attention as Attention
    from .workload import DynamicDim as DynamicDim
    from .workload import ExpertMatmul as ExpertMatmul
    from .workload import Gate as Gate
    from .workload import GatedFFN as GatedFFN
    from .workload import Norm as Norm
    from .workload import NormMatmul as NormMatmul
    from .workload import PostNorm as PostNorm
    from .workload import Projection as Projection

__version__ = "0.1.0"

_TOLD = next(
    each for each in ast.parse(Path(__file__).read_bytes()).body if isinstance(each, ast.If)
)
"""The statement above that tells type checkers the public names."""

_HOME = {
    name.name: str(line.module)
    for line in _TOLD.body
    if isinstance(line, ast.ImportFrom)
    for name in line.names
}
"""The public names, with the module that has each."""

__all__ = sorted(_HOME)

register_pipeline()


if not TYPE_CHECKING:  # type checkers would take it that every name is there

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, when it is first asked for."""
        if name in _HOME:
            value = getattr(import_module(f".{_HOME[name]}", __name__), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and find_spec(f".{name}", __name__) is not None:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
