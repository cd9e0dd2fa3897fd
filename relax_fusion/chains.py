"""The steps that transformer chains are made of, recognised one at a time.

Each function looks at one step of a chain (a norm, a linear projection, an activation, ...), in all
the spellings in which front ends write it, and returns a frozen description or None.  The passes
compose them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tvm import ir, relax, te, tirx
from tvm_ffi import structural_equal

from .errors import Reason
from .pattern import (
    BlockView,
    KernelArg,
    PrimExpr,
    check_dtype,
    dtype_of,
    guard,
    is_call,
    known_shape,
    same_shape,
    shape_of,
    static,
)
from .workload import Norm, Projection, WeightLayout


def scalar(view: BlockView, expr: relax.Expr) -> float | None:
    """Return the value of a constant with one element, or None."""
    value = view.definition(expr)
    shape = shape_of(value) if isinstance(value, ir.GenericConst) else None
    if shape is None or any(int(d) != 1 for d in shape):
        return None  # a large constant is not even copied
    return float(value.value.numpy().reshape(-1)[0])


_CONSTANT_DIGITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative rounding of a constant; front ends write five digits of the irrational ones."""


def _near(value: float, wanted: float, dtype: str) -> bool:
    return math.isclose(value, wanted, rel_tol=_CONSTANT_DIGITS.get(dtype, 1e-5))


def binary(
    view: BlockView, expr: relax.Expr, op: str
) -> tuple[tuple[relax.Expr, relax.Expr], ...]:
    """Return both orders of the operands of a commutative binary call, or nothing."""
    call = view.call(expr, op)
    return ((call.args[0], call.args[1]), (call.args[1], call.args[0])) if call is not None else ()


def scaled(view: BlockView, expr: relax.Expr) -> tuple[relax.Expr, float] | None:
    """Read ``x * c`` or ``x / c`` for a constant c as ``(x, factor)``."""
    for data, factor in binary(view, expr, "relax.multiply"):
        value = scalar(view, factor)
        if value is not None and same_shape(shape_of(data), shape_of(expr)):
            return data, value
    call = view.call(expr, "relax.divide")
    value = scalar(view, call.args[1]) if call is not None else None
    if call is None or not value or not same_shape(shape_of(call.args[0]), shape_of(expr)):
        return None
    return call.args[0], 1.0 / value


# --- activations -----------------------------------------------------------------------------

_ACTIVATION_OPS = {
    "relax.nn.silu": "silu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.relu": "relu",
}


@dataclass(frozen=True)
class Activated:
    """``name(source)``, computed by the bindings `covers`."""

    name: str
    source: relax.Expr
    covers: tuple[relax.Var, ...]


