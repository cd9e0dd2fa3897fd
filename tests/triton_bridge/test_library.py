"""A whole library, built for LLVM, loaded where there is neither Triton nor this package.

The CUDA driver is fake_cuda.c, so the kernels get pointers to memory of the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
import tvm
from tvm import ir, relax, tirx

from relax_fusion.launch.arguments import Part
from relax_fusion.transforms.modules import KERNELS_ATTR
from relax_fusion.triton_bridge import (
    OUT,
    EmbedTritonKernels,
    InOut,
    TensorMap,
    Variant,
    Workspace,
    call_tir_extern,
)

from .common import H200, add, copy_by_descriptor, copy_tile, double_first, params
from .fake_driver import build_driver

N = tirx.Var("n", "int64")
TY = relax.TensorType([N], "float32")

RUN = """
import json, os, sys, threading
for name in ("triton", "relax_fusion", "torch"):
    sys.modules[name] = None  # importing it raises
import numpy as np, tvm
from tvm import relax
library, log, dtype, columns, *steps = sys.argv[1:]
os.environ["FAKE_CUDA_PARAMS"] = "8,8,8,8,8,8" if columns == "0" else "8,8,8"
os.environ.update(FAKE_CUDA_LOG=log, FAKE_CUDA_NO_CONTEXT="1")
vm = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
result = {"errors": []}
def run(n):
    shape = (n, int(columns)) if columns != "0" else (n,)
    x, y = (tvm.runtime.tensor(np.zeros(shape, dtype)) for _ in "xy")
    try:
        z = vm["main"](x, y) if columns == "0" else vm["main"](x)[0]
        assert z.shape == shape
    except Exception as err:
        result["errors"].append(f"{type(err).__name__}: {err}")
for step in steps:
    run(int(step))
