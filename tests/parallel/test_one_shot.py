"""The one-shot all-reduce: its kernel by threads in the place of GPUs, and what it takes."""

from __future__ import annotations

import ctypes
import subprocess
import time
from pathlib import Path
from threading import Thread
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest

from relax_fusion.launch.nvrtc import find_nvrtc
from relax_fusion.parallel import Worker, WorkerError, Workers, one_shot
from relax_fusion.parallel.collectives import reduced

EMULATOR = r"""
#include <setjmp.h>
#include <string.h>
#include <unistd.h>
#define EMULATED
#define __global__
#define __syncthreads()
struct Dim { unsigned x; };
static thread_local Dim blockIdx, threadIdx;
static Dim blockDim = {1}, gridDim = {BLOCKS};
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static void begin() {}
static thread_local bool slow;  /* a worker that the others are ahead of */
static thread_local jmp_buf end;
extern "C" { volatile int stop = 0; }
static bool seldom() {
  static thread_local int count = 0;
  return slow && ++count % 61 == 0;
}
static void push(uint4* at, uint4 v) {  /* halves of a vector come in any order */
  static thread_local int first = 0;
  unsigned long long halves[2];
  memcpy(halves, &v, 16);
  first = !first;
  __atomic_store_n((unsigned long long*)at + first, halves[first], __ATOMIC_RELEASE);
  if (seldom()) usleep(10);
  __atomic_store_n((unsigned long long*)at + !first, halves[!first], __ATOMIC_RELEASE);
}
static uint4 pushed(const uint4* at) {
  if (stop) longjmp(end, 1);
  if (seldom()) usleep(10);
  unsigned long long halves[2];
  uint4 v;
  for (int i = 0; i < 2; ++i)
    halves[i] = __atomic_load_n((unsigned long long*)at + i, __ATOMIC_ACQUIRE);
  memcpy(&v, halves, 16);
  return v;
}
static float number(unsigned bits) {
#ifdef BFLOAT16
  unsigned wide = bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
#else
  unsigned short narrow = bits;
  _Float16 value;
  memcpy(&value, &narrow, 2);
  return value;
#endif
}
static unsigned bits_of(float value) {
#ifdef BFLOAT16
  unsigned wide;
  memcpy(&wide, &value, 4);
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
#else
  _Float16 narrow = value;
  unsigned short bits;
  memcpy(&bits, &narrow, 2);
  return bits;
#endif
}
"""
RUN = r"""
extern "C" void run(const uint2* send, uint2* received, Workers* workers, int rank, int count,
                    long long pairs, long long most_pairs) {
  slow = rank == 0;
  if (setjmp(end)) return;
  for (blockIdx.x = 0; blockIdx.x < BLOCKS; ++blockIdx.x)
    one_shot_all_reduce(send, received, *workers, rank, count, pairs, most_pairs);
}
"""


