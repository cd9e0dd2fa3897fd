"""All-reduces by kernels that write to all workers: see ``all_reduce.cu``.

Between GPUs of one machine that NVLink connects, by memory that processes share (CUDA IPC).  Other
collectives, and sums of other numbers, are NCCL's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import RelaxFusionError, warn
from ..files import read_file
from ..launch.nvrtc import require_nvrtc
from .nccl import find_libraries
from .worker import Worker

MOST_WORKERS = 8


@dataclass(frozen=True)
class Kernel:
    """One of the two kernels; its grid is for every call the same."""

    name: str  # of the function
    blocks: int  # of its grid
    threads: int  # of a block
    unit: int  # bytes that a thread moves at once


ONE_SHOT = Kernel("one_shot_all_reduce", 32, 256, 8)
TWO_SHOT = Kernel("two_shot_all_reduce", 132, 512, 16)
"""A third of the blocks sends, another adds.  Two of them fit on a multiprocessor."""

FEW = 1 << 19
"""Bytes that one of two workers sends the one-shot way, which takes twice as many; more workers
send as many to all others together.  This and the other sizes were the fastest of some on two H200s
(`2026-11-29-parallel.log`)."""

MOST = 1 << 25
"""Bytes of a call of the two-shot kernel, for which there is memory; more take several calls."""

CHUNK, EACH = 4096, 4
"""Vectors of the two-shot kernel: most behind one flag, and those that a thread has under way."""

COUNTS = 4096
"""Bytes in front of a kernel's memory, for the counts of calls."""

DTYPES = ("float16", "bfloat16")
NAME = "runtime.disco.nccl.allreduce"

_SUM = 0
_HOPPER = 9.0
_DEPENDENT_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LAZY_PEER_ACCESS = 1
_ATOMICS = 3  # cudaDevP2PAttrNativeAtomicSupported: by NVLink, and not by PCIe
_MEMORY, _LAUNCH = "memory of all-reduces", "launches of all-reduces"


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
    """Return the kernels for numbers of a type."""
    text = read_file(Path(__file__).with_name("all_reduce.cu")).decode()
    known = {"MOST_WORKERS": MOST_WORKERS, "COUNTS": COUNTS, "CHUNK": CHUNK, "EACH": EACH}
    known |= {"FLAGS": flags()} | ({"BFLOAT16": 1} if dtype == "bfloat16" else {})
    return "".join(f"#define {name} {value}\n" for name, value in known.items()) + text