result["log"] = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
print(json.dumps(result))
"""


def two_adds() -> ir.IRModule:
    """Return ``add(add(x, y), y)``: in blocks of 64 (up to 100 elements) or 256, then of 128."""
    x = params(TY, TY)
    builder = relax.BlockBuilder()
    with builder.function("main", x):
        with builder.dataflow():
            y = x[0]
            for block, variants in ((256, [Variant(N <= 100, {"BLOCK": 64})]), (128, [])):
                call = call_tir_extern(
                    add, lambda c: ((N + c["BLOCK"] - 1) // c["BLOCK"],), [y, x[1], OUT, N], TY,
                    constexprs={"BLOCK": block}, variants=variants, target=H200,
                )  # fmt: skip
                y = builder.emit(call)
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.get()


TILE = relax.TensorType([N, 64], "float16")
COPY = {"ROWS": 32, "COLUMNS": 64}


def mixed() -> ir.IRModule:
    """Return a module with a tensor map, scratch memory, a workspace and a tensor in place."""
    (x,) = params(TILE)
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            space = Workspace((N, 64), "float16")
            args = [TensorMap(x, (32, 64)), space]
            made = []
            for kernel, given in (
                (copy_tile, [TensorMap(Part(x, 128), (32, 64), (N - 2, 64)), OUT]),
                (copy_by_descriptor, [Part(x, 64), OUT]),
                (copy_tile_twice, [*args, OUT]),
            ):
                call = call_tir_extern(kernel, (N, 2), given, TILE, constexprs=COPY, target=H200)
                made.append(builder.emit(call))
            call = call_tir_extern(double_first, (1,), [InOut(made[1])], TILE, target=H200)
            last = builder.emit_output(relax.Tuple([made[0], builder.emit(call), made[2]]))
        builder.emit_func_output(last)
    return builder.get()


@triton.jit
def copy_tile_twice(tile, space, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(space + i[:, None] * COLUMNS + j[None, :], tile.load([0, 0]))
    tl.store(out + i[:, None] * COLUMNS + j[None, :], tile.load([0, 0]))


def test_tensor_maps_workspaces_scratch_and_in_place(driver: Path, tmp_path: Path) -> None:
    library = tmp_path / "mixed.so"
    tvm.compile(EmbedTritonKernels()(mixed()), "llvm").export_library(str(library))
    answer = run(library, tmp_path, 40, driver=driver, dtype="float16", columns=64)
    assert answer["errors"] == []
    launches = [line for line in answer["log"] if line["call"] == "cuLaunchKernelEx"]
    entries = ["copy_tile", "copy_by_descriptor", "copy_tile_twice", "double_first"]
    assert [launch["entry"] for launch in launches] == entries or (
        sorted(launch["entry"] for launch in launches) == sorted(entries)
    )
    by_entry = {launch["entry"]: launch for launch in launches}
    maps = [line for line in answer["log"] if line["call"] == "cuTensorMapEncodeTiled"]
    part, whole = sorted(maps, key=lambda m: m["dims"])
    assert [part["dims"], whole["dims"]] == [[64, 38], [64, 40]]
    assert part["base"] == whole["base"] + 2 * 64 * 2
    described = by_entry["copy_by_descriptor"]
    assert described["grid"] == [40, 2, 1]
    x, out, scratch = described["params"]
    assert int.from_bytes(bytes.fromhex(x), "little") == whole["base"] + 64 * 2
    assert len({x, out, scratch, "00" * 8}) == 4
    assert by_entry["double_first"]["params"][0] == out, "in place"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "adds.so"
    tvm.compile(EmbedTritonKernels()(two_adds()), "llvm").export_library(str(path))
    return path


def run(
    library: Path,
    tmp_path: Path,
    *sizes: int,
    driver: Path | None = None,
    dtype: str = "float32",
    columns: int = 0,
) -> dict[str, Any]:
    """Call `main` of a library in a process of its own, once for each size."""
    place = str(driver.parent) if driver else ""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RUN,
            library,
            tmp_path / "log",
            dtype,
            str(columns),
            *map(str, sizes),
        ],
        env={**os.environ, "LD_LIBRARY_PATH": place},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_runs_without_triton_and_without_this_package(
    library: Path, driver: Path, tmp_path: Path
) -> None:
    sizes = [100, 101, 0, 100, 1000]
    answer = run(library, tmp_path, *sizes, driver=driver)
    assert answer["errors"] == []
    launches = [line for line in answer["log"] if line["call"] == "cuLaunchKernelEx"]
    grids = [launch["grid"][0] for launch in launches]
    expected = [[-(-n // (64 if n <= 100 else 256)), -(-n // 128)] for n in sizes if n]
    assert grids == [blocks for pair in expected for blocks in pair]
    passed = [launch["params"] for launch in launches]
    assert [int.from_bytes(bytes.fromhex(p[3]), "little") for p in passed] == [
        n for n in sizes if n for _ in range(2)
    ]
    assert [p[4:] for p in passed] == [["00" * 8] * 2] * 8
    for first, second in zip(passed[::2], passed[1::2], strict=True):
        assert second[0] == first[2], "the second reads what the first wrote"
        assert second[1] == first[1] and len({*first[:3], second[2]}) == 4
    loads = [line for line in answer["log"] if line["call"] == "cuModuleLoadData"]
    assert len(loads) == 3, "three kernels, each once"


def test_without_a_driver_it_loads_and_says_what_is_missing(library: Path, tmp_path: Path) -> None:
    answer = run(library, tmp_path, 0, 100)
    (error,) = answer["errors"]
    assert "the CUDA driver (libcuda.so.1) was not found on this machine" in error
    funcs = [f for _, f in two_adds().functions_items() if isinstance(f, tirx.PrimFunc)]
    assert any(str(symbol) in error for f in funcs for symbol in f.attrs[KERNELS_ATTR])


def shared() -> ir.IRModule:
    """Return ``add(add(x, y), y)`` by two functions of two branches, all of one kernel."""
    x = params(TY, TY)
    builder = relax.BlockBuilder()
    with builder.function("main", x):
        with builder.dataflow():
            y = x[0]
            for grid in ((N,), (N, 2)):
                call = call_tir_extern(
                    add, lambda _, grid=grid: grid, [y, x[1], OUT, N], TY, target=H200,
                    constexprs={"BLOCK": 64}, variants=[Variant(N <= 100, {"BLOCK": 64})],
                )  # fmt: skip
                y = builder.emit(call)
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    return builder.get()


def test_every_call_of_one_kernel_launches_it(driver: Path, tmp_path: Path) -> None:
    library = tmp_path / "shared.so"
    embedded = EmbedTritonKernels()(shared())
    tvm.compile(embedded, "llvm").export_library(str(library))
    done = subprocess.run(["nm", library], capture_output=True, text=True, check=True)
    symbols = [line.split()[-2:] for line in done.stdout.splitlines() if "launch_add_" in line]
    assert len(symbols) == 4 and all(kind != "U" for kind, _ in symbols)
    answer = run(library, tmp_path, 100, 101, driver=driver)
    assert answer["errors"] == []
    launches = [line for line in answer["log"] if line["call"] == "cuLaunchKernelEx"]
    grids = [[n, k, 1] for n in (100, 101) for k in (1, 2)]
    assert [launch["grid"] for launch in launches] == grids
    loads = [line for line in answer["log"] if line["call"] == "cuModuleLoadData"]
    assert len(loads) == 1


def test_its_symbols_are_hidden(library: Path) -> None:
    done = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in done.stdout.splitlines()]
    assert not [name for name in names if name.startswith(("launch_", "rf_", "cu"))]