def activation(view: BlockView, var: relax.Expr) -> Activated | None:
    """Recognise the activation that defines `var`.

    Spellings: the operator; ``x * sigmoid(x)``; ``maximum(x, 0)``; ``0.5 x (1 + erf(x / sqrt 2))``
    and ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`` in any order of their products.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    call = view.call(var, *_ACTIVATION_OPS)
    if call is not None:
        return Activated(_ACTIVATION_OPS[call.op.name], call.args[0], (var,))
    for source, zero in binary(view, var, "relax.maximum"):
        if scalar(view, zero) == 0.0:
            return Activated("relu", source, (var,))
    for source, gate in binary(view, var, "relax.multiply"):
        sigmoid = view.call(gate, "relax.sigmoid")
        if sigmoid is not None and sigmoid.args[0].same_as(source):
            return Activated("silu", source, (gate, var))
    return _decomposed_gelu(view, var)


def _decomposed_gelu(view: BlockView, var: relax.Var) -> Activated | None:
    """Recognise ``0.5 * x * (1 + f(x))`` for the erf and the tanh form of GELU."""
    factors, covers = _factors(view, var)
    halves = [f for f in factors if scalar(view, f) == 0.5]
    rest = [f for f in factors if scalar(view, f) is None]
    if len(halves) != 1 or len(rest) != 2:
        return None
    for source, one_plus in (rest, rest[::-1]):
        for inner, one in binary(view, one_plus, "relax.add"):
            if scalar(view, one) != 1.0:
                continue
            spellings = (("erf", "gelu", _erf_source), ("tanh", "gelu_tanh", _tanh_source))
            for op, name, read in spellings:
                call = view.call(inner, f"relax.{op}")
                found = read(view, call.args[0], source) if call is not None else None
                if found is not None:
                    return Activated(name, source, (*found, inner, one_plus, *covers))
    return None


def _factors(view: BlockView, var: relax.Expr) -> tuple[list[relax.Expr], tuple[relax.Var, ...]]:
    """Flatten a product of up to three factors, looking through single-use products."""
    call = view.call(var, "relax.multiply")
    if call is None:
        return [], ()
    factors: list[relax.Expr] = []
    covers: tuple[relax.Var, ...] = (var,)
    for arg in call.args:
        inner = view.call(arg, "relax.multiply")
        if inner is not None and view.only_user(arg) is not None and len(factors) < 2:
            factors.extend(inner.args)
            covers = (arg, *covers)
        else:
            factors.append(arg)
    return factors, covers


def _erf_source(
    view: BlockView, arg: relax.Expr, source: relax.Expr
) -> tuple[relax.Var, ...] | None:
    found = scaled(view, arg)
    wanted = math.sqrt(0.5)
    if found is None or not found[0].same_as(source) or not _near(found[1], wanted, dtype_of(arg)):
        return None
    return (arg,)


def _tanh_source(
    view: BlockView, arg: relax.Expr, source: relax.Expr
) -> tuple[relax.Var, ...] | None:
    outer = scaled(view, arg)
    if outer is None or not _near(outer[1], math.sqrt(2 / math.pi), dtype_of(arg)):
        return None
    for plain, cubic in binary(view, outer[0], "relax.add"):
        term = scaled(view, cubic)
        dtype = dtype_of(cubic)
        if plain.same_as(source) and term is not None and _near(term[1], 0.044715, dtype):
            cube = _cube(view, term[0], source)
            if cube is not None:
                return (*cube, cubic, outer[0], arg)
    return None


def _cube(view: BlockView, expr: relax.Expr, source: relax.Expr) -> tuple[relax.Var, ...] | None:
    power = view.call(expr, "relax.power")
    if power is not None and power.args[0].same_as(source) and scalar(view, power.args[1]) == 3.0:
        return (expr,)
    for square, single in binary(view, expr, "relax.multiply"):
        call = view.call(square, "relax.multiply")
        if (
            call is not None
            and single.same_as(source)
            and all(a.same_as(source) for a in call.args)
        ):
            return (square, expr)
    return None


# --- norms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normed:
    """A normalisation found in the graph.

    `norm` describes it, `source` is its input (the sum, if there is one in front), `gamma` and
    `beta` its parameters, `covers` its bindings, `var` its result.
    """

    norm: Norm
    var: relax.Var
    source: relax.Expr
    gamma: relax.Expr
    beta: relax.Expr | None
    covers: tuple[relax.Var, ...]
    spelling: str


def normalisation(view: BlockView, var: relax.Expr) -> Normed | None:
    """Recognise the norm that defines `var`; refuse one that is not over the last axis."""
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    call = view.call(var, "relax.nn.rms_norm", "relax.nn.layer_norm")
    if call is None:
        return _decomposed_rms(view, var)
    kind: Literal["rms", "layer"] = "rms" if call.op.name == "relax.nn.rms_norm" else "layer"
    source, gamma = call.args[0], call.args[1]
    shape = known_shape(source, "the normalised tensor")
    axes = [int(a) % len(shape) for a in call.attrs.axes]
    guard(axes == [len(shape) - 1], Reason.AXIS, f"the norm is over axes {axes}, not the last one")
    beta = call.args[2] if kind == "layer" else None
    if kind == "layer":
        guard(
            bool(call.attrs.center) and bool(call.attrs.scale),
            Reason.ATTRIBUTE,
            "layer_norm without center or scale",
        )
    norm = Norm(kind, float(call.attrs.epsilon), beta=beta is not None)
    return Normed(norm, var, source, gamma, beta, (var,), f"{kind}_norm")


def _decomposed_rms(view: BlockView, var: relax.Var) -> Normed | None:
    """Recognise ``gamma * (x * rsqrt(mean(x^2) + eps))``, with x cast to float32 or not."""
    for scaled_x, gamma in binary(view, var, "relax.multiply"):
        covers: tuple[relax.Var, ...] = (var,)
        shape = shape_of(gamma)
        if shape is None or len(shape) != 1:
            continue
        cast = view.call(scaled_x, "relax.astype")
        if cast is not None:
            covers, scaled_x = (scaled_x, *covers), cast.args[0]
        for source, inverse in binary(view, scaled_x, "relax.multiply"):
            found = _inverse_rms(view, inverse, source)
            if found is None:
                continue
            eps, inner = found
            covers = (*inner, scaled_x, *covers)
            wide = view.call(source, "relax.astype")
            if wide is not None and dtype_of(source) == "float32":
                covers, source = (source, *covers), wide.args[0]
            return Normed(Norm("rms", eps), var, source, gamma, None, covers, "rms_decomposed")
    return None


def _inverse_rms(
    view: BlockView, inverse: relax.Expr, source: relax.Expr
) -> tuple[float, tuple[relax.Var, ...]] | None:
    """Read ``rsqrt(mean(source^2, -1, keepdims) + eps)``."""
    rsqrt = view.call(inverse, "relax.rsqrt")
    if rsqrt is None:
        return None
    for mean_var, eps_expr in binary(view, rsqrt.args[0], "relax.add"):
        eps, mean = scalar(view, eps_expr), view.call(mean_var, "relax.mean")
        if eps is None or mean is None or not mean.attrs.keepdims:
            continue
        rank = len(known_shape(source, "the normalised tensor"))
        axes = [int(a) % rank for a in mean.attrs.axis] if mean.attrs.axis is not None else []
        square = mean.args[0]
        power = view.call(square, "relax.power")
        times = view.call(square, "relax.multiply")
        is_square = (
            power is not None
            and power.args[0].same_as(source)
            and scalar(view, power.args[1]) == 2.0
        ) or (times is not None and all(a.same_as(source) for a in times.args))
        squared = view.call(square, "relax.square")
        is_square = is_square or (squared is not None and squared.args[0].same_as(source))
        if is_square:
            guard(axes == [rank - 1], Reason.AXIS, f"the mean is over axes {axes}, not the last")
            return eps, (square, mean_var, rsqrt.args[0], inverse)
    return None


# --- projections -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """``x @ W``: `x` of shape [..., k], `weight` a two-dimensional tensor in `layout`."""

    var: relax.Var
    x: relax.Expr
    weight: relax.Expr
    layout: WeightLayout
    n: int
    k: int
    covers: tuple[relax.Var, ...]


def linear(view: BlockView, var: relax.Expr) -> Linear | None:
    """Recognise the projection that defines `var`.

    Spellings: ``matmul(x, W)``, ``matmul(x, permute_dims(W))``, and the call of an NT matmul
    PrimFunc that TVM's FuseTransposeMatmul leaves.
    """
    if not isinstance(var, relax.Var) or var not in view.defs:
        return None
    value = view.definition(var)
    if is_call(value, "relax.call_tir"):
        return _nt_matmul(view, var, value)
    if not is_call(value, "relax.matmul"):
        return None
    x, weight = value.args
    shape = shape_of(weight)
    if shape is None or len(shape) != 2 or len(shape_of(x) or ()) < 2:
        return None
    layout: WeightLayout = "kn"
    n_dim, k_dim = shape[1], shape[0]
    transposed = view.call(weight, "relax.permute_dims")
    covers: tuple[relax.Var, ...] = (var,)
    if transposed is not None and len(shape_of(transposed.args[0]) or ()) == 2:
        axes = transposed.attrs.axes
        if axes is None or [int(a) for a in axes] == [1, 0]:
            if view.only_user(weight) is not None:
                covers = (weight, var)
            weight, layout = transposed.args[0], "nk"
    n, k = static(n_dim, "the weight's output features"), static(k_dim, "its input features")
    return Linear(var, x, weight, layout, n, k, covers)


def _nt_matmul(view: BlockView, var: relax.Var, call: relax.Call) -> Linear | None:
    """Recognise a call of a PrimFunc that computes ``x @ W^T`` by its body."""
    args = list(call.args[1].fields) if isinstance(call.args[1], relax.Tuple) else []
    if len(args) != 2 or not isinstance(var.ty, relax.TensorType):
        return None
    x, weight = args
    x_shape, w_shape = shape_of(x), shape_of(weight)
    if x_shape is None or w_shape is None or len(w_shape) != 2 or len(x_shape) < 2:
        return None
    body = view.mod[call.args[0]]
    if not isinstance(body, tirx.PrimFunc) or not _computes_nt_matmul(body, len(x_shape)):
        return None
    n, k = static(w_shape[0], "the weight's output features"), static(w_shape[1], "its features")
    return Linear(var, x, weight, "nk", n, k, (var,))


def _computes_nt_matmul(func: tirx.PrimFunc, rank: int) -> bool:
    """Compare a PrimFunc with a freshly made NT matmul of the same parameters."""
    if len(func.params) != 3:
        return False
    shapes = [list(p.ty.shape) for p in func.params if isinstance(p.ty, tirx.BufferType)]
    dtypes = [str(p.ty.dtype) for p in func.params if isinstance(p.ty, tirx.BufferType)]
    if len(shapes) != 3 or len(shapes[0]) != rank or len(shapes[2]) != rank:
        return False
    x = te.placeholder(shapes[0], dtypes[0])
    w = te.placeholder(shapes[1], dtypes[1])
    k = te.reduce_axis((0, shapes[0][-1]), name="k")
    for cast in (False, True):
        value = _row_by_row(x, w, k, dtypes[2] if cast else "")
        stages = [x, w, te.compute(shapes[2], value)]
        wanted = te.create_prim_func(stages, index_dtype_override="int64")
        if structural_equal(func.body, wanted.body, map_free_vars=True):
            return True
    return False


def _row_by_row(
    x: te.Tensor, w: te.Tensor, k: tirx.IterVar, cast: str
) -> Callable[..., PrimExpr]:
    """Return the elements of ``x @ w^T``, its operands cast where `cast` names a dtype."""

    def element(*idx: PrimExpr) -> PrimExpr:
        a, b = x(*idx[:-1], k), w(idx[-1], k)
        return te.sum(a.astype(cast) * b.astype(cast) if cast else a * b, axis=k)

    return element


@dataclass(frozen=True)
class Chain:
    """A projection with the steps after it that one kernel can take along."""

    linear: Linear
    projection: Projection
    args: tuple[KernelArg, ...]
    covers: tuple[relax.Var, ...]
    out: relax.Var
    out_dtype: str


def epilogue(view: BlockView, start: Linear, forbidden: set[relax.Var]) -> Chain:
    """Follow the single-use steps after a projection as far as a kernel can absorb them.

    Parameters
    ----------
    view : BlockView
        The block.
    start : Linear
        The projection.
    forbidden : set of relax.Var
        Results of the same kernel: a step that needs one of them cannot be part of it.
    """
    chain = Chain(
        start,
        Projection(start.n, start.layout),
        (KernelArg(start.weight),),
        start.covers,
        start.var,
        dtype_of(start.var),
    )
    while True:
        longer = _extend(view, chain, forbidden | set(chain.covers))
        if longer is None:
            return chain
        chain = longer


def _extend(view: BlockView, chain: Chain, forbidden: set[relax.Var]) -> Chain | None:
    """Absorb the next step: a bias, a residual, an activation or a cast, else None."""
    users = view.uses(chain.out)
    if view.escapes(chain.out) or not users:
        return None
    step = _activation_after(view, chain)
    if step is not None:
        return step
    if len(users) != 1:
        return None
    user = users[0]
    if is_call(view.defs[user], "relax.astype"):
        dtype = dtype_of(user)
        if dtype not in ("float16", "bfloat16", "float32"):
            return None
        return replace(chain, covers=(*chain.covers, user), out=user, out_dtype=dtype)
    for data, other in binary(view, user, "relax.add"):
        if data.same_as(chain.out) and not view.depends_on(other, forbidden):
            return _add(view, chain, user, other)
    return None


def _add(view: BlockView, chain: Chain, user: relax.Var, other: relax.Expr) -> Chain | None:
    """Absorb ``out + other`` as a bias (last axis only) or a residual (same shape)."""
    shape, other_shape = shape_of(chain.out), shape_of(other)
    if shape is None or other_shape is None or not same_shape(shape_of(user), shape):
        return None
    if not dtype_of(other) == dtype_of(chain.out) == dtype_of(chain.linear.x):
        return None  # all inputs of a kernel are of one dtype
    ones = all(isinstance(d, tirx.IntImm) and int(d) == 1 for d in other_shape[:-1])
    if len(shape) > 1 and len(other_shape) > 1 and same_shape(other_shape, shape):
        arg, kind = KernelArg(other), "residual"
    elif other_shape and same_shape(other_shape[-1:], shape[-1:]) and ones:
        arg, kind = KernelArg(other, (chain.projection.n,)), "bias"
    else:
        return None
    projection = replace(chain.projection, epilogue=(*chain.projection.epilogue, kind))
    return replace(
        chain,
        projection=projection,
        args=(*chain.args, arg),
        covers=(*chain.covers, user),
        out=user,
    )


def _activation_after(view: BlockView, chain: Chain) -> Chain | None:
    """Absorb an activation all of whose bindings read nothing but the chain's result."""
    for end in _ends_after(view, chain.out):
        found = activation(view, end)
        if found is None or not found.source.same_as(chain.out):
            continue
        inside = set(found.covers)
        readers = set(view.uses(chain.out))
        inner_leak = any(
            view.escapes(v) or set(view.uses(v)) - inside for v in found.covers if v is not end
        )
        if readers <= inside and not inner_leak:
            projection = replace(
                chain.projection, epilogue=(*chain.projection.epilogue, found.name)
            )
            return replace(
                chain, projection=projection, covers=(*chain.covers, *found.covers), out=end
            )
    return None


def _ends_after(view: BlockView, var: relax.Var, depth: int = 9) -> list[relax.Var]:
    """Return the bindings reachable from `var` in few steps, nearest first."""
    found: list[relax.Var] = []
    level = [var]
    for _ in range(depth):
        level = [u for v in level for u in view.uses(v) if u not in found]
        found.extend(dict.fromkeys(level))
        if len(found) > 16:
            break
    return found


def check_operands(view: BlockView, exprs: list[relax.Expr], dtype: str) -> None:
    """Refuse operands of another dtype than the kernel's."""
    check_dtype(dtype, "the chain")
    for expr in exprs:
        guard(
            dtype_of(expr) == dtype,
            Reason.DTYPE,
            f"an operand is {dtype_of(expr)}, the chain {dtype}",
        )
