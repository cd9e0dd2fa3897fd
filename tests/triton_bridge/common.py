"""Kernels that the tests share, and short ways to compile and to call them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from tvm import ir, relax, tirx
from tvm.target import Target

from relax_fusion import make_target
from relax_fusion.launch.body import kernel_of_attr
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.transforms.modules import KERNELS_ATTR
from relax_fusion.triton_bridge import call_tir_extern
from relax_fusion.triton_bridge.compile import _compiled as _kernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.kernel import KernelOptions, KernelSource

H200 = make_target("h200")


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def copy_tile(tile, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(out + i[:, None] * COLUMNS + j[None, :], tile.load([0, 0]))


@triton.jit
def copy_by_descriptor(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tile = tl.make_tensor_descriptor(
        x, shape=[ROWS, COLUMNS], strides=[COLUMNS, 1], block_shape=[ROWS, COLUMNS]
    )
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tl.store(out + i[:, None] * COLUMNS + j[None, :], tile.load([0, 0]))


@triton.jit
def matmul(a, b, out, K, N: tl.constexpr, BLOCK: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, BLOCK)
    total = tl.zeros((N, N), tl.float32)
    for step in range(0, K, BLOCK):
        left = tl.load(a + i[:, None] * K + step + k[None, :])
        right = tl.load(b + (step + k[:, None]) * N + i[None, :])
        total += tl.dot(left, right)
    tl.store(out + i[:, None] * N + i[None, :], total)


@triton.jit
def numbers(out, bit, small, middle, wide, unsigned, real):
    total = bit.to(tl.float32) + small.to(tl.float32) + middle.to(tl.float32)
    tl.store(out, total + wide.to(tl.float32) + unsigned.to(tl.float32) + real)


@triton.jit
def double_first(x):
    tl.store(x, tl.load(x) * 2)


def source(
    kernel: Any,
    types: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    aligned: Iterable[str] | None = None,
    capability: int = 90,
    **options: Any,
) -> KernelSource:
    """Return a source; parameters without a type are constexprs, pointers are aligned."""
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    return KernelSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        dict(constexprs or {}),
        frozenset(pointers if aligned is None else aligned),
        capability,
        KernelOptions(**options),
    )


def compiled(*args: Any, **kwargs: Any) -> CompiledKernel:
    """Compile the kernel of a `source`."""
    return compile_kernels([source(*args, **kwargs)])[0]


def not_compiled(sources: Sequence[KernelSource], **_: Any) -> list[CompiledKernel]:
    """Return kernels without code, in the place of `compile_kernels`."""
    return [_kernel(source.key(), source, _nothing_built(source)) for source in sources]


def _nothing_built(source: KernelSource) -> SimpleNamespace:
    """Return what Triton would, as far as it is known from the source."""
    kinds = (k for k in source.types.values() if k.startswith("tensordesc"))
    blocks = [[int(n) for n in re.search(r"\[([\d, ]+)\]", kind)[1].split(",")] for kind in kinds]
    fixed = {"elem_size": 2, "elem_type": 6, "swizzle": 3, "fp4_padded": False}
    metadata = SimpleNamespace(
        name=source.name,
        tensordesc_meta=[{"block_size": block, **fixed} for block in blocks],
        num_warps=source.options.num_warps,
        shared=0,
        global_scratch_size=0,
        global_scratch_align=1,
    )
    return SimpleNamespace(metadata=metadata, asm={"cubin": b"", "ptx": ""})


def add_source(dtype: str = "fp32", block: int = 128, **kwargs: Any) -> KernelSource:
    """Return `add` over `dtype`."""
    types = dict.fromkeys(("x", "y", "out"), f"*{dtype}")
    return source(add, {**types, "n": "i32"}, {"BLOCK": block}, **kwargs)


def copy_tile_source(**kwargs: Any) -> KernelSource:
    """Return `copy_tile` of 32 by 64 halves."""
    types = {"tile": "tensordesc<fp16[32, 64]>", "out": "*fp16"}
    return source(copy_tile, types, {"ROWS": 32, "COLUMNS": 64}, **kwargs)


def params(*types: relax.TensorType) -> list[relax.Var]:
    """Return parameters of a Relax function: p0, p1, ..."""
    return [relax.Var(f"p{i}", ty) for i, ty in enumerate(types)]


def module(
    inputs: Sequence[relax.Var], *calls: tuple[Any, ...], target: Target = H200, **kwargs: Any
) -> ir.IRModule:
    """Return a module whose `main` returns the results of `call_tir_extern(*call)`."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(inputs)):
        with builder.dataflow():
            made = [builder.emit(call_tir_extern(*c, target=target, **kwargs)) for c in calls]
            result = builder.emit_output(made[0] if len(made) == 1 else relax.Tuple(made))
        builder.emit_func_output(result)
    return builder.get()


def launched(mod: ir.IRModule) -> list[str]:
    """Return the functions of the kernels, in the order in which they are called."""
    text = next(f for _, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)).script()
    calls = [line.split('"')[1] for line in text.splitlines() if "call_cpacked(" in line]
    return [name.removeprefix("launch_").rsplit("_", 1)[0] for name in calls]


def kernels(mod: ir.IRModule) -> dict[str, list[CompiledKernel]]:
    """Return the kernels of a module by function."""
    found: dict[str, list[CompiledKernel]] = {}
    for _, func in mod.functions_items():
        for attr in (func.attrs or {}).get(KERNELS_ATTR, {}).values():
            kernel = kernel_of_attr(attr)
            found.setdefault(kernel.symbol.rsplit("_", 1)[0], []).append(kernel)
    return found
