"""The pass that compiles CUDA kernels ahead of time, instead of on load of the library.

TVM puts kernels of its own into a library as source, where no GPU is, and compiles that by a Python
function when it is loaded.  Here each becomes a cubin and is launched like a Triton kernel, so that
nothing of Python is needed any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import tvm
from tvm import ir, tirx
from tvm.target import Target

from ..errors import KernelError
from ..hardware.target import is_cuda
from ..transforms.modules import KERNELS_ATTR, module_of, module_pass, with_functions
from ..tvm_ir import structural_map, structural_walk
from .body import kernel_attr
from .cuda_source import CUDASource, LaunchCall, SourceCompiler, source_of
from .kernel import CompiledKernel
from .nvrtc import Nvrtc

_LOG = logging.getLogger(__name__)
_IS_KERNEL = "tirx.is_global_func"
_AFTER_LAUNCHES = ("tirx.MakePackedAPI", "tirx.FP8StorageLegalize", "tirx.BF16StorageLegalize")
"""Passes behind the one that makes kernels and launches of a PrimFunc."""


@module_pass
class CompileCUDAKernels:
    """Compile the CUDA kernels of all PrimFuncs, and leave launches of them.

    rewrite::

        T.launch_thread("blockIdx.x", n): ...  ->  T.call_cpacked("launch_f_1f2e", ..., n, 1, 1)

    It comes behind all passes that look into PrimFuncs, and in front of `EmbedTritonKernels`.  A
    PrimFunc that launches what the library's launcher cannot (blocks of a size that is not known,
    arguments in half precision) stays as it is, with a warning.
    """

    target: Target  # that of PrimFuncs without one
    nvrtc: Nvrtc  # the compiler

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module without kernels in CUDA C++."""
        mine = dict(self._on_cuda(mod))
        if not mine:
            return mod
        host, device = _split(module_of(mine))
        sources: dict[str, CUDASource] = {}
        launching: dict[ir.GlobalVar, tirx.PrimFunc] = {}
        for gvar in mine:
            func = host[gvar.name_hint]
            try:
                made = [source_of(launch, device) for launch in _launches(func)]
            except KernelError as err:
                _LOG.warning("%s is compiled when the library is loaded: %s", gvar.name_hint, err)
                continue
            sources |= {source.entry: source for source in made}
            if made:
                launching[gvar] = func
        with SourceCompiler(self.nvrtc) as compiler:
            compiler.start(sources.values())
            kernels = {name: compiler.kernel(source) for name, source in sources.items()}
        return with_functions(mod, {g: _launching(f, kernels) for g, f in launching.items()})

    def _on_cuda(self, mod: ir.IRModule) -> Iterator[tuple[ir.GlobalVar, tirx.PrimFunc]]:
        """Return the PrimFuncs that launch kernels, each with its target."""
        for gvar, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or "tirx.is_host_func" in (func.attrs or {}):
                continue
            target = func.attrs.get("target", self.target) if func.attrs else self.target
            if is_cuda(target):
                target = target if target.host else target.with_host(Target("llvm"))
                yield gvar, func.with_attr("target", target)


def _split(mod: ir.IRModule) -> tuple[ir.IRModule, ir.IRModule]:
    """Lower PrimFuncs by TVM's own pipeline: return those of the host, and those of the device."""
    now = tvm.transform.PassContext.current()
    skipped = [*now.disabled_pass, *_AFTER_LAUNCHES]
    lower, _, finalize = tirx.get_tir_pipeline("default")
    with tvm.transform.PassContext(
        now.opt_level, now.required_pass, skipped, config=dict(now.config)
    ):
        lowered = lower(mod)
    legalize = [tirx.transform.FP8StorageLegalize(), tirx.transform.BF16StorageLegalize()]
    device = tirx.transform.Filter(lambda func: _IS_KERNEL in func.attrs)(lowered)
    host = tirx.transform.Filter(lambda func: _IS_KERNEL not in func.attrs)(lowered)
    return host, tvm.transform.Sequential([*legalize, finalize()])(device)


def _launches(func: tirx.PrimFunc) -> list[LaunchCall]:
    """Return the launches of kernels in a lowered PrimFunc."""
    found: list[LaunchCall] = []

    def look(call: ir.Call) -> None:
        if call.op.same_as(_LAUNCH):
            found.append(LaunchCall.of(call))

    structural_walk(func.body, (ir.Call, look))
    return found


def _launching(func: tirx.PrimFunc, kernels: Mapping[str, CompiledKernel]) -> tirx.PrimFunc:
    """Return a lowered PrimFunc with its launches made by the library's launcher."""
    attrs = dict(func.attrs.get(KERNELS_ATTR, {}))

    def launch(call: ir.Call) -> ir.Call:
        if not call.op.same_as(_LAUNCH):
            return call
        given = LaunchCall.of(call)
        kernel = kernels[given.kernel]
        attrs[kernel.symbol] = kernel_attr(kernel)
        x, y, z = (given.sizes.get(f"blockIdx.{axis}", tirx.const(1, "int64")) for axis in "xyz")
        clusters = tirx.floordiv(x, tirx.const(kernel.options.num_ctas, x.ty.dtype))
        return tirx.call_cpacked(kernel.launcher, *given.args, clusters, y, z)

    body = structural_map(func.body, (ir.Call, launch), order="post")
    return func.with_body(body).with_attr(KERNELS_ATTR, attrs)


_LAUNCH = ir.Op.get("tirx.call_ffi_kernel")
