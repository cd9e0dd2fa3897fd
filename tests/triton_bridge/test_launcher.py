"""The launcher, called in a process whose libcuda.so.1 is fake_cuda.c and notes every call."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relax_fusion.errors import KernelError
from relax_fusion.launch.kernel import CompiledKernel, check_entry
from relax_fusion.launch.kernel import TensorMapLayout as MapLayout
from relax_fusion.launch.launcher import launcher_source
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions

from .common import add_source, copy_tile_source, numbers, source
from .fake_driver import (
    CUDA_HEADERS,
    FUNCTIONS,
    INCLUDES,
    WARNINGS,
    Answer,
    Job,
    Worker,
    build_driver,
    build_launcher,
    gcc,
)

X, Y, OUT = 0x7F0000000100, 0x7F0000000200, 0x7F0000000300
ADD_SIZES = (8, 8, 8, 4, 8, 8)
ADD = [X, Y, OUT, 1000, 8, 1, 1]

Do = Callable[..., Answer]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def add_kernel() -> CompiledKernel:
    return compile_kernels([add_source()])[0]


@pytest.fixture(scope="module")
def add_library(add_kernel: CompiledKernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_launcher(add_kernel, tmp_path_factory.mktemp("add"))


@pytest.fixture(scope="module")
def big_library(add_kernel: CompiledKernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_launcher(replace(add_kernel, shared_bytes=50000), tmp_path_factory.mktemp("big"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def do(worker: Worker, driver: Path) -> Do:
    return lambda library, *calls, **kwargs: worker.do(Job(driver, library, calls, **kwargs))


def le(kind: str, *values: float) -> list[str]:
    """Return numbers as the hexadecimal digits of their bytes in memory."""
    return [struct.pack("<" + kind, v).hex() for v in values]


NULLS = le("q", 0, 0)


def test_a_launch(add_kernel: CompiledKernel, add_library: Path, do: Do) -> None:
    answer = do(add_library, ADD, sizes=ADD_SIZES)
    assert answer.errors == []
    (launch,) = answer.launches
    assert launch["entry"] == add_kernel.entry == "add"
    assert launch["grid"] == [8, 1, 1] and launch["block"] == [128, 1, 1]
    assert launch["shared"] == add_kernel.shared_bytes and launch["extra"] == 0
    assert launch["attributes"] == {}
    assert launch["params"] == [*le("q", X, Y, OUT), *le("i", 1000), *NULLS]
    (load,) = answer.of("cuModuleLoadData")
    assert load["magic"] == "ELF" and load["misaligned"] == 0
    assert answer.of("cuFuncSetAttribute") == []


def test_every_type_of_number(tmp_path: Path, do: Do) -> None:
    types = {"out": "*fp32", "bit": "i1", "small": "i8", "middle": "i32"}
    types |= {"wide": "i64", "unsigned": "u32", "real": "fp32"}
    kernel = compile_kernels([source(numbers, types)])[0]
    calls = [
        [OUT, 1, -128, -(2**31), -(2**63), 2**32 - 1, 0.1, 3, 2, 1],
        [OUT, 0, 127, 2**31 - 1, 2**63 - 1, 0, -1e-45, 1, 1, 1],
        [OUT, 1, 0, 1, 0, 2**31, float("inf"), 1, 1, 1],
    ]
    answer = do(build_launcher(kernel, tmp_path), *calls, sizes=(8, 1, 1, 4, 8, 4, 4, 8, 8))
    assert answer.errors == []
    for call, launch in zip(calls, answer.launches, strict=True):
        values = [le(kind, v)[0] for kind, v in zip("qbbiqIf", call, strict=False)]
        assert launch["params"] == [*values, *NULLS]
        assert launch["grid"] == call[-3:]


def changed(kernel: CompiledKernel, kind: str, aligned: bool = False) -> CompiledKernel:
    """Return `add` as if its number were of another type; the driver here doesn't care."""
    return replace(
        kernel, params=(*kernel.params[:3], kind), aligned=(False, False, False, aligned)
    )


