"""A C++ program that runs compiled libraries: examples/run_library.cc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi.libinfo

SOURCE = Path(__file__).parents[2] / "examples" / "run_library.cc"
LIBRARIES = (Path(tvm.__file__).parent / "lib", Path(tvm_ffi.libinfo.find_libtvm_ffi()).parent)


def build_program(directory: Path) -> Path:
    """Compile the program as its comment says; skip the test where that is not possible."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    program = directory / "run_library"
    includes = dict.fromkeys(tvm_ffi.libinfo.include_paths())
    options = [f"-isystem{path}" for path in includes] + [f"-L{path}" for path in LIBRARIES]
    options += [f"-Wl,-rpath,{path}" for path in LIBRARIES]
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(SOURCE), "-o", str(program)]
    command += [*options, "-ltvm_runtime", "-ltvm_ffi", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def call_program(
    program: Path, library: Path, arrays: list[np.ndarray], device: str = "cpu"
) -> np.ndarray:
    """Return what ``main`` of a library makes of arrays, in a process without Python."""
    args: list[str] = []
    for number, array in enumerate(arrays):
        file = library.with_suffix(f".{number}.bin")
        array.tofile(file)
        args += [str(array.dtype), "x".join(map(str, array.shape)), str(file)]
    out = library.with_suffix(".out.bin")
    command = [str(program), str(library), "main", device, str(out), *args]
    paths = [str(LIBRARIES[0]), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]  # CUDA's
    environment = {"LD_LIBRARY_PATH": os.pathsep.join(paths), "TVM_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    dtype, *shape = done.stdout.split()
    return np.fromfile(out, dtype).reshape([int(size) for size in shape])
