"""Random functions compiled by the whole pipeline, and by TVM's, and run: on this processor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import tvm
from tvm import ir, relax, tirx

from relax_fusion.equivalence.operators import Misfit, Uninterpreted
from relax_fusion.matching.pattern import calls_in
from relax_fusion.matching.shapes import shape_of
from relax_fusion.passes import PATTERNS
from relax_fusion.pipeline import relax_fusion_pipeline
from relax_fusion.tvm_ir import GenericConst
from relax_fusion.workload.reference import numpy_dtype

from ..support.buffers import unaligned
from ..support.quick import machine, quick_host, quickly
from . import evaluation
from .bindings import Function, writes
from .findings import Failure, Findings
from .functions import draw

TIMES, STEPS = 4.0, 64.0
"""An error may be so many times TVM's, and so many units in the last place of the largest number:
what both round differs in order, and each value of a chain is rounded."""

TOGETHER = 16
"""Functions of a module: what each module costs by itself is two thirds of the time."""

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Different(Exception):
    """Raised where results are not those of TVM's pipeline."""


@dataclass(frozen=True)
class Case:
    """A function to compile, by what options, and of which seed."""

    seed: int
    mod: ir.IRModule
    options: tuple[bool, tuple[str, ...]]
    rng: Random


def explore(seeds: Sequence[int], draw: Callable[[int], Function] = draw) -> Findings:
    """Draw, compile and run the functions of some seeds, many of them in one module."""
    found = Findings()
    warnings.filterwarnings("error", "relax_fusion:", RuntimeWarning)
    alike: dict[Any, list[Case]] = {}
    for seed in seeds:
        found.count += 1
        try:
            case = case_of(draw(seed), seed)
        except Exception as err:
            found.failures.append(Failure.of(seed, err))
            continue
        if isinstance(case, str):
            found.seen["skipped"][case] += 1
            continue
        # Two modules may have PrimFuncs of one name
        alone = seed if len(case.mod.functions) > 1 else None
        alike.setdefault((case.options, alone), []).append(case)
    for cases in alike.values():
        for first in range(0, len(cases), TOGETHER):
            _explore(cases[first : first + TOGETHER], found)
    return found


def _explore(cases: Sequence[Case], found: Findings) -> None:
    """Compile cases as one module, or where that fails as two; compare results."""
    try:
        theirs = _compiled(cases, "default")
        ours = _compiled(cases)
    except Exception:
        middle = len(cases) // 2
        for part in (cases[:middle], cases[middle:]) if middle else ():
            _explore(part, found)
        if middle:
            return
        theirs = ours = None
    for number, case in enumerate(cases):
        try:
            alone = theirs is None or ours is None
            why = _checked(case) if alone else _compared(case, theirs, ours, f"main{number}")
        except Exception as err:
            found.failures.append(Failure.of(case.seed, err))
            continue
        if why:
            found.seen["skipped"][why] += 1
        else:
            found.compared += 1


def check(function: Function, seed: int) -> str:
    """Compile and run a function by both pipelines; return why it was not compared, or nothing.

    Raises
    ------
    Exception
        If it does not compile with our pipeline, or its results differ.
    """
    case = case_of(function, seed)
    return case if isinstance(case, str) else _checked(case)


def _checked(case: Case) -> str:
    try:
        theirs = _compiled([case], "default")
    except Exception:
        return "TVM does not compile it"
    return _compared(case, theirs, _compiled([case]), "main0")


def case_of(function: Function, seed: int) -> Case | str:
    """Return what is compiled for a function, or why it is not."""
    if any(writes(value) for _, value, _ in function.bindings):
        return "overwrites"  # TVM's own pipeline takes these for pure
    mod = function.module()
    if mod.global_infos.get("vdevice"):
        return "virtual devices"
    mod = relax.transform.DeadCodeElimination()(mod)
    if _looks_beyond(mod["main"]):
        return "an index is beyond the end"  # both read memory that is not the function's
    rng = Random(seed)
    always_fuse, disable = rng.random() < 0.7, rng.random() < 0.3
    return Case(seed, mod, (always_fuse, (*PATTERNS,) if disable else ()), rng)


def _compiled(cases: Sequence[Case], pipeline: str | None = None) -> relax.VirtualMachine:
    """Compile cases in one module, by a pipeline of TVM or by ours."""
    functions = {g: f for g, f in cases[0].mod.functions_items() if g.name_hint != "main"}
    for number, case in enumerate(cases):
        name = f"main{number}"
        functions[ir.GlobalVar(name)] = case.mod["main"].with_attr("global_symbol", name)
    always_fuse, disable = cases[0].options
    fused = relax_fusion_pipeline(
        quick_host(), always_fuse=always_fuse, disable=disable, validate=False
    )
    return machine(quickly(ir.IRModule(functions), pipeline or fused))


