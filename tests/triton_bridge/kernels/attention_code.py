"""Compiles a kernel of attention as a launch would that knows what is aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton.experimental.gluon import language as gl

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource
from relax_fusion.triton_bridge.kernels.attention_core import Constants, HeadTensor

DTYPES = {"mask": "*i1", "slopes_ptr": "*fp32", "parts_ptr": "*fp32", "lse_ptr": "*fp32"}
TENSORS = ("q", "k", "v", "bias", "mask", "out")


def map_type(block: Sequence[int]) -> str:
    """Return the type of a tensor map of float16 in Gluon."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float16)
    return f"tensordesc<fp16{list(block)},{layout!r}>"


def compiled(
    kernel: Any,
    constants: Constants,
    warps: int = 4,
    arch: int = 90,
    maps: Mapping[str, Sequence[int]] | None = None,
    fixed: Mapping[str, int] | None = None,
) -> CompiledKernel:
    """Compile for float16; `maps` are the blocks of tensor maps, `fixed` constants in arguments."""
    maps, fixed = maps or {}, fixed or {}
    types = {}
    for name in kernel.arg_names:
        if name in maps:
            types[name] = map_type(maps[name])
        elif name in TENSORS:
            types |= dict.fromkeys([f"{name}.{field}" for field in HeadTensor._fields], "i32")
            ptr = f"{name}.ptr"
            types[ptr] = map_type(maps[ptr]) if ptr in maps else DTYPES.get(name, "*fp16")
        else:
            types[name] = DTYPES.get(name, "*fp16") if name.endswith("_ptr") else "i32"
    types |= dict.fromkeys(["C", *fixed], "constexpr")
    aligned = {n for n, kind in types.items() if kind[0] == "*" or ("." in n and kind == "i32")}
    source = KernelSource(
        kernel,
        types,
        {"C": constants._replace(pdl=arch >= 90), **fixed},
        frozenset(aligned),
        arch,
        KernelOptions(num_warps=warps, dependent_launch=arch >= 90),
    )
    return compile_kernels([source])[0]
