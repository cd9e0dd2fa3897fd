"""CUDA C++ to cubins: finding NVRTC, calling it, and what it says of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_fusion.errors import KernelError, MissingPackageError
from relax_fusion.launch import nvrtc
from relax_fusion.launch.nvrtc import NEEDED, Nvrtc, find_nvrtc, require_nvrtc

needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason=f"needs {NEEDED}")

HEADERS = """
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
using namespace cuda::std;
static_assert(sizeof(int8_t) == 1 && sizeof(uint16_t) == 2 && sizeof(int64_t) == 8, "");
static_assert(is_same<int, int32_t>::value && !is_same_v<int, unsigned>, "");
static_assert(is_integral<bool>::value && !is_integral<float>::value, "");
static_assert(is_integral<unsigned long>::value && is_floating_point<double>::value, "");
static_assert(is_signed<float>::value && is_unsigned<uint8_t>::value, "");
static_assert(is_same_v<conditional<true, int, float>::type, int>, "");
static_assert(is_same_v<enable_if<true, int>::type, int>, "");
"""
KERNEL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }\n'


def places(root: Path, monkeypatch: pytest.MonkeyPatch, *files: str) -> None:
    """Let the wheels be directories in `root`, with some files."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(nvrtc, "package_roots", lambda package: [root / package])


def test_the_library_and_the_headers_are_those_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/include/cccl/nv/target")
    places(tmp_path, monkeypatch, *files, "triton/backends/nvidia/include/cuda_fp16.h")
    found = find_nvrtc.__wrapped__()
    assert found is not None and found.library == tmp_path / files[0]
    include = tmp_path / "nvidia" / "cu13" / "include"
    assert found.includes == (
        tmp_path / "triton" / "backends" / "nvidia" / "include",
        *(include, include / "cccl"),
    )


def test_without_the_wheel_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places(tmp_path, monkeypatch, "nvidia/cu13/lib/libcudart.so.13")
    assert find_nvrtc.__wrapped__() is None
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'nvidia-cuda-nvrtc>=13,<14'"):
        require_nvrtc()


def test_a_library_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "libnvrtc.so.13").write_bytes(b"no library")
    with pytest.raises(MissingPackageError, match=r"libnvrtc\.so\.13 cannot be loaded"):
        Nvrtc(tmp_path / "libnvrtc.so.13", ()).compile("f", KERNEL, "sm_90a")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("f.cu(1): warning: a\n\nf.cu(7): error: b\n    x  =1;\n", "f.cu(7): error: b | x =1;"),
        ("b.h(3): catastrophic error: c\n  d\n", "b.h(3): catastrophic error: c | d"),
        ("nvrtc: error: e\n", "nvrtc: error: e"),
    ],
)
def test_the_first_error_is_told_in_one_line(log: str, line: str) -> None:
    assert nvrtc._first_error(log) == line


def test_only_sources_with_more_of_libcxx_need_its_headers() -> None:
    assert not nvrtc._needs_more(HEADERS)
    assert nvrtc._needs_more(HEADERS + "  #include <cuda/barrier>\n")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_kernel_becomes_a_cubin(arch: str) -> None:
    cubin, ptx = require_nvrtc().compile("twice", HEADERS + KERNEL, arch)
    assert cubin.startswith(b"\x7fELF")
    assert b".visible .entry twice(" in ptx and f".target {arch}".encode() in ptx


@needs_nvrtc
def test_a_log_has_warnings_and_registers() -> None:
    source = KERNEL.replace("{", "{ int unused; ", 1)
    log = require_nvrtc().log("twice", source, "sm_90a")
    assert re.search(r"twice\.cu\(1\): warning .*\"unused\"", log)
    assert re.search(r"Used \d+ registers", log) and "0 bytes spill stores" in log
    with pytest.raises(KernelError, match=r"bad\.cu\(1\): error"):
        require_nvrtc().log("bad", "int x = y;", "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize("header", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h"])
def test_headers_of_narrow_types_are_there(header: str) -> None:
    assert require_nvrtc().compile("twice", f"#include <{header}>\n{KERNEL}", "sm_90a")


@needs_nvrtc
def test_an_error_names_kernel_line_and_text() -> None:
    expected = r"bad does not compile for sm_90a: bad\.cu\(2\): error: .*\"y\".* \| int x = y;"
    with pytest.raises(KernelError, match=expected):
        require_nvrtc().compile("bad", "// first\nint x = y;\n", "sm_90a")
    with pytest.raises(KernelError, match=r"sm_1: .*invalid value.*architecture"):
        require_nvrtc().compile("bad", KERNEL, "sm_1")
