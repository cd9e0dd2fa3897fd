"""Kernels of TVM's in CUDA C++, what it takes to launch them, and how they are compiled."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event, Semaphore

import tvm
from tvm import ir, tirx

from ..errors import KernelError
from ..hardware.nvidia import native_arch
from ..hardware.target import compute_capability
from ..transforms.modules import module_of
from .cache import KernelCache
from .kernel import CompiledKernel, LaunchOptions, TensorMapLayout, c_type, check_entry
from .nvrtc import OPTIONS, Nvrtc, find_nvrtc, require_nvrtc

_FORMAT = 3
_FORCE = "TVM_COMPILE_FORCE_FALLBACK"
_SIZES = ("blockIdx.", "threadIdx.", "clusterCtaIdx.", "tirx.use_dyn_shared_memory")
_FLAGS = {
    "tirx.use_cooperative_launch": "cooperative",
    "tirx.use_programtic_dependent_launch": "dependent_launch",
}


@dataclass(frozen=True)
class CUDASource:
    """A kernel in CUDA C++, and how it is launched.

    `aligned` says which parameters must be multiples of `ALIGNMENT`: none, where it is empty.
    """

    entry: str
    text: str
    capability: int
    params: tuple[str, ...]
    block: tuple[int, int, int]
    shared_bytes: int
    options: LaunchOptions
    tensor_maps: tuple[TensorMapLayout, ...] = ()
    aligned: tuple[bool, ...] = ()

    def key(self, nvrtc: Nvrtc) -> str:
        """Return 16 hex digits that hash all that a cubin is made of."""
        described = [self.text, native_arch(self.capability), self.params, self.block]
        launch = [self.shared_bytes, repr(self.options), repr(self.tensor_maps), self.aligned]
        made_by = [_FORMAT, nvrtc.version, OPTIONS, list(map(str, nvrtc.includes))]
        text = json.dumps([*described, *launch, *made_by])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def compile(self, key: str, nvrtc: Nvrtc) -> CompiledKernel:
        """Return the kernel; raise `KernelError` if it does not compile."""
        image, ptx = nvrtc.compile(self.entry, self.text, native_arch(self.capability))
        x, y, z = self.block
        kernel = CompiledKernel(
            symbol=f"{self.entry}_{key}",
            entry=self.entry,
            capability=self.capability,
            constants=(),
            params=self.params,
            aligned=self.aligned or (False,) * len(self.params),
            tensor_maps=self.tensor_maps,
            options=self.options,
            num_warps=-(-x * y * z // 32),
            shared_bytes=self.shared_bytes,
            scratch_bytes=0,
            scratch_align=1,
            image=image,
            ptx=ptx,
            convention="cuda",
            block=self.block,
        )
        check_entry(kernel)
        return kernel


class SourceCompiler:
    """Compiles kernels in threads, while others work; those in the cache are read from it.

    NVRTC needs no Python, so as many threads run as this process may use cores.  By default the
    installed NVRTC compiles, and the user's own cache is used.
    """

    def __init__(self, nvrtc: Nvrtc | None = None, cache: KernelCache | None = None):
        self._nvrtc, self._cache = nvrtc, cache or KernelCache()
        self._jobs = len(os.sched_getaffinity(0))
        self._pool, self._slots = ThreadPoolExecutor(self._jobs), Semaphore(self._jobs)
        self._open = Event()
        self._open.set()
        self._made: dict[CUDASource, Future[CompiledKernel]] = {}

    def start(self, sources: Iterable[CUDASource]) -> None:
        """Begin to compile those of `sources` that are new."""
        for source in sources:
            if source not in self._made:
                self._made[source] = self._pool.submit(self._compiled, source)

    def kernel(self, source: CUDASource) -> CompiledKernel:
        """Return a kernel that was started, when it is there.

        Raises `KernelError` if it does not compile.
        """
        return self._made[source].result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Compile nothing in a block that forks: whatever is under way may hold locks."""
        self._open.clear()  # else threads would take the slots that they give back again
        for _ in range(self._jobs):
            self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release(self._jobs)
            self._open.set()

    def __enter__(self) -> SourceCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is under way, and leave out what has not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _compiled(self, source: CUDASource) -> CompiledKernel:
        self._open.wait()
        with self._slots:
            nvrtc = self._nvrtc or require_nvrtc()
            key = source.key(nvrtc)
            kernel = self._cache.get(key)
            if kernel is None:
                kernel = source.compile(key, nvrtc)
                self._cache.put(key, kernel)
            return kernel


