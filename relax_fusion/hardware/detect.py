"""Which device this machine has, by what its driver tells."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm.target import Target

from .devices import DEVICES
from .nvidia import native_arch
from .spec import DeviceSpec
from .target import is_cuda, make_target


def uncalibrated(target: Target) -> Target:
    """Return the target of the device that a calibrated one is based on."""
    base, calibrated, _ = str(target.attrs.get("model", "")).partition("@")
    if not calibrated:
        return target
    own = {**target.export()}
    own.pop("model")
    return make_target(base) if is_cuda(target) else Target(own)


def cuda_here() -> Target:
    """Return the target of this machine's GPU: the device of the table that its name tells.

    Another one of its architecture stands for a GPU that is not there.
    """
    gpu = tvm.cuda()
    if not gpu.exist:
        return make_target("h200")  # any: it is refused
    capability = int(gpu.compute_version.replace(".", ""))
    words = set(gpu.device_name.replace("-", " ").split())

    def is_it(dev: DeviceSpec) -> bool:
        own = dev.label.removeprefix("RTX ").split()[0]  # "H100 SXM" calls itself H100 80GB HBM3
        return dev.arch.rstrip("af") == f"sm_{capability}" and own in words

    def far(dev: DeviceSpec) -> tuple[int, int]:
        return abs(dev.sm_count - gpu.multi_processor_count), abs(dev.l2_bytes - _l2(gpu, dev))

    alike = [d for d in DEVICES.values() if is_it(d) and "@" not in d.name]
    if not alike:
        return make_target({"kind": "cuda", "arch": native_arch(capability)})
    return make_target(min(alike, key=far).name)


def _l2(gpu: tvm.runtime.Device, dev: DeviceSpec) -> int:
    return int(getattr(gpu, "l2_cache_size_bytes", 0) or dev.l2_bytes)


def by_driver(spec: DeviceSpec, gpu: tvm.runtime.Device) -> DeviceSpec:
    """Return a device with the numbers that the driver tells."""
    return replace(spec, sm_count=gpu.multi_processor_count, l2_bytes=_l2(gpu, spec))
