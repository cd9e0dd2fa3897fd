"""Both sides of a match computed on the same inputs, and what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import ir, relax

from ..errors import GraphError
from ..matching.bounds import FAR
from ..matching.constants import near
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of
from ..workload import Attention, Workload
from ..workload.graph import Tensor
from ..workload.reference import Rounding, evaluate, sizes_of
from ..workload.values import Const, Op, parts
from .inputs import make, operand_of
from .interpreter import Interpreter, Value
from .operators import Array, Misfit
from .region import Region, coarse, coarse_bindings, is_number
from .shrinking import shrunk
from .sizes import WHOLE, Sizes

TOLERANCE = 1e-9
"""Results may differ by so much of their largest number: float64 loses less, a mistake more."""

TOLERANCE_OF_LARGE = 1e-6
"""Results may differ by so much next to numbers of -6e4 that hide scores, or large scores."""

_LARGEST, _LARGEST_PRODUCT = 2e5, {"float16": 6e4}
"""What large scores are multiplied by, so that clamps and finite masks are among them, or how large
their products are, which no dtype may overflow."""

_LEAST, _MOST = 0.05, 8.0
"""Scores and sums are made this large: exponentials and activations are neither flat nor steep."""


_TANH = math.sqrt(2 / math.pi)
_FORMULAS = (math.sqrt(0.5), _TANH, 0.044715, 1.702, 2 * _TANH, 2 * _TANH * 0.044715)
"""Constants of activations, which graphs multiply or divide by in few digits, kernels in all."""


class Invalid(Exception):
    """Raised where sizes contradict each other."""


@dataclass(frozen=True)
class Run:
    """One comparison on inputs of one of `inputs.KINDS`.

    `coarse`: whether roundings that a kernel has to keep are made coarse.
    """

    sizes: Sizes
    kind: str = "ordinary"
    coarse: bool = False
    seed: int = 0

    def __str__(self) -> str:
        """Say how this differs from others."""
        sizes = [f"{var.name} = {size}" for var, size in self.sizes.symbols.items()]
        shrink = self.sizes.shrink
        if shrink != WHOLE:
            sizes.append(f"static sizes from {shrink.least} on divided by {shrink.ratio}")
        inputs = f"inputs: {self.kind}" + ", coarse roundings" * self.coarse
        return "; ".join([", ".join(sizes), inputs] if sizes else [inputs])


def numbers_of(work: Workload) -> set[float]:
    """Return the constants of a workload."""
    values = (part for block in work.graph.blocks for part in parts(block.value))
    return {part.value for part in values if isinstance(part, Const)}


def as_meant(value: Array, dtype: str, own: Collection[float] = ()) -> Array:
    """Return the number of an activation's formula that a constant is as few digits say it.

    A factor that a kernel has as its `own`, such as a scale of 0.7071, is no part of a formula.
    """
    if value.ndim or "float" not in dtype:
        return value
    factors = (f for n in own if n for f in (n, 1 / n))
    if any(math.isclose(float(value), f, rel_tol=1e-12) for f in factors):
        return value
    meant = (n for m in _FORMULAS for n in (m, 1 / m) if near(float(value), n, dtype))
    return next((np.array(n) for n in meant), value)


def unseen(work: Workload, far: bool) -> Callable[[Array, Tensor], Array | None]:
    """Return what tells of sums over the keys of an attention which are of queries that see none.

    `far`: a number below `FAR` hides its key.  In a row that sees no key, those that it hides may
    be left beside those of minus infinity, which may be others than in the graph.
    """
    is_mixed = (
        far
        and isinstance(work, Attention)
        and ((work.mask_dims, work.lengths, work.window, work.causal) != (None, None, None, "none"))
    )
    low: Any = False

    def told(made: Array, tensor: Tensor) -> Array | None:
        nonlocal low
        if tensor.name == "row_max" and is_mixed:
            low = made <= FAR
        return (made == 0) | low if tensor.name == "row_sum" else None

    return told


class Comparison:
    """Computes a region and the workload that is to replace it."""

    def __init__(self, region: Region, mod: ir.IRModule):
        self.region, self.match = region, region.match
        self._attends = isinstance(region.match.workload, Attention)
        self._is_far = False  # whether a number counts as minus infinity
        self.interpreter = Interpreter(mod=mod, constant=self._constant)
        values = [p for block in self.match.workload.graph.blocks for p in parts(block.value)]
        named = {part.name for part in values if isinstance(part, Op)}
        self.activations = named & {"gelu", "gelu_tanh", "quick_gelu"}
        self.numbers = numbers_of(self.match.workload)
        self.coarse = coarse_bindings(region)
        self.leaf_of = {name: leaf for leaf, name in operand_of(region)}

    def _constant(self, value: Array, dtype: str) -> Array:
        """Return a constant, as it is meant in the formula of an activation that is written out."""
        self._is_far |= "float" in dtype and bool(np.any(value <= FAR))
        functions = ("relax.erf", "relax.sigmoid", "relax.tanh")
        written_out = any(is_call(e, *functions) for _, e in self.region.bindings)
        return as_meant(value, dtype, self.numbers) if written_out and self.activations else value

    def difference(self, run: Run) -> str | None:
        """Say which result differs; None if none does.

        Raises `Invalid` if the sizes contradict each other.  Raises `Uninterpreted` if an operator
        has no meaning here.
        """
        values = make(self.region, run.sizes, run.kind, run.seed)
        if run.kind in ("ordinary", "large scores"):
            self._tune(values, run)
        if run.kind == "large scores":
            self._enlarge(values, run)
        hook = self.coarse if run.coarse else None
        found = dict(values)
        region, sizes = self.region, run.sizes
        try:
            self.interpreter.run(region.bindings, found, sizes, hook, region.exact)
        except (Misfit, ValueError, IndexError, ZeroDivisionError) as err:
            raise Invalid(str(err)) from err
        try:
            wanted, ignored = self._compared(found, run)
        except (GraphError, Misfit, ValueError, IndexError) as err:
            if sizes.shrink != WHOLE:
                raise Invalid(str(err)) from err
            return f"the kernel does not fit its operands: {err} ({run})"
        for var in region.results:
            if var not in wanted:
                return f"{var.name} is read, and no output of the kernel"
            told = _told(var, found[var], wanted[var], ignored.get(var), run)
            if told:
                return f"{told} ({run})"
        return None

    def misfit(self, sizes: Sizes) -> str | None:
        """Say which operand has a shape that the workload does not take, computing nothing."""
        given: dict[str, Any] = {}
        for arg, operand in zip(self.match.args, self.match.workload.graph.inputs, strict=True):
            if is_number(arg.expr):
                given[operand.name] = sizes.of(arg.expr)
                continue
            shape = self.interpreter.shape(arg.expr.ty, sizes)
            if arg.shape is not None:
                shape = sizes.shape(arg.shape)
            if shape is not None:
                given[operand.name] = np.broadcast_to(0.0, shape)
        try:
            sizes_of(self.match.workload.graph, given)
        except GraphError as err:
            return f"the kernel does not fit its operands: {err}"
        return None

    def _tune(self, values: dict[relax.Var, Value], run: Run) -> None:
        """Scale operands until scores and sums are of unit size."""
        for _ in range(3):
            seen = self._sizes_of_sums(values, run)
            wrong = {n: s for n, s in seen.items() if not _LEAST <= s <= _MOST and s > 0}
            if not wrong:
                return
            for name, size in wrong.items():
                self._multiply(values, name, 1 / size)

    def _multiply(self, values: dict[relax.Var, Value], name: str, factor: float) -> None:
        """Multiply an operand until its sums are so many times as large."""
        leaf = self.leaf_of[name]
        twice = name == "q" and leaf.same_as(self.leaf_of.get("k"))
        values[leaf] = values[leaf] * (factor**0.5 if twice else factor)

    def _enlarge(self, values: dict[relax.Var, Value], run: Run) -> None:
        """Multiply the queries, so that scores are large."""
        largest = [0.0]

        def noted(made: Array, tensor: Tensor) -> Array:
            if tensor.name == "dot":
                largest.append(float(np.max(np.abs(made), initial=0.0)))
            return made

        query = self.leaf_of.get("q")
        if query is not None and self._observed(values, run, noted):
            most = _LARGEST_PRODUCT.get(dtype_of(query))
            factor = _LARGEST if most is None else most / (max(largest) or 1.0)
            self._multiply(values, "q", factor)

    def _observed(self, values: Mapping[relax.Var, Value], run: Run, hook: Rounding) -> bool:
        """Show a hook what the workload computes; False if the sizes contradict each other."""
        found = dict(values)
        try:
            self.interpreter.run(self.region.bindings, found, run.sizes, None, self.region.exact)
            self._reference(found, run, hook)
        except (GraphError, Misfit, ValueError, IndexError, ZeroDivisionError):
            return False
        return True

    def _sizes_of_sums(self, values: Mapping[relax.Var, Value], run: Run) -> dict[str, float]:
        """Return the root mean squares of scores and sums by the operand that they grow with."""
        found: dict[str, float] = {}

        def noted(made: Array, tensor: Tensor) -> Array:
            name = "q" if tensor.name == "score" else tensor.name.replace("acc", "w")
            name = "w0" if name == "w1" and "w1" not in self.leaf_of else name
            # Of packed weights, which are integers, the scales, if there are such
            name = f"{name}_scale" if f"{name}_scale" in self.leaf_of else name
            leaf = self.leaf_of.get(name)
            is_scaled = leaf is not None and "int" not in dtype_of(leaf)
            if is_scaled and made.size and name not in found:
                found[name] = float(np.sqrt(np.mean(np.square(made))))
            return made

        return found if self._observed(values, run, noted) else {}

    def _reference(
        self, values: Mapping[relax.Var, Value], run: Run, rounding: Rounding
    ) -> dict[str, Array]:
        """Compute the outputs of the workload."""
        work, sizes = shrunk(self.match.workload, run.sizes.shrink), run.sizes
        given: dict[str, Any] = {}
        for arg, operand in zip(self.match.args, work.graph.inputs, strict=True):
            if is_number(arg.expr):
                given[operand.name] = sizes.of(arg.expr)
                continue
            value = np.asarray(self.interpreter.value(arg.expr, values, sizes))
            given[operand.name] = (
                value if arg.shape is None else value.reshape(sizes.shape(arg.shape))
            )
        return evaluate(work.graph, given, rounding=rounding, constants="float64")

    def _compared(
        self, values: Mapping[relax.Var, Value], run: Run
    ) -> tuple[dict[relax.Var, Value], dict[relax.Var, Array]]:
        """Return what the kernel would make, and which elements may be anything.

        Those are results of queries whose keys are all hidden, where the graph has NaN or numbers
        that count as minus infinity: NaN for a sum of no weights leads to them.  NaN in such a
        query is seen through a mask that is added, and not by a kernel, whose sums of values are
        zero even where a sink has a weight.  Where a number takes the place of each score of such a
        query, a kernel that adds it has NaN, and the graph the mean of some values.
        """
        of_none = unseen(self.match.workload, self._is_far)
        empty: list[bool] = []

        def rounding(made: Array, tensor: Tensor) -> Array:
            return coarse(made) if run.coarse and tensor.rounds else made

        def marked(made: Array, tensor: Tensor) -> Array:
            none = of_none(made, tensor)
            if run.kind == "not a number" and tensor.name == "acc":
                none = made == 0
            if self._attends and none is not None:
                empty.append(bool(none.any()))
                made = np.where(none, np.nan, made)
            return rounding(made, tensor)

        wanted = self._replaced(values, run, rounding)
        if not self._attends:
            return wanted, {}
        other = self._replaced(values, run, marked)
        ignored = {}
        for var in (v for v in self.region.results if v in wanted):
            none = np.isnan(other[var]) & ~np.isnan(wanted[var]) if any(empty) else np.False_
            none = none & (self._is_far | np.isnan(values[var]))
            ignored[var] = none | (np.isnan(wanted[var]) & (run.kind == "not a number"))
        return wanted, ignored

    def _replaced(
        self, values: Mapping[relax.Var, Value], run: Run, rounding: Rounding
    ) -> dict[relax.Var, Value]:
        """Return the results as the kernel and the movements after it make them."""
        made = self._reference(values, run, rounding)
        covers = set(self.match.covers)  # of which nothing is left
        found = {v: value for v, value in values.items() if v not in covers}
        for out, operand in zip(self.match.outs, self.match.workload.graph.outputs, strict=True):
            value = made[operand.name].reshape(run.sizes.shape(out.shape))
            shape = self.interpreter.shape(out.var.ty, run.sizes)
            found[out.var] = value if shape is None else value.reshape(shape)
        self.interpreter.run(self.region.after, found, run.sizes)
        return found


def _told(
    var: relax.Var, found: Array, wanted: Array, ignored: Array | None, run: Run
) -> str | None:
    """Compare what the graph makes with what the kernel would make of it."""
    found, wanted = np.asarray(found, "float64"), np.asarray(wanted, "float64")
    if found.shape != wanted.shape:
        return f"{var.name} has shape {list(found.shape)}, the kernel's {list(wanted.shape)}"
    compared = (found != wanted) & ~(np.isnan(found) & np.isnan(wanted))
    if ignored is not None:
        compared &= ~ignored
    if not compared.any():
        return None
    finite = np.abs(found[np.isfinite(found)])
    scale = float(np.max(finite, initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        off = np.where(compared, np.abs(found - wanted), 0.0)
    off = np.where(np.isnan(off), np.inf, off)
    large = run.kind in ("hidden by a bias", "large scores")
    limit = TOLERANCE_OF_LARGE if large else TOLERANCE
    worst = float(off.max())
    if worst <= limit * scale:
        return None
    place = ", ".join(str(i) for i in np.unravel_index(int(off.argmax()), off.shape))
    return f"{var.name}[{place}] differs by {worst:.3g}, where the largest is {scale:.3g}"