@pytest.mark.parametrize(
    ("kind", "pack", "values"),
    [
        *(("i8", "b", [-128, 127]), ("u8", "B", [0, 255]), ("i16", "h", [-(2**15), 2**15 - 1])),
        *(("u16", "H", [0, 2**16 - 1]), ("u1", "B", [0, 1]), ("u64", "Q", [0, 2**63 - 1])),
        ("fp64", "d", [0.1, -1e300]),
    ],
)
def test_rarer_types(
    add_kernel: CompiledKernel, tmp_path: Path, do: Do, kind: str, pack: str, values: list
) -> None:
    library = build_launcher(changed(add_kernel, kind), tmp_path)
    size = struct.calcsize(pack)
    calls = [[X, Y, OUT, v, 1, 1, 1] for v in values]
    answer = do(library, *calls, sizes=(8, 8, 8, size, 8, 8))
    assert answer.errors == []
    assert [launch["params"][3] for launch in answer.launches] == le(pack, *values)


@pytest.mark.parametrize(
    ("kind", "values", "limits"),
    [
        ("i32", [2**31, -(2**31) - 1, 2**32 + 5], "-2147483648 to 2147483647"),
        ("u32", [-1, 2**32], "0 to 4294967295"),
        ("i8", [128, -129], "-128 to 127"),
        ("u8", [-1, 256], "0 to 255"),
        ("i16", [32768], "-32768 to 32767"),
        ("i1", [2, -1], "0 to 1"),
        ("u64", [-1], "0 to "),
    ],
)
def test_numbers_out_of_range(
    add_kernel: CompiledKernel, tmp_path: Path, do: Do, kind: str, values: list[int], limits: str
) -> None:
    kernel = changed(add_kernel, kind)
    answer = do(build_launcher(kernel, tmp_path), *[[X, Y, OUT, v, 1, 1, 1] for v in values])
    assert len(answer.errors) == len(values) and answer.launches == []
    for error, value in zip(answer.errors, values, strict=True):
        assert f"{kernel.symbol}: argument 3 is {value}; the kernel takes {limits}" in error


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 15])
def test_pointers_must_be_aligned(
    add_kernel: CompiledKernel, add_library: Path, do: Do, offset: int
) -> None:
    calls = [[X + offset, Y, OUT], [X, Y + offset, OUT], [X, Y, OUT + offset]]
    answer = do(add_library, *[[*call, 1000, 8, 1, 1] for call in calls])
    assert answer.launches == [] and len(answer.errors) == 3
    for index, error in enumerate(answer.errors):
        expected = (
            f"argument {index} begins at {calls[index][index]:#x}; the kernel takes addresses that "
            "are multiples of 16: pass a copy of the tensor"
        )
        assert f"{add_kernel.symbol}: {expected}" in error


def test_numbers_must_be_aligned(add_kernel: CompiledKernel, tmp_path: Path, do: Do) -> None:
    library = build_launcher(changed(add_kernel, "i64", aligned=True), tmp_path)
    calls = [[X + 1, Y, OUT, n, 1, 1, 1] for n in (0, 16, -32, 8, -8, 17)]
    answer = do(library, *calls, sizes=(8, 8, 8, 8))
    assert [launch["params"][3] for launch in answer.launches] == le("q", 0, 16, -32)
    assert len(answer.errors) == 3
    for error, n in zip(answer.errors, (8, -8, 17), strict=True):
        assert f"argument 3 is {n}; the kernel was compiled for multiples of 16" in error


@pytest.mark.parametrize("grid", [[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0]])
def test_an_empty_grid_launches_nothing(add_library: Path, do: Do, grid: list[int]) -> None:
    answer = do(add_library, [0, 0, 0, 0, *grid])
    assert answer.errors == [] and answer.log == []


