"""Triton kernels inside Relax modules: compiled ahead of time, launched by the library itself.

- :mod:`.call`: `call_tir_extern`, what a user or a pass calls;
- :mod:`.specialize`, :mod:`.kernel`, :mod:`.compile`: from a kernel and arguments to a cubin;
- :mod:`.emit`, :mod:`.contraction`, :mod:`.attention`, :mod:`.cuda`, :mod:`.generated`: which
  launches take the place of a fused PrimFunc; :mod:`.launches`, :mod:`.operands`: their parts;
- :mod:`.sources`: kernels' sources for a report, and compiled while the module is still matched;
- :mod:`.kernels`, :mod:`.math`: the library's own kernels.

The PrimFunc that calls a kernel, and the C code that launches it, are of `relax_fusion.launch`.
"""

from __future__ import annotations

import triton

from ..errors import KernelError

MIN_TRITON = (3, 6)
"""The oldest version whose calling convention and metadata the bridge knows, and those after it."""


def check_triton(version: str = triton.__version__) -> None:
    """Check that `version` of Triton is one that is known.

    Every later version of the same major number is taken until it proves wrong.

    Raises `KernelError` if it is not.
    """
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if len(parts) < 2 or parts < MIN_TRITON or parts[0] != MIN_TRITON[0]:
        wanted = ".".join(map(str, MIN_TRITON))
        raise KernelError(
            f"Triton {version} is installed; {wanted} or a newer {MIN_TRITON[0]}.x is needed"
        )


check_triton()  # in front of the imports of what an older Triton does not have

# ruff: noqa: E402
from ..launch.arguments import OUT, InOut, Out, TensorMap, Workspace
from ..launch.cache import KernelCache
from ..launch.launcher import EmbedTritonKernels
from .call import Variant, call_tir_extern
from .emit import EmitTritonKernels

__all__ = [
    "OUT",
    "EmbedTritonKernels",
    "EmitTritonKernels",
    "InOut",
    "KernelCache",
    "Out",
    "TensorMap",
    "Variant",
    "Workspace",
    "call_tir_extern",
]
