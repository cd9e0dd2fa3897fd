"""Times of calls and of kernels: contenders in turn, percentiles, kernel by kernel."""

from .kernels import KernelTime, how, kernel_times
from .times import PERCENTILES, Times
from .turns import host_and_device, in_turn, seconds

__all__ = [
    "PERCENTILES",
    "KernelTime",
    "Times",
    "host_and_device",
    "how",
    "in_turn",
    "kernel_times",
    "seconds",
]