def test_the_largest_grids(add_library: Path, do: Do) -> None:
    grids = [[2**31 - 1, 1, 1], [1, 65535, 1], [1, 1, 65535]]
    answer = do(add_library, *[[X, Y, OUT, 1, *grid] for grid in grids])
    assert answer.errors == [] and [launch["grid"] for launch in answer.launches] == grids


@pytest.mark.parametrize(
    ("grid", "dimension", "limit"),
    [
        *(([2**31, 1, 1], 0, 2**31 - 1), ([1, 65536, 1], 1, 65535), ([1, 1, 65536], 2, 65535)),
        *(([-1, 1, 1], 0, 2**31 - 1), ([1, 1, -3], 2, 65535), ([2**40, 0, 1], 0, 2**31 - 1)),
        ([2**32, 1, 1], 0, 2**31 - 1),
    ],
)
def test_grids_that_cuda_does_not_take(
    add_kernel: CompiledKernel,
    add_library: Path,
    do: Do,
    grid: list[int],
    dimension: int,
    limit: int,
) -> None:
    answer = do(add_library, [X, Y, OUT, 1, *grid])
    (error,) = answer.errors
    message = f"dimension {dimension} of its grid is {grid[dimension]}; CUDA takes 0 to {limit}"
    assert f"RuntimeError: {add_kernel.symbol}: {message}" in error
    assert answer.log == []


def test_a_grid_of_clusters_that_overflows(
    add_kernel: CompiledKernel, tmp_path: Path, do: Do
) -> None:
    kernel = replace(add_kernel, options=KernelOptions(num_ctas=16))
    calls = [[X, Y, OUT, 1, n, 1, 1] for n in (2**27, 2**60, 2**62)]
    answer = do(build_launcher(kernel, tmp_path), *calls)
    assert len(answer.errors) == 3 and answer.launches == []
    assert all("dimension 0 of its grid is" in error for error in answer.errors)


@pytest.mark.parametrize("count", [0, 6, 8])
def test_a_wrong_number_of_arguments(
    add_kernel: CompiledKernel, add_library: Path, do: Do, count: int
) -> None:
    answer = do(add_library, [*ADD, 1][:count])
    assert f"{add_kernel.symbol}: it takes 7 arguments, grid included" in answer.errors[0]


OPTIONS = [
    ({}, {}),
    ({"cooperative": True}, {"cooperative": 1}),
    ({"dependent_launch": True}, {"dependent": 1}),
    ({"num_ctas": 2}, {"cluster": [2, 1, 1], "spread": 1}),
    (
        {"num_ctas": 4, "cooperative": True, "dependent_launch": True},
        {"cluster": [4, 1, 1], "spread": 1, "cooperative": 1, "dependent": 1},
    ),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS)
def test_launch_attributes(
    add_kernel: CompiledKernel, tmp_path: Path, do: Do, options: dict, expected: dict
) -> None:
    kernel = replace(add_kernel, options=KernelOptions(**options))
    answer = do(build_launcher(kernel, tmp_path), [X, Y, OUT, 1, 3, 5, 7])
    assert answer.errors == []
    (launch,) = answer.launches
    assert launch["attributes"] == expected
    assert launch["grid"] == [3 * options.get("num_ctas", 1), 5, 7]
    assert answer.of("cuFuncSetAttribute") == []


@pytest.mark.parametrize(("version", "attributes"), [(12020, {}), (12030, {"dependent": 1})])
def test_drivers_whose_graphs_cannot_hold_it_get_no_dependent_launch(
    add_kernel: CompiledKernel,
    driver: Path,
    tmp_path: Path,
    version: int,
    attributes: dict[str, int],
) -> None:
    kernel = replace(add_kernel, options=KernelOptions(dependent_launch=True))
    library = build_launcher(kernel, tmp_path)
    job = Job(driver, library, [ADD], environment={"FAKE_CUDA_VERSION": str(version)})
    with Worker() as worker:  # a driver is asked once
        (launch,) = worker.do(job).launches
    assert launch["attributes"] == attributes


