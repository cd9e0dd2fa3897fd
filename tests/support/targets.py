"""Targets other than CUDA and CPU, kernels lowered for them, and the code that TVM makes of those.

Lowering needs nothing but TVM; code can be generated where TVM was built with the generator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.target import Target
from tvm.tirx.build import split_host_device_mods

from relax_fusion import Report
from relax_fusion.workload import DTYPE_BYTES

from .chains import Chain, module

_ALL_VULKAN = ("float16", "int8", "int16", "int64", "8bit_buffer", "16bit_buffer")

TARGETS: dict[str, Target] = {
    name: Target(config, host="llvm")
    for name, config in {
        "metal": {"kind": "metal", "max_threads_per_block": 1024, "thread_warp_size": 32},
        "opencl": {"kind": "opencl"},
        "adreno": {"kind": "opencl", "device": "adreno"},
        "mali": {"kind": "opencl", "device": "mali"},
        "webgpu": {"kind": "webgpu"},
        "vulkan": {"kind": "vulkan"},
        "vulkan_half": {"kind": "vulkan", **{f"supports_{what}": True for what in _ALL_VULKAN}},
        "rocm": {"kind": "rocm", "mcpu": "gfx90a"},
    }.items()
}


@dataclass(frozen=True)
class Kernel:
    """What a lowered kernel asks of its device.

    Parameters
    ----------
    threads : int
        Threads of a block.
    axes : frozenset of str
        Grid and block dimensions that it uses.
    shared : dict of str to int
        Bytes of shared memory by the name of the buffer.
    dtypes : frozenset of str
        Element types of its parameters and buffers.
    vector_bytes : int
        The widest load or store.
    text : str
        The function.
    """

    threads: int
    axes: frozenset[str]
    shared: dict[str, int]
    dtypes: frozenset[str]
    vector_bytes: int
    text: str


@dataclass(frozen=True)
class Compiled:
    """A chain through the pipeline: what was decided, and its functions for the device."""

    report: Report
    target: Target
    device: ir.IRModule

    def kernels(self) -> list[Kernel]:
        """Describe every kernel."""
        return [_kernel(func) for func in self.device.functions.values()]

    def source(self) -> str:
        """Generate the code, or say that this TVM has no generator of it (None)."""
        build = tvm.get_global_func(f"target.build.{self.target.kind.name}")
        if self.target.kind.name != "rocm":
            return build(self.device, self.target).inspect_source()
        with _without_rocm():
            return build(self.device, self.target).inspect_source("llvm")


def generator(target: Target) -> str | None:
    """Return why no code can be generated for `target` here; None where it can."""
    name = f"target.build.{target.kind.name}"
    if tvm.get_global_func(name, allow_missing=True) is None:
        return f"needs a TVM that was built with {name}"
    return None


def compile_chain(chain: Chain, target: Target, **options: object) -> Compiled:
    """Run the pipeline as a user would, and lower its kernels up to the generation of code."""
    report = Report()
    given = {"always_fuse": True, **options}
    pipeline = relax.get_pipeline("relax_fusion", target=target, report=report, **given)
    mod = pipeline(module([chain]))
    kernels = {g: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    lowered = tirx.transform.BindTarget(target)(ir.IRModule(kernels))
    lower, _, finish = tirx.get_tir_pipeline("default")
    _, devices = split_host_device_mods(lower(lowered))
    merged = ir.IRModule({})
    for part in devices.values():
        merged.update(finish()(part))
    return Compiled(report, target, merged)


def _kernel(func: tirx.PrimFunc) -> Kernel:
    threads: dict[str, int] = {}
    shared: dict[str, int] = {}
    dtypes = {str(p.ty.dtype) for p in func.params if tirx.is_buffer_var(p)}
    widest = 0

    def attr(node: tirx.AttrStmt) -> None:
        if node.attr_key == "thread_extent" and node.node.thread_tag.startswith("threadIdx"):
            threads[node.node.thread_tag] = int(node.value)

    def buffer(node: tirx.AllocBuffer | tirx.DeclBuffer) -> None:
        ty = node.buffer.ty
        dtypes.add(str(ty.dtype))
        if isinstance(node, tirx.AllocBuffer) and ty.storage_scope.startswith("shared"):
            size = math.prod(int(n) for n in ty.shape)
            shared[node.buffer.name] = size * DTYPE_BYTES.get(str(ty.dtype), 4)

    def access(node: ir.Expr) -> None:
        nonlocal widest
        bits = re.fullmatch(r"[a-z]+(\d+)x(\d+)", str(node.ty.dtype))
        if bits is not None:
            widest = max(widest, int(bits[1]) * int(bits[2]) // 8)

    tvm_ffi.structural_walk(
        func.body,
        [
            (tirx.AttrStmt, attr),
            ((tirx.AllocBuffer, tirx.DeclBuffer), buffer),
            (ir.TensorLoad, access),
        ],
    )
    axes = frozenset(str(a) for a in func.attrs["tirx.kernel_launch_params"])
    text = func.script(show_meta=False)
    return Kernel(math.prod(threads.values()), axes, shared, frozenset(dtypes), widest, text)


@contextmanager
def _without_rocm() -> Iterator[None]:
    """Generate code for AMD without ROCm: functions of its device library stay unresolved."""
    unlinked: dict[str, Callable] = {
        "tvm_callback_rocm_bitcode_path": lambda *_: [],
        "tvm_callback_rocm_link": lambda binary: binary,
    }
    known = {name: tvm.get_global_func(name) for name in unlinked}
    for name, function in unlinked.items():
        tvm.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        for name, function in known.items():
            tvm.register_global_func(name, function, override=True)
