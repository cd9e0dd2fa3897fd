"""Several workers that run one library together: tensor parallelism by TVM's Disco.

`Workers` starts processes, each with a GPU or on the CPU, runs functions on all of them, and ends
them, whatever happens.  Kernels' collectives (``relax.op.ccl``) are NCCL's between GPUs, by a
library that `nccl_library` builds, and NumPy's between CPUs.
"""

from __future__ import annotations

from .nccl import nccl_library
from .worker import Worker
from .workers import WorkerError, Workers

__all__ = ["Worker", "WorkerError", "Workers", "nccl_library"]