def test_large_clusters_need_leave(add_kernel: CompiledKernel, tmp_path: Path, do: Do) -> None:
    kernel = replace(add_kernel, options=KernelOptions(num_ctas=16))
    answer = do(build_launcher(kernel, tmp_path), ADD)
    (leave,) = answer.of("cuFuncSetAttribute")
    assert (leave["name"], leave["value"]) == ("cluster", 1)
    assert answer.launches[0]["attributes"]["cluster"] == [16, 1, 1]


def test_a_block_may_have_three_dimensions(
    add_kernel: CompiledKernel, do: Do, tmp_path: Path
) -> None:
    library = build_launcher(replace(add_kernel, block=(8, 4, 2), num_warps=2), tmp_path)
    assert do(library, ADD, sizes=ADD_SIZES).launches[0]["block"] == [8, 4, 2]


@pytest.mark.parametrize("size", [0, 49152, 49153, 232448])
def test_shared_memory(add_kernel: CompiledKernel, tmp_path: Path, do: Do, size: int) -> None:
    answer = do(build_launcher(replace(add_kernel, shared_bytes=size), tmp_path), ADD)
    assert answer.errors == [] and answer.launches[0]["shared"] == size
    asked = [(a["entry"], a["name"], a["value"]) for a in answer.of("cuFuncSetAttribute")]
    assert asked == ([("add", "shared", size)] if size > 49152 else [])


def test_too_little_shared_memory(add_kernel: CompiledKernel, tmp_path: Path, do: Do) -> None:
    library = build_launcher(replace(add_kernel, shared_bytes=102401), tmp_path)
    answer = do(library, ADD, environment={"FAKE_CUDA_SHARED": "102400"})
    expected = f"{add_kernel.symbol}: it needs 102401 bytes of shared memory; device 0 has 102400"
    assert expected in answer.errors[0] and answer.launches == []


def test_scratch_memory(add_kernel: CompiledKernel, tmp_path: Path, do: Do) -> None:
    library = build_launcher(replace(add_kernel, scratch_bytes=128), tmp_path)
    answer = do(library, [X, Y, OUT, 1000, 0xABCD00, 8, 1, 1], ADD, sizes=ADD_SIZES)
    assert answer.launches[0]["params"][4:] == le("q", 0xABCD00, 0)
    assert answer.launches[0]["grid"] == [8, 1, 1]
    assert "it takes 8 arguments" in answer.errors[0]


@pytest.mark.parametrize(
    ("compiled_for", "device", "runs"),
    [
        *((90, "90", True), (100, "100", True), (80, "80", True), (80, "86", True)),
        *((80, "89", True), (90, "80", False), (90, "100", False), (80, "90", False)),
        *((89, "86", False), (100, "103", False), (103, "100", False), (120, "121", False)),
    ],
)
def test_compute_capability(
    add_kernel: CompiledKernel, tmp_path: Path, do: Do, compiled_for: int, device: str, runs: bool
) -> None:
    kernel = replace(add_kernel, capability=compiled_for)
    library = build_launcher(kernel, tmp_path)
    answer = do(library, ADD, environment={"FAKE_CUDA_CAPABILITY": device})
    if runs:
        assert answer.errors == [] and len(answer.launches) == 1
        return
    ours = f"{compiled_for // 10}.{compiled_for % 10}"
    theirs = f"{int(device) // 10}.{int(device) % 10}"
    expected = f"it was compiled for compute capability {ours}; device 0 has {theirs}"
    assert f"{kernel.symbol}: {expected}" in answer.errors[0]
    assert answer.launches == [] and answer.of("cuModuleLoadData") == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cuInit", "making device 0 current"),
        ("cuDevicePrimaryCtxRetain", "making device 0 current"),
        ("cuCtxSetCurrent", "making device 0 current"),
        ("cuDeviceGetAttribute", "cuDeviceGetAttribute"),
        ("cuModuleLoadData", "cuModuleLoadData"),
        ("cuModuleGetFunction", "cuModuleGetFunction"),
        ("cuFuncSetAttribute", "asking for shared memory"),
        ("cuLaunchKernelEx", "launching a grid of (8, 1, 1) blocks of 128 threads"),
    ],
)
def test_calls_of_the_driver_that_fail(
    add_kernel: CompiledKernel, big_library: Path, do: Do, function: str, words: str
) -> None:
    environment = {"FAKE_CUDA_FAIL": f"{function}:2", "FAKE_CUDA_NO_CONTEXT": "1"}
    answer = do(big_library, ADD, ADD, environment=environment)
    expected = f"{add_kernel.symbol}: {words} failed with FAKE_ERROR_2 (words of the driver)"
    assert len(answer.errors) == 2 and all(expected in error for error in answer.errors)
    assert answer.launches == [] or function == "cuLaunchKernelEx"


