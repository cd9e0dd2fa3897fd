"""The library by which TVM's Disco calls NCCL: built from what wheels hold, and kept.

TVM's wheel has the source of that library and not the library.  NCCL and the headers of CUDA are
NVIDIA's wheels, `WHEELS`, or a toolkit's; three headers of TVM are in no wheel, and of these the
source needs what is written here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import MissingPackageError
from ..files import read_file, user_cache_directory, write_file
from ..launch.nvrtc import package_roots
from .worker import Worker

WHEELS = ("nvidia-nccl-cu13", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
"""What the extra ``nccl`` installs."""

LIBRARY = "RELAX_FUSION_NCCL_LIBRARY"
"""Environment variable: the path of a library that `nccl_library` built on another machine."""

OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility-inlines-hidden")

_RUNTIME = "libcudart.so.13"
_INSTALL = "pip install 'relax-fusion[nccl]'"

# TVM's tensor.h has functions that read and write streams, which are not called here.
_STREAM = """#pragma once
namespace tvm { namespace support {
struct Stream {
  template <typename... Args> bool Read(Args&&...);
  template <typename... Args> void Write(Args&&...);
  template <typename... Args> bool ReadArray(Args&&...);
  template <typename... Args> void WriteArray(Args&&...);
};
} }
"""
_HEADERS = {
    "tvm/support/io.h": _STREAM,
    "tvm/support/serializer.h": "#pragma once\n",
    "support/process_id.h": "#pragma once\n",
}
_DEEP = "src/runtime/disco/nccl"
"""The source looks for a header four directories above itself, and then above each of the include
path: this one is made there."""

_ID_BYTES = 128


@dataclass(frozen=True)
class Parts:
    """What the library is built of."""

    source: Path
    includes: tuple[Path, ...]


def nccl_library(directory: Path | None = None) -> Path:
    """Return the library, which is built by the C++ compiler of this machine if it is not kept.

    It needs no GPU.  Where the environment variable `LIBRARY` is set, it is the file of that path.

    Parameters
    ----------
    directory : Path, optional
        Where it is kept; ``nccl`` in the cache of the user by default.

    Raises
    ------
    MissingPackageError
        If a wheel or the compiler is not installed, the source does not compile, or the
        environment variable names no file.
    """
    given = os.environ.get(LIBRARY)
    if given:
        if not Path(given).is_file():
            raise MissingPackageError(f"{LIBRARY} is {given!r}, which is no file")
        return Path(given)
    parts = find_parts()
    directory = directory or user_cache_directory() / "nccl"
    path = directory / f"{_key(parts)}.so"
    try:
        read_file(path, own=True)
    except OSError:
        _build(parts, path)
    return path


def find_parts() -> Parts:
    """Return the installed files of which the library is built.

    Raises `MissingPackageError` if one is not there; the text names it and what to install.
    """
    tvm, ffi = package_roots("tvm"), package_roots("tvm_ffi")
    source = _found(tvm, "src/runtime/extra/disco/nccl/nccl.cc", "apache-tvm 0.27")
    includes = (
        _include(tvm, "include", "tvm/runtime/disco/session.h", "apache-tvm 0.27"),
        _include(ffi, "include", "tvm/ffi/c_api.h", "apache-tvm-ffi"),
        _include(ffi, "include", "dlpack/dlpack.h", "apache-tvm-ffi"),
        _include([*_wheels("nccl"), *_toolkits()], "include", "nccl.h", WHEELS[0]),
        *_cuda_includes(),
    )
    return Parts(source, tuple(dict.fromkeys(includes)))


def find_libraries() -> tuple[Path, ...]:
    """Return what the library runs with: CUDA's runtime, NCCL, and TVM's.

    Raises `MissingPackageError` if one is not there; the text names it and what to install.
    """
    return (
        _found([*_wheels("cu13"), *_toolkits()], f"lib/{_RUNTIME}", WHEELS[1]),
        _found([*_wheels("nccl"), *_toolkits()], "lib/libnccl.so.2", WHEELS[0]),
        _found(package_roots("tvm"), "lib/libtvm_runtime_extra.so", "apache-tvm 0.27"),
    )


def _wheels(part: str) -> list[Path]:
    return [root / part for root in package_roots("nvidia")]


def _toolkits() -> list[Path]:
    """Return where a toolkit of the version of CUDA that TVM calls is installed."""
    nvcc = shutil.which("nvcc")
    folders = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), Path("/usr/local/cuda")]
    folders += [Path(nvcc).resolve().parents[1]] if nvcc else []
    return [folder for folder in folders if (folder / "lib64" / _RUNTIME).is_file()]


def _cuda_includes() -> list[Path]:
    """Return the folders of CUDA's headers: wheels', or else all of them one toolkit's."""
    headers = (
        ("include", "cuda_runtime.h", WHEELS[1]),
        ("include", "crt/host_config.h", WHEELS[2]),
        ("include/cccl", "nv/target", WHEELS[3]),
    )
    try:
        return [_include(_wheels("cu13"), *header) for header in headers]
    except MissingPackageError:
        for toolkit in _toolkits():
            with suppress(MissingPackageError):
                return [_include([toolkit], *header) for header in headers]
        raise


