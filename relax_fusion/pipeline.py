"""The pipeline ``relax_fusion``: six phases, each a function that returns a list of passes.

Each takes what the pipeline was told, a `PipelineOptions`; its passes are to be run in their order,
with the target in scope.  The phases and their keyword arguments are those of MLC-LLM's pipeline,
so that one can stand in for the other.  A user can take five of the functions and replace one::

    with target:
        for phase in (phase0_annotate, phase1_fuse, my_phase2, phase3_tir, phase4_schedule, ...):
            mod = tvm.transform.Sequential(phase(options))(mod)
"""

from __future__ import annotations

from typing import Any

from tvm import ir, relax, tirx
from tvm.ir.transform import Pass
from tvm.s_tir import dlight as dl
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from .canonical import CANONICAL, MoveViews, WidenFloat8Products
from .dlight_rules import (
    CopyRule,
    CPUSpatialRule,
    FusedRule,
    GenericMatmulRule,
    JoinedRule,
    NormRule,
    NumbersRule,
    ReductionRule,
    RowSumRule,
    ScalarMatmulRule,
    ScheduleKernels,
    SingleThreadRule,
    WindowRule,
)
from .dlight_rules.generic_matmul.kernel import laid_kernel
from .grouping import AnnotateOperators, FuseGroups
from .hardware.target import has_triton, is_cuda, is_gpu, is_webgpu, most_lanes
from .inventory.collect import RecordKernels, RecordWork
from .inventory.memory import RecordMemory, RecordTVMMemory
from .inventory.record_graph import RecordGraph
from .launch.cuda_kernels import CompileCUDAKernels
from .mend.constants import CopyConstants, FoldConstants
from .mend.device_targets import BindDeviceTargets
from .mend.float_constants import FiniteConstants, RoundConstants
from .mend.in_place import SeparateWrites
from .mend.legalize import LEGALIZE_MAP
from .mend.memory_planning import NameInPlaceResults, PlanMemory
from .mend.narrow_floats import RoundNarrowFloats
from .mend.no_alias import AttachNoAlias
from .mend.shifted_indices import DivideShiftedIndices
from .mend.transposed_matmul import FuseTransposeMatmul
from .mend.unaligned_arguments import UnalignedArguments
from .mend.views import RewriteReshapes
from .mend.whole_buffers import ReadWholeBuffers
from .mend.wide_indices import WidenIndices, WidenPositions
from .options import PipelineOptions, make_options
from .passes import FusePatterns
from .phases import Phase, run_phases
from .transforms.add_in_place import AddInPlace
from .transforms.annotate import (
    AttachAdditionalPrimFuncs,
    AttachFunctionAttrs,
    AttachMetadata,
    RefuseLowered,
)
from .transforms.cuda_graph import CaptureCUDAGraphs
from .transforms.fixed_arguments import MarkFixedArguments
from .transforms.fuse_dequantize import FuseDequantize
from .transforms.join_rotations import JoinRotations
from .transforms.kernel_limits import FoldGridDepth, NarrowVectors
from .transforms.lay_out_weights import LayOutWeights
from .transforms.moved_operands import ComposeMovements, ReadMoved
from .transforms.parts import NameParts, ReadParts
from .transforms.report_leftovers import ReportLeftovers
from .transforms.routing import RouteExperts
from .transforms.views import FoldReshapes, ReturnReshapedViews
from .transforms.whole_graph import KeepResults
from .triton_bridge import EmbedTritonKernels, EmitTritonKernels
from .triton_bridge.append import AppendInAttention
from .triton_bridge.sources import CompileAhead, RecordSources


def phase0_annotate(options: PipelineOptions) -> list[Pass]:
    """Attach what later phases need to know: bounds, capture hints, functions, target, devices."""
    passes: list[Pass] = [
        RefuseLowered(),
        AttachFunctionAttrs(options.variable_bounds, options.cuda_graph_symbolic_capture_hints),
        AttachAdditionalPrimFuncs(options.additional_tirs),
        tirx.transform.BindTarget(options.target),
        relax.transform.RealizeVDevice(),
    ]
    if options.report is not None and (found := options.report.material.tvm_memory) is not None:
        passes.append(RecordTVMMemory(found, options.variable_bounds))
    return passes


