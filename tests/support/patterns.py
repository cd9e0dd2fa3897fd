"""Every fused pattern in few words, in the sizes and types that a target has to cope with."""

from __future__ import annotations

from .chains import Chain

Size = int | str

NORM = "a = R.nn.rms_norm(x, g, axes=[-1], epsilon=1e-5)"


def linears(rows: Size, dtype: str, k: int = 64, n: int = 96) -> list[Chain]:
    """Return norms, matmuls and gated pairs with `rows` rows."""
    x, weight = f"x[{rows},{k}]", f"W[{n},{k}]"
    layer = "a = R.nn.layer_norm(x, g, b, axes=[-1], epsilon=1e-5); t = R.permute_dims(W)"
    gated = "s = R.split(h, 2, axis=-1); u = s[0]; v = s[1]; o = R.multiply(R.nn.silu(u), v)"
    three = "; ".join(f"t{i} = R.permute_dims(W{i}); o{i} = R.matmul(a, t{i})" for i in range(3))
    found = {
        "norm_matmul": (
            f"{x} g[{k}] {weight}",
            f"{NORM}; t = R.permute_dims(W); o = R.matmul(a, t)",
        ),
        "norm_matmul_kn": (f"{x} g[{k}] W[{k},{n}]", f"{NORM}; o = R.matmul(a, W)"),
        "layer_norm_bias": (
            f"{x} g[{k}] b[{k}] {weight} c[{n}]",
            f"{layer}; h = R.matmul(a, t); o = R.add(h, c)",
        ),
        "norm_three": (f"{x} g[{k}] W0[{n},{k}] W1[{n},{k}] W2[{n},{k}]", f"{NORM}; {three}"),
        "gated_ffn": (
            f"{x} g[{k}] W[{2 * n},{k}]",
            f"{NORM}; t = R.permute_dims(W); h = R.matmul(a, t); {gated}",
        ),
        "matmul_gelu": (
            f"{x} c[{n}] {weight}",
            "t = R.permute_dims(W); h = R.matmul(x, t); i = R.add(h, c); o = R.nn.gelu_tanh(i)",
        ),
        "matmul_residual": (
            f"{x} y[{rows},{n}] {weight}",
            "t = R.permute_dims(W); h = R.matmul(x, t); o = R.add(h, y)",
        ),
    }
    results = {"norm_three": "(o0, o1, o2)"}
    return [
        Chain(name, inputs, body, results.get(name, "o"), dtype=dtype)
        for name, (inputs, body) in found.items()
    ]


def rotated(rows: Size, dtype: str, k: int = 64) -> Chain:
    """Return a norm, a projection to four heads of 16 features, and their rotation."""
    turn = (
        "s = R.split(q, 2, axis=-1); l = s[0]; r = s[1]; m = R.negative(r); "
        "w = R.concat((m, l), axis=-1); i = R.multiply(q, cos); j = R.multiply(w, sin); "
        "o = R.add(i, j)"
    )
    body = (
        f"{NORM}; t = R.permute_dims(W); h = R.matmul(a, t); "
        f"q = R.reshape(h, R.shape([{rows}, 4, 16])); {turn}"
    )
    inputs = f"x[{rows},{k}] g[{k}] W[64,{k}] cos[{rows},1,16] sin[{rows},1,16]"
    return Chain("rope", inputs, body, "o", dtype=dtype)


def attentions(
    rows: Size, dtype: str, heads: int = 4, width: int = 32, keys: Size | None = None
) -> list[Chain]:
    """Return attention in its forms, with `rows` queries."""
    keys = rows if keys is None else keys
    q, kv = f"q[1,{rows},{heads},{width}]", f"[1,{keys},{heads},{width}]"
    plain = f"{q} k{kv} v{kv}"
    half = f"[1,{keys},{heads // 2 or 1},{width}]"
    group = heads // (heads // 2 or 1)
    first = f"[1,{heads},{keys},{width}]"
    written = "t = R.permute_dims(k, [0, 1, 3, 2]); s = R.matmul(q, t)"
    cap = f"R.const(8.0, '{dtype}')"
    return [
        Chain("attention", plain, "o = R.nn.attention(q, k, v)", "o", dtype=dtype),
        Chain(
            "attention_causal_grouped",
            f"{q} k{half} v{half}",
            f"i = R.repeat(k, {group}, axis=2); j = R.repeat(v, {group}, axis=2); "
            "o = R.nn.attention(q, i, j, causal_mask='TopLeft')",
            "o",
            dtype=dtype,
        ),
        Chain(
            "attention_bias",
            f"{plain} b[1,{heads},{rows},{keys}]",
            "o = R.nn.attention_bias(q, k, v, b)",
            "o",
            dtype=dtype,
        ),
        Chain(
            "attention_mask",
            f"q[1,{heads},{rows},{width}] k{first} v{first} m[1,1,{rows},{keys}]:bool",
            f"{written}; z = R.where(m, s, R.const(-1e999, '{dtype}')); "
            "p = R.nn.softmax(z); o = R.matmul(p, v)",
            "o",
            dtype=dtype,
        ),
        Chain(
            "attention_softcap",
            f"q[1,{heads},{rows},{width}] k{first} v{first}",
            f"{written}; c = R.divide(s, {cap}); d = R.tanh(c); z = R.multiply(d, {cap}); "
            "p = R.nn.softmax(z); o = R.matmul(p, v)",
            "o",
            dtype=dtype,
        ),
    ]


def patterns(rows: Size, dtype: str = "float32") -> list[Chain]:
    """Return all of them."""
    return [*linears(rows, dtype), rotated(rows, dtype), *attentions(rows, dtype)]


def wide_rows(rows: Size = 1) -> list[Chain]:
    """Return rows long enough for the widest vector loads that there are."""
    return linears(rows, "float16", 2048, 256)


def odd_sizes() -> list[Chain]:
    """Return sizes of no rows or keys, of one, and of numbers that nothing divides."""
    found = [
        c
        for rows, k, n in ((0, 64, 96), (3, 1, 8), (3, 8, 1), (1, 1, 1), ("n", 37, 53))
        for c in linears(rows, "float32", k, n)
    ]
    sizes = ((0, 2, 16, 5), (5, 2, 16, 0), (1, 1, 1, 1), (3, 2, 1, 7), (7, 3, 20, 13))
    return found + [
        c
        for rows, heads, width, keys in sizes
        for c in attentions(rows, "float32", heads, width, keys)
    ]