def _include(places: list[Path], folder: str, name: str, wheel: str) -> Path:
    return _found(places, f"{folder}/{name}", wheel).parents[name.count("/")]


def _found(places: list[Path], name: str, wheel: str) -> Path:
    for root in places:
        for path in (root / name, root / name.replace("lib/", "lib64/")):
            if path.is_file():
                return path
    raise MissingPackageError(
        f"workers with GPUs need {Path(name).name} of the wheel {wheel}, which is not installed "
        f"here; {_INSTALL}"
    )


def _compiler() -> str:
    from tvm.support.cc import get_cc

    found = get_cc()
    if found is None:
        raise MissingPackageError(
            "workers with GPUs need a library that a C++ compiler builds, and no g++ or clang++ "
            "was found; install one, or set CXX to its path"
        )
    return found


def _key(parts: Parts) -> str:
    """Return a name for the library that is another one where what it is built of is."""
    told = [_version(name) for name in ("apache-tvm", "apache-tvm-ffi", *WHEELS)]
    told += [*OPTIONS, *_HEADERS, *_HEADERS.values()]
    text = "\0".join(told).encode() + parts.source.read_bytes()
    return hashlib.sha256(text).hexdigest()


def _version(wheel: str) -> str:
    try:
        return version(wheel)
    except PackageNotFoundError:  # a toolkit is used in its place
        return ""


def _build(parts: Parts, path: Path) -> None:
    """Compile the library; it takes its place as a whole."""
    compiler = _compiler()
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part") as folder:
        root = Path(folder)
        (root / _DEEP).mkdir(parents=True)
        for name, text in _HEADERS.items():
            header = root / name
            header.parent.mkdir(parents=True, exist_ok=True)
            write_file(header, text)
        includes = [f"-I{i}" for i in (root / _DEEP, root, *parts.includes)]
        made = root / path.name
        command = [compiler, *OPTIONS, *includes, "-o", str(made), str(parts.source)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            error = next((e for e in ran.stderr.splitlines() if "error" in e), ran.stderr[:400])
            raise MissingPackageError(f"{compiler} cannot build TVM's nccl.cc: {error.strip()}")
        made.chmod(0o600)
        os.replace(made, path)


def load(library: Path) -> None:
    """Load the library, and before it those that it calls, so that TVM has its functions.

    Raises
    ------
    MissingPackageError
        If one of them cannot be loaded.
    """
    libraries = find_libraries()
    for path in (*libraries, library):
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as err:
            raise MissingPackageError(f"{path} cannot be loaded: {err}") from err
    with suppress(OSError):  # `import tvm` loads it only where it finds CUDA's runtime by itself
        ctypes.CDLL(str(libraries[-1].with_name("libtvm_runtime_cuda.so")))


def unique_id(worker: Worker, library: str) -> bytes:
    """Return, on worker 0, by what the workers find one another."""
    load(Path(library))
    if worker.rank:
        return b""
    identity = ctypes.create_string_buffer(_ID_BYTES)
    code = ctypes.CDLL(str(find_libraries()[1])).ncclGetUniqueId(identity)
    if code:
        raise RuntimeError(f"ncclGetUniqueId failed with code {code}")
    return identity.raw


def connect(worker: Worker, identity: bytes) -> None:
    """Initialise NCCL on a worker: its GPU is the one with its number."""
    function: Any = tvm_ffi.get_global_func("runtime.disco.nccl.init_ccl_per_worker")
    function(tvm_ffi.Shape(tuple(range(worker.count))), identity)
