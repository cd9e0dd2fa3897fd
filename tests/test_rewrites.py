"""What each pass makes of a small module: `tests/data/passes` has it before and after.

``RELAX_FUSION_REWRITE=1 python -m pytest tests/test_rewrites.py`` writes anew what comes after.
Names and attributes of fused functions, which tell plans and workloads, are left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.target import Target

import relax_fusion
from relax_fusion import PATTERNS, FuseDequantize, FuseOptions, FusePatterns, make_target
from relax_fusion.algebra import AlgebraOptions, SimplifyAlgebra
from relax_fusion.canonical import (
    ChooseExperts,
    FuseNormRotation,
    MendImports,
    MergeDuplicates,
    MoveNorms,
    MoveReshapes,
    MoveSlices,
    MoveTransposes,
    MoveViews,
    MultiplyBytes,
    MultiplyConvolutions,
    PadRotations,
    RecogniseOperators,
    SplitProjections,
    WidenFloat8Products,
)
from relax_fusion.grouping import AnnotateOperators, FuseGroups
from relax_fusion.mend.constants import CopyConstants, FoldConstants
from relax_fusion.mend.device_targets import BindDeviceTargets
from relax_fusion.mend.float_constants import FiniteConstants, RoundConstants
from relax_fusion.mend.in_place import SeparateWrites
from relax_fusion.mend.memory_planning import NameInPlaceResults, PlanMemory
from relax_fusion.mend.narrow_floats import RoundNarrowFloats
from relax_fusion.mend.no_alias import AttachNoAlias
from relax_fusion.mend.shifted_indices import DivideShiftedIndices
from relax_fusion.mend.transposed_matmul import FuseTransposeMatmul
from relax_fusion.mend.unaligned_arguments import UnalignedArguments
from relax_fusion.mend.views import RewriteReshapes
from relax_fusion.mend.whole_buffers import ReadWholeBuffers
from relax_fusion.mend.wide_indices import WidenIndices, WidenPositions
from relax_fusion.options import make_options
from relax_fusion.pipeline import schedule_kernels
from relax_fusion.transforms.annotate import AttachFunctionAttrs
from relax_fusion.transforms.cuda_graph import CaptureCUDAGraphs
from relax_fusion.transforms.join_rotations import JoinRotations
from relax_fusion.transforms.kernel_limits import FoldGridDepth, NarrowVectors
from relax_fusion.transforms.moved_operands import ComposeMovements
from relax_fusion.transforms.parts import NameParts, ReadParts
from relax_fusion.transforms.routing import RouteExperts
from relax_fusion.transforms.views import FoldReshapes, ReturnReshapedViews
from relax_fusion.transforms.whole_graph import KeepResults
from relax_fusion.triton_bridge import EmitTritonKernels

from .triton_bridge.common import not_compiled

PACKAGE = Path(relax_fusion.__file__).parent
MODULES = Path(__file__).parent / "data" / "passes"
CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})
H200 = make_target("h200")
FUSE = FuseOptions(CPU, always_fuse=True, validate="strict")
PASSES: dict[str, tvm.transform.Pass] = {
    **{name: make(FUSE) for name, make in PATTERNS.items()},
    "FuseAdapters": PATTERNS["FuseAdapters"](replace(FUSE, target=H200, backend="triton")),
    "FuseChains": PATTERNS["FuseChains"](replace(FUSE, target=H200, backend="triton")),
    "FusePatterns": FusePatterns(FUSE),
    "AttachFunctionAttrs": AttachFunctionAttrs({"n": 8}, {"decode": ["n"], "batch_verify": ["n"]}),
    "AnnotateOperators": AnnotateOperators(),
    "AttachNoAlias": AttachNoAlias(),
    "BindDeviceTargets": BindDeviceTargets(H200),
    "CaptureCUDAGraphs": CaptureCUDAGraphs(True),
    "ChooseExperts": ChooseExperts(),
    "ComposeMovements": ComposeMovements(CPU),
    "CopyConstants": CopyConstants(),
    "DivideShiftedIndices": DivideShiftedIndices(),
    "EmitTritonKernels": EmitTritonKernels(H200),
    "FiniteConstants": FiniteConstants(),
    "RouteExperts": RouteExperts(CPU),
    "FoldConstants": FoldConstants(),
    "FoldGridDepth": FoldGridDepth(),
    "FoldReshapes": FoldReshapes(),
    "FuseDequantize": FuseDequantize(),
    "FuseGroups": FuseGroups(CPU),
    "FuseTransposeMatmul": FuseTransposeMatmul(),
    "JoinRotations": JoinRotations(),
    "KeepResults": KeepResults(),
    "FuseNormRotation": FuseNormRotation(),
    "MendImports": MendImports(),
    "MergeDuplicates": MergeDuplicates(),
    "MoveNorms": MoveNorms(),
    "MoveViews": MoveViews(),
    "MoveReshapes": MoveReshapes(),
    "MoveSlices": MoveSlices(),
    "MoveTransposes": MoveTransposes(),
    "MultiplyBytes": MultiplyBytes(),
    "MultiplyConvolutions": MultiplyConvolutions(),
    "NameParts": NameParts(),
    "NameInPlaceResults": NameInPlaceResults(),
    "NarrowVectors": NarrowVectors(4),
    "PadRotations": PadRotations(),
    "PlanMemory": PlanMemory(),
    "RecogniseOperators": RecogniseOperators(),
    "ReturnReshapedViews": ReturnReshapedViews(),
    "RewriteReshapes": RewriteReshapes(),
    "RoundConstants": RoundConstants(),
    "RoundNarrowFloats": RoundNarrowFloats(CPU),
    "SimplifyAlgebra": SimplifyAlgebra(AlgebraOptions(H200, validate="strict")),
    "ScheduleKernels": schedule_kernels(make_options(CPU, {})),
    "ReadParts": ReadParts(),
    "ReadWholeBuffers": ReadWholeBuffers(),
    "SplitProjections": SplitProjections(),
    "SeparateWrites": SeparateWrites(),
    "UnalignedArguments": UnalignedArguments(CPU),
    "WidenFloat8Products": WidenFloat8Products(H200),
    "WidenIndices": WidenIndices(),
    "WidenPositions": WidenPositions(),
}
OTHERS = ("relax_fusion", "RefuseLowered", "AttachAdditionalPrimFuncs", "AttachMetadata")
OTHERS += ("EmbedTritonKernels", "ReportLeftovers", "CompileCUDAKernels")
OTHERS += ("LiftWorkspaces", "MarkFixedArguments", "ReadSingleElements", "RunThreadsInTurn")
OTHERS += ("CompileAhead", "RecordGraph", "RecordWork", "RecordKernels", "RecordSources")
OTHERS += ("RecordMemory", "RecordTVMMemory", "LayOutWeights", "AddInPlace", "ReadMoved")
OTHERS += ("AppendInAttention", "TakePositionsOfBatch", "NumberFirstExperts", "ReadExperts")
"""The pipeline; passes that only look, or refuse, or attach what TVMScript does not show; and those
of fused functions, CUDA sources, launches and MLC-LLM, whose rewrites have tests of their own."""

MARK = "# expected\n"


def without_noise(text: str) -> str:
    """Return a module's text without what the parser finds out, or does not take."""
    noise = re.compile(r" *(T\.(reads|writes)\(.+\)|# (with|from|Metadata).*)")
    lines = [line for line in text.splitlines() if not noise.fullmatch(line)]
    return re.sub(r"(alloc_tensor\(.*), ty_args=.*", r"\1)", "\n".join(lines)).strip()


