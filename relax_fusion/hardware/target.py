"""From a tvm Target to a `DeviceSpec`: the only reader of targets in the library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tvm.target import Target, codegen

from ..errors import TargetError
from ..validation import shown
from .device_file import read_device_file, registered
from .devices import DEVICES, device, generic_cpu
from .instructions import CPU_INSTRUCTIONS, Capabilities, MatrixInstruction
from .nvidia import ARCHITECTURES, STATIC_SMEM_BYTES, capability_of
from .spec import DeviceSpec

_GPU_BY_DEVICE = {"adreno": "adreno730", "mali": "mali_g710"}
_GPU_BY_KIND = {"metal": "m1", "rocm": "mi300x"}
"""The device that stands for a ``device`` attribute or a kind of target when the target names none
(``model``); for every other target but CUDA's, an integrated GPU of a laptop."""

LEAST_SMEM_BYTES = 16 * 1024
"""Shared memory that every device has of an API whose target states none (Vulkan's
``maxComputeSharedMemorySize``, https://docs.vulkan.org/spec/latest/chapters/limits.html)."""

_X86_BITS = {"avx512f": 512, "avx": 256, "sse2": 128}
"""Bits of a vector by the feature of a processor that tells of them, the widest first."""

MAX_CORES = 2**16
"""Far more than a host has; tiles are counted by their multiples, in 32 bits."""

_LIMITS = (
    *("max_threads_per_block", "max_num_threads", "max_shared_memory_per_block"),
    "thread_warp_size",
)
"""Attributes in which a target states the limits of its device."""


def is_gpu(target: Target) -> bool:
    """Tell whether `target` executes kernels on a GPU."""
    return "gpu" in target.keys


def is_cpu(target: Target) -> bool:
    """Tell whether `target` is a host processor that LLVM compiles for."""
    return target.kind.name == "llvm"


def is_cuda(target: Target) -> bool:
    """Tell whether `target` is an NVIDIA GPU."""
    return target.kind.name == "cuda"


def is_webgpu(target: Target) -> bool:
    """Tell whether kernels for `target` are written in WGSL.

    WGSL cannot write an infinity, and lets implementations assume that there are none
    (https://www.w3.org/TR/WGSL/#floating-point-evaluation); TVM 0.27 writes ``-inff``.
    """
    return target.kind.name == "webgpu"


def most_lanes(target: Target) -> int | None:
    """Return the elements of the longest vector that code for `target` can name; None for any.

    MSL and WGSL have vectors of 2, 3 and 4, and so has SPIR-V without its capability Vector16.
    """
    return 4 if target.kind.name in ("metal", "vulkan", "webgpu") else None


