"""All our rules on PrimFuncs of TVM's legaliser: none may fail, and what they schedule is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir import dlight as dl
from tvm.target import Target

from relax_fusion import host_target
from relax_fusion.dlight_rules import (
    CopyRule,
    CPUSpatialRule,
    FusedRule,
    GenericMatmulRule,
    NormRule,
    NumbersRule,
    ReductionRule,
    RowSumRule,
    ScalarMatmulRule,
    WindowRule,
)
from relax_fusion.dlight_rules.safe_rule import SafeRule
from relax_fusion.errors import Decline
from relax_fusion.hardware.target import is_cpu
from relax_fusion.workload.reference import numpy_dtype

from ..support import generic_cases as cases
from ..support.quick import loaded
from .legalised import Call
from .processes import in_processes

RULES: tuple[SafeRule, ...] = (
    FusedRule(),
    GenericMatmulRule(),
    NormRule(),
    NumbersRule(),
    ScalarMatmulRule(),
    RowSumRule(),
    CPUSpatialRule(),
    ReductionRule(),
    WindowRule(),
    CopyRule(),
)

Arrays = list[np.ndarray]


@dataclass
class Outcome:
    """What the rules made of the PrimFuncs of one call."""

    functions: int = 0
    scheduled: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why TVM made nothing of the call, or does not compile what it made."""


def legalised(call: Call, dtype: str, symbolic: bool) -> list[tirx.PrimFunc]:
    """Return the PrimFuncs of a call, then all of it as one if there are several operators."""
    inputs = call.typed(dtype, symbolic)
    functions = cases.prim_funcs(cases.module(inputs, call.emit))
    return [*functions, cases.fused(inputs, call.emit)] if len(functions) > 1 else functions


def check(call: Call, dtype: str, symbolic: bool, targets: Sequence[Target]) -> Outcome:
    """Run every rule on every PrimFunc of a call for every target.

    What is scheduled for a CPU is run, for the first GPU compiled.
    """
    outcome = Outcome()
    try:
        functions = legalised(call, dtype, symbolic)
        wide = legalised(call, "float32", symbolic)
    except Exception as err:  # TVM has no such call: nothing to try
        outcome.skipped = _last_line(err)
        return outcome
    outcome.functions = len(functions)
    gpu = next((t for t in targets if not is_cpu(t)), None)
    for func, like in zip(functions, wide, strict=True):
        for target in targets:
            kernels = _schedules(func, target, outcome)
            if is_cpu(target):
                _run_all(func, like, kernels, outcome)
            elif target.same_as(gpu):
                _compile_all(func, target, kernels, outcome)
    return outcome


def _schedules(func: tirx.PrimFunc, target: Target, outcome: Outcome) -> dict[str, tirx.PrimFunc]:
    """Return what the rules make of a function, by the rule."""
    kernels = {}
    for rule in RULES:
        name = f"{type(rule).__name__} {target.kind.name}"
        found = rule.attempt(func, target)
        if isinstance(found, Decline):
            key = f"{name}: {found.reason.value}"
            outcome.declined[key] = outcome.declined.get(key, 0) + 1
        elif isinstance(found, s_tir.Schedule):
            outcome.scheduled[name] = outcome.scheduled.get(name, 0) + 1
            kernels[name] = found.mod["main"]
    return kernels


def _run_all(
    func: tirx.PrimFunc, wide: tirx.PrimFunc, kernels: dict[str, tirx.PrimFunc], outcome: Outcome
) -> None:
    if not kernels:
        return
    arrays = inputs_of(func)
    try:
        want = run(func, func, arrays)
        exact = run(wide, wide, [_like(a, p) for a, p in zip(arrays, inputs(wide), strict=True)])
    except Exception as err:  # TVM does not compile its own function
        outcome.skipped = _last_line(err)
        return
    for name, kernel in kernels.items():
        try:
            compare(run(kernel, func, arrays), want, exact)
        except Exception as err:
            outcome.wrong.append(f"{name}: {type(err).__name__}: {str(err).strip()[-300:]}")