def _compared(
    case: Case, theirs: relax.VirtualMachine, ours: relax.VirtualMachine, name: str
) -> str:
    """Run a function of both machines; return why results were not compared, or nothing."""
    func = case.mod["main"]
    sizes = evaluation.sizes_of(func)
    args = evaluation.arguments(func, sizes, case.seed)
    try:
        wanted, _ = evaluation.run(func, sizes, args, mod=case.mod)
    except Uninterpreted:
        wanted = None
    except (Misfit, ValueError, IndexError, ZeroDivisionError):
        return "sizes do not fit"  # both read memory that is not the function's
    types = [p.ty for p in func.params]
    try:
        reference = _run(theirs[name], args, types, None)
    except Exception:
        return "TVM does not run it"
    made = _run(ours[name], args, types, case.rng)
    parts = func.ret_ty.fields if isinstance(func.ret_ty, relax.TupleType) else [func.ret_ty]
    try:
        _compare(made, reference, wanted, [str(ty.dtype) for ty in parts])
    except Different:
        if evaluation.is_far(func):  # of queries that see no key: V1
            return "a number below -1e30 may hide all keys"
        nudges = [evaluation.nudged(args, sign * coarsest(func)) for sign in (1, -1)]
        moved = [_run(theirs[name], nudge, types, None) for nudge in nudges]
        _compare(made, reference, wanted, [str(ty.dtype) for ty in parts], moved)
    return ""


def coarsest(func: relax.Function) -> float:
    """Return the largest relative rounding that a value of a function has."""
    values = [*func.params, *(b.var for block in func.body.blocks for b in block.bindings)]
    dtypes = {str(v.ty.dtype) for v in values if isinstance(v.ty, relax.TensorType)}
    return max((EPSILON[dtype] for dtype in dtypes if dtype in EPSILON), default=0.0)


def _looks_beyond(func: relax.Function) -> bool:
    """Tell whether a constant index is no place of the axis that it is of."""
    for call in calls_in(func, "relax.take"):
        places, shape = call.args[1], shape_of(call.args[0]) or [tirx.IntImm("int64", 1)]
        axis = -1 if call.attrs.axis is None else int(call.attrs.axis)
        size = int(shape[axis]) if isinstance(shape[axis], tirx.IntImm) else 1
        if isinstance(places, GenericConst) and not np.all(_within(places.value.numpy(), size)):
            return True
    return False


def _within(places: np.ndarray, size: int) -> np.ndarray:
    return (places >= 0) & (places < size)


def _run(
    function: Any, args: Sequence[Any], types: Sequence[Any], rng: Random | None
) -> list[np.ndarray]:
    """Run a function; with `rng`, arrays begin at any element."""
    given = (_given(a, t, rng) for a, t in zip(args, types, strict=True))
    result = function(*given)
    results = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [r.numpy() for r in results]


def _given(value: Any, ty: Any, rng: Random | None) -> Any:
    if isinstance(ty, relax.ShapeType):
        return tvm.runtime.ShapeTuple(list(value))
    if isinstance(value, tuple):
        return tuple(_given(v, t, rng) for v, t in zip(value, ty.fields, strict=True))
    array = np.asarray(value).astype(numpy_dtype(str(ty.dtype)))
    if rng is None:
        return tvm.runtime.tensor(array)
    return unaligned(array, rng.choice((0, 1, 2, 3, 8, 15)) * array.itemsize)


def _compare(
    made: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    wanted: Sequence[Any] | None,
    dtypes: Sequence[str],
    moved: Sequence[Sequence[np.ndarray]] = (),
) -> None:
    """Raise where results are further from the truth than TVM's and rounding explain.

    `dtypes` are those of the graph: TVM returns float32 of ``R.nn.attention`` whatever they say.
    `moved` are TVM's results of arguments a rounding away: so far off may ours be, too, where a
    step is of fewer bits than the result, and integers are free where they differ from TVM's own.
    """
    for number, (a, b, dtype) in enumerate(zip(made, theirs, dtypes, strict=True)):
        if a.shape != b.shape or str(a.dtype) not in (dtype, str(b.dtype)):
            raise Different(f"result {number}: {a.dtype}{a.shape}, not {dtype}{b.shape}")
        true = b if wanted is None else np.asarray(wanted[number])
        others = [b, *(each[number] for each in moved)]
        if (epsilon := EPSILON.get(dtype)) is not None:
            _compare_floats(number, a, others, true.astype("float64"), epsilon)
        elif not np.all((a == true) | np.any([(a == b) | (b != c) for c in others], axis=0)):
            raise Different(f"result {number} differs")


def _compare_floats(
    number: int, made: np.ndarray, others: Sequence[np.ndarray], true: np.ndarray, epsilon: float
) -> None:
    ours, theirs = made.astype("float64"), [other.astype("float64") for other in others]
    known = np.isfinite(true) & np.all([np.isfinite(other) for other in theirs], axis=0)
    scale = np.max(np.abs(true[known]), initial=0.0)
    usual = max(np.max(np.abs(other - true)[known], initial=0.0) for other in theirs)
    allowed = TIMES * usual + STEPS * epsilon * scale
    off = np.abs(ours - true)[known]
    worst = np.max(np.where(np.isnan(off), np.inf, off), initial=0.0)
    if not worst <= allowed + 1e-30:
        raise Different(f"result {number} is off by {worst:.3g}, {allowed:.3g} allowed")