def test_a_thread_without_a_context_gets_device_0(add_library: Path, do: Do) -> None:
    answer = do(add_library, ADD, ADD, environment={"FAKE_CUDA_NO_CONTEXT": "1"})
    assert answer.errors == [] and len(answer.launches) == 2
    assert [line["device"] for line in answer.of("cuDevicePrimaryCtxRetain")] == [0]


def test_the_current_device_is_used(add_library: Path, do: Do) -> None:
    answer = do(add_library, ADD, environment={"FAKE_CUDA_DEVICE": "63"})
    assert answer.errors == [] and len(answer.launches) == 1
    assert answer.of("cuInit") == [] and answer.of("cuDevicePrimaryCtxRetain") == []
    answer = do(add_library, ADD, environment={"FAKE_CUDA_DEVICE": "64"})
    assert "device 64 is beyond the 64 that are supported" in answer.errors[0]


def test_a_kernel_is_loaded_once(add_library: Path, do: Do) -> None:
    answer = do(add_library, *[ADD] * 20, threads=8, environment={"FAKE_CUDA_NO_CONTEXT": "1"})
    assert answer.errors == [] and len(answer.launches) == 160
    assert len(answer.of("cuModuleLoadData")) == 1
    assert len(answer.of("cuDevicePrimaryCtxRetain")) == 8


def test_threads_that_fail_at_once_all_hear_of_it(add_library: Path, do: Do) -> None:
    environment = {"FAKE_CUDA_FAIL": "cuModuleLoadData:2"}
    answer = do(add_library, *[ADD] * 5, threads=8, environment=environment)
    assert len(answer.errors) == 40 and answer.launches == []
    assert all("cuModuleLoadData failed with FAKE_ERROR_2" in error for error in answer.errors)


def test_no_driver(add_kernel: CompiledKernel, add_library: Path, worker: Worker) -> None:
    answer = worker.do(Job(None, add_library, [ADD, ADD, [X, Y, OUT, 0, 0, 1, 1]]))
    expected = "the CUDA driver (libcuda.so.1) was not found on this machine"
    assert len(answer.errors) == 2, "an empty grid needs no driver"
    assert all(f"{add_kernel.symbol}: {expected}" in error for error in answer.errors)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_old_driver(
    add_kernel: CompiledKernel, add_library: Path, tmp_path: Path, worker: Worker, function: str
) -> None:
    answer = worker.do(Job(build_driver(tmp_path, function), add_library, [ADD, ADD]))
    expected = f"the CUDA driver has no {function}; version 525 (CUDA 12.0) or newer is needed"
    assert len(answer.errors) == 2
    assert all(f"{add_kernel.symbol}: {expected}" in error for error in answer.errors)


@pytest.fixture(scope="module")
def tile_kernel() -> CompiledKernel:
    return compile_kernels([copy_tile_source()])[0]


