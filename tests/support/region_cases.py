"""Regions for `FuseChains`, small: each with the statements that it becomes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .chains import Chain


@dataclass(frozen=True)
class Case:
    """A chain, the statements that it becomes, and what remains beside the kernel."""

    chain: Chain
    statements: str
    left: tuple[str, ...] = ()


def half(name: str, inputs: str, body: str, result: str, **sizes: int) -> Chain:
    return Chain(name, inputs, body, result, sizes, "float16")


def _case(name: str, inputs: str, body: str, statements: str, **sizes: int) -> Case:
    """Return a chain whose result is what its last statement binds."""
    result = re.split(r"[;\n]", body)[-1].partition("=")[0].strip()
    return Case(half(name, inputs, body, result, **sizes), statements)


CASES = [
    _case(
        "mlp",
        "x[b,s,32] W[32,48] p[48] WV[48,32] q[32]",
        "h = R.nn.gelu(R.add(R.matmul(x, W), p)); y = R.add(R.add(R.matmul(h, WV), q), x)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = gelu(t0[m, k] + x1[k])
        t2[m, n]    float32 = sum k: t1[m, k] * w1[k, n]
        out0[m, n]  float16 = t2[m, n] + x2[n] + x0[m, n]
        """,
        b=2,
        s=9,
    ),
    _case(
        "one_tensor_twice",
        "x[2,n,48] k[2,40,32] K[48,32]",
        "g = R.matmul(R.permute_dims(k, [0, 2, 1]), k); y = R.matmul(R.matmul(x, K), g)",
        """
        t0[h, p, k]    float32 = sum q: w0[h, q, p] * w0[h, q, k]
        t1[h, p, k]    float16 = t0[h, p, k]
        t2[m, n, r]    float32 = sum s: x0[m, n, s] * w1[s, r]
        t3[m, n, r]    float16 = t2[m, n, r]
        t4[m, n, k]    float32 = sum r: t3[m, n, r] * t1[m, r, k]
        out0[m, n, k]  float16 = t4[m, n, k]
        """,
        n=21,
    ),
    _case(
        "token_mixer",
        "x[3,40,48] W[40,32] p[32] WV[32,40] q[40]",
        "t = R.permute_dims(x, [0, 2, 1]); h = R.nn.gelu(R.add(R.matmul(t, W), p))\n"
        "m = R.add(R.matmul(h, WV), q); y = R.add(R.permute_dims(m, [0, 2, 1]), x)",
        """
        t0[m, k, h]    float32 = sum p: x0[m, p, k] * w0[p, h]
        t1[m, k, h]    float16 = gelu(t0[m, k, h] + x1[h])
        t2[m, k, n]    float32 = sum h: t1[m, k, h] * w1[h, n]
        out0[m, n, k]  float16 = t2[m, k, n] + x2[n] + x0[m, n, k]
        """,
    ),
    _case(
        "three_products",
        "x[n,32] WA[32,16] WB[16,48] WC[48,32]",
        "a = R.nn.relu(R.matmul(x, WA)); b = R.tanh(R.matmul(a, WB)); y = R.matmul(b, WC)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = relu(t0[m, k])
        t2[m, p]    float32 = sum k: t1[m, k] * w1[k, p]
        t3[m, p]    float16 = tanh(t2[m, p])
        t4[m, n]    float32 = sum p: t3[m, p] * w2[p, n]
        out0[m, n]  float16 = t4[m, n]
        """,
        n=21,
    ),
    _case(
        "numbers_with_dimensions",
        "x[20,32] W[32,16] WB[16,32]",
        "t = R.permute_dims(R.reshape(R.const(2.0, 'float16'), (1, 1)), [1, 0])\n"
        "a = R.power(R.matmul(x, W), R.const([[2.0]], 'float16'))\n"
        "y = R.matmul(R.multiply(a, t), WB)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = square(t0[m, k]) * 2
        t2[m, n]    float32 = sum k: t1[m, k] * w1[k, n]
        out0[m, n]  float16 = t2[m, n]
        """,
    ),
    _case(
        "norm_of_columns",
        "x[20,32] W[32,16] g[20] WB[16,32]",
        "a = R.nn.layer_norm(R.matmul(x, W), g, g, axes=[0], center=False, scale=False)\n"
        "y = R.matmul(a, WB)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[k]       float32 = sum m: t0[m, k]
        t2[k]       float32 = sum m: (t0[m, k] - (t1[k] / 20)) * (t0[m, k] - (t1[k] / 20))
        t3[m, k]    float16 = (t0[m, k] - (t1[k] / 20)) * rsqrt(t2[k] / 20 + 1e-05)
        t4[m, n]    float32 = sum k: t3[m, k] * w1[k, n]
        out0[m, n]  float16 = t4[m, n]
        """,
    ),
    _case(
        "norm_in_front",
        "x[20,32] g[32] WA[32,48] WB[48,16] WC[16,32]",
        "n = R.nn.rms_norm(x, g, axes=[-1]); a = R.nn.relu(R.matmul(n, WA))\n"
        "b = R.nn.relu(R.matmul(a, WB)); y = R.matmul(b, WC)",
        """
        t0[m]       float32 = sum k: x0[m, k] * x0[m, k]
        t1[m, k]    float16 = (x0[m, k] * rsqrt(t0[m] / 32 + 1e-05)) * x1[k]
        t2[m, h]    float32 = sum k: t1[m, k] * w0[k, h]
        t3[m, h]    float16 = relu(t2[m, h])
        t4[m, p]    float32 = sum h: t3[m, h] * w1[h, p]
        t5[m, p]    float16 = relu(t4[m, p])
        t6[m, n]    float32 = sum p: t5[m, p] * w2[p, n]
        out0[m, n]  float16 = t6[m, n]
        """,
    ),
    _case(
        "norm_between",
        "x[20,32] WA[32,48] g[48] WB[48,16] r[20,48]",
        "s = R.add(R.matmul(x, WA), r); h = R.nn.rms_norm(s, g, axes=[-1])\n"
        "y = R.matmul(R.nn.silu(h), WB)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = t0[m, k] + x1[m, k]
        t2[m]       float32 = sum k: t1[m, k] * t1[m, k]
        t3[m, k]    float16 = silu((t1[m, k] * rsqrt(t2[m] / 48 + 1e-05)) * x2[k])
        t4[m, n]    float32 = sum k: t3[m, k] * w1[k, n]
        out0[m, n]  float16 = t4[m, n]
        """,
    ),
    _case(
        "softmax_between",
        "x[2,16,32] WA[2,32,48] m[2,16,48] WB[2,48,16] Ww[16,16]",
        "s = R.add(R.multiply(R.matmul(x, WA), R.const(0.25, 'float16')), m)\n"
        "p = R.nn.softmax(R.nn.relu(s), axis=-1); y = R.matmul(R.matmul(p, WB), Ww)",
        """
        t0[m, n, h]    float32 = sum p: x0[m, n, p] * w0[m, p, h]
        t1[m, n, h]    float32 = relu(t0[m, n, h] * 0.25 + x1[m, n, h])
        t2[m, n]       float32 = max h: t1[m, n, h]
        t3[m, n, h]    float16 = exp(t1[m, n, h] - finite(t2[m, n]))
        t4[m, n]       float32 = sum h: t3[m, n, h]
        t5[m, n, q]    float32 = sum h: t3[m, n, h] * w1[m, h, q]
        t6[m, n, q]    float16 = t5[m, n, q] / t4[m, n]
        t7[m, n, k]    float32 = sum q: t6[m, n, q] * w2[q, k]
        out0[m, n, k]  float16 = t7[m, n, k]
        """,
    ),
    _case(
        "adapter",
        "x[n,32] base[n,48] WA[16,32] WB[48,16]",
        "l = R.matmul(R.matmul(x, R.permute_dims(WA)), R.permute_dims(WB))\n"
        "m = R.multiply(R.max(l, axis=[1], keepdims=True), R.const(2.0, 'float16'))\n"
        "y = R.nn.silu(R.add(base, m))",
        """
        t0[k, h]    float32 = sum p: x0[k, p] * w0[h, p]
        t1[k, h]    float16 = t0[k, h]
        t2[k, q]    float32 = sum h: t1[k, h] * w1[q, h]
        t3[k]       float32 = max q: t2[k, q]
        out0[m, n]  float16 = silu(x1[m, n] + t3[m] * 2)
        """,
        n=17,
    ),
    _case(
        "rounded",
        "x[24,32] WA[32,16] WB[16,48]",
        "h = R.nn.gelu(R.matmul(x, WA, out_dtype='float32')); c = R.astype(h, 'float16')\n"
        "y = R.nn.softmax(R.astype(R.matmul(c, WB), 'float32'))",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = gelu(t0[m, k])
        t2[m, n]    float32 = sum k: t1[m, k] * w1[k, n]
        t3[m]       float32 = max n: t2[m, n]
        t4[m, n]    float32 = exp(t2[m, n] - finite(t3[m]))
        t5[m]       float32 = sum n: t4[m, n]
        out0[m, n]  float32 = t4[m, n] / t5[m]
        """,
    ),
    _case(
        "mean_behind",
        "x[24,32] WA[32,16] WB[16,48] WC[24,48]",
        "y = R.matmul(R.exp(R.matmul(x, WA)), WB); m = R.mean(y, axis=[1], keepdims=True)\n"
        "z = R.multiply(R.subtract(y, m), WC)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, k]    float16 = exp(t0[m, k])
        t2[m, n]    float32 = sum k: t1[m, k] * w1[k, n]
        t3[m]       float32 = sum n: t2[m, n]
        out0[m, n]  float16 = (t2[m, n] - (t3[m] / 48)) * x1[m, n]
        """,
    ),
    _case(
        "side_by_side",
        "x[24,32] WA[32,16] WB[32,16] WC[16,48]",
        "a = R.nn.silu(R.matmul(x, WA)); b = R.matmul(x, WB); c = R.multiply(a, b)\n"
        "y = R.matmul(c, WC)",
        """
        t0[m, k]    float32 = sum h: x0[m, h] * w0[h, k]
        t1[m, p]    float32 = sum h: x0[m, h] * w1[h, p]
        t2[m, k]    float16 = silu(t0[m, k]) * t1[m, k]
        t3[m, n]    float32 = sum k: t2[m, k] * w2[k, n]
        out0[m, n]  float16 = t3[m, n]
        """,
    ),
    _case(
        "batched",
        "x[b,n,32] WA[b,32,16] WB[b,16,48]",
        "h = R.clip(R.matmul(x, WA), 0, 6); y = R.sqrt(R.nn.relu(R.matmul(h, WB)))",
        """
        t0[m, n, h]    float32 = sum p: x0[m, n, p] * w0[m, p, h]
        t1[m, n, h]    float16 = min(max(t0[m, n, h], 0), 6)
        t2[m, n, k]    float32 = sum h: t1[m, n, h] * w1[m, h, k]
        out0[m, n, k]  float16 = sqrt(relu(t2[m, n, k]))
        """,
        b=2,
        n=9,
    ),
    _case(
        "merged_heads",
        "x[2,4,9,8] WA[32,48] WB[48,16]",
        "t = R.permute_dims(x, [0, 2, 1, 3]); r = R.reshape(t, [2, 9, 32])\n"
        "h = R.tanh(R.matmul(r, WA)); y = R.matmul(h, WB)",
        """
        t0[m, n, h]    float32 = sum p, q: x0[m, p, n, q] * w0[8*p + q, h]
        t1[m, n, h]    float16 = tanh(t0[m, n, h])
        t2[m, n, k]    float32 = sum h: t1[m, n, h] * w1[h, k]
        out0[m, n, k]  float16 = t2[m, n, k]
        """,
    ),
    _case(
        "any_width",
        "x[b,n,32] WA[b,32,v] WB[b,v,16]",
        "h = R.tanh(R.tanh(R.matmul(x, WA))); y = R.matmul(h, WB)",
        """
        t0[m, n, h]    float32 = sum p: x0[m, n, p] * w0[m, p, h]
        t1[m, n, h]    float16 = tanh(tanh(t0[m, n, h]))
        t2[m, n, k]    float32 = sum h: t1[m, n, h] * w1[m, h, k]
        out0[m, n, k]  float16 = t2[m, n, k]
        """,
        b=2,
        n=9,
        v=40,
    ),
]
