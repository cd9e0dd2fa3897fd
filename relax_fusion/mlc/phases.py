"""The pipeline that stands in for MLC-LLM's: its passes for its engine, our phases for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from tvm import relax, tirx
from tvm.ir.transform import Pass
from tvm.relax.pipeline import PIPELINE_MAP
from tvm.target import Target

from ..errors import PipelineError
from ..hardware.target import is_cuda, is_gpu
from ..mend.single_elements import ReadSingleElements
from ..options import PipelineOptions, make_options
from ..phases import Phase, run_phases
from ..pipeline import (
    lower_to_vm,
    phase1_fuse,
    phase2_lower,
    phase3_tir,
    phase4_schedule,
    plan_memory,
)
from ..transforms.annotate import RefuseLowered
from ..transforms.cuda_graph import CaptureCUDAGraphs
from .experts import ReadExperts
from .package import LIBRARIES, NAME, available, check_shards, load, options
from .repairs import LiftWorkspaces, NumberFirstExperts, RunThreadsInTurn, TakePositionsOfBatch


@dataclass(frozen=True)
class Given:
    """What MLC-LLM's passes get, besides the target."""

    passes: ModuleType
    """Where they are."""
    metadata: dict[str, Any]
    """MLC-LLM's own, which some of them change: it reads memory usage and KV cache from there."""
    variable_bounds: Mapping[str, int]
    """With those that are no bounds, such as -1."""
    additional_tirs: Mapping[str, tirx.PrimFunc]
    """Functions for the loader of weights."""
    flashinfer: bool
    faster_transformer: bool
    """Whether to call these libraries, which are there."""


def make_pipeline(
    passes: ModuleType, chosen: Mapping[str, Any], target: Target, **arguments: Any
) -> Pass:
    """Return the pipeline for what MLC-LLM's compiler asks of its own.

    `passes`: ``mlc_llm.compiler_pass.pipeline``.
    `chosen`: arguments of our pipeline that MLC-LLM's lacks.
    `**arguments`: those of MLC-LLM's pipeline.
    Raises `PipelineError` if an argument is unknown or has a value that it cannot take.
    """
    wanted = {name: bool(arguments.pop(name, False)) for name in LIBRARIES if name != "cutlass"}
    library = {name: available(name, value) for name, value in wanted.items()}
    metadata = arguments.pop("metadata", None)
    if is_cuda(target) and metadata:
        check_shards(metadata.get("tensor_parallel_shards", 1))
    bounds = arguments.pop("variable_bounds", None) or {}
    given = Given(
        passes,
        {} if metadata is None else metadata,
        bounds,
        arguments.pop("additional_tirs", None) or {},
        library["flashinfer"],
        library["faster_transformer"],
    )
    options = make_options(
        target,
        {
            "progress": logging.getLogger("mlc_llm.compiler_pass.pipeline").info,
            **chosen,
            **arguments,
            "cublas_gemm": library["cublas_gemm"],
            "variable_bounds": {name: bound for name, bound in bounds.items() if bound > 0},
        },
    )
    return run_phases(options, phases_of(given))


def phases_of(given: Given) -> tuple[Phase, ...]:
    """Return the phases, with the names of MLC-LLM's dumps."""

    def phase1(options: PipelineOptions) -> list[Pass]:
        return [*_kernels_of_models(given, options.target), *phase1_fuse(options)]

    return (
        ("debug-phase0.py", partial(phase0_annotate, given), "Attaching functions"),
        ("debug-phase1.py", phase1, "Fusing operators"),
        ("debug-phase2.py", phase2_lower, "Lowering to TIR"),
        ("debug-phase3.py", phase3_tir, "Cleaning up TIR"),
        ("debug-phase4.py", phase4_schedule, "Scheduling kernels"),
        ("debug-phase5.py", partial(phase5_memory, given), "Planning memory"),
        ("debug-final.py", partial(phase6_bytecode, given), "Lowering to VM bytecode"),
    )


