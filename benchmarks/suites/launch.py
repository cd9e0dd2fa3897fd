"""What launching costs: an embedded Triton kernel against TVM's own CUDA kernel, through the VM.

One run on a machine with an NVIDIA GPU.  Both modules hold the same chain of element-wise additions
over few elements.  "host" is the time until the VM returns, by the number of kernels, with a queue
so short that it never waits for the device; "device" is the time until the last of many is done.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import relax as R
from tvm.target import Target

from benchmarks.report import Entry
from benchmarks.suite import Suite
from relax_fusion import make_target
from relax_fusion.timing import host_and_device
from relax_fusion.triton_bridge import OUT, call_tir_extern
from tests.gpu.triton_cases import vector_add

KERNELS, REPEATS = 100, 15
CALLS = {"host": 5, "device": 50}  # the driver queues about 1000 launches before it waits
SIZE = 1024


def chain(target: Target, *, triton: bool, symbolic: bool) -> tvm.runtime.Executable:
    """Compile ``x + y + y + ...``, one kernel for each addition."""
    n = tirx.Var("n", "int64") if symbolic else SIZE
    x, y = (relax.Var(name, R.Tensor((n,), "float32")) for name in "xy")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            value = x
            for _ in range(KERNELS):
                if triton:
                    call = call_tir_extern(
                        vector_add,
                        ((n + 255) // 256,),
                        [value, y, OUT, n],
                        x.ty,
                        constexprs={"BLOCK": 256},
                        target=target,
                    )
                else:
                    call = relax.op.add(value, y)
                value = builder.emit(call)
            out = builder.emit_output(value)
        builder.emit_func_output(out)
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    mod = builder.get()
    if not triton:  # one kernel for each, as in the other module: nothing is fused
        mod = relax.transform.LegalizeOps()(mod)
        mod = tvm.ir.IRModule(
            {
                gvar: func.with_attr("op_pattern", 8) if isinstance(func, tirx.PrimFunc) else func
                for gvar, func in mod.functions_items()
            }
        )
    return tvm.compile(mod, target, relax_pipeline=pipeline)


class Launch(Suite):
    """A hundred launches of each, with sizes known when compiling and not."""

    name, device = "bench_launch", "gpu"
    key = ("dims", "time")
    head = ("dims", "time", "TVM's kernel, us", "embedded Triton kernel, us", "ratio")

    def begin(self) -> None:
        self.built: dict[str, list[Callable[[], Any]]] = {}

    def items(self) -> Iterator[tuple[str, str]]:
        return product(("static", "symbolic"), CALLS)

    def calls(self, dims: str) -> list[Callable[[], Any]]:
        """Return the calls of TVM's kernels and of Triton's."""
        if dims not in self.built:
            dev, target = tvm.cuda(0), make_target(self.args.target)
            tensors = [tvm.runtime.tensor(np.ones(SIZE, "float32"), dev) for _ in range(2)]
            made = [chain(target, triton=t, symbolic=dims == "symbolic") for t in (False, True)]
            mains = [relax.VirtualMachine(executable, dev)["main"] for executable in made]
            self.built[dims] = [partial(main, *tensors) for main in mains]
        return self.built[dims]

    def measured(self, item: tuple[str, str]) -> Entry:
        dims, what = item
        times: list[list[float]] = [[], []]
        for _ in range(3):
            for kept, call in zip(times, self.calls(dims), strict=True):
                found = host_and_device(call, tvm.cuda(0).sync, CALLS[what], REPEATS)
                kept += found[0 if what == "host" else 1]
        theirs, ours = (1e6 * statistics.median(kept) / KERNELS for kept in times)
        return {"us": {"tvm": theirs, "ours": ours}}

    def intro(self, record: Entry) -> str:
        return f"{record['gpu']}, {KERNELS} kernels of {SIZE} elements."

    def row(self, entry: Entry, record: Entry) -> tuple[str, ...]:
        theirs, ours = entry["us"]["tvm"], entry["us"]["ours"]
        numbers = (f"{number:.2f}" for number in (theirs, ours, ours / theirs))
        return entry["dims"], entry["time"], *numbers
