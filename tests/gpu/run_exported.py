"""Run one exported library with TVM's runtime alone: ``run_exported.py STEM``.

Reads STEM.so and STEM.in.npz, writes STEM.out.npz.  To be run with ``TVM_USE_RUNTIME_LIB=1``: then
TVM's compiler is not loaded, and its CUDA runtime only on request, as a C++ program would link it.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm.runtime.vm import VirtualMachine


def main(stem: str) -> None:
    runtime = Path(tvm.base._LOADED_LIBS["tvm_runtime"]._name).parent
    ctypes.CDLL(str(runtime / "libtvm_runtime_cuda.so"))
    dev = tvm.cuda(0)
    vm = VirtualMachine(tvm.runtime.load_module(f"{stem}.so"), dev)
    with np.load(f"{stem}.in.npz") as file:
        inputs = [tvm.runtime.tensor(file[name], dev) for name in sorted(file.files)]
    outputs = vm["main"](*inputs)
    foreign = {"triton", "relax_fusion", "tvm.relax"} & set(sys.modules)
    assert not foreign, f"imported: {foreign}"
    assert tvm.base._RUNTIME_ONLY
    np.savez(f"{stem}.out.npz", **{f"out{i}": out.numpy() for i, out in enumerate(outputs)})


if __name__ == "__main__":
    main(sys.argv[1])
