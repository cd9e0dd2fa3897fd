"""Candidates, measured by the launcher in a process whose libcuda.so.1 is fake_cuda.c."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.launch.launcher import BEGIN, NEXT, launcher_source
from relax_fusion.triton_bridge.compile import compile_kernels

from .common import add_source
from .fake_driver import (
    EVENT_FUNCTIONS,
    INCLUDES,
    WARNINGS,
    Answer,
    Job,
    Worker,
    build_driver,
    gcc,
)

MANY, SPLIT, FEW = [1], [2, 3], [4]
"""Blocks of the launches of three candidates."""
SAMPLES = 5
ROUNDS = 1 + SAMPLES
SIZE = 256 << 20
WRITES = 8
"""Of memory, one behind the other, before the first sample."""

Do = Callable[..., Answer]

WRAPPER = """
#include <stdlib.h>
/* launch(device, capturing, is_empty): what host code with three candidates does. */
int __tvm_ffi_launch(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  static const int blocks[3][2] = {{1, 0}, {2, 3}, {4, 0}};
  TVMFFIAny count = {0}, calls, i = {0}, which, call[7];
  char device[8];
  int j, k;
  (void)n;
  snprintf(device, sizeof device, "%d", (int)args[0].v_int64);
  setenv("FAKE_CUDA_DEVICE", device, 1);
  setenv("FAKE_CUDA_CAPTURING", args[1].v_int64 ? "1" : "", 1);
  count.v_int64 = 3;
  memset(call, 0, sizeof call);
  if (BEGIN(self, &count, 1, &calls)) return -1;
  for (; i.v_int64 < calls.v_int64; ++i.v_int64) {
    if (NEXT(self, &i, 1, &which)) return -1;
    for (j = 0; which.v_int64 >= 0 && j < 2 && (k = blocks[which.v_int64][j]); ++j) {
      call[4].v_int64 = args[2].v_int64 ? 0 : k;
      call[5].v_int64 = call[6].v_int64 = 1;
      if (LAUNCH(self, call, 7, result)) return -1;
    }
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def kernel() -> CompiledKernel:
    return compile_kernels([add_source()])[0]


@pytest.fixture(scope="module")
def library(kernel: CompiledKernel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = tmp_path_factory.mktemp("library") / "tuned.c"
    names = f"#define BEGIN {BEGIN}\n#define NEXT {NEXT}\n#define LAUNCH {kernel.launcher}\n"
    code.write_text(launcher_source([kernel], {BEGIN: 1, NEXT: 1}) + names + WRAPPER)
    made = code.with_suffix(".so")
    gcc("gcc", "-std=gnu11", "-shared", "-fPIC", *INCLUDES, code, "-o", made)
    return made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def do(worker: Worker, driver: Path, library: Path) -> Do:
    """Call the function, once for each (device, whether the stream is captured, whether empty)."""

    def call(
        *calls: tuple[int, int], threads: int = 1, driver: Path = driver, **env: str
    ) -> Answer:
        names = ("TIMES", "WRITE", "DISTURBED", "FAIL", "FAIL_BLOCKS")
        settings = {**dict.fromkeys(names, ""), **env}
        environment = {f"FAKE_CUDA_{name}": value for name, value in settings.items()}
        given = [[*each, 0][:3] for each in calls]
        return worker.do(Job(driver, library, given, environment=environment, threads=threads))

    return call


NOW = (0, 0)
CAPTURED = (0, 1)
ROUND = [*MANY, *SPLIT, *FEW]


def blocks(answer: Answer) -> list[int]:
    return [launch["grid"][0] for launch in answer.launches]


@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        ("1:3,2:1,3:1,4:5", SPLIT),  # the sum of both launches counts
        ("1:3,2:2,3:2,4:5", MANY),
        ("1:3,2:2,3:2,4:2.5", FEW),
        ("1:3,2:2,3:1,4:3", MANY),  # of equals the one with the best price
    ],
)
def test_the_fastest_is_found_once(do: Do, times: str, fastest: list[int]) -> None:
    answer = do(NOW, NOW, CAPTURED, NOW, TIMES=times)
    assert answer.errors == []
    assert blocks(answer) == ROUND * ROUNDS + fastest * 4


@pytest.mark.parametrize("launch", [2, 14, 22])
def test_one_disturbance_changes_nothing(do: Do, launch: int) -> None:
    answer = do(NOW, TIMES="1:3,2:1,3:1,4:5", DISTURBED=str(launch))
    assert blocks(answer) == [*ROUND * ROUNDS, *SPLIT]


def test_each_sample_is_taken_behind_a_write_of_the_cache(do: Do) -> None:
    answer = do(NOW, NOW)
    samples = 3 * ROUNDS
    assert [line["value"] for line in answer.of("cuMemsetD8Async")] == [SIZE] * (WRITES + samples)
    assert len(answer.of("cuEventRecord")) == 2 + 2 * samples
    order = [line["call"] for line in answer.log if line["call"] not in _LOADING]
    first = order.index("cuLaunchKernelEx") - 2
    sample = ["cuMemsetD8Async", "cuEventRecord", "cuLaunchKernelEx", "cuEventRecord"]
    assert order[first : first + 5] == [*sample, "cuEventSynchronize"]


@pytest.mark.parametrize(("ms", "times"), [("1000", 1), ("2", 4), ("0.5", 13), ("0", 400)])
def test_the_device_is_busy_before_the_first_sample(do: Do, ms: str, times: int) -> None:
    answer = do(NOW, WRITE=ms, TIMES="1:3")
    assert blocks(answer) == [*ROUND * ROUNDS, *FEW]
    assert len(answer.of("cuMemsetD8Async")) == WRITES * times + 3 * ROUNDS


_LOADING = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"}


def test_nothing_is_left_behind(do: Do) -> None:
    answer = do(NOW, NOW)
    assert len(answer.of("cuEventCreate")) == len(answer.of("cuEventDestroy")) == 2
    assert [line["value"] for line in answer.of("cuMemAlloc")] == [SIZE]
    assert [line["value"] for line in answer.of("cuMemFree")] == [0x5000]
    modes = [line["value"] for line in answer.of("cuThreadExchangeStreamCaptureMode")]
    assert modes == [2, 0], "relaxed, and as it was"


def test_a_captured_stream_gets_the_best_by_price(do: Do) -> None:
    answer = do(CAPTURED, CAPTURED, TIMES="1:3")
    assert answer.errors == [] and blocks(answer) == MANY * 2
    assert {line["call"] for line in answer.log} <= {"cuLaunchKernelEx", *_LOADING}
    answer = do(CAPTURED, NOW, CAPTURED, TIMES="1:3")
    assert blocks(answer) == [*MANY, *ROUND * ROUNDS, *FEW, *FEW], "measured as soon as can be"


@pytest.mark.parametrize("function", ["cuStreamIsCapturing", "cuEventCreate"])
def test_where_nothing_can_be_measured(do: Do, function: str) -> None:
    answer = do(NOW, NOW, FAIL=f"{function}:906", TIMES="1:3")
    assert answer.errors == [] and blocks(answer) == MANY * 2
    assert len(answer.of("cuEventDestroy")) == 0


@pytest.mark.parametrize("function", EVENT_FUNCTIONS)
def test_a_driver_without_events(do: Do, tmp_path: Path, function: str) -> None:
    answer = do(NOW, NOW, driver=build_driver(tmp_path, function), TIMES="1:3")
    assert answer.errors == [] and blocks(answer) == MANY * 2


def test_without_memory_the_cache_stays_warm(do: Do) -> None:
    answer = do(NOW, NOW, FAIL="cuMemAlloc:2", TIMES="1:3")
    assert answer.errors == [] and blocks(answer) == [*ROUND * ROUNDS, *FEW, *FEW]
    assert answer.of("cuMemsetD8Async") == answer.of("cuMemFree") == []


@pytest.mark.parametrize(
    ("failing", "tried", "fastest"),
    [("1", [1], FEW), ("2", [2, 3], FEW), ("3", [2, 3], FEW), ("4", [4], MANY)],
)
def test_a_candidate_that_fails_loses(
    do: Do, failing: str, tried: list[int], fastest: list[int]
) -> None:
    answer = do(NOW, NOW, FAIL_BLOCKS=failing, TIMES=f"{failing}:0.1,1:2,2:2,3:2")
    assert answer.errors == []
    rest = [n for n in ROUND if n not in tried]
    assert blocks(answer) == [*ROUND, *rest * SAMPLES, *fastest, *fastest]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cuLaunchKernelEx", "launching a grid of (1, 1, 1) blocks"),
        ("cuEventSynchronize", "waiting for a candidate"),
        ("cuEventElapsedTime", "waiting for a candidate"),
        ("cuModuleLoadData", "cuModuleLoadData"),
    ],
)
def test_where_all_fail_the_first_error_is_told(do: Do, function: str, words: str) -> None:
    answer = do(NOW, NOW, FAIL=f"{function}:700")
    assert len(answer.errors) == 2, "nothing is remembered"
    assert all(words in error and "FAKE_ERROR_700" in error for error in answer.errors)
    assert len(answer.of("cuEventDestroy")) == 4 and len(answer.of("cuMemFree")) == 2