def test_a_tensor_map(tile_kernel: CompiledKernel, tmp_path: Path, do: Do) -> None:
    library = build_launcher(tile_kernel, tmp_path)
    sizes = (128, 4, 4, 8, 8, 8, 8, 8)
    answer = do(library, [X, 100, 72, 72, 1, OUT, 1, 1, 1], sizes=sizes)
    assert answer.errors == []
    (encoded,) = answer.of("cuTensorMapEncodeTiled")
    assert encoded["base"] == X and encoded["misaligned"] == 0
    assert encoded["type"] == 6, "CU_TENSOR_MAP_DATA_TYPE_FLOAT16"
    assert encoded["dims"] == [72, 100] and encoded["strides"] == [144]
    assert encoded["box"] == [64, 32] and encoded["steps"] == [1, 1]
    assert encoded["swizzle"] == 3, "rows of 128 bytes"
    assert encoded["rest"] == [0, 2, 0], "no interleave, promotion to 128 bytes, zeros outside"
    (launch,) = answer.launches
    assert launch["params"] == [
        "ab" * 128, *le("i", 100, 72), *le("q", 72, 1), *le("q", OUT), *NULLS,
    ]  # fmt: skip


@pytest.mark.parametrize("rank", range(1, 6))
def test_tensor_maps_of_every_rank(
    tile_kernel: CompiledKernel, tmp_path: Path, do: Do, rank: int
) -> None:
    dims, block = [3, 5, 7, 11, 16][-rank:], [1, 2, 4, 8, 16][-rank:]
    strides = [5 * 7 * 11 * 16, 7 * 11 * 16, 11 * 16, 16, 1][-rank:]
    kernel = replace(
        tile_kernel,
        params=(f"tensordesc<fp32[{', '.join(map(str, block))}]>", "*fp16"),
        tensor_maps=(MapLayout(tuple(block), 4, 7, 1),),
    )
    sizes = [128, *[4] * rank, *[8] * rank, 8]
    answer = do(build_launcher(kernel, tmp_path), [X, *dims, *strides, OUT, 1, 1, 1], sizes=sizes)
    assert answer.errors == []
    (encoded,) = answer.of("cuTensorMapEncodeTiled")
    assert encoded["dims"] == dims[::-1] and encoded["box"] == block[::-1]
    assert encoded["strides"] == [4 * s for s in strides[-2::-1]]
    assert encoded["steps"] == [1] * rank
    expected = ["ab" * 128, *le("i", *dims), *le("q", *strides), *le("q", OUT)]
    assert answer.launches[0]["params"] == expected


def test_a_tensor_map_that_the_driver_refuses(
    tile_kernel: CompiledKernel, tmp_path: Path, do: Do
) -> None:
    call = [X, 100, 72, 72, 1, OUT, 1, 1, 1]
    environment = {"FAKE_CUDA_FAIL": "cuTensorMapEncodeTiled:1"}
    answer = do(build_launcher(tile_kernel, tmp_path), call, environment=environment)
    (error,) = answer.errors
    assert f"{tile_kernel.symbol}: making the tensor map of argument 0 (innermost: 72 el" in error
    assert "next stride 144 bytes, box 64) failed with FAKE_ERROR_1" in error
    assert answer.launches == []


def test_what_a_tensor_map_is_of_must_be_aligned(
    tile_kernel: CompiledKernel, tmp_path: Path, do: Do
) -> None:
    answer = do(build_launcher(tile_kernel, tmp_path), [X + 8, 100, 72, 72, 1, OUT, 1, 1, 1])
    assert answer.launches == [] and answer.of("cuTensorMapEncodeTiled") == []
    assert f"{tile_kernel.symbol}: argument 0 begins at {X + 8:#x}; the" in answer.errors[0]


def test_a_tensor_larger_than_its_map_can_say(
    tile_kernel: CompiledKernel, tmp_path: Path, do: Do
) -> None:
    call = [X, 2**31, 72, 72, 1, OUT, 1, 1, 1]
    answer = do(build_launcher(tile_kernel, tmp_path), call)
    assert answer.launches == [], "the kernel takes sizes as int32"
    assert str(2**31) in answer.errors[0]