_running: ContextVar[SourceCompiler | None] = ContextVar("running", default=None)


@contextmanager
def source_compiler() -> Iterator[SourceCompiler]:
    """Give the compiler of the block around, a pipeline's; without one, make it for this block.

    Behind the block that made it, none of its threads is left.
    """
    running = _running.get()
    if running is not None:
        yield running
        return
    with SourceCompiler() as compiler:
        token = _running.set(compiler)
        try:
            yield compiler
        finally:
            _running.reset(token)


def compiler_of_pipeline() -> SourceCompiler | None:
    """Return the compiler of the block around, None if there is none, or no NVRTC."""
    return _running.get() if find_nvrtc() is not None else None


@dataclass(frozen=True)
class LaunchCall:
    """A launch in a lowered PrimFunc: a kernel's name and arguments, sizes by tag, and flags."""

    kernel: str
    args: tuple[ir.Expr, ...]
    sizes: Mapping[str, ir.Expr]
    flags: tuple[str, ...]

    @staticmethod
    def of(call: ir.Call) -> LaunchCall:
        """Take a call apart."""
        name, *args = call.args
        tags = [str(tag) for tag in call.attrs["launch_params"]]
        flags = tuple(tag for tag in tags if tag in _FLAGS)
        named = [tag for tag in tags if tag not in _FLAGS]
        count = len(args) - len(named)
        sizes = dict(zip(named, args[count:], strict=True))
        return LaunchCall(str(name.value), tuple(args[:count]), sizes, flags)

    def constant(self, tag: str, default: int = 1) -> int:
        """Return a size that is part of the kernel."""
        size = self.sizes.get(tag, tirx.const(default, "int64"))
        if not isinstance(size, tirx.IntImm):
            raise KernelError(f"{self.kernel}: {tag} is {size}; it must be a number")
        return int(size.value)


def source_of(launch: LaunchCall, device: ir.IRModule) -> CUDASource:
    """Return the kernel of a launch in CUDA C++.

    Raises `KernelError` if the launcher cannot launch it.
    """
    for tag in launch.sizes:
        if not tag.startswith(_SIZES):
            raise KernelError(f"{launch.kernel}: {tag} is not known to the launcher")
    cluster = [launch.constant(f"clusterCtaIdx.{axis}") for axis in "xyz"]
    if cluster[1:] != [1, 1]:
        raise KernelError(f"{launch.kernel}: its clusters are {cluster}; they must be a row")
    x, y, z = (launch.constant(f"threadIdx.{axis}") for axis in "xyz")
    func = device[launch.kernel]
    return CUDASource(
        entry=launch.kernel,
        text=_text(launch.kernel, func),
        capability=compute_capability(func.attrs["target"]),
        params=tuple(_kind(param) for param in func.params),
        block=(x, y, z),
        shared_bytes=launch.constant("tirx.use_dyn_shared_memory", 0),
        options=LaunchOptions(cluster[0], **{_FLAGS[flag]: True for flag in launch.flags}),
    )


def _kind(param: tirx.Var) -> str:
    """Return the type of a kernel's parameter as `CompiledKernel` spells it."""
    if not isinstance(param.ty, ir.PrimType):
        return "*u8"
    dtype = str(param.ty.dtype)
    kind = "i1" if dtype == "bool" else dtype
    for name, short in (("uint", "u"), ("int", "i"), ("float", "fp")):
        kind = kind.replace(name, short)
    c_type(kind)
    return kind


def _text(name: str, func: tirx.PrimFunc) -> str:
    """Return a kernel in CUDA C++."""
    with _source_only():
        build = tvm.get_global_func("target.build.cuda")
        made = build(module_of({ir.GlobalVar(name): func}), func.attrs["target"])
    return made.inspect_source("cuda")


@contextmanager
def _source_only() -> Iterator[None]:
    """Keep TVM from compiling CUDA C++ itself, which it does where there is a GPU."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