def phase1_fuse(options: PipelineOptions) -> list[Pass]:
    """Rewrite the operator graph: our patterns first, then libraries for what is left."""
    passes: list[Pass] = [
        WidenIndices(),
        CopyConstants(),
        relax.transform.ConvertToDataflow(min_size=1),
        relax.transform.CanonicalizeBindings(),
    ]
    told = {"SimplifyAlgebra": (options.algebra,)}
    left = {*options.disable, *(("SplitProjections",) if options.cublas_gemm else ())}
    for name, make in CANONICAL.items():
        passes += [] if name in left else [make(*told.get(name, ()))]
    if (report := options.report) is not None:
        passes.append(RecordGraph(report.material.before, options.variable_bounds))
    if "RouteExperts" not in options.disable:
        passes.append(RouteExperts(options.target, options.fuse.decisions))
    passes.append(FusePatterns(options.fuse))
    passes += [CompileAhead(options.target)] if has_triton(options.target) else []
    passes += [WidenFloat8Products(options.target), FuseDequantize(), SeparateWrites()]
    if options.cublas_gemm:
        from tvm.relax.backend.cuda.cublas import partition_for_cublas

        passes.append(ir.transform.module_pass(lambda mod, _: partition_for_cublas(mod), 0))
    if report is not None:
        passes.append(ReportLeftovers(report.leftovers, report.decisions, options.disable))
        passes.append(RecordWork(report))
    if options.cublas_gemm:
        passes.append(relax.transform.RunCodegen())
    return [*passes, MoveViews(), FoldReshapes(), FuseTransposeMatmul(), NameParts()]


def phase2_lower(options: PipelineOptions) -> list[Pass]:
    """Turn the remaining operators into PrimFuncs, and join those that are faster together."""
    return [
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(dict(LEGALIZE_MAP)),
        CopyConstants(),
        AnnotateOperators(),
        FoldConstants(),
        FuseGroups(options.target, options.report.joined if options.report is not None else None),
        relax.transform.FuseTIR(),
        ComposeMovements(options.target),
        BindDeviceTargets(options.target),
    ]


def phase3_tir(options: PipelineOptions) -> list[Pass]:
    """Clean up on the level of PrimFuncs."""
    return [WidenPositions(), JoinRotations(), relax.transform.DeadCodeElimination()]


def phase4_schedule(options: PipelineOptions) -> list[Pass]:
    """Make kernels of all PrimFuncs: ours by their plans, the others by safe rules."""
    appends, triton = [], []
    if has_triton(options.target):
        appends, triton = [AppendInAttention()], [EmitTritonKernels(options.target)]
    exact = [RoundConstants()] if is_gpu(options.target) else []
    web = [FiniteConstants(), FoldGridDepth()] if is_webgpu(options.target) else []
    narrow = [NarrowVectors(n)] if (n := most_lanes(options.target)) is not None else []
    known = [LayOutWeights(options.target, laid_kernel), MarkFixedArguments(options.target)]
    mends = [DivideShiftedIndices(), ReadWholeBuffers()]
    first = [*appends, *known, schedule_kernels(options), *mends]
    joined = options.report.joined if options.report is not None else None
    reads = [ReadParts(), ReadMoved(options.target, joined)]
    rest = [*triton, *reads, *exact, *web, *narrow, RoundNarrowFloats(options.target)]
    if (report := options.report) is None:
        return [*first, *rest]
    sources = RecordSources(options.target, report.material.sources)
    return [*first, sources, *rest, RecordKernels(report.kernels)]


