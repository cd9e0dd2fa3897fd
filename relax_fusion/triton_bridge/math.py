"""Maths of the Triton kernels: values in, values out.

Nothing here knows a pointer, a stride or a mask, so every kernel family shares these functions and
a change of formula happens once.  Values are float32 unless a docstring says otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """Return ``x * sigmoid(x)`` of a float32 tensor of any shape."""
    return x * tl.sigmoid(x)


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def inverse(x):
    """Return ``1 / x`` of float32 numbers from 1 on, within one unit of the last place.

    One instruction, where a division takes eight: a kernel that unrolls it for a large tile may
    else outgrow the cache of instructions.
    """
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def to_l2(pointers):
    """Have the lines at `pointers` brought to L2, and wait for nothing."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def gelu(x):
    """Return the exact GELU, ``x * Phi(x)``, of a float32 tensor of any shape.

    For ``a >= 0``, ``Phi(-a)`` is ``exp(-a * a / 2)`` times a polynomial of ``1 / (1 + 0.295 a)``,
    a minimax fit that errs by 3.7e-8 of the value: half the instructions of `erf`, no branch,
    and no cancellation in the tail.
    """
    size = tl.abs(x)
    t = inverse(1.0 + 0.295 * size)
    tail = 0.039421144872903824 * t - 0.18340614438056946
    tail = tail * t + 0.27101653814315796
    tail = tail * t - 0.11707103252410889
    tail = tail * t + 0.16628892719745636
    tail = tail * t + 0.08474482595920563
    tail = tail * t + 0.12169938534498215
    tail = tail * t + 0.11728934198617935
    tail = tail * t + 1.7006907000904903e-05
    tail *= tl.exp2((-0.7213475204444817 * size) * size)
    return x * tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def gelu_tanh(x):
    """Return GELU's tanh approximation of a float32 tensor of any shape.

    ``0.5 * (1 + tanh(u))`` is ``sigmoid(2 u)``, which needs one exponential and no tanh.
    """
    twice_sqrt_2_over_pi: tl.constexpr = 1.5957691216057308
    return x * tl.sigmoid(twice_sqrt_2_over_pi * (x + 0.044715 * x * x * x))


@triton.jit
def quick_gelu(x):
    """Return ``x * sigmoid(1.702 x)`` of a float32 tensor of any shape."""
    return x * tl.sigmoid(1.702 * x)


@triton.jit
def relu(x):
    """Return ``max(x, 0)`` of a float32 tensor of any shape, NaN staying NaN."""
    return tl.where(x < 0.0, 0.0, x)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent of a float32 tensor of any shape.

    Near 0, where ``2 sigmoid(2 x) - 1`` would cancel, a polynomial errs by 1.6e-8 of the result.
    """
    size, square = tl.abs(x), x * x
    near = square * 0.0172569385 - 0.0530529242
    near = x + x * square * ((near * square + 0.133259869) * square - 0.333331484)
    far = 2.0 * tl.sigmoid(2.0 * size) - 1.0
    return tl.where(size < 0.5, near, tl.where(x < 0.0, -far, far))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation of that name; ``"none"`` returns `x`."""
    if ACTIVATION == "silu":
        return silu(x)
    elif ACTIVATION == "gelu":
        return gelu(x)
    elif ACTIVATION == "gelu_tanh":
        return gelu_tanh(x)
    elif ACTIVATION == "quick_gelu":
        return quick_gelu(x)
    elif ACTIVATION == "relu":
        return relu(x)
    elif ACTIVATION == "relu2":
        return relu(x) * relu(x)
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(x)
    elif ACTIVATION == "tanh":
        return tanh(x)
    else:
        tl.static_assert(ACTIVATION == "none", "no such activation")
        return x


@triton.jit
def glu(gate, up, ACTIVATION: tl.constexpr):
    """Return ``activation(gate) * up`` of two float32 tensors of one shape."""
    return activate(gate, ACTIVATION) * up


@triton.jit
def after_step(x, operand, KIND: tl.constexpr, NUMBER: tl.constexpr):
    """Return a float32 tensor after one step of an epilogue.

    `x`, `operand` (float32 tensors): `operand`, which is broadcast to `x`, is ignored by steps that
    have none.
    `KIND`: ``"add"`` or ``"multiply"``, by the operand; ``"times"``, by `NUMBER`; or an activation.
    """
    if KIND == "add":
        return x + operand
    elif KIND == "multiply":
        return x * operand
    elif KIND == "times":
        return x * NUMBER
    else:
        return activate(x, KIND)


@triton.jit
def inverse_rms(sum_squares, width, eps):
    """Return ``1 / sqrt(mean square + eps)`` of float32 sums over `width` elements."""
    return 1.0 / tl.sqrt_rn(sum_squares / width + eps)


@triton.jit
def affine(x, gamma, beta, HAS_BETA: tl.constexpr):
    """Return ``x * gamma`` plus `beta` where there is one."""
    x = x * gamma
    if HAS_BETA:
        x += beta
    return x


@triton.jit
def finite(x):
    """Return 0 for minus infinity, and anything else as it is."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def ratio(x, y):
    """Return ``x / y``, and 0 for a divisor of 0."""
    return tl.where(y == 0.0, y, x / tl.where(y == 0.0, 1.0, y))


@triton.jit
def quotient(x, y):
    """Return ``x / y`` rounded down; Triton's ``//`` rounds towards 0."""
    return x // y - tl.where(x % y < 0, 1, 0)


@triton.jit
def remainder(x, y):
    """Return what ``y * quotient(x, y)`` leaves of ``x``; Triton's ``%`` can be less than 0."""
    return (x % y + y) % y


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """Return the maximum along an axis; that of NaN is NaN."""
    return tl.reduce(x, AXIS, _larger)
