"""Triton kernels inside Relax modules: compiled ahead of time, launched by the library itself.

- :mod:`.call`: `call_tir_extern`, what a user or a pass calls;
- :mod:`.arguments`, :mod:`.specialize`: what a kernel can be called with, and what is compiled;
- :mod:`.kernel`, :mod:`.compile`: sources to cubins;
- :mod:`.emit`, :mod:`.contraction`, :mod:`.hopper`, :mod:`.steps`: which launches take the place of
  a fused PrimFunc; :mod:`.fixed`: what they may read ahead of their turn;
- :mod:`.kernels`, :mod:`.math`: the library's own kernels;
- :mod:`.prim_func`, :mod:`.embed`, :mod:`.launcher`: the PrimFunc that calls a kernel, and the C
  code that launches it.
"""

from __future__ import annotations

from .versions import check_triton

check_triton()  # in front of the imports of what an older Triton does not have

# ruff: noqa: E402
from ..launch.arguments import OUT, InOut, Out, TensorMap, Workspace
from ..launch.cache import KernelCache
from ..launch.embed import EmbedTritonKernels
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
