"""The library by which TVM's Disco calls NCCL: built from what wheels hold, and kept.

TVM's wheel has the source of that library and not the library.  NCCL and the headers of CUDA are
NVIDIA's wheels, `WHEELS`; three headers of TVM are in no wheel, and of these the source needs what
is written here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tvm_ffi

from ..errors import MissingPackageError
from ..files import read_file, user_cache_directory, write_file
from ..launch.nvrtc import package_roots
from .worker import Worker

WHEELS = ("nvidia-nccl-cu13", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-cuda-cccl")
"""What the extra ``nccl`` installs."""

OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility-inlines-hidden")

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
    """What the library is built of and runs with."""

    source: Path
    includes: tuple[Path, ...]
    libraries: tuple[Path, ...]


def nccl_library(directory: Path | None = None) -> Path:
    """Return the library, which is built by the C++ compiler of this machine if it is not kept.

    It needs no GPU.

    Parameters
    ----------
    directory : Path, optional
        Where it is kept; ``nccl`` in the cache of the user by default.

    Raises
    ------
    MissingPackageError
        If a wheel or the compiler is not installed, or the source does not compile.
    """
    parts = find_parts()
    directory = directory or user_cache_directory() / "nccl"
    path = directory / f"{_key(parts)}.so"
    try:
        read_file(path, own=True)
    except OSError:
        _build(parts, path)
    return path


def find_parts() -> Parts:
    """Return the installed files.

    Raises
    ------
    MissingPackageError
        If one is not there; the text names it and what to install.
    """
    tvm, ffi = package_roots("tvm"), package_roots("tvm_ffi")
    cuda, nccl = ([root / part for root in package_roots("nvidia")] for part in ("cu13", "nccl"))
    collectives, runtime, compiler, cccl = WHEELS
    source = _found(tvm, "src/runtime/extra/disco/nccl/nccl.cc", "apache-tvm 0.27")
    headers = (
        (tvm, "include", "tvm/runtime/disco/session.h", "apache-tvm 0.27"),
        (ffi, "include", "tvm/ffi/c_api.h", "apache-tvm-ffi"),
        (ffi, "include", "dlpack/dlpack.h", "apache-tvm-ffi"),
        (nccl, "include", "nccl.h", collectives),
        (cuda, "include", "cuda_runtime.h", runtime),
        (cuda, "include", "crt/host_config.h", compiler),
        (cuda, "include/cccl", "nv/target", cccl),
    )
    includes = []
    for places, folder, name, wheel in headers:
        header = _found(places, f"{folder}/{name}", wheel)
        includes.append(header.parents[name.count("/")])
    libraries = (
        _found(cuda, "lib/libcudart.so.13", runtime),
        _found(nccl, "lib/libnccl.so.2", collectives),
        _found(tvm, "lib/libtvm_runtime_extra.so", "apache-tvm 0.27"),
    )
    return Parts(source, tuple(dict.fromkeys(includes)), libraries)


def _found(places: list[Path], name: str, wheel: str) -> Path:
    for root in places:
        if (root / name).is_file():
            return root / name
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
    told = [version(name) for name in ("apache-tvm", "apache-tvm-ffi", *WHEELS)]
    told += [*OPTIONS, *_HEADERS, *_HEADERS.values()]
    text = "\0".join(told).encode() + parts.source.read_bytes()
    return hashlib.sha256(text).hexdigest()


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
    for path in (*find_parts().libraries, library):
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as err:
            raise MissingPackageError(f"{path} cannot be loaded: {err}") from err


def unique_id(worker: Worker, library: str) -> bytes:
    """Return, on worker 0, by what the workers find one another."""
    load(Path(library))
    if worker.rank:
        return b""
    identity = ctypes.create_string_buffer(_ID_BYTES)
    code = ctypes.CDLL(str(find_parts().libraries[1])).ncclGetUniqueId(identity)
    if code:
        raise RuntimeError(f"ncclGetUniqueId failed with code {code}")
    return identity.raw


def connect(worker: Worker, identity: bytes) -> None:
    """Initialise NCCL on a worker: its GPU is the one with its number."""
    function: Any = tvm_ffi.get_global_func("runtime.disco.nccl.init_ccl_per_worker")
    function(tvm_ffi.Shape(tuple(range(worker.count))), identity)
