"""The kernels of our all-reduces on a CPU: a thread for each of a GPU's, a worker for each GPU."""

from __future__ import annotations

import ctypes
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from relax_fusion.parallel import all_reduce
from relax_fusion.parallel.all_reduce import ONE_SHOT, TWO_SHOT, Kernel

EMULATOR = r"""
#include <setjmp.h>
#include <string.h>
#include <unistd.h>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>
#define EMULATED
#define FUNCTION inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
struct Dim { unsigned x; };
static thread_local Dim blockIdx, threadIdx;
static thread_local Dim blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static void __threadfence() {}
extern "C" {
volatile int stop = 0;
std::atomic<long> written{0};
}

static thread_local unsigned long long drawn;
static unsigned random_number() {
  drawn = drawn * 6364136223846793005ull + 1442695040888963407ull;
  return drawn >> 33;
}
static thread_local bool slow;  /* a worker that the others are ahead of */
static void linger() {
  if (slow && random_number() % 61 == 0) usleep(10);
}
static thread_local jmp_buf end;
static void wait() {
  if (stop) longjmp(end, 1);
  std::this_thread::yield();
}

/* Where blocks of a kernel say that the next may begin, and those in front that they have ended. */
static thread_local std::atomic<int>*begun, *ended;
static void wait_for_those_in_front() {
  while (ended && !*ended) wait();
  if (threadIdx.x == 0) ++*begun;
  linger();
}

/* Half a vector that is on its way: these come in any order, and late. */
struct Half { unsigned long long *at, value; };
struct Block {
  std::mutex lock;
  std::vector<Half> written;  /* before the last barrier */
  std::atomic<unsigned> arrived{0}, left{0};
};
static thread_local Block* block_of_this;
static thread_local std::vector<Half> under_way;
static void come(std::vector<Half>& halves, size_t left = 0) {
  while (halves.size() > left) {
    std::swap(halves[random_number() % halves.size()], halves.back());
    const Half half = halves.back();
    halves.pop_back();
    __atomic_store_n(half.at, half.value, __ATOMIC_RELEASE);
    ++written;
    linger();
  }
}
static void push(uint4* at, uint4 v) {
  unsigned long long halves[2];
  memcpy(halves, &v, 16);
  for (int i = 0; i < 2; ++i) under_way.push_back({(unsigned long long*)at + i, halves[i]});
  if (random_number() % 4 == 0) come(under_way, random_number() % 64);
}
static uint4 pushed(const uint4* at) {
  if (stop || random_number() % 16 == 0) wait();  /* to yield costs much among busy processes */
  if (!under_way.empty()) come(under_way, under_way.size() - (random_number() % 32 == 0));
  linger();
  unsigned long long halves[2];
  uint4 v;
  for (int i = 0; i < 2; ++i)
    halves[i] = __atomic_load_n((unsigned long long*)at + i, __ATOMIC_ACQUIRE);
  memcpy(&v, halves, 16);
  return v;
}
static void __syncthreads() {
  Block& block = *block_of_this;
  {
    std::lock_guard<std::mutex> held(block.lock);
    block.written.insert(block.written.end(), under_way.begin(), under_way.end());
  }
  under_way.clear();
  const unsigned turn = block.arrived++ / blockDim.x;
  while (block.arrived < (turn + 1) * blockDim.x) wait();
  linger();
}
static void raise(unsigned* flag, unsigned call) {
  come(under_way);
  {
    std::lock_guard<std::mutex> held(block_of_this->lock);
    come(block_of_this->written);
  }
  __atomic_store_n(flag, call, __ATOMIC_RELEASE);
  ++written;
}
static bool is_raised(const unsigned* flag, unsigned call) {
  wait();
  linger();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE) == call;
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
"""What the kernels call, by threads of a CPU: what is written comes late, and in any order."""

RUN = r"""
struct Launch {
  const void* send;
  void* received;
  const Workers* workers;
  int rank, count;
  long long units, most;
  bool is_two_shot;
  int blocks, threads, at_once;
  std::atomic<int>*begun, *ended;
};
static void run_thread(const Launch* told, Block* block, unsigned index, unsigned thread) {
  blockIdx.x = index, threadIdx.x = thread;
  blockDim.x = told->threads, gridDim.x = told->blocks;
  block_of_this = block;
  begun = told->begun, ended = told->ended;
  slow = told->rank == 0;
  drawn = (told->rank * 1000003ull + index) * 1000003 + thread + told->units;
  under_way.clear();
  if (setjmp(end)) return;
  if (told->is_two_shot)
    two_shot_all_reduce((const uint4*)told->send, (uint4*)told->received, *told->workers,
                        told->rank, told->count, told->units, told->most);
  else
    one_shot_all_reduce((const uint2*)told->send, (uint2*)told->received, *told->workers,
                        told->rank, told->count, told->units, told->most);
  come(under_way);
}
/* Some blocks run at once; one begins, in their order, where another has ended. */
static void run(const Launch* told) {
  std::atomic<int> next{0};
  auto blocks = [&] {
    for (int index; (index = next++) < told->blocks;) {
      Block block;
      std::vector<std::thread> threads;
      for (int thread = 1; thread < told->threads; ++thread)
        threads.emplace_back(run_thread, told, &block, index, thread);
      run_thread(told, &block, index, 0);
      for (auto& thread : threads) thread.join();
      come(block.written);
    }
  };
  std::vector<std::thread> places;
  for (int i = 1; i < told->at_once; ++i) places.emplace_back(blocks);
  blocks();
  for (auto& place : places) place.join();
}
/* A kernel begins when all blocks of the one in front have said so. */
extern "C" void run_all(Launch* calls, int count) {
  std::vector<std::atomic<int>> begun(count), ended(count);
  std::vector<std::thread> kernels;
  for (int i = 0; i < count; ++i) {
    calls[i].begun = &begun[i];
    calls[i].ended = i ? &ended[i - 1] : nullptr;
    while (i && begun[i - 1] < calls[i - 1].blocks && !stop) std::this_thread::yield();
    kernels.emplace_back([&, i] {
      run(&calls[i]);
      ended[i] = 1;
    });
  }
  for (auto& kernel : kernels) kernel.join();
}
"""

DRIVER = r"""
#include <stdlib.h>
struct Handle { char reserved[64]; };
extern "C" {
int linked = 1;
int cudaDeviceGetP2PAttribute(int* found, int what, int from, int to) {
  *found = linked;
  return what != 3 || from == to;
}
int cudaSetDevice(int device) { return device != 0 && device != 1; }
int cudaMalloc(void** place, size_t size) { return !(*place = aligned_alloc(4096, size)); }
int cudaMemset(void* place, int value, size_t size) { return !memset(place, value, size); }
int cudaDeviceSynchronize() { return 0; }
int cudaIpcGetMemHandle(Handle* handle, void* place) { return !memcpy(handle, &place, 8); }
int cudaIpcOpenMemHandle(void** place, Handle handle, unsigned flags) {
  memcpy(place, &handle, 8);
  return flags != 1 || !memcmp(&handle, "closed", 6);
}
int cuModuleLoadData(void** module, const char* image) { return strncmp(image + 1, "ELF", 3); }
int cuModuleGetFunction(void** function, void*, const char* name) {
  *function = name[0] == 'o' ? (void*)&one_shot_all_reduce : (void*)&two_shot_all_reduce;
  return strcmp(name + 3, "_shot_all_reduce");
}
struct Attribute { int id, padding, value; char rest[60]; };
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
int cuLaunchKernelEx(const Config* config, void* function, void** args, void** extra) {
  const bool two = function == (void*)&two_shot_all_reduce;
  if (config->grid[0] != (two ? 132 : 32) || config->block[0] != (two ? 512 : 256) || extra ||
      config->grid[1] != 1 || config->block[2] != 1 || config->shared || config->stream ||
      config->count != 1 || config->attributes->id != 6 || config->attributes->value != 1)
    return 1;
  Launch told = {*(const void**)args[0], *(void**)args[1], (Workers*)args[2], *(int*)args[3],
                 *(int*)args[4], *(long long*)args[5], *(long long*)args[6], two,
                 (int)config->grid[0], 1, 1};
  run_all(&told, 1);
  return 0;
}
}
"""
"""What of CUDA is called, where a kernel runs when it is launched, on the host."""


class Launch(ctypes.Structure):
    _fields_ = [
        *(("send", ctypes.c_void_p), ("received", ctypes.c_void_p), ("places", ctypes.c_void_p)),
        *(("rank", ctypes.c_int), ("count", ctypes.c_int)),
        *(("units", ctypes.c_longlong), ("most", ctypes.c_longlong), ("two", ctypes.c_bool)),
        *(("blocks", ctypes.c_int), ("threads", ctypes.c_int), ("at_once", ctypes.c_int)),
        *(("begun", ctypes.c_void_p), ("ended", ctypes.c_void_p)),
    ]


def emulated(dtype: str, folder: Path, text: str | None = None) -> ctypes.CDLL:
    """Compile the kernels for a CPU."""
    file, library = folder / "kernel.cc", folder / "kernel.so"
    source = all_reduce.source(dtype) if text is None else text
    defined = "#define BFLOAT16\n" if dtype == "bfloat16" else ""
    file.write_text(defined + EMULATOR + source.replace("#define BFLOAT16 1\n", "") + RUN + DRIVER)
    command = ["g++", "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(file)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Grid:
    """How a kernel runs: blocks of threads, of which some run at once."""

    blocks: int = 1
    threads: int = 1
    at_once: int = 1


def all_workers(
    library: ctypes.CDLL,
    kernel: Kernel,
    grid: Grid,
    sent: list[list[np.ndarray]],
    patience_s: float = 60,
) -> list[list[np.ndarray]]:
    """Return what each worker receives in each of its calls, which it makes as fast as it can.

    It fails where nothing was written for so long, and a worker still waits.
    """
    count = len(sent)
    size = sum(all_reduce.sizes(count).values())
    memory = [np.zeros(size + 16, "uint8") for _ in range(count)]
    places = all_reduce.places([-(-each.ctypes.data // 16) * 16 for each in memory])[kernel]
    most = all_reduce.few(count) if kernel == ONE_SHOT else all_reduce.MOST
    received = [[np.zeros_like(array) for array in calls] for calls in sent]

    def worker(rank: int) -> None:
        calls = (Launch * len(sent[rank]))()
        for i, (array, out) in enumerate(zip(sent[rank], received[rank], strict=True)):
            units = (n // kernel.unit for n in (array.nbytes, most))
            pointers = array.ctypes.data, out.ctypes.data, ctypes.addressof(places)
            how = kernel == TWO_SHOT, grid.blocks, grid.threads, grid.at_once
            calls[i] = Launch(*pointers, rank, count, *units, *how)
        library.run_all(calls, len(calls))

    threads = [Thread(target=worker, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    written = ctypes.c_long.in_dll(library, "written")
    before = -1
    while any(thread.is_alive() for thread in threads) and written.value != before:
        before, until = written.value, time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        ctypes.c_int.in_dll(library, "stop").value = 1
        for thread in threads:
            thread.join()
        ctypes.c_int.in_dll(library, "stop").value = 0  # for who shares the library
        pytest.fail("a worker waits for ever")
    return received