def host_target() -> Target:
    """Return the target of this machine's CPU, with its own instruction set and core count."""
    return Target(
        {"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu(), "num-cores": usable_cores()}
    )


def usable_cores() -> int:
    """Return how many processors this process may use: fewer than there are, in a container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(count or 1, _quota()))


def _quota() -> int:
    """Return the processors whose time the control group may use (Linux, cgroup v2)."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize


def make_target(name: str | Target | Mapping[str, Any]) -> Target:
    """Return the target that `name` stands for.

    Parameters
    ----------
    name : str, Target or mapping
        A device of the table (``"h200"``, ``"a100"``, ...), ``"llvm"`` or ``"cpu"`` for this
        machine's processor, a file that ``relax-fusion calibrate`` wrote (``"mine.json"``), or
        anything that `tvm.target.Target` reads (a tag, JSON, a mapping).

    Raises
    ------
    TargetError
        If nothing reads it; the message lists the names of the table.
    """
    if isinstance(name, Target):
        return name
    if isinstance(name, str) and name in ("llvm", "cpu"):
        return host_target()
    if isinstance(name, str) and name.endswith(".json"):
        found = read_device_file(Path(name))
        measured = registered(found)
        own = {**found.target, "model": measured.name}
        return _named(measured) if measured.kind == "gpu" else make_target(own)
    spec = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if spec is not None and spec.kind == "gpu":
        return _named(spec)
    try:
        if isinstance(name, str):
            return Target(json.loads(name) if name.lstrip().startswith("{") else name)
        return Target(dict(name))
    except (ValueError, RuntimeError, TypeError, LookupError, RecursionError) as err:
        gpus = ", ".join(sorted(n for n, d in DEVICES.items() if d.kind == "gpu"))
        raise TargetError(
            f"target {shown(name)} is neither 'llvm', one of {gpus}, nor a target that TVM reads"
        ) from err


def _named(spec: DeviceSpec) -> Target:
    """Return the target of a GPU of the table."""
    config = {
        "kind": spec.target_kind,
        "model": spec.name,
        "max_threads_per_block": spec.max_threads_per_block,
        "max_shared_memory_per_block": spec.smem_per_block_bytes,
    }
    if spec.target_kind == "cuda":
        config |= {"arch": spec.arch, "thread_warp_size": spec.warp_size}
        config["max_shared_memory_per_block"] = STATIC_SMEM_BYTES
    try:
        return Target({**config, **dict(spec.target_attrs)}, host=Target("llvm"))
    except (ValueError, RuntimeError, TypeError, LookupError) as err:
        raise TargetError(
            f"device {spec.name!r}: TVM reads no target of kind {spec.target_kind!r} with "
            f"{shown(dict(spec.target_attrs))}"
        ) from err


def device_of(target: Target) -> DeviceSpec:
    """Return the device that `target` compiles for.

    The ``model`` attribute names it.  Without one, a device of the same architecture stands in for
    a CUDA target, and one GPU of its kind for any other, within the limits of threads, shared
    memory and element types that the target states; `DeviceSpec.modelled_on` tells which.

    Raises `TargetError` if the target is neither a GPU nor LLVM, a limit is no number that a device
    could have, nobody knows its processor or architecture, or no device of its architecture is
    known.
    """
    attrs = {str(k): v for k, v in target.attrs.items()}
    for part in (target, target.host):
        if part is not None and is_cpu(part):
            _check_processor(part)
    if is_cpu(target):
        return _cpu(target, int(attrs.get("num-cores", 0)))
    if not is_gpu(target):
        raise TargetError(f"target kind {target.kind.name!r} is not supported; use llvm or a GPU")
    limits = _limits(target, attrs)
    named = DEVICES.get(str(attrs.get("model", "")).lower())
    if named is not None and named.target_kind != target.kind.name:
        named = None
    if is_cuda(target):
        return _nvidia(str(attrs.get("arch", "")), named)
    stated = str(attrs.get("device", ""))
    usual = _GPU_BY_DEVICE.get(stated) or _GPU_BY_KIND.get(target.kind.name, "iris_xe")
    spec = named or device(usual)
    threads = limits.get("max_threads_per_block", limits.get("max_num_threads", sys.maxsize))
    smem = limits.get("max_shared_memory_per_block", LEAST_SMEM_BYTES)
    return replace(
        spec,
        label=spec.label if named else f"{target.kind.name} GPU",
        modelled_on="" if named else spec.label,
        max_threads_per_block=min(spec.max_threads_per_block, threads),
        smem_per_block_bytes=min(spec.smem_per_block_bytes, smem),
        wave_size=max(spec.wave_size, limits.get("thread_warp_size", 1)),
        missing_dtypes=_missing_dtypes(target, attrs),
    )


def _nvidia(arch: str, named: DeviceSpec | None) -> DeviceSpec:
    """Return the device that a CUDA target names, or one of its architecture, as one of `arch`.

    A device of another architecture lends its numbers; instructions are those of `arch`.
    """
    capability = capability_of(arch)
    spec = named or _of_capability(capability, arch)
    if spec.arch == arch:
        return spec
    if capability_of(spec.arch) == capability:  # sm_90 instead of sm_90a
        return replace(spec, arch=arch)
    found = ARCHITECTURES[capability]
    smem = min(spec.smem_per_block_bytes, found.smem_per_block_bytes or sys.maxsize)
    lent = replace(spec, capabilities=found.capabilities, smem_per_block_bytes=smem, arch=arch)
    return replace(_standing_in(lent, arch), measured=False)


def _standing_in(spec: DeviceSpec, arch: str) -> DeviceSpec:
    return replace(spec, label=f"{arch} GPU", modelled_on=spec.label)


def _of_capability(capability: int, arch: str) -> DeviceSpec:
    """Return the device that stands for a CUDA target which names none."""
    gpus = [spec for spec in DEVICES.values() if spec.target_kind == "cuda"]
    for spec in gpus:
        if capability_of(spec.arch) == capability:
            return _standing_in(spec, arch)
    known = ", ".join(spec.name for spec in gpus)
    why = ", which TVM takes where it finds no GPU," if arch == "sm_50" else ""
    raise TargetError(
        f"target 'cuda': no device of arch {arch!r}{why} is known; name the nearest in the "
        f"target's attribute 'model' (of {known}), or describe yours by "
        "relax_fusion.hardware.register(DeviceSpec(...))"
    )


def _check_processor(target: Target) -> None:
    """Refuse a processor that LLVM does not know; TVM would take a generic one."""
    mcpu = str(target.attrs.get("mcpu", ""))
    triple = str(target.attrs.get("mtriple", "")) or codegen.llvm_get_system_triple()
    if mcpu and not codegen.llvm_is_valid_cpu(mcpu, triple):
        raise TargetError(f"LLVM knows no processor mcpu {shown(mcpu)} of mtriple {shown(triple)}")


def _cpu(target: Target, cores: int) -> DeviceSpec:
    """Return the processor of an LLVM target; 0 cores are those of this process."""
    if not 0 <= cores <= MAX_CORES:
        raise TargetError(f"target 'llvm': num-cores is {cores}, must be in 0..{MAX_CORES}")
    bits, instructions = _vectors(str(target))
    spec = generic_cpu(cores=cores or usable_cores(), vector_bytes=bits // 8)
    named = DEVICES.get(str(target.attrs.get("model", "")))
    if named and (named.sm_count, named.vector_bytes) == (spec.sm_count, spec.vector_bytes):
        spec = named  # calibrated, with as many cores
    return replace(spec, capabilities=Capabilities(matrix_instructions=instructions))


@cache
def _vectors(text: str) -> tuple[int, tuple[MatrixInstruction, ...]]:
    """Return the bits of an LLVM target's vectors, and its instructions for matrices.

    LLVM is asked once of each target: it takes a millisecond.
    """
    target = Target(text)
    try:
        bits = codegen.llvm_get_vector_width(target)
    except (RuntimeError, ValueError) as err:
        raise TargetError(
            f"LLVM knows no processor of mtriple {shown(str(target.attrs.get('mtriple')))}"
        ) from err
    if "vector-width" not in target.attrs:  # TVM 0.27 says 512 of every x86
        own = (width for f, width in _X86_BITS.items() if codegen.target_has_features(f, target))
        bits = next(own, bits)
    found = [f for f in CPU_INSTRUCTIONS if codegen.target_has_features(f, target)]
    return bits, tuple(i for feature in found for i in CPU_INSTRUCTIONS[feature])


def _limits(target: Target, attrs: Mapping[str, Any]) -> dict[str, int]:
    """Return the limits that a GPU target states; all are positive, but for shared memory."""
    found = {name: int(attrs[name]) for name in _LIMITS if name in attrs}
    for name, value in found.items():
        least = 0 if name == "max_shared_memory_per_block" else 1
        if value < least:
            raise TargetError(
                f"target {target.kind.name!r}: {name} is {value}, must be at least {least}"
            )
    warp = found.get("thread_warp_size", 1)
    if warp & (warp - 1) or warp > 128:
        raise TargetError(
            f"target {target.kind.name!r}: thread_warp_size is {warp}, must be a power of two up "
            "to 128"
        )
    return found


def _missing_dtypes(target: Target, attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the element types that kernels of a target other than CUDA cannot read or write.

    TVM keeps bfloat16 in 16-bit and booleans in 8-bit integers, which WGSL does not have; a Vulkan
    target says what its device can do.
    """
    if is_webgpu(target):
        return ("bfloat16", "bool")
    if target.kind.name != "vulkan":
        return ()
    needs = {
        "float16": ("supports_float16", "supports_16bit_buffer"),
        "bfloat16": ("supports_int16", "supports_16bit_buffer"),
        "bool": ("supports_int8", "supports_8bit_buffer"),
    }
    return tuple(t for t, names in needs.items() if not all(attrs.get(n) for n in names))


def without_tensor_cores(target: Target) -> Target:
    """Return a target for which TVM's matmul rule makes scalar tiles: any, where it does anyway.

    For CUDA that is an architecture before tensor cores, for Metal another API of the same limits.
    """
    config = {str(k): v for k, v in target.attrs.items()}
    if is_cuda(target):
        return Target({**config, "kind": "cuda", "arch": "sm_60"})
    if target.kind.name == "metal":
        shared = {k: v for k, v in config.items() if k in _LIMITS}
        return Target({**shared, "kind": "opencl"})
    return target


def has_triton(target: Target) -> bool:
    """Tell whether Triton kernels can be compiled for `target`: CUDA, sm_80 or newer."""
    return is_cuda(target) and device_of(target).capabilities.async_copies


def compute_capability(target: Target) -> int:
    """Return ten times the compute capability of a CUDA target, for code generators.

    Raises `TargetError` if the target is not CUDA, or names no architecture that there is.
    """
    if not is_cuda(target):
        raise TargetError(
            f"target {target} names no CUDA architecture; Triton kernels need one, such as 'h200' "
            'or {"kind": "cuda", "arch": "sm_90a"}'
        )
    return capability_of(str(target.attrs.get("arch", "")))
