"""What launching costs: an embedded Triton kernel against TVM's own CUDA kernel, through the VM.

One run on a machine with an NVIDIA GPU.  Both modules hold the same chain of element-wise additions
over few elements.  "host" is the time until the VM returns, by the number of kernels, with a queue
so short that it never waits for the device; "device" is the time until the last of many is done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.script import relax as R
from tvm.target import Target

from benchmarks import recording
from relax_fusion import make_target
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


def launch_seconds(executable: tvm.runtime.Executable, what: str) -> list[float]:
    """Return the time of one launch, for every repeat."""
    dev = tvm.cuda(0)
    vm = relax.VirtualMachine(executable, dev)
    x, y = (tvm.runtime.tensor(np.ones(SIZE, "float32"), dev) for _ in range(2))
    main = vm["main"]
    for _ in range(5):
        main(x, y)
    times = []
    for _ in range(REPEATS):
        dev.sync()
        start = time.perf_counter()
        for _ in range(CALLS[what]):
            main(x, y)
        if what == "device":
            dev.sync()
        times.append((time.perf_counter() - start) / (CALLS[what] * KERNELS))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h200", help="a device of the table (default: h200)")
    parser.add_argument("--output", type=Path, default=recording.RESULTS)
    args = parser.parse_args()
    target = make_target(args.target)
    record = {**recording.facts(), "gpu": str(tvm.cuda(0).device_name), "microseconds": {}}
    rows = [("dims", "time", "TVM's kernel, us", "embedded Triton kernel, us", "ratio")]
    for name in ("static", "symbolic"):
        made = [chain(target, triton=t, symbolic=name == "symbolic") for t in (False, True)]
        for what in CALLS:
            times: list[list[float]] = [[], []]
            for _ in range(3):
                for kept, executable in zip(times, made, strict=True):
                    kept += launch_seconds(executable, what)
            theirs, ours = (1e6 * statistics.median(kept) for kept in times)
            record["microseconds"][f"{name}, {what}"] = {"tvm": theirs, "triton": ours}
            rows.append((name, what, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}"))
    head = f"{record['gpu']}, {KERNELS} kernels of {SIZE} elements."
    table = f"{head}\n\n{recording.markdown_table(rows)}"
    print(table)
    for path in recording.write("bench_launch", record, table, args.output):
        print(path)


if __name__ == "__main__":
    main()
