"""What devices can do, as data.  Only :mod:`.target`, which reads TVM targets, needs TVM."""

from .capabilities import NO_CAPABILITIES, Capabilities
from .cpu import generic_cpu
from .devices import DEVICES, device, register
from .nvidia import STATIC_SMEM_BYTES
from .spec import DeviceSpec

__all__ = [
    "DEVICES",
    "NO_CAPABILITIES",
    "STATIC_SMEM_BYTES",
    "Capabilities",
    "DeviceSpec",
    "device",
    "generic_cpu",
    "register",
]
