"""The code that the compiler makes of a launch, for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import triton
from tvm import relax

from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.hardware import DeviceSpec, device
from relax_fusion.hardware.nvidia import capability_of
from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.compile import compile_kernels
from relax_fusion.triton_bridge.launches import Step
from relax_fusion.triton_bridge.specialize import specialize
from relax_fusion.workload import Workload

from ...support.launches import launch_cases, parameters

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FEW = 16
"""Rows or query positions that the launches serve at most."""

SIGNS = {
    "wide loads": r"ld\.global[^;]*\.v4",
    "loads": r"ld\.global[^;]*\.v4",
    "copies": r"cp\.async\.cg[^;]*0x10",
    "tensor copies": r"cp\.async\.bulk\.tensor",
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
}
NARROW = {"loads": r"ld\.global(?![^;]*\.v4)", "copies": r"cp\.async\.ca|st\.shared\.b16"}
"""Copies that pass through registers end in stores to shared memory, element by element."""


def compiled(work: Workload, plan: TilePlan, name: str = "h200", at: int = 0) -> CompiledKernel:
    """Compile the launch at a place among those of a workload, as the pipeline does."""
    dev = device(name)
    cases = launch_cases(work, plan, parameters(work), FEW, dev)
    return compiled_step(cases[-1 if plan.split_k > 1 else 0][1][at], work, dev)


def compiled_step(step: Step, work: Workload, dev: DeviceSpec) -> CompiledKernel:
    """Compile a launch of a workload."""
    outs = [
        relax.TensorType([d if isinstance(d, int) else FEW for d in o.shape or ()], o.dtype)
        for o in work.graph.outputs
    ]
    given = step.args, step.constexprs, step.options, outs, capability_of(dev.arch)
    return compile_kernels([specialize(step.function, *given)[0]])[0]


def said_by(tool: str, option: str, cubin: bytes, folder: Path) -> str:
    """Return what a tool of CUDA says of a kernel."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [os.fspath(TOOLS / tool), option, os.fspath(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Return the bytes of stack of a kernel: more than none means that registers were spilled."""
    return int(re.search(r"STACK:(\d+)", said_by("cuobjdump", "-res-usage", cubin, folder))[1])
