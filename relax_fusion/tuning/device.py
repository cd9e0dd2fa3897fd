"""Kernels that are compiled together, and the device that they are measured on.

That is one of this machine, or of another one by TVM's RPC.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, rpc, tirx
from tvm.target import Target

from ..compute import build_prim_func
from ..errors import TuningError
from ..estimator.registry import is_launched
from ..estimator.tile_plan import PlanTable, TilePlan
from ..hardware.target import is_gpu
from ..passes import PATTERNS
from ..timing import FLUSH_BYTES
from ..validation import reason, shown
from ..workload import Workload
from .contests import Contest

FOREIGN_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError)
"""What compilers raise of a kernel that they cannot make."""


WARM_UP_S = 0.2
"""A GPU works for 0.2 seconds before the first sample at a size.  An idle one, as while inputs are
drawn, lowers its clock: the first kernels took up to 3.5 times as long
(`2026-11-24-tune-bert-large.log`)."""

RPC_TIMEOUT_S = 300
"""A server that was asked by a tracker takes its device back after 300 seconds."""


def tables_of(contests: Sequence[Contest]) -> dict[TilePlan, PlanTable]:
    """Return for each plan of some contests a table in which it serves all sizes.

    Triton's kernels rely on the most rows of their range, so the ranges are there in which the plan
    is measured; other kernels know nothing of theirs.  Beyond, where it is not measured, all share
    one plan.
    """
    tables = {}
    shared = contests[-1].plans[0] if contests else None
    for plan in dict.fromkeys(plan for contest in contests for plan in contest.plans):
        known = {c.box.rows for c in contests if plan in c.plans and is_launched(plan)}
        uppers = sorted(rows for rows in known if rows is not None)
        beyond = plan if shared is None or not uppers or None in known else shared
        tables[plan] = PlanTable((*((rows, plan) for rows in uppers), (None, beyond)))
    return tables


def compiled(
    work: Workload, tables: Mapping[TilePlan, PlanTable], target: Target
) -> tuple[list[tuple[relax.VMExecutable, dict[TilePlan, str]]], dict[TilePlan, str]]:
    """Compile plans together; where that fails, halves of them, until it is known which fails.

    Returns executables with the names of their functions, and why other plans do not compile.
    """
    names = {plan: f"run_{number}" for number, plan in enumerate(tables)}
    try:
        mod = _module(work, {names[plan]: table for plan, table in tables.items()})
        pipeline = relax.get_pipeline(
            "relax_fusion", target=target, disable=list(PATTERNS), use_cuda_graph=False
        )
        return [(tvm.compile(mod, target=target, relax_pipeline=pipeline), names)], {}
    except FOREIGN_ERRORS as err:
        if len(tables) == 1:
            return [], {plan: reason(err) for plan in tables}
    plans, executables = list(tables), []
    failed: dict[TilePlan, str] = {}
    half = len(plans) // 2
    for some in (plans[:half], plans[half:]):
        made, wrong = compiled(work, {plan: tables[plan] for plan in some}, target)
        executables += made
        failed |= wrong
    return executables, failed


def _module(work: Workload, tables: Mapping[str, PlanTable]) -> ir.IRModule:
    builder = relax.BlockBuilder()
    for name, table in tables.items():
        func = build_prim_func(work, table).without_attr("global_symbol")
        gvar = builder.add_func(func, f"kernel_of_{name}")
        _add_call(builder, gvar, func, (name, len(work.graph.outputs)))
    return builder.get()


def _add_call(
    builder: relax.BlockBuilder, gvar: ir.GlobalVar, func: tirx.PrimFunc, told: tuple[str, int]
) -> None:
    """Add a function, of a name and a number of results, that calls a PrimFunc."""
    name, results = told
    dims: dict[ir.Var, ir.Var] = {}

    def size(dim: ir.Expr) -> ir.Expr:
        known = isinstance(dim, ir.Var)
        return dims.setdefault(dim, tirx.Var(dim.name, "int64")) if known else dim

    def type_of(param: tirx.Var) -> ir.Type:
        if not hasattr(param.ty, "shape"):  # a number
            return param.ty
        return relax.TensorType([size(dim) for dim in param.ty.shape], str(param.ty.dtype))

    types = [type_of(param) for param in func.params]
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:-results])]
    out = types[-1] if results == 1 else types[-results:]
    with builder.function(name, params):
        with builder.dataflow():
            made = builder.emit_output(relax.op.call_tir(gvar, relax.Tuple(params), out))
        builder.emit_func_output(made)


Function = tuple[relax.VirtualMachine, str]
"""A function, by its name, of a loaded executable."""


@dataclass(frozen=True)
class MeasuringDevice:
    """A device, and the session with the machine that has it."""

    device: tvm.runtime.Device  # of the session, where there is one
    on_gpu: bool  # whether it is a GPU, whose caches are emptied before each sample
    session: Any = None  # none: the device is of this machine

    @property
    def machine(self) -> str:
        """What the device calls itself, and its API's version; empty for a CPU."""
        if not self.on_gpu:
            return ""
        return f"{self.device.device_name}, API {self.device.api_version}"

    def load(self, executable: relax.VMExecutable) -> relax.VirtualMachine:
        """Return a virtual machine that runs an executable there."""
        if self.session is None:
            return relax.VirtualMachine(executable, self.device)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "tuned.so"
            executable.export_library(str(path))
            self.session.upload(str(path))
        return relax.VirtualMachine(self.session.load_module(path.name), self.device)

    def tensor(self, value: Any) -> Any:
        """Bring an array there; a number stays one."""
        return tvm.runtime.tensor(value, self.device) if isinstance(value, np.ndarray) else value

    def results(self, function: Function, arguments: Sequence[Any]) -> list[np.ndarray]:
        """Call a function and return what it returns."""
        machine, name = function
        machine.module["set_input"](name, *arguments)  # the machine's own method takes no numbers
        machine.invoke_stateful(name)
        made = machine.get_outputs(name)
        return [out.numpy() for out in (made if isinstance(made, tuple) else (made,))]

    def warm_up(self, function: Function, arguments: Sequence[Any]) -> None:
        """Call a function until a GPU's clock has risen; a CPU is left alone."""
        end = time.monotonic() + WARM_UP_S
        while self.on_gpu and time.monotonic() < end:
            self.sample(function, arguments, 10)

    def sample(
        self, function: Function, arguments: Sequence[Any], count: int, *, flush: bool = True
    ) -> list[float]:
        """Return the seconds of `count` calls of a function, after one more to warm up.

        Unless told otherwise, a GPU's caches are emptied in front of each.
        """
        machine, name = function
        machine.module["save_function"](name, f"{name}_timed", 0, *arguments)
        emptied = FLUSH_BYTES if self.on_gpu and flush else 0  # a CPU's would take too long
        timed = machine.module.time_evaluator(
            f"{name}_timed", self.device, number=1, repeat=count, cache_flush_bytes=emptied
        )
        return list(timed().results)


