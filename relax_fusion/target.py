"""From a tvm Target to a `DeviceSpec`: the only reader of targets in the library."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from tvm.target import Target, codegen

from .device import DEVICES, STATIC_SMEM_BYTES, DeviceSpec, device, generic_cpu
from .errors import TargetError

_GPU_BY_ARCH = {"sm_80": "a100", "sm_86": "rtx3080", "sm_89": "rtx4090", "sm_90": "h100"}
"""The device that stands for an architecture when the target names none (``model``)."""


def is_gpu(target: Target) -> bool:
    """Tell whether `target` executes kernels on a GPU."""
    return "gpu" in target.keys


def is_cpu(target: Target) -> bool:
    """Tell whether `target` is a host processor that LLVM compiles for."""
    return target.kind.name == "llvm"


def is_cuda(target: Target) -> bool:
    """Tell whether `target` is an NVIDIA GPU."""
    return target.kind.name == "cuda"


def has_infinity(target: Target) -> bool:
    """Tell whether kernels for `target` can hold infinite constants.

    WGSL has no way to write one, and lets an implementation assume that there are none
    (https://www.w3.org/TR/WGSL/#floating-point-evaluation); TVM 0.27 writes ``-inff``.
    """
    return target.kind.name != "webgpu"


def host_target() -> Target:
    """Return the target of this machine's CPU, with its own instruction set and core count."""
    return Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": _cores()})


def _cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_target(name: str | Target) -> Target:
    """Return the target that `name` stands for.

    Parameters
    ----------
    name : str or Target
        A device of the table (``"h200"``, ``"a100"``, ...), ``"llvm"`` or ``"cpu"`` for this
        machine's processor, or anything that `tvm.target.Target` reads (a tag, JSON).

    Raises
    ------
    TargetError
        If nothing reads it; the message lists the names of the table.
    """
    if isinstance(name, Target):
        return name
    if name in ("llvm", "cpu"):
        return host_target()
    spec = DEVICES.get(name.lower())
    if spec is not None and spec.kind == "gpu":
        return Target(
            {
                "kind": "cuda",
                "arch": spec.arch,
                "model": spec.name,
                "max_threads_per_block": spec.max_threads_per_block,
                "max_shared_memory_per_block": STATIC_SMEM_BYTES,
                "thread_warp_size": spec.warp_size,
            },
            host=Target("llvm"),
        )
    try:
        return Target(json.loads(name) if name.lstrip().startswith("{") else name)
    except (ValueError, RuntimeError, TypeError) as err:
        gpus = ", ".join(sorted(n for n, d in DEVICES.items() if d.kind == "gpu"))
        raise TargetError(
            f"target {name!r} is neither 'llvm', one of {gpus}, nor a target that TVM reads"
        ) from err


def device_of(target: Target) -> DeviceSpec:
    """Return the device that `target` compiles for.

    A CUDA target's ``model`` attribute names it; without one, the usual device of its ``arch``
    stands in, under the architecture's own name.  Any other GPU is taken for the smallest GPU of
    the table, within its own limits of threads and shared memory and without the name.

    Raises
    ------
    TargetError
        If the target is neither a GPU nor LLVM.
    """
    attrs = {str(k): v for k, v in target.attrs.items()}
    if is_cpu(target):
        cores = int(attrs.get("num-cores", 0)) or _cores()
        return generic_cpu(cores=cores, vector_bytes=codegen.llvm_get_vector_width(target) // 8)
    if not is_gpu(target):
        raise TargetError(f"target kind {target.kind.name!r} is not supported; use llvm or a GPU")
    model = str(attrs.get("model", "")).lower()
    arch = str(attrs.get("arch", "")).rstrip("af")
    spec = device(model if model in DEVICES else _GPU_BY_ARCH.get(arch, "rtx3080"))
    if is_cuda(target):
        known = not arch or spec.arch.rstrip("af") == arch
        return spec if known else replace(spec, arch=arch)
    threads = int(attrs.get("max_threads_per_block", spec.max_threads_per_block))
    smem = int(attrs.get("max_shared_memory_per_block", spec.smem_per_block_bytes))
    return replace(
        spec,
        arch="",
        max_threads_per_block=min(spec.max_threads_per_block, threads),
        smem_per_block_bytes=min(spec.smem_per_block_bytes, smem),
    )


def without_tensor_cores(target: Target) -> Target:
    """Return a CUDA target of an architecture before tensor cores; any other target as it is."""
    if not is_cuda(target):
        return target
    config = {str(k): v for k, v in target.attrs.items()}
    return Target({**config, "kind": "cuda", "arch": "sm_60"})


def has_triton(target: Target) -> bool:
    """Tell whether Triton kernels can be compiled for `target`: CUDA, sm_80 or newer."""
    arch = str(target.attrs.get("arch", "")) if is_cuda(target) else ""
    return arch.startswith("sm_") and compute_capability(target) >= 80


def compute_capability(target: Target) -> int:
    """Return ten times the major plus the minor compute capability of a CUDA target.

    Raises
    ------
    TargetError
        If the target is not CUDA, or names no architecture.
    """
    arch = str(target.attrs.get("arch", "")) if is_cuda(target) else ""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit():
        raise TargetError(
            f"target {target} names no CUDA architecture; Triton kernels need one, such as 'h200' "
            'or {"kind": "cuda", "arch": "sm_90a"}'
        )
    return int(digits)


def user_cache_directory() -> Path:
    """Return where this user keeps what can be made again.

    ``RELAX_FUSION_CACHE_DIR``, else ``relax_fusion`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    ours = os.environ.get("RELAX_FUSION_CACHE_DIR")
    if ours:
        return Path(ours)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "relax_fusion"