def flags() -> int:
    """Return the most chunks of a worker's part: none has more than where there are two."""
    return -(-MOST // TWO_SHOT.unit // 2 // CHUNK) + TWO_SHOT.blocks // 3


def few(count: int) -> int:
    """Return the most bytes that so many workers send the one-shot way."""
    return FEW // max(count - 1, 1) // 16 * 16


def sizes(count: int) -> dict[Kernel, int]:
    """Return the bytes of a worker's memory for each kernel."""
    part = -(-MOST // TWO_SHOT.unit // count) * TWO_SHOT.unit
    rooms = 2 * (count - 1)  # for numbers and for sums, of each other worker
    return {
        ONE_SHOT: COUNTS + 2 * count * 2 * few(count),
        TWO_SHOT: COUNTS + 2 * MOST_WORKERS * flags() * 4 + rooms * part,
    }


def share(worker: Worker) -> bytes:
    """Allocate a worker's memory, load its kernels; return by what its peers open the memory.

    That is nothing where NVLink does not connect it with all others, or CUDA or NVRTC fails, which
    a warning says.
    """
    return _attempted(_shared, worker) or b""


def join(worker: Worker, handles: Sequence[bytes]) -> bool:
    """Open the memories of all workers; tell whether that was possible."""
    return _attempted(_joined, worker, handles) or False


def use(worker: Worker) -> None:
    """Have the all-reduces of a worker that has joined all others go by its kernels."""
    nccl = tvm_ffi.get_global_func(NAME)
    all_reduce = reducing(worker.kept[_LAUNCH], nccl, worker.count)
    tvm_ffi.register_global_func(NAME, all_reduce, override=True)


def _attempted(step: Callable[..., Any], *given: Any) -> Any:
    try:
        return step(*given)
    except (RelaxFusionError, RuntimeError, OSError) as err:
        warn(f"all-reduces between these GPUs are NCCL's: {err}")
        return None


def _shared(worker: Worker) -> bytes:
    cuda, size = _runtime(), sum(sizes(worker.count).values())
    for peer in range(worker.count):
        linked = ctypes.c_int(1)
        if peer != worker.rank:
            pair = worker.rank, peer
            code = cuda.cudaDeviceGetP2PAttribute(ctypes.byref(linked), _ATOMICS, *pair)
            _checked(code, "cudaDeviceGetP2PAttribute")
        if not linked.value:
            return b""
    place, handle = ctypes.c_void_p(), Handle()
    _checked(cuda.cudaSetDevice(worker.rank), "cudaSetDevice")
    _checked(cuda.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(size)), "cudaMalloc")
    _checked(cuda.cudaMemset(place, 0, ctypes.c_size_t(size)), "cudaMemset")
    _checked(cuda.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
    _checked(cuda.cudaIpcGetMemHandle(ctypes.byref(handle), place), "cudaIpcGetMemHandle")
    version = worker.tvm_device.compute_version
    kernels = {dtype: loaded(dtype, f"sm_{version.replace('.', '')}") for dtype in DTYPES}
    worker.kept[_MEMORY] = place, kernels, float(version) >= _HOPPER
    return bytes(handle)


def _joined(worker: Worker, handles: Sequence[bytes]) -> bool:
    cuda, where = _runtime(), list[int]()
    own, *how = worker.kept[_MEMORY]
    for rank, given in enumerate(handles):
        place = own
        if rank != worker.rank:
            place, handle = ctypes.c_void_p(), Handle.from_buffer_copy(given)
            code = cuda.cudaIpcOpenMemHandle(ctypes.byref(place), handle, _LAZY_PEER_ACCESS)
            _checked(code, "cudaIpcOpenMemHandle")
        where.append(place.value)
    worker.kept[_LAUNCH] = Launcher(worker, places(where), *how)
    return True


def places(memories: Sequence[int]) -> dict[Kernel, Places]:
    """Return where each kernel's memory is in those of all workers."""
    found, begin = dict[Kernel, Places](), 0
    for kernel, size in sizes(len(memories)).items():
        found[kernel] = Places()
        found[kernel].at[: len(memories)] = [memory + begin for memory in memories]
        begin += size
    return found


def reducing(
    launch: Callable[[Kernel, Any, Any, int, int], None], nccl: Callable[..., None], count: int
) -> Callable[..., None]:
    """Return the all-reduce that launches our kernels for sums of 16-bit numbers, else NCCL's."""

    def all_reduce(send: Any, kind: int, in_group: bool, received: Any) -> None:
        size, at = 2 * prod(map(int, send.shape)), 0
        if kind != _SUM or str(send.dtype) not in DTYPES or size % ONE_SHOT.unit or not size:
            nccl(send, kind, in_group, received)
            return
        while at < size:
            part, kernel = size - at, ONE_SHOT
            if part > few(count):
                kernel = TWO_SHOT
                part = min(part, MOST) // kernel.unit * kernel.unit
            launch(kernel, send, received, at, part)
            at += part

    return all_reduce


@dataclass(frozen=True)
class Launcher:
    """Launches kernels of a worker on the stream of the caller, which may be recorded.

    Where the GPU can (`dependent`), a kernel begins before the one in front has ended, for which it
    waits itself.  `kernels` are those of a type, by name.
    """

    worker: Worker
    places: dict[Kernel, Places]
    kernels: dict[str, dict[str, Any]]
    dependent: bool

    def __call__(self, kernel: Kernel, send: Any, received: Any, at: int, size: int) -> None:
        """Reduce so many bytes, from a byte on."""
        most = few(self.worker.count) if kernel == ONE_SHOT else MOST
        given = [
            *(ctypes.c_void_p(tensor.data_ptr() + at) for tensor in (send, received)),
            self.places[kernel],
            *(ctypes.c_int(self.worker.rank), ctypes.c_int(self.worker.count)),
            *(ctypes.c_longlong(n // kernel.unit) for n in (size, most)),
        ]
        args = (ctypes.c_void_p * len(given))(*(ctypes.addressof(value) for value in given))
        attribute = Attribute(_DEPENDENT_LAUNCH, 0, 1)
        stream = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", self.worker.rank))
        shape = (kernel.blocks, 1, 1), (kernel.threads, 1, 1)
        config = Config(*shape, 0, stream, ctypes.pointer(attribute), int(self.dependent))
        function = self.kernels[str(send.dtype)][kernel.name]
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), function, args, None)
        _checked(code, "cuLaunchKernelEx")


def loaded(dtype: str, arch: str) -> dict[str, Any]:
    """Return the kernels for a type, compiled and loaded on the current device."""
    cubin, _ = require_nvrtc().compile("all_reduce", source(dtype), arch)
    module, driver = ctypes.c_void_p(), _driver()
    _checked(driver.cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
    functions = {kernel.name: ctypes.c_void_p() for kernel in (ONE_SHOT, TWO_SHOT)}
    for name, function in functions.items():
        code = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _checked(code, "cuModuleGetFunction")
    return functions


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(str(find_libraries()[0]))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with the CUDA error {code}")