def phase0_annotate(given: Given, options: PipelineOptions) -> list[Pass]:
    """Attach what MLC-LLM's engine calls and later phases need to know, by MLC-LLM's passes.

    The bounds are attached here and nowhere else: the functions that sample bring their own.
    """
    mlc, target, metadata = given.passes, options.target, given.metadata
    return [
        RefuseLowered(),
        TakePositionsOfBatch(),
        ReadExperts(options),
        NumberFirstExperts(),
        mlc.DispatchKVCacheCreation(target, given.flashinfer, metadata),
        *([] if is_gpu(target) else [ReadSingleElements(), RunThreadsInTurn()]),
        mlc.AttachSoftmaxWithTemperature(target, metadata),
        mlc.AttachVariableBounds(given.variable_bounds),
        mlc.AttachCUDAGraphSymbolicCaptureHints(dict(options.cuda_graph_symbolic_capture_hints)),
        mlc.AttachPipelineParallelStages(metadata.get("pipeline_parallel_stages", 1)),
        mlc.AttachLogitProcessFunc(target),
        mlc.AttachAdditionalPrimFuncs(given.additional_tirs),
        mlc.AttachAllocEmbeddingTensorFunc(metadata),
        mlc.AttachGPUSamplingFunc(target, given.variable_bounds),
        mlc.AttachSpecDecodeAuxFuncs(metadata.get("tensor_parallel_shards", 1)),
        mlc.AttachMemoryPlanAttr(),
        mlc.AttachSequenceLengthPaddingFactor(target, metadata),
        tirx.transform.BindTarget(target),
        relax.transform.RealizeVDevice(),
    ]


def _kernels_of_models(given: Given, target: Target) -> list[Pass]:
    """Return the passes for kernels that a model itself asks for: Triton's, FasterTransformer's."""
    transformer = [given.passes.FuseFTDequantizeEpilogue()] if given.faster_transformer else []
    return [given.passes.DispatchTritonKernel(target), *transformer]


def phase5_memory(given: Given, options: PipelineOptions) -> list[Pass]:
    """Split functions into stages of a pipeline, plan memory, attach and complete the metadata."""
    mlc = given.passes
    return [
        *([LiftWorkspaces()] if is_gpu(options.target) else []),
        mlc.ScatterTupleGetItem(),
        mlc.PipelineParallelRewrite(),
        *plan_memory(options),
        mlc.AttachMetadataWithMemoryUsage(given.metadata),
    ]


def phase6_bytecode(given: Given, options: PipelineOptions) -> list[Pass]:
    """Lower to instructions of the VM; what CUDA graphs keep gets a function that allocates it."""
    graphs: list[Pass] = []
    if is_cuda(options.target):
        graphs = [
            CaptureCUDAGraphs(options.use_cuda_graph),
            given.passes.AttachCUDAGraphAllocInitFunc(),
        ]
    return [*graphs, *lower_to_vm(options)]


ANY = "h200"
"""A target that takes every choice, to check their values before one is known."""

CHOICES = (
    *("backend", "plans", "disable", "always_fuse", "allow_tf32", "exact", "validate"),
    *("report", "progress", "allow_int8_rows"),
)
"""Arguments of our pipeline that MLC-LLM's lacks."""

_before: dict[str, Any] = {}
"""The objects that `install` replaced: the pipeline, and the method that settles options."""


def install(**choices: Any) -> None:
    """Let MLC-LLM compile with our phases.

    Its own passes still attach what its engine calls, and its metadata.  Again is harmless: the
    last choices hold.  Call it before MLC-LLM is imported, which TVM 0.27 needs, or after.

    Parameters
    ----------
    **choices
        Fields of `relax_fusion.PipelineOptions` that MLC-LLM does not set: ``backend``, ``plans``,
        ``disable``, ``always_fuse``, ``allow_tf32``, ``exact``, ``validate``, ``report``,
        ``progress``, ``allow_int8_rows``.

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