def test_what_fails_while_nothing_is_measured_reaches_the_caller(
    do: Do, kernel: CompiledKernel
) -> None:
    answer = do(CAPTURED, FAIL_BLOCKS="1")
    (error,) = answer.errors
    assert f"{kernel.symbol}: launching a grid of (1, 1, 1) blocks" in error


def test_long_kernels_are_measured_once(do: Do) -> None:
    answer = do(NOW, TIMES="1:90,2:90,3:90,4:80")
    assert blocks(answer) == ROUND * 2 + FEW, "once to warm up, and one sample"
    answer = do(NOW, TIMES="1:20,2:20,3:20,4:10")
    assert blocks(answer) == ROUND * 4 + FEW, "70 ms a round: 210 behind the third"


def test_a_call_without_elements_decides_nothing(do: Do) -> None:
    empty = (0, 0, 1)
    answer = do(empty, empty, NOW, empty, NOW, TIMES="1:3")
    assert answer.errors == []
    assert blocks(answer) == [*ROUND * ROUNDS, *FEW, *FEW]
    assert len(answer.of("cuMemAlloc")) == len(answer.of("cuMemFree")) == 3


def test_each_device_has_a_choice_of_its_own(do: Do) -> None:
    answer = do((3, 0), (5, 1), (5, 0), (3, 0), (5, 0), (0, 1), TIMES="1:3,2:0.1,3:0.1")
    measured = [*ROUND * ROUNDS, *SPLIT]
    assert answer.errors == []
    assert blocks(answer) == [*measured, *MANY, *measured, *SPLIT, *SPLIT, *MANY]