def schedule_kernels(options: PipelineOptions) -> ScheduleKernels:
    """Return the pass that schedules all PrimFuncs but those that Triton's kernels will replace."""
    rules: list[ScheduleRule] = [
        FusedRule(),
        GenericMatmulRule(options.allow_tf32),
        WindowRule(),
        NumbersRule(),
        JoinedRule(),
        NormRule(),
        RowSumRule(),
        CPUSpatialRule(),
        ReductionRule(),
        CopyRule(),
        ScalarMatmulRule(),
        dl.gpu.GEMV(),
        dl.gpu.Reduction(),
        dl.gpu.GeneralReduction(),
        dl.gpu.Fallback(),
        SingleThreadRule(),
    ]
    record = options.report.schedules if options.report is not None else None
    return ScheduleKernels(options.target, rules, record)


def count_launches(options: PipelineOptions) -> list[Pass]:
    """Return the passes that make views of reshapes, and record which kernels are left to run."""
    passes: list[Pass] = [ReturnReshapedViews(), RewriteReshapes()]
    if options.report is not None:
        passes.append(RecordGraph(options.report.material.after, options.variable_bounds))
    return passes


def plan_memory(options: PipelineOptions) -> list[Pass]:
    """Return the passes of phase 5 that turn calls into writes to memory, and plan that."""
    passes: list[Pass] = [
        *count_launches(options),
        AddInPlace(options.target),
        NameInPlaceResults(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
    ]
    if options.allreduce_strategy:
        passes.append(relax.transform.IPCAllReduceRewrite(options.allreduce_strategy))
    passes += [*([KeepResults()] if is_cuda(options.target) else []), PlanMemory()]
    if (report := options.report) is not None:
        passes.append(RecordMemory(report.material.memory, options.variable_bounds))
    return passes


def lower_to_vm(options: PipelineOptions) -> list[Pass]:
    """Return the last passes: instructions of the VM, and what is linked to them."""
    shared = [relax.transform.LowerGPUIPCAllocStorage()] if is_cuda(options.target) else []
    passes: list[Pass] = [
        *shared,
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        AttachNoAlias(),
        relax.transform.AttachGlobalSymbol(),
    ]
    if options.ext_mods:
        passes.append(relax.transform.AttachExternModules(list(options.ext_mods)))
    cubins = [CompileCUDAKernels(options.target, options.nvrtc)] if options.nvrtc else []
    return [*passes, UnalignedArguments(options.target), *cubins, EmbedTritonKernels()]


def phase5_bytecode(options: PipelineOptions) -> list[Pass]:
    """Lower Relax to VM bytecode: memory planning, CUDA graphs, shapes, external modules."""
    graphs = [CaptureCUDAGraphs(options.use_cuda_graph)] if is_cuda(options.target) else []
    metadata = AttachMetadata(dict(options.metadata))
    return [*plan_memory(options), metadata, *graphs, *lower_to_vm(options)]


PHASES: tuple[Phase, ...] = (
    ("debug-phase0.py", phase0_annotate, "annotating"),
    ("debug-phase1.py", phase1_fuse, "fusing operators"),
    ("debug-phase2.py", phase2_lower, "lowering to TIR"),
    ("debug-phase3.py", phase3_tir, "cleaning up TIR"),
    ("debug-phase4.py", phase4_schedule, "scheduling kernels"),
    ("debug-final.py", phase5_bytecode, "lowering to VM bytecode"),
)
"""The phases in order: the file that a dump writes after each, the function, what it is doing."""


def relax_fusion_pipeline(target: Target | str | None = None, **kwargs: Any) -> Pass:
    """Make the pipeline; what ``relax.get_pipeline("relax_fusion", target=..., ...)`` calls.

    Parameters
    ----------
    target : Target or str, optional
        A target, or a name that `relax_fusion.make_target` knows; the target in scope by default.
    **kwargs
        The other fields of `PipelineOptions`; None stands for a field's default.

    Returns
    -------
    tvm.transform.Pass
        Takes a Relax module, gives one that `tvm.compile` builds.

    Raises
    ------
    PipelineError
        If an argument is unknown or has a value that it cannot take.
    TargetError
        If no device is known for the target.
    """
    return run_phases(make_options(target, kwargs), PHASES)
