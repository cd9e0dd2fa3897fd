"""Norms, projections, gates and adapters, in the spellings of front ends, at random."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax import op

from relax_fusion.matching.shapes import dtype_of

from .writer import Writer

EPSILONS = (1e-6, 1e-5, 1e-3)
FEATURES = (1, 4, 5, 16, 24, 33)
END = 9223372036854775807


# --- norms -----------------------------------------------------------------------------------


def norm(w: Writer, x: relax.Var) -> relax.Var:
    """Normalise over the last axis, rarely over another one or several."""
    shape = w.shape(x)
    eps = w.pick(*EPSILONS)
    spelling = w.pick("rms", "rms", "layer", "layer", "written rms", "written layer")
    if spelling.startswith("written"):
        return written_norm(w, x, eps, spelling.endswith("layer"))
    rank = len(shape)
    axes = [w.pick(-1, rank - 1)]
    if rank > 1 and w.chance(4):
        axes = w.pick([-2], [0], [rank - 2, rank - 1])
    sizes = [shape[a] for a in axes]
    gamma = w.leaf(sizes, dtype_of(x))
    if spelling == "rms":
        return w(op.nn.rms_norm, x, gamma, axes, eps)
    beta = w.leaf(sizes, dtype_of(x))
    flags = w.pick({}, {}, {}, {"scale": False}, {"center": False})
    return w(op.nn.layer_norm, x, gamma, beta, axes, eps, **flags)


def written_norm(w: Writer, x: relax.Var, eps: float, layer: bool, wrong: str = "") -> relax.Var:
    """Write a norm out, in one of the ways of the front ends; or nearly so, if one is `wrong`."""
    narrow = dtype_of(x)
    axis = {"axis": [0], "two": [-2, -1]}.get(wrong, [w.pick(-1, len(w.shape(x)) - 1)])
    wide = x
    if narrow != "float32" and w.chance(85):
        wide = w(op.astype, x, "float32")
    if layer:
        wide = w(op.subtract, wide, w(op.mean, wide, axis, True))
    squared = w(op.multiply, wide, w(op.negative, wide)) if wrong == "other" else _square(w, wide)
    inside = w(op.sum if wrong == "dims" else op.mean, squared, axis, True)
    if wrong != "inside":
        small = w.param([], dtype_of(inside)) if wrong == "eps" else w.scalar(eps, inside)
        inside = w.either(op.add, inside, small)
    one, power = w.scalar(1.001 if wrong == "one" else 1.0, inside), w.scalar(-0.5, inside)
    scaled: relax.Var = w.pick(
        *[lambda: w.either(op.multiply, wide, w(op.rsqrt, inside))] * 3,
        *[lambda: w(op.divide, wide, w(op.sqrt, inside))] * 2,
        lambda: w.either(op.multiply, wide, w(op.divide, one, w(op.sqrt, inside))),
        lambda: w.either(op.multiply, wide, w(op.power, inside, power)),
    )()
    late = w.chance(25)
    if dtype_of(scaled) != narrow and not late:
        scaled = w(op.astype, scaled, narrow)
    shape = w.shape(x)[-2:] if wrong == "gamma" else w.shape(x)[-1:]
    gamma = w.leaf(shape, dtype_of(scaled) if late else narrow)
    if w.chance(15):
        gamma = w.either(op.add, gamma, w.scalar(1.0, gamma))
    made = w.either(op.multiply, gamma, scaled)
    if layer and w.chance(80):
        made = w.either(op.add, made, w.leaf(w.shape(x)[-1:], dtype_of(made)))
    return w(op.astype, made, narrow) if dtype_of(made) != narrow else made


def _square(w: Writer, x: relax.Var) -> relax.Var:
    spelling = w.pick("square", "power", "multiply")
    if spelling == "square":
        return w(op.square, x)
    if spelling == "power":
        return w(op.power, x, w.scalar(w.pick(2.0, 2.0, 2.0, 3.0), x))
    return w(op.multiply, x, x)


# --- projections -----------------------------------------------------------------------------


def weight(w: Writer, k: Any, n: Any, dtype: str) -> relax.Expr:
    """Return a right operand ``[k, n]``: plain, transposed, or one that was used before."""
    layout = w.pick("nk", "nk", "kn")
    known = w.weights.setdefault((k, n, layout, dtype), [])
    if not known or w.chance(75):
        known.append(w.param((k, n) if layout == "kn" else (n, k), dtype))
    base = w.pick(*known)
    if w.chance(2):  # decoded from integers
        scale = w.param((w.shape(base)[0], 1), dtype)
        packed = w.param(w.shape(base), "int8")
        base = w.either(op.multiply, w(op.astype, packed, dtype), scale)
    if layout == "kn":
        return base
    shared = w.weights.setdefault((k, n, "transposed", dtype), [])
    if not shared or w.chance(70):
        shared.append(w(op.permute_dims, base, w.pick(None, [1, 0], [-1, -2])))
    return w.pick(*shared)


def project(w: Writer, x: relax.Var, n: int, wide: bool = False) -> relax.Var:
    """Multiply by a weight; `wide` asks for results in float32."""
    out = "float32" if wide or w.chance(3) else None
    right = weight(w, w.shape(x)[-1], n, dtype_of(x))
    if len(w.shape(x)) > 2 and w.chance(20):
        shape = w.shape(x)
        flat = w(op.reshape, x, [math.prod(shape[1:-1], start=shape[0]), shape[-1]])
        return w(op.reshape, w(op.matmul, flat, right, out), [*shape[:-1], n])
    return w(op.matmul, x, right, out)


def bias(w: Writer, x: relax.Var, percent: int = 50) -> relax.Var:
    """Add a bias in one of its shapes, or nothing."""
    if not w.chance(percent):
        return x
    n, ones = w.shape(x)[-1], [1] * (len(w.shape(x)) - 1)
    shape = w.pick(*[[n]] * 7, [*ones, n], [1, n], [1], [*ones, 1])
    return w.either(op.add, x, w.leaf(shape, dtype_of(x)))


def residual(w: Writer, x: relax.Var, source: relax.Var | None = None) -> relax.Var:
    """Add `source`, or any tensor of the same, or of a broadcasting, shape."""
    if source is not None and w.chance(85) and dtype_of(source) == dtype_of(x):
        return w.either(op.add, x, source)
    same = w.like(x)
    if same and w.chance(60):
        return w.either(op.add, x, w.pick(*same))
    shape = w.shape(x)
    fewer = (shape, shape, shape[1:], [1, *shape[1:]], [*shape[:-1], 1])
    return w.either(op.add, x, w.param(w.pick(*fewer), dtype_of(x)))


def activation(w: Writer, x: relax.Var, off: float = 1.0) -> relax.Var:
    """Apply an activation in one of its spellings, sometimes in float32.

    Where `off` is not 1, some of its numbers are off by that factor.
    """
    narrow = dtype_of(x)
    if narrow != "float32" and w.chance(15):
        x = w(op.astype, x, "float32")
    made = _activated(w, x, off)
    return w(op.astype, made, narrow) if dtype_of(made) != narrow else made


def _activated(w: Writer, x: relax.Var, off: float) -> relax.Var:
    def number(value: float) -> float:
        return value * off if w.chance(50) else value

    name = w.pick("silu", "gelu", "gelu_tanh", "relu", "silu", "gelu", "quick", "relu6")
    if name == "quick":
        return w.either(op.multiply, x, w(op.sigmoid, w.times(x, number(1.702))))
    if name == "relu6":
        return w(op.nn.relu, w(op.minimum, x, w.scalar(number(6.0), x)))
    if off == 1 and w.chance(50):
        return w(getattr(op.nn, name), x)
    if name == "silu":
        if w.chance(30):
            below = w(op.add, w(op.exp, w(op.negative, x)), w.scalar(number(1.0), x))
            return w(op.divide, x, below)
        other = w(op.negative, x) if w.chance(5) else x
        return w.either(op.multiply, other, w(op.sigmoid, x))
    if name == "relu":
        return w.either(op.maximum, x, w.scalar(w.pick(0.0, 0.0, -0.0, 0.0, 0.5), x))
    return _written_gelu(w, x, name == "gelu_tanh", number)


def _written_gelu(
    w: Writer, x: relax.Var, tanh: bool, number: Callable[[float], float]
) -> relax.Var:
    if tanh:
        if w.chance(50):
            cube = w(op.power, x, w.scalar(number(3.0), x))
        else:
            cube = w.either(op.multiply, w(op.multiply, x, x), x)
        inner = w.either(op.add, x, w.times(cube, number(0.044715)))
        inside = w(op.tanh, w.times(inner, number(math.sqrt(2 / math.pi))))
    else:
        inside = w(op.erf, w.times(x, number(w.pick(math.sqrt(0.5), math.sqrt(0.5), 1 / 1.4142))))
    gate = w.either(op.add, inside, w.scalar(number(1.0), x))
    order = w.pick("half x", "half last", "half gate")
    half = w.scalar(number(w.pick(0.5, 0.5, 0.5, 0.5, 0.25)), x)
    if order == "half x":
        return w.either(op.multiply, w.either(op.multiply, x, half), gate)
    if order == "half last":
        return w.either(op.multiply, w.either(op.multiply, x, gate), half)
    return w.either(op.multiply, x, w.either(op.multiply, gate, half))


# --- motifs: each takes a stream and returns one of the same shape ----------------------------


def mlp(w: Writer, x: relax.Var) -> relax.Var:
    """Project up, activate, project down."""
    y = bias(w, project(w, x, w.pick(*FEATURES)))
    return bias(w, project(w, activation(w, y), w.shape(x)[-1]), 30)


def gated(w: Writer, x: relax.Var) -> relax.Var:
    """Multiply an activated gate by its other half, merged or separate; project down."""
    n = w.pick(1, 4, 5, 16, 24)
    if w.chance(50):
        both = bias(w, project(w, x, 2 * n), 25)
        whole = 2 * n
        at = w.pick(2, [n]) if w.chance(95) else [n // 2 or n]
        axis = w.pick(-1, len(w.shape(x)) - 1)
        if w.chance(25):
            gate, up = (
                w(op.strided_slice, both, [axis], [begin], [w.pick(end, min(end, whole))])
                for begin, end in ((0, n), (n, whole if w.chance(50) else END))
            )
        else:
            parts = w.emit(op.split(both, at, axis))
            gate, up = (w.emit(relax.TupleGetItem(parts, i)) for i in range(2))
        if w.shape(gate) != w.shape(up):
            return project(w, up, w.shape(x)[-1])
        gate, up = (gate, up) if w.chance(60) else (up, gate)
        up = gate if w.chance(3) else up
    else:
        percent = w.pick(0, 0, 100, 50)
        gate, up = (bias(w, project(w, x, n), percent) for _ in range(2))
        if dtype_of(gate) != dtype_of(up):
            up = w(op.astype, up, dtype_of(gate))
    y = w.either(op.multiply, activation(w, gate), up)
    return bias(w, project(w, y, w.shape(x)[-1]), 20) if w.chance(70) else y


def adapter(w: Writer, x: relax.Var) -> relax.Var:
    """Project to few features and back, and add a projection: LoRA."""
    width = w.shape(x)[-1]
    y = bias(w, project(w, x, w.pick(1, 4, 5, 16)), 15)
    y = activation(w, y) if w.chance(25) else y
    y = w.times(y, w.pick(0.5, 2.0)) if w.chance(25) else y
    y = bias(w, project(w, y, width), 15)
    y = w.times(y, w.pick(0.5, 2.0, 1.0)) if w.chance(50) else y
    if not w.chance(60):
        return y
    other = project(w, x, width)
    return w.either(op.add, y, other) if dtype_of(other) == dtype_of(y) else y


def adapted(w: Writer, x: relax.Var) -> relax.Var:
    """Add adapters to one or several projections, as peft writes them; project back."""
    n, rank = w.pick(8, 16, 16, 24, 5), w.pick(8, 8, 16, 4)
    joined: relax.Var | None = None
    for _ in range(w.pick(1, 1, 2)):
        y = bias(w, project(w, x, n), 30)
        low = project(w, x, rank)
        low = w.times(low, w.pick(0.5, 3.0)) if w.chance(20) else low
        low = project(w, low, n)
        low = w.times(low, w.pick(0.5, 2.0, 2.0, 3.0)) if w.chance(50) else low
        y = w.either(op.add, y, low) if dtype_of(y) == dtype_of(low) else y
        y = activation(w, y) if w.chance(25) else y
        joined = y if joined is None or dtype_of(joined) != dtype_of(y) else w(op.add, joined, y)
    assert joined is not None
    return project(w, joined, w.shape(x)[-1])


def batched(w: Writer, x: relax.Var) -> relax.Var:
    """Multiply matrices of a batch one after the other."""
    shape = w.shape(x)
    if len(shape) < 3:
        return adapter(w, x)
    y = x
    for n in (w.pick(1, 4, 8), shape[-1]):
        k = w.shape(y)[-1]
        if w.chance(40):
            axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            right = w(op.permute_dims, w.param((*shape[:-2], n, k), dtype_of(y)), axes)
        else:
            right = w.param((*shape[:-2], k, n), dtype_of(y))
        y = w(op.matmul, y, right)
        y = w.times(y, 0.5) if w.chance(20) else y
    return y


def several(w: Writer, x: relax.Var) -> relax.Var:
    """Let several matmuls read the same tensor, each with steps after it, and join them."""
    joined: relax.Var | None = None
    for _ in range(w.pick(2, 3)):
        y = bias(w, project(w, x, w.shape(x)[-1]))
        y = activation(w, y) if w.chance(30) else y
        if joined is None or dtype_of(joined) != dtype_of(y):
            joined = y
        else:
            joined = w(w.pick(op.add, op.multiply), joined, y)
    assert joined is not None
    return joined


def linear(w: Writer, x: relax.Var) -> relax.Var:
    """Project once, with steps after it in any order."""
    y = project(w, x, w.shape(x)[-1], wide=w.chance(10))
    for _ in range(w.pick(0, 1, 2, 3)):
        step = w.pick("bias", "residual", "activation", "cast", "number")
        if step == "cast":
            y = w(op.astype, y, w.pick("float32", "float16", w.dtype))
        elif step == "residual":
            y = residual(w, y)
        elif step == "activation":
            y = activation(w, y)
        elif step == "number":
            y = w.times(y, w.pick(0.5, 2.0))
        else:
            y = bias(w, y, 100)
    return y


def noise(w: Writer, x: relax.Var) -> relax.Var:
    """Do something that no pattern wants."""
    what = w.pick("tanh", "flat", "transposed", "negative")
    shape = w.shape(x)
    if what == "flat":
        flat = w(op.reshape, x, [math.prod(shape[1:-1], start=shape[0]), shape[-1]])
        return w(op.reshape, linear(w, flat), shape) if len(shape) > 1 else x
    if what == "transposed" and len(shape) == 3:
        return w(op.permute_dims, linear(w, w(op.permute_dims, x, [1, 0, 2])), [1, 0, 2])
    return w(op.negative if what == "negative" else op.tanh, x)


Motif = Callable[[Writer, relax.Var], relax.Var]
MOTIFS: tuple[Motif, ...] = (
    *(mlp, gated, gated, adapter, batched, several, linear, linear, noise),
    *(adapted, adapted, adapted),
)
