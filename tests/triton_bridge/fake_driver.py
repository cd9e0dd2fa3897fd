"""Builds the CUDA driver without a GPU, and launchers to call with it."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton
import tvm_ffi.libinfo

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.launch.launcher import launcher_source

from ..support.processes import without_torch

HERE = Path(__file__).parent
CUDA_HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
TVM_HEADERS = [tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()]
INCLUDES = [f"-isystem{path}" for path in [CUDA_HEADERS, *dict.fromkeys(TVM_HEADERS)]]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-overlength-strings"]

FUNCTIONS = [
    *("cuInit", "cuGetErrorName", "cuGetErrorString", "cuCtxGetDevice", "cuCtxSetCurrent"),
    *("cuDriverGetVersion", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    "cuModuleLoadData",
    *("cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"),
]


def gcc(*args: str | Path) -> None:
    """Run a compiler: `gcc`, or the one named first."""
    command = [str(a) for a in args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def _driver_object() -> str:
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    target = f"{directory.name}/fake_cuda.o"
    gcc("gcc", "-c", "-fPIC", *INCLUDES, HERE / "fake_cuda.c", "-o", target)
    return target


def build_driver(directory: Path, *without: str) -> Path:
    """Build libcuda.so.1 in `directory`, lacking some functions; return its path."""
    target, hidden = directory / "libcuda.so.1", directory / "hidden.map"
    hidden.write_text(f"{{ global: cu*; local: {' '.join(f'{name};' for name in without)} *; }};")
    options = ["-Wl,-soname,libcuda.so.1", f"-Wl,--version-script={hidden}"]
    gcc("gcc", "-shared", *options, _driver_object(), "-o", target)
    return target


def build_launcher(kernel: CompiledKernel, directory: Path) -> Path:
    """Build a library whose function "launch" is the launcher of `kernel`."""
    directory.mkdir(parents=True, exist_ok=True)
    code = directory / f"{kernel.symbol}.c"
    wrapper = f"""
    int __tvm_ffi_launch(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {{
      return {kernel.launcher}(self, args, n, result);
    }}
    """
    code.write_text(launcher_source([kernel]) + wrapper)
    library = code.with_suffix(".so")
    gcc("gcc", "-std=gnu11", "-shared", "-fPIC", *INCLUDES, code, "-o", library)
    return library


@dataclass
class Job:
    """Calls of one launcher in one environment, with one driver or none."""

    driver: Path | None
    library: Path
    calls: Sequence[Sequence[Any]]
    sizes: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    threads: int = 1

    def to_json(self) -> dict[str, Any]:
        sizes = ",".join(map(str, self.sizes))
        environment = {"FAKE_CUDA_PARAMS": sizes} if sizes else {}
        return {
            "driver": str(self.driver) if self.driver else None,
            "library": str(self.library),
            "calls": self.calls,
            "environment": {**environment, **self.environment},
            "threads": self.threads,
        }


@dataclass
class Answer:
    """What came of a job."""

    errors: list[str]
    log: list[dict[str, Any]]

    def of(self, call: str) -> list[dict[str, Any]]:
        """Return the calls of one function of the driver."""
        return [line for line in self.log if line["call"] == call]

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The launches that the driver saw."""
        return self.of("cuLaunchKernelEx")


class Worker:
    """A process that does jobs."""

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fake_cuda_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=without_torch(),
        )
        return self

    def do(self, job: Job) -> Answer:
        """Do `job`."""
        print(json.dumps(job.to_json()), file=self._process.stdin, flush=True)
        return Answer(**json.loads(self._process.stdout.readline()))

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
