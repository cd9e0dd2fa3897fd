"""PrimFuncs with candidates, built for LLVM, and run with the driver of fake_cuda.c."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tvm
from tvm import ir, relax, tirx

from relax_fusion.launch.arguments import OUT
from relax_fusion.launch.branches import Branch, Candidates, Launch
from relax_fusion.launch.launcher import BEGIN, NEXT
from relax_fusion.launch.prim_func import ExternFunc
from relax_fusion.triton_bridge import EmbedTritonKernels
from relax_fusion.triton_bridge.compile import compile_kernels

from .common import add_source, params
from .fake_driver import build_driver
from .test_library import run

N = tirx.Var("n", "int64")
TY = relax.TensorType([N], "float32")


def twice() -> ir.IRModule:
    """Return two calls of a function of two ranges, for each of which there are candidates.

    Launches are told apart by their blocks: of up to 100 elements n, or n + 1 and n + 2, or n + 3
    (below 10: n + 4); of others 2 n or 2 n + 1.
    """
    (kernel,) = compile_kernels([add_source()])
    x = params(TY, TY)

    def branch(*blocks: ir.Expr, when: object = True) -> Branch:
        args = [*x, OUT, N.astype("int32")]
        return Branch(when, [Launch(kernel, [n], args) for n in blocks])

    small = [[branch(N)], [branch(N + 1, N + 2)], [branch(N + 4, when=N < 10), branch(N + 3)]]
    cases = [Candidates(N <= 100, small), Candidates(True, [[branch(2 * N)], [branch(2 * N + 1)]])]
    extern = ExternFunc.of([TY], cases)
    builder = relax.BlockBuilder()
    with builder.function("main", x):
        with builder.dataflow():
            y = x[0]
            for name in ("first", "second"):
                gvar = builder.add_func(extern.func.with_attr("global_symbol", name), name)
                y = builder.emit(extern.call(builder, gvar, {x[0]: y}))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.get()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "candidates.so"
    tvm.compile(EmbedTritonKernels()(twice()), "llvm").export_library(str(path))
    return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


def test_every_range_of_every_function_is_measured_once(
    library: Path, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_TIMES", "40:3,41:1,42:1,43:4,400:2,401:1,9:5,10:3,11:1,13:1")
    answer = run(library, tmp_path, 40, 200, 9, 40, 200, driver=driver)
    assert answer["errors"] == []
    found = [x["grid"][0] for x in answer["log"] if x["call"] == "cuLaunchKernelEx"]
    small = [40, 41, 42, 43] * 6 + [41, 42]
    large = [400, 401] * 6 + [401]
    again = [10, 11, 10, 11, 41, 42, 41, 42, 401, 401]
    assert found == [*small, *small, *large, *large, *again]


def test_a_condition_inside_a_candidate_holds(
    library: Path, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_TIMES", "13:0.1")
    answer = run(library, tmp_path, 9, 40, driver=driver)
    found = [x["grid"][0] for x in answer["log"] if x["call"] == "cuLaunchKernelEx"]
    assert found == [*[9, 10, 11, 13] * 6, 13] * 2 + [43, 43]


def test_errors_of_a_candidate_end_nothing(
    library: Path, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL_BLOCKS", "41")
    answer = run(library, tmp_path, 40, 40, driver=driver)
    assert answer["errors"] == []
    found = [x["grid"][0] for x in answer["log"] if x["call"] == "cuLaunchKernelEx"]
    assert found == [40, 41, 42, 43, *[40, 43] * 5, 40] * 2 + [40, 40]


def test_no_name_is_called_twice() -> None:
    embedded = EmbedTritonKernels()(twice())
    called = re.findall(r'call_cpacked\("(\w+)"', embedded.script(show_meta=False))
    assert len(called) == len(set(called)) == 2 * (7 + 2 * 2)
    for name in (BEGIN, NEXT):
        assert [n for n in called if n.startswith(name)] == [
            name, *(f"{name}_{i}" for i in range(1, 4))
        ]  # fmt: skip
    assert [n.replace(NEXT, BEGIN) for n in called if n.startswith((BEGIN, NEXT))] == [
        name for i in range(4) for name in [f"{BEGIN}_{i}" if i else BEGIN] * 2
    ], "the two functions of a range have the same number"
    assert EmbedTritonKernels()(embedded).same_as(embedded)
