"""Kernels written in Gluon are called like those of Triton."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from tvm import relax

from relax_fusion.launch.body import kernel_of_attr
from relax_fusion.transforms.modules import KERNELS_ATTR
from relax_fusion.triton_bridge import OUT, TensorMap, call_tir_extern

from .common import H200

LOAD = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
STORE = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Renamed in Triton 3.9."""


@gluon.jit
def copy_by_engine(x, out, ROWS: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, [ROWS, 64], x.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    row = gl.program_id(0) * ROWS
    mbarrier.expect(barrier, ROWS * 64 * 2)
    LOAD(x, [row, 0], barrier, tile)
    mbarrier.wait(barrier, 0)
    fence_async_shared()
    STORE(out, [row, 0], tile)
    tma.store_wait(0)


def test_a_gluon_kernel_with_tensor_maps() -> None:
    x = relax.Var("x", relax.TensorType([128, 64], "float16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        maps = [TensorMap(x, (32, 64)), TensorMap(OUT, (32, 64))]
        y = builder.emit(
            call_tir_extern(copy_by_engine, (4,), maps, x.ty, constexprs={"ROWS": 32}, target=H200)
        )
        builder.emit_func_output(y)
    (func,) = [f for f in builder.get().functions.values() if KERNELS_ATTR in (f.attrs or {})]
    (attr,) = func.attrs[KERNELS_ATTR].values()
    kernel = kernel_of_attr(attr)
    assert [p.split("[")[0] for p in kernel.params] == ["tensordesc<fp16"] * 2
    assert [m.block for m in kernel.tensor_maps] == [(32, 64)] * 2
    assert kernel.machine_params().count("tensor_map") == 2
    assert kernel.num_warps == 4 and kernel.shared_bytes >= 32 * 64 * 2
