"""Ahead-of-time compilation: Triton kernels to cubins, with no GPU, driver or torch.

`triton.compile` compiles for any `GPUTarget`; what its own launcher would do at the first call
(checking resources, reading the metadata) is done here.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.errors import TritonError

from ..errors import KernelError
from ..hardware.nvidia import ARCHITECTURES
from ..launch.cache import KernelCache
from ..launch.kernel import CompiledKernel, TensorMapLayout, check_entry
from .kernel import KernelSource

SCRATCH_ALIGN = 256
"""Alignment of what TVM allocates on a CUDA device (that of `cudaMalloc`)."""

Made = CompiledKernel | KernelError
"""A source becomes a kernel, or the error that compiling it raised."""


def compile_kernels(
    sources: Sequence[KernelSource], *, cache: KernelCache | None = None, jobs: int | None = None
) -> list[CompiledKernel]:
    """Compile kernels, several at a time, in order; those in the cache are read from it.

    `sources`: what to compile; equal ones are compiled once.
    `cache`: where compiled kernels are kept; the user's own by default.
    `jobs`: processes; as many as this one may use cores by default.
    Raises `KernelError` if a kernel does not compile, needs more than its device has, or ends the
    compiler.
    """
    made = []
    for kernel in try_kernels(sources, cache=cache, jobs=jobs):
        if isinstance(kernel, KernelError):
            raise kernel
        made.append(kernel)
    return made


def try_kernels(
    sources: Sequence[KernelSource],
    *,
    cache: KernelCache | None = None,
    jobs: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Made]:
    """Compile kernels as `compile_kernels` does; of one that does not compile, return the error.

    `meanwhile`: called when processes that compile have been forked, to begin other work in
    threads.  They must not have locks that Python, Triton or the C library know when this function
    is called.
    Raises `KernelError` if the compiler ends, or an architecture lacks what a source asks for.
    """
    for source in sources:
        _check_device(source)
    cache = cache or KernelCache()
    keys = [source.key() for source in sources]
    done: dict[str, Made] = {
        key: kernel for key in set(keys) if (kernel := cache.get(key)) is not None
    }
    missing = {k: s for k, s in zip(keys, sources, strict=True) if k not in done}
    with _nothing_kept():
        for key, made in _each(missing, jobs or len(os.sched_getaffinity(0)), meanwhile):
            done[key] = made
            if isinstance(made, CompiledKernel):
                cache.put(key, made)
    return [done[key] for key in keys]


def _each(
    sources: Mapping[str, KernelSource], jobs: int, meanwhile: Callable[[], None]
) -> Iterator[tuple[str, Made]]:
    """Yield kernels or errors by their keys, compiled in forked processes where there are several.

    Triton's front end is Python: threads would wait for each other.  A process that is forked has
    the kernels' functions already; it runs no destructor of what it inherits, as of GPU memory.
    """
    if min(jobs, len(sources)) < 2:
        meanwhile()
        yield from ((key, _attempt(key, source)) for key, source in sources.items())
        return
    forked = multiprocessing.get_context("fork")
    workers = min(jobs, len(sources))
    with warnings.catch_warnings():  # of forks beside threads: those of TVM and of CUDA are idle
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = ProcessPoolExecutor(workers, forked, _begin, ({**sources},))
        with pool:
            made = pool.map(_compile_here, sources)  # all processes are forked here
            meanwhile()
            try:
                yield from zip(sources, made, strict=True)
            except BrokenProcessPool as err:
                names = ", ".join(sorted({source.name for source in sources.values()}))
                raise KernelError(f"a compiler of {names} ended; jobs=1 shows how") from err


_inherited: Mapping[str, KernelSource] = {}


def _begin(sources: Mapping[str, KernelSource]) -> None:
    """Prepare a forked process; the parent answers to an interruption."""
    global _inherited
    _inherited = sources
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile_here(key: str) -> Made:
    return _attempt(key, _inherited[key])


def _attempt(key: str, source: KernelSource) -> Made:
    try:
        return _compile(key, source)
    except KernelError as err:
        return err


_KNOBS = threading.Lock()  # Triton's settings are the process's


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """Keep Triton from reading or filling its own cache, which has no checksums."""
    with (
        _KNOBS,
        tempfile.TemporaryDirectory() as directory,
        knobs.cache.scope(),
        knobs.compilation.scope(),
    ):
        knobs.cache.dir = directory
        knobs.compilation.always_compile = True
        yield


def _check_device(source: KernelSource) -> None:
    """Refuse what an architecture lacks, before the compiler fails in words of its own."""
    if source.capability not in ARCHITECTURES:
        raise KernelError(f"{source.name}: there is no architecture sm_{source.capability}")
    has = ARCHITECTURES[source.capability].capabilities
    if not has.async_copies:
        raise KernelError(f"{source.name}: sm_{source.capability} is older than sm_80")
    wants = {
        "num_ctas > 1 (clusters)": (source.options.num_ctas > 1, has.clusters),
        "dependent_launch": (source.options.dependent_launch, has.dependent_launch),
        "a tensor map": (any(t.startswith("tensordesc") for t in source.types.values()), has.tma),
    }
    for what, (wanted, had) in wants.items():
        if wanted and not had:
            raise KernelError(
                f"{source.name}: {what} needs sm_90 or newer; the target is sm_{source.capability}"
            )


def _compile(key: str, source: KernelSource) -> CompiledKernel:
    """Compile one kernel.  Triton reports bad code by its own errors, RuntimeErrors and asserts."""
    try:
        built = triton.compile(
            source.ast(), target=source.gpu_target, options=source.options.for_triton()
        )
    except (TritonError, RuntimeError, AssertionError, ValueError) as err:
        kinds = ", ".join(f"{name}: {kind}" for name, kind in source.types.items())
        raise KernelError(
            f"{source.name}({kinds}) does not compile for sm_{source.capability}: {err}"
        ) from err
    kernel = _compiled(key, source, built)
    check_entry(kernel)
    check_resources(kernel, built.metadata.profile_scratch_size)
    return kernel


def _compiled(key: str, source: KernelSource, built: Any) -> CompiledKernel:
    meta = built.metadata
    runtime = [name for name, kind in source.types.items() if kind != "constexpr"]
    return CompiledKernel(
        symbol=f"{source.name}_{key}",
        entry=meta.name,
        capability=source.capability,
        constants=tuple((n, str(getattr(v, "__name__", v))) for n, v in source.constexprs.items()),
        params=tuple(source.types[name] for name in runtime),
        aligned=tuple(name in source.aligned for name in runtime),
        tensor_maps=tuple(_tensor_map(m) for m in meta.tensordesc_meta or ()),
        options=source.options.launch,
        num_warps=meta.num_warps,
        shared_bytes=meta.shared,
        scratch_bytes=meta.global_scratch_size,
        scratch_align=meta.global_scratch_align,
        image=built.asm["cubin"],
        ptx=built.asm["ptx"].encode(),
    )


# Device code numbers the element types of tensor maps otherwise than the driver's
# ``CUtensorMapDataType`` does: there, 8 is float32 with denormals flushed.
_DRIVER_TYPE = {8: 10, 9: 8, 10: 9}


def _tensor_map(meta: dict[str, Any]) -> TensorMapLayout:
    if meta["fp4_padded"] or meta.get("is_im2col"):
        raise KernelError("tensor maps of fp4 data and im2col ones are not supported")
    return TensorMapLayout(
        block=tuple(meta["block_size"]),
        element_bytes=meta["elem_size"],
        element_type=_DRIVER_TYPE.get(meta["elem_type"], meta["elem_type"]),
        swizzle=meta["swizzle"],
    )


def check_resources(kernel: CompiledKernel, profiler_bytes: int) -> None:
    """Check that a launch can give a kernel what it needs.

    Raises `KernelError` if it needs more shared memory than a thread block has, global memory that
    is aligned better than TVM's, or the buffer of Triton's profiler.
    """
    limit = ARCHITECTURES[kernel.capability].smem_per_block_bytes
    if limit and kernel.shared_bytes > limit:
        raise KernelError(
            f"{kernel.entry} needs {kernel.shared_bytes} bytes of shared memory; {kernel.arch} has "
            f"{limit} per thread block: use smaller tiles or fewer stages"
        )
    if kernel.scratch_align > SCRATCH_ALIGN:
        raise KernelError(
            f"{kernel.entry} needs global memory aligned to {kernel.scratch_align} bytes; a tensor "
            f"of TVM's begins at a multiple of {SCRATCH_ALIGN}"
        )
    if profiler_bytes:
        raise KernelError(f"{kernel.entry} was compiled with Triton's profiler; turn it off")
