"""What tests on a GPU share: TVM's kernels are compiled without the headers of libcu++."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tvm
import tvm_ffi

from relax_fusion.hardware.nvidia import native_arch
from relax_fusion.hardware.target import compute_capability
from relax_fusion.launch.nvrtc import find_nvrtc

from ..support.gpu import gpu, gpu_target

COMPILE = "tvm_callback_cuda_compile"


@pytest.fixture(scope="session", autouse=True)
def quick_cuda() -> Iterator[None]:
    """Have TVM's CUDA sources compiled as `CompileCUDAKernels` does: a kernel takes .3 s, not 5."""
    nvrtc = find_nvrtc()
    if not gpu() or nvrtc is None:
        yield
        return
    arch = native_arch(compute_capability(gpu_target()))
    tvms = tvm.get_global_func(COMPILE)
    ours = lambda code: nvrtc.compile("tvm_kernels", code, arch)[0]  # noqa: E731
    tvm_ffi.register_global_func(COMPILE, ours, override=True)
    yield
    tvm_ffi.register_global_func(COMPILE, tvms, override=True)