ABI = """
#define SAME(a, b) _Static_assert((a) == (b), #a " is " #b)
#define FIELD(ours, mine, theirs, its) \\
  SAME(offsetof(ours, mine), offsetof(theirs, its)); \\
  SAME(sizeof(((ours*)0)->mine), sizeof(((theirs*)0)->its))
SAME(sizeof(rf_launch_attribute), sizeof(CUlaunchAttribute));
FIELD(rf_launch_attribute, id, CUlaunchAttribute, id);
FIELD(rf_launch_attribute, value, CUlaunchAttribute, value);
FIELD(rf_launch_attribute, value.number, CUlaunchAttribute, value.cooperative);
FIELD(rf_launch_attribute, value.number, CUlaunchAttribute,
      value.programmaticStreamSerializationAllowed);
FIELD(rf_launch_attribute, value.number, CUlaunchAttribute,
      value.clusterSchedulingPolicyPreference);
FIELD(rf_launch_attribute, value.dim, CUlaunchAttribute, value.clusterDim);
SAME(sizeof(rf_launch_config), sizeof(CUlaunchConfig));
SAME(offsetof(rf_launch_config, grid), offsetof(CUlaunchConfig, gridDimX));
SAME(offsetof(rf_launch_config, grid) + 8, offsetof(CUlaunchConfig, gridDimZ));
SAME(offsetof(rf_launch_config, block), offsetof(CUlaunchConfig, blockDimX));
SAME(offsetof(rf_launch_config, block) + 8, offsetof(CUlaunchConfig, blockDimZ));
FIELD(rf_launch_config, shared_bytes, CUlaunchConfig, sharedMemBytes);
FIELD(rf_launch_config, stream, CUlaunchConfig, hStream);
FIELD(rf_launch_config, attributes, CUlaunchConfig, attrs);
FIELD(rf_launch_config, num_attributes, CUlaunchConfig, numAttrs);
SAME(sizeof(rf_tensor_map), sizeof(CUtensorMap));
SAME(_Alignof(rf_tensor_map) % _Alignof(CUtensorMap), 0);
SAME(sizeof(CUresult), 4);
SAME(sizeof(CUdevice), 4);
SAME(RF_CUDA_SUCCESS, CUDA_SUCCESS);
SAME(RF_SHARED_BYTES_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
SAME(RF_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(RF_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(RF_FUNC_DYNAMIC_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
SAME(RF_FUNC_NON_PORTABLE_CLUSTER, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
SAME(RF_LAUNCH_COOPERATIVE, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME(RF_LAUNCH_CLUSTER, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME(RF_LAUNCH_CLUSTER_SCHEDULING, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
SAME(RF_LAUNCH_DEPENDENT, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
SAME(RF_CLUSTER_SPREAD, CU_CLUSTER_SCHEDULING_POLICY_SPREAD);
SAME(2, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
SAME(0, CU_TENSOR_MAP_INTERLEAVE_NONE);
SAME(0, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
"""


def test_the_header_agrees_with_nvidias(tmp_path: Path) -> None:
    code = tmp_path / "abi.c"
    text = launcher_source([]).replace("#ifdef __cplusplus\n}", f"{ABI}\n#ifdef __cplusplus\n}}")
    code.write_text(f"#include <stddef.h>\n#include <cuda.h>\n{text}")
    assert "SAME(sizeof(rf_tensor_map)" in code.read_text()
    gcc("gcc", "-std=c11", "-c", *INCLUDES, code, "-o", code.with_suffix(".o"))


def test_versioned_names_are_those_of_nvidias_header() -> None:
    text = (CUDA_HEADERS / "cuda.h").read_text()
    for name in FUNCTIONS:
        assert not re.search(rf"#define +{name} +{name}_v\d", text), "the header renames it"
        assert re.search(rf"CUDAAPI {name}\(", text)


