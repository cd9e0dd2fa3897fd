"""The devices that are known by name: the tables of makers of GPUs, joined, and processors.

The numbers of a processor are *measured*, on one AMD EPYC (Zen) core pair, or *assumed*.
"""

from __future__ import annotations

from ..errors import TargetError
from ..validation import shown
from . import nvidia, other_makers
from .spec import DeviceSpec


def generic_cpu(cores: int = 8, vector_bytes: int = 32) -> DeviceSpec:
    """Return a processor of `cores` cores with vector registers of `vector_bytes` bytes.

    Raises
    ------
    TargetError
        If `cores` is not positive or `vector_bytes` is no power of two of at least 4.
    """
    for name, value in (("cores", cores), ("vector_bytes", vector_bytes)):
        if not isinstance(value, int):
            raise TargetError(f"device 'cpu': {name} is {shown(value)}, must be an integer")
    clock_hz = 2.6e9  # measured: the clock of a server core under load; desktop cores run higher
    fma_per_cycle = 2  # two 256-bit (Zen, Skylake) or 512-bit (Zen 5, Skylake-SP) FMA pipes
    # JEDEC DDR4-3200 moves 25.6e9 B/s a channel.  Assumed: two channels up to 16 cores, else eight.
    channels = 2 if cores <= 16 else 8
    return DeviceSpec(
        name="cpu",
        label=f"{cores}-core CPU",
        kind="cpu",
        arch="",
        sm_count=cores,
        clock_hz=clock_hz,
        dram_bytes_per_s=channels * 25.6e9,
        l2_bytes=512 << 10,  # Zen 2 and 3; newer cores have 1 or 2 MB
        l2_bytes_per_s=cores * clock_hz * 32,  # Zen and Skylake: 32 or 64 B per cycle to L1
        launch_s=5e-6,  # assumed: waking a thread pool takes a few microseconds
        # Lanes of float32 * pipes * 2 flop (multiply and add)
        fma_float32_flops_per_s=cores * clock_hz * fma_per_cycle * 2 * max(vector_bytes // 4, 1),
        vector_bytes=vector_bytes,
        # AVX-512 names 32 registers, AVX2 and SSE 16; NEON names 32 but 16 is always safe
        vector_registers=32 if vector_bytes >= 64 else 16,
        l1_bytes=32 << 10,  # Zen and Skylake; newer cores have 48 KB
        fma_per_cycle=fma_per_cycle,
        target_kind="llvm",
        measured=True,
    )


DEVICES: dict[str, DeviceSpec] = {
    spec.name: spec for spec in (*nvidia.GPUS, *other_makers.GPUS, generic_cpu())
}
"""The devices that are known by name; `register` adds others."""


def device(name: str) -> DeviceSpec:
    """Return the device called `name` in `DEVICES`, in any case.

    Raises
    ------
    TargetError
        If there is none; the message lists the names.
    """
    spec = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if spec is None:
        raise TargetError(f"unknown device {shown(name)}; known are {', '.join(sorted(DEVICES))}")
    return spec


def register(spec: DeviceSpec) -> DeviceSpec:
    """Add a GPU to `DEVICES`, so that ``make_target(spec.name)`` compiles for it.

    A target without a ``model`` is for it, too, if it has the same CUDA architecture and no device
    before it has.

    Returns
    -------
    DeviceSpec
        `spec` itself.

    Raises
    ------
    TargetError
        If `spec` is no GPU, if its name is not in lower case or belongs to another device or
        to a kind of targets, or if it is for CUDA and its architecture does not exist.
    """
    if not isinstance(spec, DeviceSpec):
        raise TargetError(f"device is {shown(spec)}, must be a DeviceSpec")
    if spec.kind != "gpu":
        raise TargetError(f"device {spec.name!r} is a CPU; a target of kind 'llvm' describes it")
    if not spec.name or spec.name != spec.name.lower():
        raise TargetError(f"device {spec.name!r}: its name must be in lower case and not empty")
    if spec.name in ("llvm", spec.target_kind):
        raise TargetError(f"device {spec.name!r}: its name is that of a kind of targets")
    if DEVICES.get(spec.name, spec) != spec:
        raise TargetError(f"device {spec.name!r} is known already, with other numbers")
    if spec.target_kind == "cuda":
        nvidia.capability_of(spec.arch)
    return DEVICES.setdefault(spec.name, spec)
