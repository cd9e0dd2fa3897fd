"""What devices can do, as data.  Only :mod:`.target`, which reads TVM targets, needs TVM."""

from .devices import DEVICES, device, generic_cpu, register
from .instructions import NO_CAPABILITIES, Capabilities
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