COMPILERS = [("gcc", "-std=c99"), ("gcc", "-std=c11", "-O2"), ("g++", "-std=c++11", "-xc++")]


@pytest.mark.parametrize("compiler", COMPILERS, ids=" ".join)
def test_the_code_compiles_without_warnings(
    add_kernel: CompiledKernel,
    tile_kernel: CompiledKernel,
    tmp_path: Path,
    compiler: tuple[str, ...],
) -> None:
    code = tmp_path / "code.c"
    code.write_text(launcher_source([add_kernel, replace(tile_kernel, scratch_bytes=128)]))
    gcc(*compiler, *WARNINGS, "-c", *INCLUDES, code, "-o", tmp_path / "code.o")


@pytest.mark.parametrize("text", ["*/", "/*", "\\", "??/", 'é\n"', "%d"])
def test_text_among_the_constants_is_harmless(
    add_kernel: CompiledKernel, tmp_path: Path, text: str
) -> None:
    code = tmp_path / "code.c"
    kernel = replace(add_kernel, constants=(("BLOCK", text), ("\\", text)))
    code.write_text(launcher_source([kernel]))
    gcc("gcc", "-std=c11", "-Wall", "-Werror", "-Wno-unused-function", "-c", *INCLUDES, code,
        "-o", tmp_path / "code.o")  # fmt: skip


def test_kernels_are_hidden(add_library: Path, add_kernel: CompiledKernel) -> None:
    listed = subprocess.run(["nm", "-D", add_library], capture_output=True, text=True, check=True)
    exported = [line.split()[-1] for line in listed.stdout.splitlines() if " T " in line]
    assert exported == ["__tvm_ffi_launch"]
    assert "cuda" not in listed.stdout and " cu" not in listed.stdout


def test_the_image_is_stored_byte_for_byte(add_kernel: CompiledKernel) -> None:
    image = bytes(range(256)) * 3 + b"0"
    text = launcher_source([replace(add_kernel, image=image)])
    literal = text[text.index("aligned(64))) =") :].split(";")[0]
    digits = re.findall(r"\\(\d{3})", literal)
    assert bytes(int(d, 8) for d in digits) == image
    assert re.fullmatch(r"[\\0-7\"\s]*", literal.split("=", 1)[1])


def test_a_kernel_that_triton_did_not_compile(
    add_kernel: CompiledKernel, tile_kernel: CompiledKernel, tmp_path: Path, do: Do
) -> None:
    """Three warps; nothing but its arguments, and of a tensor map nothing but the map."""
    kernel = replace(add_kernel, convention="cuda", num_warps=3)
    assert kernel.machine_params() == ["void*"] * 3 + ["int32_t"]
    answer = do(build_launcher(kernel, tmp_path / "add"), ADD, sizes=(8, 8, 8, 4))
    assert answer.errors == []
    (launch,) = answer.launches
    assert launch["block"] == [96, 1, 1] and len(launch["params"]) == 4
    mapped = replace(tile_kernel, convention="cuda")
    assert mapped.machine_params() == ["tensor_map", "void*"]
    call = [X, 100, 72, 72, 1, OUT, 1, 1, 1]
    answer = do(build_launcher(mapped, tmp_path / "map"), call, sizes=(128, 8))
    assert answer.errors == [] and len(answer.of("cuTensorMapEncodeTiled")) == 1
    assert len(answer.launches[0]["params"]) == 2


def test_the_entry_of_another_convention_is_refused(add_kernel: CompiledKernel) -> None:
    with pytest.raises(KernelError, match="calling convention 'cuda'"):
        check_entry(replace(add_kernel, convention="cuda"))


@pytest.mark.parametrize("warps", [1, 12, 32])
def test_threads(add_kernel: CompiledKernel, tmp_path: Path, do: Do, warps: int) -> None:
    answer = do(build_launcher(replace(add_kernel, num_warps=warps), tmp_path), ADD)
    assert answer.launches[0]["block"] == [32 * warps, 1, 1]
