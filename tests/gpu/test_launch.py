"""A kernel that nobody of ours compiled, launched by the launch layer on a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import triton
import tvm
from tvm import relax, tirx

from relax_fusion.launch.arguments import Out
from relax_fusion.launch.branches import Branch, Launch
from relax_fusion.launch.kernel import CompiledKernel, LaunchOptions, check_entry
from relax_fusion.launch.launcher import EmbedTritonKernels
from relax_fusion.launch.prim_func import ExternFunc

from ..support.gpu import gpu_target, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"

# y[i] = x[i] + x[i], by clusters of two blocks of three warps, each after the launch in front
SOURCE = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry doubled(.param .u64 x, .param .u64 y, .param .u32 n)
{
  .reg .b32 %r<6>; .reg .b64 %d<4>; .reg .f32 %f<2>; .reg .pred %p;
  griddepcontrol.wait;
  mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x;
  mad.lo.u32 %r3, %r0, %r1, %r2;
  ld.param.u32 %r4, [n]; setp.ge.u32 %p, %r3, %r4; @%p ret;
  ld.param.u64 %d0, [x]; ld.param.u64 %d1, [y];
  mul.wide.u32 %d2, %r3, 4; add.u64 %d0, %d0, %d2; add.u64 %d1, %d1, %d2;
  ld.global.f32 %f0, [%d0]; add.f32 %f0, %f0, %f0; st.global.f32 [%d1], %f0;
  ret;
}
"""


def assembled(directory: Path) -> CompiledKernel:
    """Return the kernel for sm_90."""
    text, image = directory / "doubled.ptx", directory / "doubled.cubin"
    text.write_text(SOURCE)
    subprocess.run([PTXAS, "-arch=sm_90a", text, "-o", image], check=True)
    return CompiledKernel(
        symbol="doubled_by_hand",
        entry="doubled",
        capability=90,
        constants=(),
        params=("*fp32", "*fp32", "i32"),
        aligned=(False, False, False),
        tensor_maps=(),
        options=LaunchOptions(num_ctas=2, dependent_launch=True),
        num_warps=3,
        shared_bytes=0,
        scratch_bytes=0,
        scratch_align=1,
        image=image.read_bytes(),
        ptx=SOURCE.encode(),
        convention="cuda",
    )


def test_a_kernel_of_three_warps_in_clusters(tmp_path: Path) -> None:
    if not gpu_target().attrs["arch"].startswith("sm_90"):
        pytest.skip("needs a GPU of compute capability 9.0")
    kernel = assembled(tmp_path)
    check_entry(kernel)
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n], "float32"))
    clusters = (n + 191) // 192
    launch = Launch(kernel, [clusters], [x, Out(0), n.astype("int32")])
    extern = ExternFunc.of([relax.TensorType([n], "float32")], [Branch(True, [launch, launch])])
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        gvar = builder.add_func(extern.func, "doubled")
        with builder.dataflow():
            out = builder.emit_output(extern.call(builder, gvar))
        builder.emit_func_output(out)
    executable = tvm.compile(EmbedTritonKernels()(builder.get()), gpu_target())
    machine = relax.VirtualMachine(executable, tvm.cuda(0))
    for size in (1, 95, 96, 192, 1000):
        given = np.arange(size, dtype="float32")
        got = machine["main"](tvm.runtime.tensor(given, tvm.cuda(0))).numpy()
        np.testing.assert_array_equal(got, given + given)