def _compile_all(
    func: tirx.PrimFunc, target: Target, kernels: dict[str, tirx.PrimFunc], outcome: Outcome
) -> None:
    for name, kernel in kernels.items():
        try:
            cases.compiled(kernel, target)
        except Exception as err:
            why = _last_line(err)
            if _compiles(dl.gpu.Fallback().apply(func, target, False), target):
                outcome.wrong.append(f"{name}: {why}")
            else:  # nor does it with a schedule of TVM's
                outcome.skipped = why


def _compiles(schedule: s_tir.Schedule | None, target: Target) -> bool:
    try:
        return schedule is not None and bool(cases.compiled(schedule.mod["main"], target))
    except Exception:
        return False


def _last_line(err: Exception) -> str:
    return f"{type(err).__name__}: {str(err).strip().splitlines()[-1][:200]}"


def compare(got: Arrays, want: Arrays, exact: Arrays) -> None:
    """Compare with the unscheduled function, and with the one of float32 inputs where it differs.

    A kernel may differ from that by twice what the unscheduled function does, and a rounding.
    """
    for unfused, ours, best in zip(want, got, exact, strict=True):
        if ours.dtype.kind in "biu":
            np.testing.assert_array_equal(ours, unfused)
            continue
        a, b, c = (x.astype("float64") for x in (unfused, ours, best))
        finite = np.isfinite(a) & np.isfinite(c)
        np.testing.assert_array_equal(np.isnan(b[finite]), False)
        eps = float(ml_dtypes.finfo(ours.dtype).eps)
        size = np.abs(c[finite])
        # Sums of float32 may be added up in any order.
        order = 16 * float(np.finfo("float32").eps) * (1 + size.max(initial=0))
        error = np.abs(b[finite] - c[finite])
        allowed = 2 * np.abs(a[finite] - c[finite]).max(initial=0) + eps * size + order
        if np.any(error > allowed):
            raise AssertionError(f"error {error.max():.2g} of {size.max():.2g}")


def _like(array: np.ndarray, param: tirx.Var) -> np.ndarray:
    return array if array.dtype.kind in "biu" else array.astype(str(param.ty.dtype))


def inputs(func: tirx.PrimFunc) -> list[tirx.Var]:
    """Return the buffer parameters that a function only reads."""
    written: list[tirx.Var] = []
    tvm_ffi.structural_walk(
        func.body, (tirx.BufferStore, lambda store: written.append(store.buffer))
    )
    return [p for p in func.params if tirx.is_buffer_var(p) and p not in set(written)]


def inputs_of(func: tirx.PrimFunc) -> Arrays:
    return [
        cases.array(cases.shape_of(p), str(p.ty.dtype), seed) for seed, p in enumerate(inputs(func))
    ]


def run(kernel: tirx.PrimFunc, like: tirx.PrimFunc, arrays: Arrays) -> Arrays:
    """Run a function of the parameters of `like`; return what it writes."""
    given = dict(zip(inputs(like), arrays, strict=True))
    args: list[Any] = []
    outs = []
    for param in like.params:
        if not tirx.is_buffer_var(param):
            args.append(cases.SIZES.get(param.name, cases.OTHER_SIZE))
        elif param in given:
            args.append(tvm.runtime.tensor(given[param]))
        else:
            zeros = np.zeros(cases.shape_of(param), numpy_dtype(str(param.ty.dtype)))
            outs.append(tvm.runtime.tensor(zeros))
            args.append(outs[-1])
    loaded(cases.compiled(kernel, host_target()))["main"](*args)
    return [out.numpy() for out in outs]


# --- each call in a process of its own --------------------------------------------------------

Job = tuple[str, Call, str, bool]


def isolated(
    jobs: Sequence[Job], targets: Sequence[Target], seconds: int
) -> Iterator[tuple[Job, Outcome]]:
    """Check every job in a child process, so that a crash of TVM is an outcome like any other."""
    for job, found in in_processes(partial(_job, targets=targets), jobs, seconds):
        yield job, found if isinstance(found, Outcome) else Outcome(wrong=[found])


def _job(job: Job, targets: Sequence[Target]) -> Outcome:
    _, call, dtype, symbolic = job
    return check(call, dtype, symbolic, targets)
