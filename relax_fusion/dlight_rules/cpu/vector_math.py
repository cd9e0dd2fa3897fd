"""Functions of numbers as arithmetic that a CPU does a vector at a time.

LLVM calls the C library for each element.  The arithmetic keeps what it uses twice in scratch,
which LLVM keeps in registers.  TVM 0.27 replaces a name that is bound by a statement with its
value wherever it is read, and takes away numbers that were added in order to round; names that are
bound inside of each other take it minutes.  It does neither to what a buffer holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from tvm import ir, tirx

from ...compute.activations import polynomial
from ...matching.expressions import found_in, is_if_then_else, loads_of, substitute
from ...tvm_ir import SBlock, SBlockRealize, structural_map

FLOAT = "float32"

LEAST, MOST = -104.0, 89.0
"""Where the exponential is 0 in float32, and where it is infinity."""

LN2_HIGH = 355 / 512
"""The natural logarithm of 2 to nine bits, so that its product with n is exact."""

LN2_LOW = math.log(2) - LN2_HIGH

ROUNDING, ROUNDING_BITS = 12582912.0, 0x4B400000
"""One and a half times 2^23, and its bits: what is added to it is rounded to a whole number."""

EXP = (0.49999994, 0.16666521, 0.04166839, 0.008368715, 0.0013814595)
"""Coefficients of r^2, r^3 ... in ``e^r`` where ``|r| <= ln(2) / 2``: they err by 3e-9."""

MOST_TAIL = 10.125
"""Where what the error function lacks of 1 is 0 in float32."""

TAIL_ABOVE = (1.0, 1.2340986, 0.7270955, 0.22707233, 0.032346861)
TAIL_BELOW = (1.0, 2.3624783, 2.3928589, 1.316953, 0.40250382, 0.057332542)
"""For z from 0 to `MOST_TAIL`, ``erfc(z)`` is ``exp(-z * z)`` times the ratio of polynomials of z
with these coefficients, which errs by 5e-9.  As all of them are positive, nothing cancels."""

ERF_NEAR = 0.875
ERF = (0.128379157, -0.376125505, 0.112824553, -0.0267914619, 0.00503217978, -0.000620324752)
"""Below `ERF_NEAR`, the error function is x and x times a polynomial of its square with these
coefficients, which err by 9e-9 of the value."""

TANH_NEAR = 0.7
TANH = (-0.3333319, 0.13329111, -0.05355886, 0.020091971, -0.0051386637)
"""Below `TANH_NEAR`, the hyperbolic tangent is x times 1 and the square times such a polynomial,
which errs by 1.5e-8.  -0 stays -0."""

LOG = (
    *(0.33333313, -0.2500001, 0.20002119, -0.16667995, 0.14219551),
    *(-0.12405599, 0.118881844, -0.11675606, 0.06746539),
)
"""Coefficients of f^3, f^4 ... in ``log(1 + f)``, behind ``f - f^2 / 2``, where 1 + f is from the
root of 0.5 to that of 2: they err by 3e-9 of the value."""

ROOT_BITS = 0x3F3504F3
"""The bits of the root of 0.5."""

NORMAL, SHIFT = 2.0**-126, 23
"""The least normal number, and the powers of 2 by which smaller ones are made normal."""

MOST_POWER = 4
"""The highest power that is computed as products."""


def with_vector_math(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with exp, log, sigmoid, tanh, erf and powers of all but float64 as arithmetic.

    rewrite: ``y[i] = f(exp(x[i]))`` -> ``a[i] = x[i]; ...; n[i] = ...; y[i] = f(...)``

    Powers are those by 2, 3 and 4.  ``1 + erf(z)`` is one function, so that nothing cancels where z
    is negative.  The arithmetic is done in front of the statement, also where the function stood in
    one of two alternatives; what it reads is then still read in that alternative only.
    """

    def in_vectors(loop: tirx.For) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.VECTORIZED or not isinstance(loop.extent, tirx.IntImm):
            return loop
        writer = _Writer(loop.loop_var - loop.min, int(loop.extent))
        made = structural_map(loop, (_STATEMENTS, writer.statement))
        if not writer.scratch:
            return loop
        made = structural_map(made, (SBlockRealize, partial(_with_lane, loop)))
        return tirx.SeqStmt([*writer.scratch, made])

    def alone(stmt: tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        writer = _Writer(tirx.const(0, "int32"), 1)
        made = writer.statement(stmt)
        return tirx.SeqStmt([*writer.scratch, made]) if writer.scratch else stmt

    body = func.body
    for change in ((tirx.For, in_vectors), (_STATEMENTS, alone)):
        body = structural_map(body, change)
    return func if body.same_as(func.body) else func.with_body(body)


_STATEMENTS = (tirx.BufferStore, tirx.Bind)


def _with_lane(loop: tirx.For, realize: SBlockRealize) -> SBlockRealize:
    """Give a block that uses the variable of a loop around it an axis of that."""
    block = realize.block
    if not any(v.same_as(loop.loop_var) for v in found_in(block.body, tirx.Var)):
        return realize
    lane = tirx.Var("lane", loop.loop_var.ty.dtype)
    extent = ir.Range.from_min_extent(loop.min, loop.extent)
    new = SBlock(
        [*block.iter_vars, tirx.IterVar(extent, lane, tirx.IterVar.DataPar)],
        block.reads,
        block.writes,
        block.name_hint,
        substitute(block.body, {loop.loop_var: lane}),
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )
    return SBlockRealize([*realize.iter_values, loop.loop_var], realize.predicate, new)


class _Writer:
    """Writes the arithmetic of statements in front of them.

    `place`: where a number is kept in its scratch: the element of a vector.
    `lanes`: elements of a vector.
    """

    def __init__(self, place: tirx.Expr, lanes: int):
        self.place, self.lanes = place, lanes
        self.scratch: list[tirx.Stmt] = []
        self.stores: list[tirx.Stmt] = []
        self.guards: list[tirx.Expr] = []

    def statement(self, stmt: tirx.BufferStore | tirx.Bind) -> tirx.Stmt:
        """Return a statement behind the arithmetic of the functions in its value."""
        if not any(_formula(call) for call in found_in(stmt.value, ir.Call)):
            return stmt
        self.stores = []
        value = self._value(stmt.value)
        if isinstance(stmt, tirx.Bind):
            stmt = tirx.Bind(stmt.var, value)
        else:
            stmt = tirx.BufferStore(stmt.buffer, value, stmt.indices)
        return tirx.SeqStmt([*self.stores, stmt])

    def keep(self, name: str, value: tirx.Expr) -> tirx.Expr:
        """Return a number that is computed once and may be used often."""
        kept = tirx.decl_buffer((self.lanes,), str(value.ty.dtype), name, scope="local")
        self.scratch.append(tirx.AllocBuffer(kept))
        self.stores.append(tirx.BufferStore(kept, value, [self.place]))
        return tirx.BufferLoad(kept, [self.place])

    def _value(self, value: tirx.Expr) -> tirx.Expr:
        rewrites = (
            (ir.Call, self._call),
            (tirx.Add, self._sum),
            (tirx.Let, self._let),
            (tirx.Select, self._select),
            ((tirx.And, tirx.Or), self._logic),
        )
        return structural_map(value, rewrites, order="pre")

    def _call(self, call: ir.Call) -> tirx.Expr:
        if is_if_then_else(call):
            return tirx.if_then_else(*self._either(*call.args))
        formula = _formula(call)
        return call if formula is None else self._arithmetic(formula, call)

    def _sum(self, total: tirx.Add) -> tirx.Expr:
        for one, other in ((total.a, total.b), (total.b, total.a)):
            if isinstance(one, tirx.FloatImm) and one.value == 1.0 and _formula(other) is erf:
                return self._arithmetic(one_and_erf, other)
        return total

    def _arithmetic(self, formula: Formula, call: ir.Call) -> tirx.Expr:
        given = self._value(call.args[0]).astype(FLOAT)
        if self.guards and loads_of(call.args[0]):
            given = tirx.if_then_else(tirx.all(*self.guards), given, _const(0.0))
        return formula(self, self.keep("x", given)).astype(str(call.ty.dtype))

    def _let(self, let: tirx.Let) -> tirx.Expr:
        if not any(_formula(call) for call in found_in(let.body, ir.Call)):
            return let
        kept = self.keep(let.var.name, self._value(let.value))
        return self._value(substitute(let.body, {let.var: kept}))

    def _select(self, choice: tirx.Select) -> tirx.Expr:
        return tirx.Select(*self._either(choice.condition, choice.true_value, choice.false_value))

    def _either(self, condition: tirx.Expr, *values: tirx.Expr) -> list[tirx.Expr]:
        found = [self._value(condition)]
        for guard, value in zip((found[0], tirx.Not(found[0])), values, strict=True):
            self.guards.append(guard)
            found.append(self._value(value))
            self.guards.pop()
        return found

    def _logic(self, both: tirx.And | tirx.Or) -> tirx.Expr:
        first = self._value(both.a)
        self.guards.append(first if isinstance(both, tirx.And) else tirx.Not(first))
        second = self._value(both.b)
        self.guards.pop()
        return type(both)(first, second)


Formula = Callable[[_Writer, tirx.Expr], tirx.Expr]


def exp(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return ``e^x`` by two powers of 2, of which neither overflows where the result does not."""
    x = w.keep("x", tirx.Select(_const(MOST) < x, _const(MOST), x))  # NaN stays
    x = w.keep("x", tirx.Select(_const(LEAST) > x, _const(LEAST), x))
    rounded = w.keep("rounded", x * _const(1 / math.log(2)) + _const(ROUNDING))
    whole = w.keep("whole", rounded - _const(ROUNDING))
    r = w.keep("r", x - whole * _const(LN2_HIGH) - whole * _const(LN2_LOW))
    n = w.keep("n", tirx.reinterpret("int32", rounded) - _whole(ROUNDING_BITS))
    half = w.keep("half", n >> _whole(1))
    series = (polynomial(EXP, r) * (r * r) + r) + _const(1.0)
    return w.keep("e", series * power_of_2(half) * power_of_2(n - half))


def sigmoid(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return ``1 / (1 + e^-|x|)``, times the exponential where x is negative."""
    e = exp(w, -tirx.abs(x))
    above = tirx.Select(x < _const(0.0), e, _const(1.0))
    return w.keep("sigmoid", above / (_const(1.0) + e))


def tanh(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return a polynomial near 0, else ``1 - 2 / (e^(2 |x|) + 1)`` with the sign of x."""
    size, square = w.keep("size", tirx.abs(x)), w.keep("square", x * x)
    near = x * (_const(1.0) + square * polynomial(TANH, square))
    far = w.keep("far", _const(1.0) - _const(2.0) / (exp(w, size * _const(2.0)) + _const(1.0)))
    signed = tirx.Select(x < _const(0.0), -far, far)
    return w.keep("tanh", tirx.Select(size < _const(TANH_NEAR), near, signed))


def erf(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return a polynomial near 0, else ``1 - erfc(|x|)`` with the sign of x."""
    near = x + x * polynomial(ERF, w.keep("square", x * x))
    size = w.keep("size", tirx.abs(x))
    far = w.keep("far", _const(1.0) - _tail(w, size))
    signed = tirx.Select(x < _const(0.0), -far, far)
    return w.keep("erf", tirx.Select(size < _const(ERF_NEAR), near, signed))


def one_and_erf(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return ``1 + erf(x)``, which is ``erfc(-x)``."""
    tail = _tail(w, w.keep("size", tirx.abs(x)))
    return w.keep("sum", tirx.Select(x < _const(0.0), tail, _const(2.0) - tail))


def _tail(w: _Writer, size: tirx.Expr) -> tirx.Expr:
    """Return ``erfc(size)`` of a `size` that is not negative."""
    z = w.keep("z", tirx.Select(_const(MOST_TAIL) < size, _const(MOST_TAIL), size))
    ratio = polynomial(TAIL_ABOVE, z) / polynomial(TAIL_BELOW, z)
    return w.keep("tail", ratio * exp(w, -(z * z)))


def log(w: _Writer, x: tirx.Expr) -> tirx.Expr:
    """Return ``n log(2) + log(1 + f)`` for x = 2^n (1 + f)."""
    tiny = x < _const(NORMAL)
    scaled = w.keep("scaled", tirx.Select(tiny, x * _const(2.0**SHIFT), x))
    bits = w.keep("bits", tirx.reinterpret("int32", scaled))
    n = w.keep("n", (bits - _whole(ROOT_BITS)) >> _whole(SHIFT))
    f = w.keep("f", tirx.reinterpret(FLOAT, bits - n * _whole(1 << SHIFT)) - _const(1.0))
    twos = w.keep("twos", n.astype(FLOAT) - tirx.Select(tiny, _const(SHIFT), _const(0.0)))
    square = w.keep("square", f * f)
    behind = f * square * polynomial(LOG, f) - square * _const(0.5) + twos * _const(LN2_LOW)
    found = w.keep("log", twos * _const(LN2_HIGH) + (f + behind))
    infinite = _const(math.inf)
    least = tirx.Select(x < _const(0.0), _const(math.nan), _const(-math.inf))
    found = tirx.Select(x < infinite, found, x)  # NaN stays
    return w.keep("log", tirx.Select(x <= _const(0.0), least, found))


def power(w: _Writer, x: tirx.Expr, exponent: int) -> tirx.Expr:
    """Return products of x."""
    square = w.keep("square", x * x)
    return {2: square, 3: square * x, 4: square * square}[exponent]


_FORMULAS: Mapping[str, Formula] = {
    "tirx.exp": exp,
    "tirx.log": log,
    "tirx.sigmoid": sigmoid,
    "tirx.tanh": tanh,
    "tirx.erf": erf,
}


def _formula(call: object) -> Formula | None:
    """Return the arithmetic of a call, if it is one of a function that has some."""
    if not isinstance(call, ir.Call) or str(call.ty.dtype) not in (FLOAT, "float16", "bfloat16"):
        return None
    name = getattr(call.op, "name", "")
    if name == "tirx.pow" and isinstance(call.args[1], tirx.FloatImm):
        exponent = call.args[1].value
        if exponent in range(2, MOST_POWER + 1):
            return partial(power, exponent=int(exponent))
    return _FORMULAS.get(name)


def power_of_2(n: tirx.Expr) -> tirx.Expr:
    """Return ``2^n`` for an int32 `n` of which it is a normal float32 number."""
    exponent = (n + _whole(127)) * _whole(1 << 23)
    return tirx.reinterpret(FLOAT, exponent)


def _whole(value: int) -> tirx.Expr:
    return tirx.const(value, "int32")


def _const(value: float) -> tirx.Expr:
    return tirx.const(value, FLOAT)
