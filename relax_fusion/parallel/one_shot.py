"""All-reduces of few bytes by one kernel, which writes to all workers: see ``one_shot.cu``.

Between GPUs of one machine, by memory that processes share (CUDA IPC).  More bytes, and other
collectives, are NCCL's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import tvm_ffi

from ..files import read_file
from ..launch.nvrtc import require_nvrtc
from .nccl import find_libraries
from .worker import Worker
from .workers import MOST_GPUS

MOST_WORKERS, BLOCKS, THREADS = MOST_GPUS, 32, 256
AREAS = 4096
"""Where the areas for what is received begin, behind the counts."""

PAIR = 8
"""Bytes that are sent together: two words, which take twice as many."""

DTYPES = ("float16", "bfloat16")
NAME = "runtime.disco.nccl.allreduce"

_SUM = 0
_HOPPER = 9.0
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LAZY_PEER_ACCESS = 1
_MEMORY = "one-shot memory"


class Handle(ctypes.Structure):
    """By what another process opens memory: ``cudaIpcMemHandle_t``."""

    _fields_ = [("reserved", ctypes.c_char * 64)]


class Places(ctypes.Structure):
    """Where the memories of all workers are."""

    _fields_ = [("at", ctypes.c_void_p * MOST_WORKERS)]


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` of a value that is a number."""

    _fields_ = [
        *(("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int)),
        ("rest", ctypes.c_char * 60),
    ]


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute))),
        ("count", ctypes.c_uint),
    ]


def source(dtype: str) -> str:
    """Return the kernel for numbers of a type."""
    text = read_file(Path(__file__).with_name("one_shot.cu")).decode()
    which = "#define BFLOAT16\n" if dtype == "bfloat16" else ""
    return f"#define MOST_WORKERS {MOST_WORKERS}\n#define AREAS {AREAS}\n{which}{text}"


def size_of_memory(count: int, capacity: int) -> int:
    """Return the bytes of a worker's memory for all-reduces of so many bytes."""
    return AREAS + 2 * count * 2 * capacity


def share(worker: Worker, capacity: int) -> bytes:
    """Allocate a worker's memory; return by what its peers open it."""
    place, handle = ctypes.c_void_p(), Handle()
    cuda = _runtime()
    size = size_of_memory(worker.count, capacity)
    _checked(cuda.cudaSetDevice(worker.rank), "cudaSetDevice")
    _checked(cuda.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size)), "cudaMalloc")
    _checked(cuda.cudaMemset(place, 0, ctypes.c_size_t(size)), "cudaMemset")
    _checked(cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    _checked(cuda.cudaIpcGetMemHandle(ctypes.byref(handle), place), "cudaIpcGetMemHandle")
    worker.kept[_MEMORY] = place
    return bytes(handle)


def use(worker: Worker, handles: Sequence[bytes], capacity: int) -> None:
    """Open the memories of all workers, and have their all-reduces of few bytes go by them."""
    places = opened(worker, handles)
    version = worker.tvm_device.compute_version
    kernels = {dtype: loaded(dtype, f"sm_{version.replace('.', '')}") for dtype in DTYPES}
    nccl = tvm_ffi.get_global_func(NAME)
    dependent = float(version) >= _HOPPER
    launch = partial(launched, worker, places, kernels, capacity, dependent)
    tvm_ffi.register_global_func(NAME, reducing(launch, nccl, capacity), override=True)


def opened(worker: Worker, handles: Sequence[bytes]) -> Places:
    """Return where a worker finds the memories of all workers."""
    cuda, places = _runtime(), Places()
    for rank, given in enumerate(handles):
        place = worker.kept[_MEMORY]
        if rank != worker.rank:
            place, handle = ctypes.c_void_p(), Handle.from_buffer_copy(given)
            code = cuda.cudaIpcOpenMemHandle(ctypes.byref(place), handle, _LAZY_PEER_ACCESS)
            _checked(code, "cudaIpcOpenMemHandle")
        places.at[rank] = place.value
    return places


def reducing(
    launch: Callable[[Any, Any], None], nccl: Callable[..., None], capacity: int
) -> Callable[..., None]:
    """Return the all-reduce that launches our kernel for sums of few bytes, else NCCL's."""

    def all_reduce(send: Any, kind: int, in_group: bool, received: Any) -> None:
        moved = _bytes(send)
        few = 0 < moved <= capacity and moved % PAIR == 0
        if few and kind == _SUM and str(send.dtype) in DTYPES:
            launch(send, received)
        else:
            nccl(send, kind, in_group, received)

    return all_reduce


def _bytes(tensor: Any) -> int:
    return 2 * prod(map(int, tensor.shape))


def launched(
    worker: Worker,
    places: Places,
    kernels: dict[str, Any],
    capacity: int,
    dependent: bool,
    send: Any,
    received: Any,
) -> None:
    """Launch the kernel on the stream of the caller, which may be recorded.

    Where the GPU can, it begins before the kernel in front has ended, for which it waits itself.
    """
    stream = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", worker.rank))
    given = [
        *(ctypes.c_void_p(send.data_ptr()), ctypes.c_void_p(received.data_ptr()), places),
        *(ctypes.c_int(worker.rank), ctypes.c_int(worker.count)),
        *(ctypes.c_longlong(_bytes(send) // PAIR), ctypes.c_longlong(capacity // PAIR)),
    ]
    args = (ctypes.c_void_p * len(given))(*(ctypes.addressof(value) for value in given))
    attribute = Attribute(_DEPENDENT_LAUNCH, 0, 1)
    config = Config((BLOCKS, 1, 1), (THREADS, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
    config.count = int(dependent)
    kernel = kernels[str(send.dtype)]
    code = _driver().cuLaunchKernelEx(ctypes.byref(config), kernel, args, None)
    _checked(code, "cuLaunchKernelEx")


def loaded(dtype: str, arch: str) -> ctypes.c_void_p:
    """Return the kernel for a type, compiled and loaded on the current device."""
    cubin, _ = require_nvrtc().compile("one_shot_all_reduce", source(dtype), arch)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    _checked(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    name = b"one_shot_all_reduce"
    code = driver.cuModuleGetFunction(ctypes.byref(function), module, name)
    _checked(code, "cuModuleGetFunction")
    return function


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_libraries()[0]))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with the CUDA error {code}")
