"""MLC-LLM's passes among our phases, and what both make of its arguments."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

from relax_fusion import PipelineError, Report, make_target
from relax_fusion.mlc import AbsentLibraryWarning, install
from relax_fusion.mlc.package import PASSES

from ..support.chains import Chain, module
from ..support.quick import machine, quick_host

H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
BLOCK = Chain("decode", "x[n,32] g[32] W[32,48]", H + "y = R.matmul(h, W)", "y", {"n": 5})
BOUNDS = {"n": 64, "rolling_cache_len": -1, "batch_size": 4}


@T.prim_func(s_tir=True)
def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("twice"):
            vi = T.axis.spatial(4, i)
            b[vi] = a[vi] * T.float32(2)


def compiled(target: str = "llvm", **arguments: Any) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Compile with the stub of MLC-LLM as far as its pipeline goes."""
    mlc = importlib.import_module("mlc_llm.interface.compile")
    flags = importlib.import_module("mlc_llm.interface.compiler_flags").OptimizationFlags
    opt = flags(**arguments.pop("opt", {}))
    given = {"variable_bounds": BOUNDS, "ext_mods": [], "debug_dump": None, **arguments}
    return mlc.compile(module([BLOCK]), make_target(target), opt, **given)


def test_passes_run_in_their_order_and_the_result_runs(stub: Path) -> None:
    report = Report()
    install(report=report)
    mod, metadata = compiled(additional_tirs={"twice": twice})
    ran = importlib.import_module("mlc_llm.compiler_pass.passes").RAN
    only_cuda = {"FuseFTDequantizeEpilogue", "AttachCUDAGraphAllocInitFunc"}
    assert ran == [name for name in PASSES if name not in only_cuda]
    assert [d.pattern for d in report.fused] == ["FuseRMSNormMatmul"]
    assert report.fused[0].workload.rows.upper == 64
    assert metadata["kv_cache"] == {"head_dim": 64, "flashinfer": False}
    assert {"decode", "sample"} <= set(metadata["memory_usage"])
    built = tvm.compile(mod, quick_host(), relax_pipeline=None)
    vm = machine(built)
    assert json.loads(vm["_metadata"]()) == metadata
    assert vm["decode"](*map(tvm.runtime.tensor, BLOCK.arrays())).shape == (5, 48)
    assert built.mod.get_function("twice", query_imports=True) is not None


def test_bounds(stub: Path, tmp_path: Path) -> None:
    install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no word of bounds for variables that no function has
        mod, _ = compiled(debug_dump=tmp_path)
    attrs = mod["decode"].attrs
    assert dict(attrs["tir_var_upper_bound"]) == {"n": 64, "batch_size": 4}
    assert list(attrs["tir_non_negative_var"]) == ["vocab_size"]
    assert dict(mod["sample"].attrs["tir_var_upper_bound"]) == {"num_samples": 7}
    dumps = [*(f"debug-phase{i}.py" for i in range(6)), "debug-final.py"]
    written = sorted([*dumps, "passes.json", "report.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == written


OPTIONS = ("flashinfer", "cublas_gemm", "faster_transformer", "cutlass")


def test_absent_libraries_are_named_once_and_done_without(stub: Path) -> None:
    install(backend="tir")
    with pytest.warns(AbsentLibraryWarning) as said:
        _, metadata = compiled("h200", opt=dict.fromkeys(OPTIONS, True) | {"cudagraph": True})
    texts = [str(warning.message) for warning in said]
    assert [text.partition("=")[0] for text in texts] == list(OPTIONS)
    assert texts[0] == "flashinfer=True needs the package flashinfer; compiling without"
    assert metadata["kv_cache"]["flashinfer"] is False


def test_the_pipeline_itself_warns_too(stub: Path) -> None:
    install()
    with pytest.warns(AbsentLibraryWarning, match="cublas_gemm=True needs a TVM"):
        tvm.relax.get_pipeline("mlc_llm", target=make_target("h200"), cublas_gemm=True)


@pytest.mark.parametrize(("target", "shards"), [("h200", 2), ("h200", 1), ("llvm", 2)])
def test_what_several_workers_need_is_told(stub: Path, target: str, shards: int) -> None:
    install()
    metadata = {"tensor_parallel_shards": shards}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tvm.relax.get_pipeline("mlc_llm", target=make_target(target), metadata=metadata)
    texts = [str(w.message) for w in said if w.category is AbsentLibraryWarning]
    assert len(texts) == (target == "h200" and shards == 2)
    assert all("_shards is 2; to run it" in t and "nccl_library() builds" in t for t in texts)


def test_cuda_graphs_get_a_function_that_allocates_them(stub: Path) -> None:
    install(backend="tir")
    compiled("h200", opt={"cudagraph": True})
    ran = importlib.import_module("mlc_llm.compiler_pass.passes").RAN
    assert ran[-2:] == ["AttachMetadataWithMemoryUsage", "AttachCUDAGraphAllocInitFunc"]


def test_an_argument_that_nobody_knows(stub: Path) -> None:
    install()
    with pytest.raises(PipelineError, match="no argument 'page_size'"):
        compiled(page_size=16)