def emulated(dtype: str, folder: Path, blocks: int, text: str | None = None) -> ctypes.CDLL:
    """Compile the kernel for a CPU: its blocks one after the other, each of one thread.

    One block is the hardest: it meets no other worker but for what it does.
    """
    file, library = folder / "kernel.cc", folder / "kernel.so"
    source = one_shot.source(dtype) if text is None else text
    head = f"#define BLOCKS {blocks}\n"
    head += "#define BFLOAT16\n" if dtype == "bfloat16" else ""
    file.write_text(head + EMULATOR + source.replace("#define BFLOAT16\n", "") + RUN + DRIVER)
    command = ["g++", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(file)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def all_workers(
    kernel: ctypes.CDLL, sent: list[list[np.ndarray]], capacity: int, seconds: float = 120
) -> list[list[np.ndarray]]:
    """Return what each worker receives in each of its calls, which it makes as fast as it can."""
    count = len(sent)
    size = one_shot.size_of_memory(count, capacity)
    memory = [np.zeros(size + 16, "uint8") for _ in range(count)]
    places = one_shot.Places()
    for rank, each in enumerate(memory):
        places.at[rank] = -(-each.ctypes.data // 16) * 16
    received = [[np.zeros_like(array) for array in calls] for calls in sent]

    def worker(rank: int) -> None:
        for array, out in zip(sent[rank], received[rank], strict=True):
            pointers = (ctypes.c_void_p(a.ctypes.data) for a in (array, out))
            sizes = (ctypes.c_longlong(n // one_shot.PAIR) for n in (array.nbytes, capacity))
            kernel.run(*pointers, ctypes.byref(places), rank, count, *sizes)

    threads = [Thread(target=worker, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        ctypes.c_int.in_dll(kernel, "stop").value = 1
        for thread in threads:
            thread.join()
        pytest.fail("a worker waits for ever")
    return received


def drawn(count: int, dtype: str, sizes: list[int]) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(count)
    return [[rng.standard_normal(n, "float32").astype(dtype) for n in sizes] for _ in range(count)]


DRIVER = r"""
#include <stdlib.h>
struct Handle { char reserved[64]; };
extern "C" {
int cudaSetDevice(int device) { return device != 0 && device != 1; }
int cudaMalloc(void** place, size_t size) { return !(*place = aligned_alloc(4096, size)); }
int cudaMemset(void* place, int value, size_t size) { return !memset(place, value, size); }
int cudaDeviceSynchronize() { return 0; }
int cudaIpcGetMemHandle(Handle* handle, void* place) { return !memcpy(handle, &place, 8); }
int cudaIpcOpenMemHandle(void** place, Handle handle, unsigned flags) {
  memcpy(place, &handle, 8);
  return flags != 1;
}
int cuModuleLoadData(void** module, const char* image) { return strncmp(image + 1, "ELF", 3); }
int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = (void*)&run;
  return strcmp(name, "one_shot_all_reduce");
}
struct Attribute { int id, padding, value; char rest[60]; };
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const Config* config, void* function, void** args, void** extra) {
  if (function != (void*)&run || config->grid[0] != BLOCKS || config->block[0] != 256 || extra ||
      config->grid[1] != 1 || config->block[2] != 1 || config->shared || config->stream ||
      config->count != 1 || config->attributes->id != 6 || config->attributes->value != 1)
    return 1;
  run(*(const uint2**)args[0], *(uint2**)args[1], (Workers*)args[2], *(int*)args[3],
      *(int*)args[4], *(long long*)args[5], *(long long*)args[6]);
  return 0;
}
}
"""
"""What of CUDA is called, where a kernel runs when it is launched, on the host."""

SIZES = [8, 4096, 8 * 33, 4096, 16384, 8] * 5
"""Elements of calls: of one vector, of all blocks or some, and more than one vector of each."""


@pytest.mark.parametrize(
    ("count", "dtype", "blocks"),
    [(2, "float16", one_shot.BLOCKS), (3, "bfloat16", 1), (8, "float16", 1)],
)
def test_all_workers_have_the_same_sum(count: int, dtype: str, blocks: int, tmp_path: Path) -> None:
    sent = drawn(count, dtype, SIZES)
    received = all_workers(emulated(dtype, tmp_path, blocks), sent, 2 * max(SIZES))
    for call in range(len(SIZES)):
        expected = reduced([calls[call] for calls in sent], 0)
        for rank in range(count):
            found = received[rank][call]
            np.testing.assert_array_equal(found.view("uint16"), expected.view("uint16"))


@pytest.mark.parametrize(
    ("broken", "by"),
    [
        ("(call & 1) * count", "0 * count"),
        ("come.y != call || come.w != call", "0"),
        ("|| come.w != call", ""),
        ("come.y != call ||", ""),
    ],
    ids=["one area", "nobody waits", "first half", "second half"],
)
def test_what_it_waits_for_is_needed(broken: str, by: str, tmp_path: Path) -> None:
    text = one_shot.source("float16")
    assert broken in text
    sent = drawn(3, "float16", [1 << 12] * 40)
    kernel = emulated("float16", tmp_path, 1, text.replace(broken, by))
    sums = [reduced([calls[call] for calls in sent], 0) for call in range(40)]
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        for calls in all_workers(kernel, sent, 2 << 12, seconds=10):
            np.testing.assert_array_equal(calls, sums)


@pytest.mark.skipif(find_nvrtc() is None, reason="there is no NVRTC")
@pytest.mark.parametrize("dtype", one_shot.DTYPES)
def test_it_compiles(dtype: str) -> None:
    found = find_nvrtc()
    assert found is not None
    for arch in ("sm_80", "sm_90"):
        cubin, _ = found.compile("one_shot_all_reduce", one_shot.source(dtype), arch)
        assert b"one_shot_all_reduce" in cubin


class Sent:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.array = np.ones(shape, dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@pytest.mark.skipif(find_nvrtc() is None, reason="there is no NVRTC")
def test_what_cuda_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers share their memories, load the kernel and launch it, by a driver on the host."""
    library = emulated("float16", tmp_path, one_shot.BLOCKS)
    for name in ("_runtime", "_driver"):
        monkeypatch.setattr(one_shot, name, lambda: library)
    workers, capacity = [Worker(rank, 2, "cuda") for rank in range(2)], 4096
    handles = [one_shot.share(worker, capacity) for worker in workers]
    kernels = {dtype: one_shot.loaded(dtype, "sm_90") for dtype in one_shot.DTYPES}
    pairs = [(Sent((1, 2048), "float16"), Sent((1, 2048), "float16")) for _ in workers]

    def reduce_on(worker: Worker) -> None:
        sent, received = pairs[worker.rank]
        sent.array *= worker.rank + 1
        places = one_shot.opened(worker, handles)
        one_shot.launched(worker, places, kernels, capacity, True, sent, received)

    threads = [Thread(target=reduce_on, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((received.array == 3).all() for _, received in pairs)
    with pytest.raises(RuntimeError, match="cudaSetDevice failed with the CUDA error 1"):
        one_shot.share(Worker(2, 3, "cuda"), capacity)


@pytest.mark.parametrize(
    ("sent", "kind", "taken"),
    [
        (Sent((1, 8, 64), "float16"), 0, True),
        (Sent((1, 8, 64), "bfloat16"), 0, True),
        (Sent((1, 8, 64), "float32"), 0, False),
        (Sent((1, 8, 64), "float16"), 4, False),
        (Sent((1, 9, 64), "float16"), 0, False),
        (Sent((1, 6), "float16"), 0, False),
        (Sent((0, 8), "float16"), 0, False),
    ],
    ids=["float16", "bfloat16", "float32", "mean", "large", "no pairs", "empty"],
)
def test_what_is_left_to_nccl(sent: Sent, kind: int, taken: bool) -> None:
    calls: list[str] = []

    def launch(*_: Any) -> None:
        calls.append("ours")

    def nccl(*_: Any) -> None:
        calls.append("nccl")

    one_shot.reducing(launch, nccl, 1024)(sent, kind, True, None)
    assert calls == ["ours" if taken else "nccl"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"one_shot_bytes": -1}, "one_shot_bytes is -1; must be from 0 to 16777216"),
        ({"one_shot_bytes": "1k"}, "one_shot_bytes is '1k'; must be from 0 to 16777216"),
        ({"one_shot_bytes": 64}, "it is for up to 8 workers with GPUs, and there are 2 on cpu"),
    ],
)
def test_what_cannot_be_one_shot(given: dict[str, Any], text: str) -> None:
    with pytest.raises(WorkerError, match=text):
        Workers(2, **given)
