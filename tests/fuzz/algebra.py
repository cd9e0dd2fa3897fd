"""Random functions that are put together of the formulas of algebraic rules."""

from __future__ import annotations

from collections import Counter

import numpy as np
from tvm import ir, relax, tirx

from relax_fusion.algebra import RULES, AlgebraOptions, Rule, SimplifyAlgebra
from relax_fusion.algebra.formula import NUMBERS, Term
from relax_fusion.canonical import MergeDuplicates
from relax_fusion.equivalence.interpreter import Interpreter
from relax_fusion.equivalence.operators import Misfit, Uninterpreted
from relax_fusion.equivalence.sizes import Sizes
from relax_fusion.hardware.target import make_target
from relax_fusion.matching.shapes import same_shape, shape_of
from relax_fusion.report.decision import Rewrite

from .matches import Wrong

DTYPE, TOLERANCE = "float64", 1e-7
WIDTHS = (4, 6, 16)
TARGETS = ("h200", "llvm")


class Unfit(Exception):
    """Raised where a formula has no meaning with the shapes at hand."""


class Draw:
    """Draws a function, rule by rule."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.rows = tirx.Var("n", "int64") if seed % 3 == 0 else int(self.rng.integers(1, 40))
        self.builder, self.params = relax.BlockBuilder(), list[relax.Var]()
        self.bound: list[relax.Expr] = []
        self.bindings: list[relax.Binding] = []
        self.names: dict[str, relax.Expr] = {}
        self.reductions: dict[str, tuple[int, bool]] = {}

    def module(self) -> ir.IRModule:
        """Return ``main``."""
        rng, made = self.rng, 0
        while made < 1 + rng.integers(4):
            rule = RULES[rng.integers(len(RULES))]
            made += DTYPE in rule.dtypes and "astype" not in rule.before and self._drawn(rule)
        others = rng.integers(len(self.bound), size=rng.integers(3))
        last = [self.bound[-1], *(self.bound[int(i)] for i in others)]
        outs = [relax.Var(f"y{i}", v.ty) for i, v in enumerate(last)]
        bindings = [*self.bindings, *map(relax.VarBinding, outs, last)]
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], relax.Tuple(outs))
        func = relax.Function(self.params, body, relax.TupleType([o.ty for o in outs]))
        return relax.transform.Normalize()(ir.IRModule({"main": func}))

    def _drawn(self, rule: Rule) -> bool:
        self.names, self.reductions = {}, {}
        lead = [2] if self.rng.random() < 0.2 else []
        shape = [*lead, self.rows, int(self.rng.choice(WIDTHS))]
        try:
            made = self._term(rule.pattern, shape)
            if rule.pattern.name and self.rng.random() < 0.8:
                self._emit(relax.op.nn.silu(made))  # what follows a reduction is part of its reader
        except Unfit:
            return False
        return True

    def _emit(self, value: relax.Expr) -> relax.Expr:
        value = self.builder.normalize(value)
        var = relax.DataflowVar(f"v{len(self.bound)}", value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        self.bound.append(var)
        return var

    def _term(self, term: Term, shape: list[ir.Expr | int]) -> relax.Expr:
        """Make a formula with a result of a shape."""
        if term.value is not None:
            return relax.const(np.array(term.value), DTYPE)
        if not term.op:
            return self._named(term, shape)
        if term.op == "matmul":
            known = [shape_of(self.names[a.name]) for a in term.args if a.name in self.names]
            inner = known[0][-1 if term.args[0].name in self.names else -2] if known else None
            inner = int(self.rng.choice(WIDTHS) if inner is None else inner)
            left = self._term(term.args[0], [*shape[:-1], inner])
            batch = shape[:-2] if len(shape) > 2 and self.rng.random() < 0.3 else []
            right = term.args[1]
            batch = [] if right.is_constant else batch
            return self._emit(relax.op.matmul(left, self._term(right, [*batch, inner, shape[-1]])))
        if term.op == "take":
            places = relax.Var(f"p{len(self.params)}", relax.TensorType(shape[:-1], "int64"))
            self.params.append(places)
            return self._emit(relax.op.take(self._term(term.args[0], [5, shape[-1]]), places, 0))
        if term.name:
            return self._reduced(term, shape)
        args = [self._term(arg, shape) for arg in term.args]
        return self._emit(relax.Call(ir.Op.get(f"relax.{term.op}"), args))

    def _reduced(self, term: Term, shape: list[ir.Expr | int]) -> relax.Expr:
        """Make a reduction, of an axis that is put in front of the others, or behind."""
        if term.name not in self.reductions:
            keeps = any(k for _, k in self.reductions.values())
            if not self.reductions:
                keeps = bool(self.rng.random() < 0.5)
            axis = int(self.rng.integers(len(shape) + (not keeps)))
            self.reductions[term.name] = axis, keeps
        axis, keeps = self.reductions[term.name]
        before = list(shape)
        if keeps and before[axis] != 1:
            before[axis] = 1  # the result is broadcast to what reads it
        wide = [*before[:axis], 6, *before[axis + keeps :]]
        made = getattr(relax.op, term.op)(
            self._term(term.args[0], wide), axis=[axis], keepdims=keeps
        )
        return self._emit(made)

    def _named(self, term: Term, shape: list[ir.Expr | int]) -> relax.Expr:
        known = self.names.get(term.name)
        if known is None:
            known = self.names[term.name] = self._new(term, shape)
        elif not _broadcasts(shape_of(known) or [], shape):
            raise Unfit
        return known

    def _new(self, term: Term, shape: list[ir.Expr | int]) -> relax.Expr:
        rng = self.rng
        if term.name in NUMBERS:
            return relax.const(np.array(rng.choice([0.5, 2.0, -3.0, 1.7, 8.0, -0.25])), DTYPE)
        if term.is_constant:
            sizes = [d for d in shape[-2:] if isinstance(d, int)]
            if term.name in "VW" or len(sizes) < 2:
                sizes = sizes[-1:] if rng.random() < 0.8 else [1, *sizes[-1:]]
            return relax.const(rng.standard_normal(sizes), DTYPE)
        fits = [v for v in self.bound if same_shape(shape_of(v), shape)]
        if fits and rng.random() < 0.6:
            return fits[rng.integers(len(fits))]
        own = [*shape[:-1], 1] if term.name == "y" and rng.random() < 0.3 else shape
        own = [1 if rng.random() < 0.1 else d for d in own]
        var = relax.Var(f"p{len(self.params)}", relax.TensorType(own, DTYPE))
        self.params.append(var)
        return var


def _broadcasts(small: list[ir.Expr], shape: list[ir.Expr | int]) -> bool:
    """Tell whether a tensor can be used in the place of one of a shape."""
    pairs = zip(small[::-1], shape[::-1], strict=False)
    return len(small) <= len(shape) and all(
        same_shape([a], [b]) or same_shape([a], [1]) for a, b in pairs
    )


def check(seed: int, told: Counter[str] | None = None) -> str:
    """Compare a function before and after its rules; return what came of it.

    Raises
    ------
    Wrong
        If the numbers differ, or the pass does not come to an end.
    """
    try:
        before = MergeDuplicates()(Draw(seed).module())
    except (ValueError, IndexError) as err:  # shapes that do not fit
        return f"not drawn: {type(err).__name__} {str(err).splitlines()[-1][:80]}"
    rewrites: list[Rewrite] = []
    target = make_target(TARGETS[seed % len(TARGETS)])
    options = AlgebraOptions(target, exact=seed % 5 == 0, validate="strict", rewrites=rewrites)
    after = SimplifyAlgebra(options)(before)
    relax.analysis.well_formed(after)  # raises
    if told is not None:
        told.update(r.rule for r in rewrites)
    for lengths in (3, 1, 8):
        try:
            wanted = _run(before, lengths, seed)
        except (Misfit, Uninterpreted, ValueError):
            return "not computed"
        for number, (a, b) in enumerate(zip(wanted, _run(after, lengths, seed), strict=True)):
            _compare(number, np.asarray(a), np.asarray(b))
    return "rewritten" if rewrites else "unchanged"


def _run(mod: ir.IRModule, length: int, seed: int) -> tuple[np.ndarray, ...]:
    func, rng = mod["main"], np.random.default_rng(seed)
    symbols = dict.fromkeys(relax.analysis.defined_symbolic_vars(func), length)
    sizes, values = Sizes(symbols), {}
    for param in func.params:
        shape = sizes.shape(param.ty.shape.values)
        if "int" in str(param.ty.dtype):
            values[param] = rng.integers(0, 5, shape)
        else:
            values[param] = rng.standard_normal(shape) + 0.5 * (seed % 2)
    worker = Interpreter(mod=mod)
    bound = [(b.var, b.value) for block in func.body.blocks for b in block.bindings]
    worker.run(bound, values, sizes)
    return worker.value(func.body.body, values, sizes)


def _compare(number: int, old: np.ndarray, new: np.ndarray) -> None:
    finite = np.isfinite(old) & (np.abs(old) < 1e100)
    scale = float(np.max(np.abs(old[finite]), initial=0.0)) or 1.0
    if old.shape != new.shape:
        raise Wrong(f"result {number} is {list(new.shape)}, not {list(old.shape)}")
    close = np.isclose(new, old, rtol=TOLERANCE, atol=TOLERANCE * scale)
    if not np.all(close | ~finite):
        raise Wrong(
            f"result {number} is off, by {np.nanmax(np.abs(old - new)[finite]) / scale:.3g}"
        )


def explore(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Return what came of seeds, and which rules fired."""
    rules: Counter[str] = Counter()
    return Counter(check(seed, rules) for seed in seeds), rules
