"""Random functions at match level: every match validated, and the whole function afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from tvm import ir, relax, tirx
from tvm.target import Target

from relax_fusion import Decision, FuseOptions, make_target
from relax_fusion.equivalence.operators import Misfit, Uninterpreted
from relax_fusion.estimator import Choice, Prediction, RangePrediction
from relax_fusion.estimator.tile_plan import PlanTable, TilePlan
from relax_fusion.passes import PATTERNS, FusePatterns, block_round, driver
from relax_fusion.workload import Workload

from . import evaluation
from .bindings import Function, smaller
from .findings import Failure, Findings
from .functions import draw

TOLERANCE = 1e-6
"""Of the largest number of a result; nothing is rounded, so that only a mistake differs."""

ESTIMATED = 40
"""One function in so many asks the estimator, whose time is most of a pass's."""


class Wrong(Exception):
    """Raised where a rewritten function computes something else."""


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let passes take every match, and make kernels of it that have no body."""
    plans = Choice(PlanTable.single(TilePlan(1, 1, 1, family="cpu_tiles")), ())

    def named(work: Workload, *args: object, **kwargs: object) -> tirx.PrimFunc:
        # Another one for each workload: a module has equal functions once
        return tirx.PrimFunc([], tirx.Evaluate(tirx.IntImm("int64", int(work.key, 16))))

    def guessed(work: Workload, *args: object, **kwargs: object) -> Choice:
        # A gain of its own for each workload, so that any of the rivals may be the best
        fused = Prediction(int(work.key, 16) % 997 * 1e-6, 0, 0, 1, "launch")
        unfused = replace(fused, seconds=1e-3)
        return replace(plans, predictions=(RangePrediction(None, 16, fused, unfused, fused),))

    with (
        mock.patch.object(block_round, "choose", guessed),
        mock.patch.object(driver, "build_prim_func", named),
    ):
        yield


def fused(mod: ir.IRModule, options: FuseOptions, order: Sequence[str]) -> ir.IRModule:
    """Run the passes together, or one after the other in some order."""
    for make in [PATTERNS[name] for name in order] or [FusePatterns]:
        mod = make(options)(mod)
    return mod


def check(function: Function, seed: int) -> tuple[list[Decision], bool]:
    """Run the passes on a function with every match validated, and compare the whole of it.

    Returns
    -------
    tuple of (list of Decision, bool)
        What the passes decided, and whether the whole function could be compared.

    Raises
    ------
    EquivalenceError
        If a match computes something else.
    Wrong
        If the whole function does.
    """
    mod = function.module()
    estimated = seed % ESTIMATED == 0
    decisions: list[Decision] = []
    on_gpu = not estimated and seed % 3 == 1
    options = FuseOptions(
        target=make_target("h200") if on_gpu else Target("llvm"),
        backend="triton" if on_gpu else "tir",
        bounds=function.bounds,
        decisions=decisions,
        always_fuse=not estimated or seed % 3 > 0,
        validate="strict",
    )
    order = list(PATTERNS) if seed % 7 == 0 else []
    np.random.default_rng(seed).shuffle(order)
    if estimated:
        after = fused(mod, options, order)
        relax.analysis.well_formed(after)
    else:
        with without_kernels():
            after = fused(mod, options, order)
    for decision in decisions:
        if decision.decline is not None and not decision.decline.detail.strip():
            raise Wrong(f"{decision.where}: declined without a reason")
    return decisions, compare(mod["main"], after["main"], decisions, seed)


def compare(
    before: relax.Function, after: relax.Function, decisions: Sequence[Decision], seed: int
) -> bool:
    """Compare the results of a function and of what became of it; False if numpy cannot tell.

    Raises
    ------
    Wrong
        If they differ.
    """
    if not any(d.fused for d in decisions):
        return False
    sizes = evaluation.sizes_of(before)
    args = evaluation.arguments(before, sizes, seed)
    try:
        wanted = evaluation.run(before, sizes, args, decisions)
    except (Misfit, Uninterpreted, ValueError, IndexError, ZeroDivisionError):
        return False
    far = evaluation.is_far(before)
    made = evaluation.run(after, evaluation.sizes_of(after), args, decisions, far=far)
    told = _difference(wanted, made, far)
    if told is not None:  # a scale may be a number that activations have
        read = evaluation.run(before, sizes, args, meant=False)
        made = evaluation.run(after, sizes, args, decisions, meant=False, far=far)
        told = _difference(read, made, far)
    if told is not None:  # kernels round factors to float32, which cancelling sums enlarge
        moved = evaluation.run(before, sizes, evaluation.nudged(args), decisions)
        told = _difference(wanted, made, far, moved)
    if told is not None:
        raise Wrong(told)
    return True


def _difference(wanted: Any, made: Any, far: bool, moved: Any = None) -> str | None:
    """Say which result, or which parameter that was overwritten, differs.

    Twice the distance from `moved`, the results of inputs a rounding away, is no difference.
    """
    for what, *each in zip(("result", "parameter"), wanted, made, moved or wanted, strict=True):
        for number, (a, b, c) in enumerate(zip(*each, strict=True)):
            told = _compared(np.asarray(a), np.asarray(b), far, np.asarray(c))
            if told is not None:
                return f"{what} {number} {told}"
    return None


def _compared(old: np.ndarray, new: np.ndarray, far: bool, moved: np.ndarray) -> str | None:
    if old.shape != new.shape:
        return f"has shape {list(new.shape)}, not {list(old.shape)}"
    if old.dtype.kind != "f":
        return None if np.array_equal(old, new) else "differs"
    known = ~np.isnan(old) & (old != new)  # NaN: of queries that see no key
    known &= ~np.isnan(new) if far else True
    finite = old[np.isfinite(old)]
    scale = float(np.max(np.abs(finite), initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        off = np.where(known, np.abs(old - new), 0.0)
        allowed = TOLERANCE * scale + 2 * np.nan_to_num(np.abs(moved - old), posinf=0.0)
    worst = float(np.max(np.where(np.isnan(off), np.inf, off), initial=0.0))
    is_near = np.all(off <= allowed)  # NaN is not
    return None if is_near else f"is off by {worst / scale:.3g} of its largest"


def explore(seeds: Sequence[int]) -> Findings:
    """Draw and check the functions of some seeds; count decisions by pass, reason and spelling."""
    found = Findings()
    for seed in seeds:
        found.count += 1
        try:
            decisions, compared = check(draw(seed), seed)
        except Exception as err:
            found.failures.append(Failure.of(seed, err))
            continue
        found.compared += compared
        for d in decisions:
            if d.decline is not None:
                found.seen["declines"][d.decline.reason.value] += 1
                continue
            found.seen["matches"][d.pattern] += 1
            found.seen["spellings"][f"{d.pattern} / {d.spelling}"] += 1
            if d.validation == "checked":
                found.seen["checked"][d.pattern] += 1
            else:
                found.seen["unchecked"][d.validation] += 1
    return found


def minimised(
    function: Function,
    seed: int,
    budget: int = 200,
    check: Callable[[Function, int], object] = check,
) -> Function:
    """Return a smaller function that goes wrong in the same way, bindings dropped one by one."""

    def kind(candidate: Function) -> str:
        try:
            check(candidate, seed)
        except Exception as err:
            return type(err).__name__
        return ""

    wanted, best, again = kind(function), function, True
    while again and wanted:
        again = False
        for candidate in smaller(best):
            budget -= 1
            if budget < 0:
                return best
            if kind(candidate) == wanted:
                best, again = candidate, True
                break
    return best
