"""The devices that are known by name: the tables of their makers, joined."""

from __future__ import annotations

from ..errors import TargetError
from ..validation import shown
from . import nvidia, other_makers
from .cpu import generic_cpu
from .spec import DeviceSpec

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