def open_device(target: Target, where: str | None) -> MeasuringDevice:
    """Find the device that a target is for.

    `where`: ``"host:port"`` of an RPC server, or ``"host:port/key"`` of a tracker that knows
    servers by a key; this machine by default.
    Raises `TuningError` if there is no such device, or nobody answers.
    """
    kind = target.kind.name
    session = None if where is None else _session(where)
    device = (session or tvm).device("cpu" if kind == "llvm" else kind)
    if not device.exist:
        place = f"at {where}" if where else "on this machine"
        hint = "" if where else "; rpc='host:port' (--rpc host:port) measures on another"
        raise TuningError(f"target {kind}: no such device {place}{hint}")
    return MeasuringDevice(device, is_gpu(target), session)


def _session(where: str) -> Any:
    found = re.fullmatch(r"([^/\s]+):(\d{1,5})(?:/(\S+))?", where)
    if found is None:
        text = "must be host:port of a server, or host:port/key of a tracker"
        raise TuningError(f"rpc is {shown(where)}; {text}")
    host, port, key = found[1], int(found[2]), found[3]
    try:
        if key is None:
            return rpc.connect(host, port)
        return rpc.connect_tracker(host, port).request(key, session_timeout=RPC_TIMEOUT_S)
    except FOREIGN_ERRORS as err:
        raise TuningError(f"rpc {where}: no session ({reason(err)})") from err
