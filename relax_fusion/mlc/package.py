"""The user's ``mlc_llm``: found, imported, recognised as one that our phases fit; its libraries."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm.relax.pipeline import PIPELINE_MAP

from ..errors import MissingPackageError, RelaxFusionError, VersionError, warn
from . import aliases

TVM = "0.27"
"""The release of TVM whose differences `aliases` knows."""

PASSES = (
    *("DispatchKVCacheCreation", "AttachSoftmaxWithTemperature", "AttachVariableBounds"),
    *("AttachCUDAGraphSymbolicCaptureHints", "AttachPipelineParallelStages"),
    *("AttachLogitProcessFunc", "AttachAdditionalPrimFuncs", "AttachAllocEmbeddingTensorFunc"),
    *("AttachGPUSamplingFunc", "AttachSpecDecodeAuxFuncs", "AttachMemoryPlanAttr"),
    *("AttachSequenceLengthPaddingFactor", "DispatchTritonKernel", "FuseFTDequantizeEpilogue"),
    *("ScatterTupleGetItem", "PipelineParallelRewrite", "AttachMetadataWithMemoryUsage"),
    "AttachCUDAGraphAllocInitFunc",
)
"""The passes of MLC-LLM that run among ours."""

REPLACED = (
    *("FuseDequantizeTranspose", "BLASDispatch", "FuseAddRMSNorm", "FuseTransposeMatmul"),
    *("FuseDequantizeMatmulEwise", "FuseDequantizeTake", "CleanUpTIRAttrs"),
    *("LowBatchGemvSpecialize", "LiftTIRGlobalBufferAlloc"),
)
"""The passes of MLC-LLM in whose place ours run."""

NAME = "mlc_llm"
"""The name under which MLC-LLM asks for its pipeline."""

FLAGS = "mlc_llm.interface.compiler_flags"
"""MLC-LLM's module of its options of optimisation."""

KNOWN = "known to work is its commit 79d603f (2026-07-23)"
GET_IT = "git clone https://github.com/mlc-ai/mlc-llm; export PYTHONPATH=$PWD/mlc-llm/python"


def load() -> ModuleType:
    """Import MLC-LLM's compiler and return the module of its pipeline.

    Without its native library only the compiler is imported: ``mlc_llm`` itself would want it.
    Where that fails, TVM has no more names than before.

    Raises
    ------
    MissingPackageError
        If it cannot be imported.
    VersionError
        If TVM or MLC-LLM is of a version that is not known.
    """
    if not tvm.__version__.startswith(f"{TVM}."):
        raise VersionError(f"TVM is {tvm.__version__}; relax_fusion.mlc knows {TVM}")
    added, package = aliases.restore(), sys.modules.get("mlc_llm")
    try:
        pipeline = _imported()
        _recognise(pipeline)
    except RelaxFusionError:
        aliases.remove(added)
        if package is None:
            sys.modules.pop("mlc_llm", None)
        raise
    return pipeline


def _imported() -> ModuleType:
    try:
        if "mlc_llm" not in sys.modules:
            _without_native_library()
        for name in ("mlc_llm.interface.compile", FLAGS):
            importlib.import_module(name)
        pipeline = importlib.import_module("mlc_llm.compiler_pass.pipeline")
    except ImportError as err:
        raise MissingPackageError(f"mlc_llm cannot be imported ({err}); {GET_IT}") from err
    except Exception as err:  # whatever a module of somebody else does while it is imported
        what = f"{type(err).__name__}: {err}"
        raise VersionError(f"mlc_llm does not fit TVM {tvm.__version__} ({what}); {KNOWN}") from err
    aliases.do_not_check("mlc_llm")
    return pipeline


def has_native_library() -> bool:
    """Tell whether MLC-LLM, which is imported, is whole, and not its compiler alone."""
    return hasattr(sys.modules["mlc_llm"], "__file__")


def _without_native_library() -> None:
    """Put a bare package in the place of one whose import would end at the missing library."""
    spec = importlib.util.find_spec("mlc_llm")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders or _library(Path(folders[0])):
        return
    package = ModuleType("mlc_llm")
    package.__path__ = folders
    package.__spec__ = spec
    sys.modules["mlc_llm"] = package


def _library(folder: Path) -> bool:
    """Tell whether MLC-LLM finds its native library; the file that looks for it imports nothing."""
    spec = importlib.util.spec_from_file_location("_mlc_llm_libinfo", folder / "libinfo.py")
    if spec is None or spec.loader is None or not (folder / "libinfo.py").is_file():
        return True
    libinfo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(libinfo)
    return bool(libinfo.find_lib_path("mlc_llm_module", optional=True))


def _recognise(pipeline: ModuleType) -> None:
    """Refuse a pipeline that lacks a pass that we run, or has one that nobody knows."""
    own = f"{pipeline.__name__.rpartition('.')[0]}."
    there = {
        name
        for name, thing in vars(pipeline).items()
        if isinstance(thing, type)
        and thing.__module__.startswith(own)
        and thing.__module__ != pipeline.__name__
    }
    for name in PASSES:
        if not hasattr(pipeline, name):
            raise VersionError(f"mlc_llm lacks the pass {name}; {KNOWN}")
    for name in sorted(there.difference(PASSES, REPLACED)):
        raise VersionError(f"mlc_llm has the pass {name}, which is not known; {KNOWN}")
    if NAME not in PIPELINE_MAP:
        raise VersionError(f"mlc_llm registers no pipeline {NAME!r}; {KNOWN}")
    if not hasattr(options(), "update"):
        raise VersionError(f"mlc_llm lacks {FLAGS}.OptimizationFlags.update; {KNOWN}")


def options() -> Any:
    """Return the class of MLC-LLM's options of optimisation, None where it lacks that."""
    return getattr(sys.modules.get(FLAGS), "OptimizationFlags", None)


class AbsentLibraryWarning(UserWarning):
    """An option asks for a library that is not there; compilation goes on without."""


def _in_tvm(function: str) -> Callable[[], bool]:
    return lambda: tvm.get_global_func(function, True) is not None


LIBRARIES: dict[str, tuple[str, Callable[[], bool]]] = {
    "flashinfer": (
        "the package flashinfer",
        lambda: importlib.util.find_spec("flashinfer") is not None,
    ),
    "cublas_gemm": ("a TVM that was built with cuBLAS", _in_tvm("relax.ext.cublas")),
    "faster_transformer": (
        "a TVM that was built with FasterTransformer",
        _in_tvm("fastertransformer.gemm_fp16_int"),
    ),
    "cutlass": ("a TVM that was built with CUTLASS", _in_tvm("cutlass.group_gemm")),
}
"""What an option of MLC-LLM needs, by its name, and whether that is there."""


def available(option: str, wanted: bool) -> bool:
    """Return what an option can be; warn where it was wanted and its library is absent."""
    needs, is_there = LIBRARIES[option]
    if wanted and not is_there():
        warn(f"{option}=True needs {needs}; compiling without", AbsentLibraryWarning)
        return False
    return wanted


def check_shards(count: int) -> None:
    """Warn of a model for several workers where what these need is absent."""
    if count > 1 and not _in_tvm("runtime.disco.nccl.init_ccl")():
        warn(
            f"tensor_parallel_shards is {count}; to run it, Disco needs a library for NCCL that no "
            "wheel of TVM has: relax_fusion.parallel.nccl_library() builds it, and Workers of "
            "relax_fusion.parallel load it (pip install 'relax-fusion[nccl]')",
            AbsentLibraryWarning,
        )