def test_one_thread_measures(do: Do) -> None:
    answer = do(*[NOW] * 10, threads=6, TIMES="1:3")
    assert answer.errors == []
    found = blocks(answer)
    assert found.count(2) == found.count(3) == ROUNDS
    assert len(found) == 4 * ROUNDS + 60, "the others go by the price meanwhile, or by the result"
    assert len(answer.of("cuEventCreate")) == 2


COMPILERS = [("gcc", "-std=c99"), ("gcc", "-std=c11", "-O2"), ("g++", "-std=c++11", "-xc++")]


@pytest.mark.parametrize("compiler", COMPILERS, ids=" ".join)
def test_the_code_compiles_without_warnings(
    kernel: CompiledKernel, tmp_path: Path, compiler: tuple[str, ...]
) -> None:
    code = tmp_path / "code.c"
    code.write_text(launcher_source([kernel], {kernel.launcher: 2, BEGIN: 2, NEXT: 2}))
    gcc(*compiler, *WARNINGS, "-c", *INCLUDES, code, "-o", tmp_path / "code.o")


CHECKED = """
#include <cuda.h>
#define SAME(a, b) _Static_assert((a) == (b), #a " is " #b)
SAME(RF_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(0, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(sizeof(uint64_t), sizeof(CUdeviceptr));
SAME(sizeof(int32_t), sizeof(CUstreamCaptureStatus));
SAME(sizeof(int32_t), sizeof(CUstreamCaptureMode));
"""


def test_the_header_agrees_with_nvidias(kernel: CompiledKernel, tmp_path: Path) -> None:
    code = tmp_path / "abi.c"
    code.write_text(launcher_source([kernel], {BEGIN: 1, NEXT: 1}) + CHECKED)
    gcc("gcc", "-std=c11", "-c", *INCLUDES, code, "-o", tmp_path / "abi.o")


def test_a_library_without_candidates_has_none_of_this(kernel: CompiledKernel) -> None:
    assert "rf_trial" not in launcher_source([kernel])
