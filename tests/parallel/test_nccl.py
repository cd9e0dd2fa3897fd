"""The library by which Disco calls NCCL, built where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_fusion.errors import MissingPackageError
from relax_fusion.launch.nvrtc import package_roots
from relax_fusion.parallel import Workers, nccl, nccl_library

CUDA = """#pragma once
typedef struct CUstream_st* cudaStream_t;
typedef int cudaError_t;
constexpr int cudaSuccess = 0;
extern "C" {
cudaError_t cudaSetDevice(int);
cudaError_t cudaStreamCreate(cudaStream_t*);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaGetLastError();
const char* cudaGetErrorName(cudaError_t);
const char* cudaGetErrorString(cudaError_t);
}
"""
COLLECTIVES = """#pragma once
#include <stddef.h>
#include <cuda_runtime.h>
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;
typedef struct ncclComm* ncclComm_t;
enum ncclResult_t { ncclSuccess };
enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg };
enum ncclDataType_t { ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64,
                      ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16 };
struct ncclConfig_t;
extern "C" {
ncclResult_t ncclGetUniqueId(ncclUniqueId*);
ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int);
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*);
ncclResult_t ncclCommDestroy(ncclComm_t);
const char* ncclGetErrorString(ncclResult_t);
ncclResult_t ncclAllReduce(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                           cudaStream_t);
ncclResult_t ncclAllGather(const void*, void*, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
ncclResult_t ncclBroadcast(const void*, void*, size_t, ncclDataType_t, int, ncclComm_t,
                           cudaStream_t);
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
}
"""
FILES = {
    "nccl/include/nccl.h": ("nvidia-nccl-cu13", COLLECTIVES),
    "nccl/lib/libnccl.so.2": ("nvidia-nccl-cu13", ""),
    "cu13/include/cuda_runtime.h": ("nvidia-cuda-runtime", CUDA),
    "cu13/lib/libcudart.so.13": ("nvidia-cuda-runtime", ""),
    "cu13/include/crt/host_config.h": ("nvidia-cuda-crt", ""),
    "cu13/include/cccl/nv/target": ("nvidia-cuda-cccl", ""),
}
"""What wheels hold that are 300 MB large, as far as TVM's source asks for it."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, (_, text) in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    roots: Callable[[str], list[Path]] = package_roots
    monkeypatch.setattr(
        nccl, "package_roots", lambda name: [tmp_path] if name == "nvidia" else roots(name)
    )
    monkeypatch.setattr(nccl, "_toolkits", list)
    monkeypatch.delenv(nccl.LIBRARY, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_what_is_missing_is_named(wheels: Path, name: str) -> None:
    nccl.find_parts()
    nccl.find_libraries()
    (wheels / name).unlink()
    wheel, _ = FILES[name]
    text = f"need {Path(name).name} of the wheel {wheel}, which is not installed here; pip install"
    with pytest.raises(MissingPackageError, match=text):
        Workers(2, device="cuda")


def test_a_toolkit_has_what_wheels_have_not(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit = tmp_path / "toolkit"
    (wheels / "cu13/include").rename(tmp_path / "include")
    (tmp_path / "include/crt").rename(tmp_path / "crt")
    toolkit.mkdir()
    (tmp_path / "include").rename(toolkit / "include")
    (wheels / "cu13/lib").rename(toolkit / "lib64")
    monkeypatch.setattr(nccl, "_toolkits", lambda: [toolkit])
    with pytest.raises(MissingPackageError, match=r"cuda_runtime\.h of the wheel nvidia-cuda-run"):
        nccl.find_parts()  # not the half of a toolkit
    (tmp_path / "crt").rename(toolkit / "include/crt")
    found = nccl.find_parts().includes
    assert found[-2:] == (toolkit / "include", toolkit / "include/cccl")
    assert nccl.find_libraries()[0] == toolkit / "lib64/libcudart.so.13"


@pytest.mark.parametrize("how", ["CUDA_HOME", "PATH"])
def test_where_toolkits_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    for name in ("bin/nvcc", "lib64/libcudart.so.13"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert tmp_path not in nccl._toolkits()
    monkeypatch.setenv(how, str(tmp_path / ("" if how == "CUDA_HOME" else "bin")))
    assert tmp_path in nccl._toolkits()
    (tmp_path / "lib64/libcudart.so.13").rename(tmp_path / "lib64/libcudart.so.12")
    assert tmp_path not in nccl._toolkits()


def test_a_library_from_elsewhere(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "built.so"
    monkeypatch.setenv(nccl.LIBRARY, str(built))
    with pytest.raises(MissingPackageError, match=r"LIBRARY is '.*built\.so', which is no file"):
        Workers(2, device="cuda")
    built.touch()
    assert nccl_library() == built


def test_a_compiler_is_asked_for(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm.support.cc.get_cc", lambda: None)
    with pytest.raises(MissingPackageError, match=r"no g\+\+ or clang\+\+ was found"):
        nccl_library(wheels / "kept")


def test_a_compiler_that_fails_is_quoted(wheels: Path) -> None:
    (wheels / "nccl/include/nccl.h").write_text("#error too old\n")
    with pytest.raises(MissingPackageError, match=r"cannot build TVM's nccl\.cc: .*#error too old"):
        nccl_library(wheels / "kept")
    assert list((wheels / "kept").iterdir()) == []


@pytest.mark.slow
def test_it_is_built_once(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = nccl_library(wheels / "kept")
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    named = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True, check=True)
    assert "ncclAllReduce" in named.stdout and "tvm7support" not in named.stdout
    monkeypatch.setattr(nccl, "_build", None)
    assert nccl_library(wheels / "kept") == path


@pytest.mark.slow
@pytest.mark.skipif(
    not any((root / "nccl").is_dir() for root in package_roots("nvidia")),
    reason="the extra nccl is not installed",
)
def test_tvm_finds_its_functions() -> None:
    code = (
        "from relax_fusion.parallel import nccl, nccl_library; import tvm_ffi, tvm\n"
        "nccl.load(nccl_library())\n"
        "for name in ('allreduce', 'allgather', 'init_ccl_per_worker', 'sync_worker'):\n"
        "    assert tvm_ffi.get_global_func('runtime.disco.nccl.' + name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
