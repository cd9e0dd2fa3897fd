"""TVM's own CUDA kernels: compiled ahead of time, and launched like Triton's."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_fusion
from relax_fusion import options
from relax_fusion.cli.build import cuda_kernels
from relax_fusion.errors import KernelError, MissingPackageError
from relax_fusion.launch import cuda_source
from relax_fusion.launch import nvrtc as nvrtc_module
from relax_fusion.launch.cuda_kernels import CompileCUDAKernels
from relax_fusion.launch.nvrtc import Nvrtc, find_nvrtc
from relax_fusion.transforms.modules import KERNELS_ATTR

from .test_nvrtc import needs_nvrtc

FORCE = "TVM_COMPILE_FORCE_FALLBACK"
H200 = relax_fusion.make_target("h200")


@dataclass(frozen=True)
class FakeNvrtc(Nvrtc):
    """Compiles nothing, and says what it was given."""

    library: Path = Path("none")
    includes: tuple[Path, ...] = ()
    version: str = "0"
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def compile(self, name: str, source: str, arch: str) -> tuple[bytes, bytes]:
        self.seen[name] = (source, arch)
        params = re.search(rf"__global__ .*\b{name}\((.*?)\) {{", source)[1].split(", ")
        sizes = [64 if "*" in p or "int64_t" in p else 32 for p in params]
        declared = ", ".join(f".param .u{size} p{i}" for i, size in enumerate(sizes))
        return b"\x7fELF", f".visible .entry {name}({declared})".encode()


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    monkeypatch.setenv("RELAX_FUSION_CACHE_DIR", str(tmp_path / "cache"))
    return FakeNvrtc()


@I.ir_module
class Scaled:
    @T.prim_func(private=True, s_tir=True)
    def scale(x: T.handle, y: T.handle):
        T.func_attr({"tirx.is_scheduled": True})
        n = T.int64()
        X = T.match_buffer(x, (n, 128), "float16")
        Y = T.match_buffer(y, (n, 128), "float16")
        for i in T.thread_binding(n, "blockIdx.y"):
            for j in T.thread_binding(4, "threadIdx.y"):
                for k in T.thread_binding(32, "threadIdx.x"):
                    with T.sblock("y"):
                        v = T.axis.spatial(n, i)
                        w = T.axis.spatial(128, j * 32 + k)
                        Y[v, w] = X[v, w] * T.float16(2)

    @R.function
    def main(x: R.Tensor(("n", 128), "float16")) -> R.Tensor(("n", 128), "float16"):
        n = T.int64()
        cls = Scaled
        with R.dataflow():
            y = R.call_tir(cls.scale, (x,), out_ty=R.Tensor((n, 128), "float16"))
            z = R.call_tir(cls.scale, (y,), out_ty=R.Tensor((n, 128), "float16"))
            R.output(z)
        return z


def compiled(mod: tvm.IRModule, nvrtc: Nvrtc) -> tvm.IRModule:
    """Return `mod` with its CUDA kernels compiled."""
    with H200:
        mod = relax.transform.AttachGlobalSymbol()(mod)
        return CompileCUDAKernels(H200, nvrtc)(mod)


def test_a_kernel_becomes_a_launch(nvrtc: FakeNvrtc) -> None:
    func = compiled(Scaled, nvrtc)["scale"]
    ((symbol, attr),) = func.attrs[KERNELS_ATTR].items()
    launch = f'"launch_{symbol}", X_1.data, Y_1.data, n, T.int64(1), n, T.int64(1))'
    assert f"T.call_cpacked({launch}" in func.script()
    assert '"block": [32, 4, 1]' in str(attr["kernel"])
    source, arch = nvrtc.seen["scale_kernel"]
    assert arch == "sm_90a" and "__launch_bounds__(128)" in source


@pytest.mark.parametrize("cubins", [True, False])
def test_the_library_has_no_source_of_kernels(
    cubins: bool, nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(options, "require_nvrtc", lambda: nvrtc)
    executable = compile_with_pipeline(Scaled, cubins)
    text = {module.kind: module.inspect_source() for module in modules(executable.mod)}
    if cubins is False:
        assert "scale_kernel" in text["cuda"] and "c" not in text
    else:
        assert "cuda" not in text
        assert re.search(r'"scale_kernel", rf_image_scale\w+, 90, {32, 4, 1},', text["c"])
    (name,) = cuda_kernels(executable)
    assert name.startswith("scale_kernel")
    assert len(cuda_kernels(executable, ("cuda",))) == (cubins is False)
    executable.export_library(str(tmp_path / "lib.so"))


def compile_with_pipeline(mod: tvm.IRModule, cubins: bool) -> relax.VMExecutable:
    """Compile as users do."""
    pipeline = relax.get_pipeline("relax_fusion", target=H200, cubins=cubins)
    return tvm.compile(mod, H200, relax_pipeline=pipeline)


def modules(module: tvm.runtime.Module) -> list[tvm.runtime.Module]:
    """Return a module and all that it imports."""
    return [module, *(m for child in module.imports for m in modules(child))]


def test_kernels_are_compiled_once(nvrtc: FakeNvrtc) -> None:
    compiled(Scaled, nvrtc)
    again = FakeNvrtc()
    func = compiled(Scaled, again)["scale"]
    assert again.seen == {} and KERNELS_ATTR in func.attrs
    other = FakeNvrtc(version="1")
    compiled(Scaled, other)
    assert list(other.seen) == ["scale_kernel"]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('T.thread_binding(4, thread="', 'T.thread_binding(n, thread="', "threadIdx.y"),
        ('thread="blockIdx.y"', 'thread="clusterCtaIdx.y"', "clusterCtaIdx.y"),
    ],
)
def test_what_the_launcher_cannot_launch_stays(
    old: str, new: str, reason: str, nvrtc: FakeNvrtc, caplog: pytest.LogCaptureFixture
) -> None:
    text = Scaled.script()
    assert old in text
    with caplog.at_level(logging.WARNING):
        mod = compiled(tvm.script.from_source(text.replace(old, new)), nvrtc)
    assert KERNELS_ATTR not in mod["scale"].attrs and nvrtc.seen == {}
    assert f"scale is compiled when the library is loaded: scale_kernel: {reason}" in caplog.text


def test_errors_of_the_compiler_reach_the_user(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Nvrtc, name: str, source: str, arch: str) -> tuple[bytes, bytes]:
        raise KernelError(f"{name} does not compile for {arch}: line 3")

    monkeypatch.setattr(options, "find_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(options, "require_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(FakeNvrtc, "compile", fail)
    with pytest.raises(KernelError, match="scale_kernel does not compile for sm_90a: line 3"):
        compile_with_pipeline(Scaled, True)


def test_tvm_compiles_nothing_meanwhile_and_may_later(
    nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    for before in (None, "0"):
        monkeypatch.delenv(FORCE, raising=False)
        if before is not None:
            monkeypatch.setenv(FORCE, before)
        with cuda_source._source_only():
            assert os.environ[FORCE] == "1"
        assert os.environ.get(FORCE) == before


def test_functions_of_the_host_and_of_other_devices_stay(nvrtc: FakeNvrtc) -> None:
    host = Scaled["scale"].with_attr("tirx.is_host_func", True)
    cpu = Scaled["scale"].with_attr("target", tvm.target.Target("llvm"))
    mod = tvm.IRModule({"host": host, "cpu": cpu})
    tvm.ir.assert_structural_equal(CompileCUDAKernels(H200, nvrtc)(mod), mod)


def test_cubins_need_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_module, "find_nvrtc", lambda: None)
    with pytest.raises(MissingPackageError, match=r"need nvidia-cuda-nvrtc 13 \(pip install"):
        relax.get_pipeline("relax_fusion", target=H200, cubins=True)
    relax.get_pipeline("relax_fusion", target="llvm", cubins=True)  # compiles anyway


@needs_nvrtc
def test_kernels_in_half_precision_become_cubins() -> None:
    (attr,) = compiled(Scaled, find_nvrtc())["scale"].attrs[KERNELS_ATTR].values()
    assert attr["image"].numpy().tobytes().startswith(b"\x7fELF")
