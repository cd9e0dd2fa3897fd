"""Gated feed-forward networks in several spellings, for chains of tests."""

from __future__ import annotations

from relax_fusion import DynamicDim, GatedFFN, Norm

PASS = "FuseGatedFFN"
H = "h = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)\n"
RMS = Norm("rms", 1e-5)
N = 48
SEPARATE = "x[6,32] g[32] Wg[32,48] Wu[32,48]"
TWO = H + "p = R.matmul(h, Wg); u = R.matmul(h, Wu)\n"

ACTIVATION_SPELLINGS = {
    "silu": ("silu", "a = R.nn.silu(p)"),
    "gelu": ("gelu", "a = R.nn.gelu(p)"),
    "gelu_tanh": ("gelu_tanh", "a = R.nn.gelu_tanh(p)"),
    "relu": ("relu", "a = R.nn.relu(p)"),
    "silu_by_sigmoid": ("silu", "e = R.sigmoid(p); a = R.multiply(p, e)"),
    "relu_by_maximum": ("relu", 'a = R.maximum(R.const(0.0, "float32"), p)'),
    "quick_gelu": (
        "quick_gelu",
        'd = R.multiply(p, R.const(1.702, "float32")); e = R.sigmoid(d); a = R.multiply(p, e)',
    ),
    "sigmoid": ("sigmoid", "a = R.sigmoid(p)"),
    "tanh": ("tanh", "a = R.tanh(p)"),
    "relu2_by_power": ("relu2", 'e = R.nn.relu(p); a = R.power(e, R.const(2.0, "float32"))'),
    "relu2_by_multiply": ("relu2", "e = R.nn.relu(p); a = R.multiply(e, e)"),
    "relu2_by_square": ("relu2", 'e = R.maximum(p, R.const(0.0, "float32")); a = R.square(e)'),
    "gelu_by_erf": (
        "gelu",
        'e = R.multiply(p, R.const(0.70710678, "float32")); f = R.erf(e)\n'
        'o = R.add(R.const(1.0, "float32"), f); q = R.multiply(R.const(0.5, "float32"), p)\n'
        "a = R.multiply(q, o)",
    ),
    "gelu_by_erf_of_a_quotient": (
        "gelu",
        'e = R.divide(p, R.const(1.41421356, "float32")); f = R.erf(e)\n'
        'o = R.add(f, R.const(1.0, "float32")); q = R.multiply(p, o)\n'
        'a = R.multiply(q, R.const(0.5, "float32"))',
    ),
    "gelu_by_tanh": (
        "gelu_tanh",
        'c = R.power(p, R.const(3.0, "float32")); d = R.multiply(c, R.const(0.044715, "float32"))\n'
        'e = R.add(p, d); f = R.multiply(R.const(0.79788456, "float32"), e); t = R.tanh(f)\n'
        'o = R.add(t, R.const(1.0, "float32")); q = R.multiply(p, R.const(0.5, "float32"))\n'
        "a = R.multiply(q, o)",
    ),
    "gelu_by_tanh_of_products": (
        "gelu_tanh",
        "s = R.multiply(p, p); c = R.multiply(s, p)\n"
        'd = R.multiply(R.const(0.044715, "float32"), c); e = R.add(d, p)\n'
        'f = R.multiply(e, R.const(0.79788456, "float32")); t = R.tanh(f)\n'
        'o = R.add(t, R.const(1.0, "float32")); q = R.multiply(p, o)\n'
        'a = R.multiply(R.const(0.5, "float32"), q)',
    ),
    "gelu_by_tanh_factored": (
        "gelu_tanh",
        'q = R.multiply(p, R.const(0.5, "float32"))\n'
        'e = R.multiply(p, R.const(0.79788456, "float32"))\n'
        'c = R.multiply(p, R.const(0.044715, "float32")); d = R.multiply(c, p)\n'
        'f = R.add(d, R.const(1.0, "float32")); s = R.multiply(e, f); t = R.tanh(s)\n'
        'o = R.add(t, R.const(1.0, "float32")); a = R.multiply(q, o)',
    ),
    "gelu_by_sigmoid_of_a_cubic": (
        "gelu_tanh",
        's = R.square(p); c = R.multiply(s, R.const(0.0713548, "float32"))\n'
        'd = R.add(c, R.const(1.5957691, "float32")); e = R.multiply(d, p)\n'
        "f = R.sigmoid(e); a = R.multiply(p, f)",
    ),
}


def gated(
    activation: str = "silu",
    *,
    rows: int | DynamicDim = 6,
    merged: bool = False,
    gate_first: bool = True,
    norm: Norm | None = RMS,
    layout: str = "kn",
    bias: bool = False,
    dtype: str = "float32",
) -> GatedFFN:
    """Return the workload of a gate and an up projection of 48 features."""
    return GatedFFN(rows, 32, N, layout, merged, gate_first, activation, norm, dtype, dtype, bias)
