"""What devices can do, as data.  Only :mod:`.target`, which reads TVM targets, needs TVM."""

from .devices import DEVICES, STATIC_SMEM_BYTES, device, generic_cpu
from .spec import DeviceSpec

__all__ = ["DEVICES", "STATIC_SMEM_BYTES", "DeviceSpec", "device", "generic_cpu"]