def shown(mod: ir.IRModule) -> str:
    """Return a module's text, with short names of fused functions and kernels."""
    text = without_noise(mod.script(show_meta=False, name="Expected"))
    text = re.sub(r" *T\.func_attr\(.*relax_fusion\..*\n", "", text)
    return re.sub(r"(?<=[a-z])_[0-9a-f]{8}_\w+|(?<=[a-z])_[0-9a-f]{10,}", "", text)


@pytest.mark.parametrize("path", sorted(MODULES.iterdir()), ids=lambda path: path.stem)
def test_rewrite(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_fusion.triton_bridge.emit.try_kernels", not_compiled)
    name = path.name.partition(".")[0]
    before, mark, expected = path.read_text().partition(MARK)
    mod = tvm.script.from_source(before)
    with H200 if name == "CaptureCUDAGraphs" else CPU:
        after = PASSES[name](mod)
    relax.analysis.well_formed(after)  # raises
    found = shown(after)
    if os.environ.get("RELAX_FUSION_REWRITE"):
        expected = found + "\n"
        path.write_text(before + mark + expected)
    tvm.ir.assert_structural_equal(*map(tvm.script.from_source, (found, expected)))
    for gvar, func in mod.functions_items():
        new = after.functions.get(gvar)
        if isinstance(func, tirx.PrimFunc) and tvm_ffi.structural_equal(new, func):
            assert new.same_as(func), f"{gvar.name_hint} is made anew"


def test_every_pass_has_a_rewrite() -> None:
    found = re.compile(r'@module_pass\nclass (\w+)|module_pass\(opt_level=0, name="(\w+)"')
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    names = {one or other for text in texts for one, other in found.findall(text)}
    assert names | {*PATTERNS} == {*PASSES, *OTHERS}
    assert {path.name.partition(".")[0] for path in MODULES.iterdir()} == {*PASSES}
