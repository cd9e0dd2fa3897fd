"""How many kernels a token launches."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from relax_fusion import PipelineOptions
from relax_fusion.matching.pattern import is_call
from relax_fusion.models import ExportedModel
from relax_fusion.pipeline import PHASES
from relax_fusion.transforms.modules import KERNELS_ATTR
from relax_fusion.transforms.whole_graph import is_run_or_capture


def launches(exported: ExportedModel, target: tvm.target.Target) -> tuple[int, int]:
    """Return how many kernels a call of ``decode`` launches, and how many of them from graphs."""
    options = PipelineOptions(target)
    mod = exported.mod
    with target:
        for _, phase, _ in PHASES[:5]:
            mod = tvm.transform.Sequential(phase(options))(mod)
        for step in PHASES[5][1](options):
            mod = step(mod)
            if step.info.name == "CaptureCUDAGraphs":
                break
    decode = mod["decode"]
    inside = sum(_launches(mod, mod[b.value.args[1].fields[0]]) for b in _replays(decode))
    return _launches(mod, decode) + inside, inside


def _replays(func: relax.Function) -> list[relax.VarBinding]:
    return [b for block in func.body.blocks for b in block.bindings if is_run_or_capture(b.value)]


def _launches(mod: ir.IRModule, func: relax.Function) -> int:
    """Count the launches of the PrimFuncs that a function calls itself."""
    count = 0
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            gvar = call.op if isinstance(call, relax.Call) else None
            if isinstance(gvar, ir.GlobalVar) and isinstance(mod[gvar], tirx.PrimFunc):
                count += _kernels(mod[gvar])
    return count


def _kernels(func: tirx.PrimFunc) -> int:
    """Count the kernels of a scheduled PrimFunc: launchers called, or loops bound to blocks."""
    found: list[Any] = []

    def call(node: ir.Call) -> None:
        if is_call(node, "tirx.tvm_call_cpacked"):
            found.append(node)

    def loop(node: tirx.For) -> None:
        if node.thread_binding is not None and node.thread_binding.thread_tag == "blockIdx.x":
            found.append(node)

    visit = (ir.Call, call) if KERNELS_ATTR in func.attrs else (tirx.For, loop)
    tvm_ffi.structural_walk(func.body, visit)
    return len(found)
