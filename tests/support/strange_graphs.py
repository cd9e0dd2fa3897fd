"""Block graphs with what chains seldom have: masks, starts, other dtypes, odd coordinates."""

from __future__ import annotations

import math
import random
from functools import reduce
from operator import mul
from typing import Any

from relax_fusion.workload import Attention, DynamicDim, GatedFFN, Norm, NormMatmul, Projection
from relax_fusion.workload.builder import GraphBuilder, Handle
from relax_fusion.workload.graph import Band, Graph
from relax_fusion.workload.values import At, Axis, AxisValue, Const, Expr, Size, apply, at


def attention(choose: random.Random) -> Graph:
    """Attention with some of all its options."""
    heads = choose.choice((1, 2))
    some = (True, True, True, True), (False, True, False, True), (True, False, True, True)
    rows, keys = (
        choose.choice((1, 20, 33, DynamicDim("q"))),
        choose.choice((1, 17, DynamicDim("t"))),
    )
    return Attention(
        *(choose.choice((1, 2)), rows, keys),
        *(2 * heads, heads, choose.choice((16, 24, 80)), choose.choice((16, 40)), 0.25),
        choose.choice(("none", "top_left", "bottom_right")),
        choose.choice((None, *some)),
        *("float16", choose.choice(("float16", "float32"))),
        *(choose.choice(("bsnh", "bnsh")) for _ in range(3)),
        bias_dtype=choose.choice(("float32", "float16")),
        bias_op=choose.choice(("add", "min")),
        mask_dims=choose.choice((None, *some)),
        window=choose.choice((None, 5)),
        softcap=choose.choice((None, 3.0)),
        alibi=choose.choice((None, "float32")),
        sinks=choose.choice((None, "float32", "float16")),
        kv_prefix=choose.random() < 0.3,
    ).graph


def masked(choose: random.Random) -> Graph:
    """A product under a band and a condition, with a start; its band may hide everything."""
    g = GraphBuilder()
    i, j = (Axis(n, choose.choice((1, 7, 16, 33))) for n in "ij")
    k = Axis("k", choose.choice((7, 16, 33)))  # a condition of one element has no interpreter
    x, w = g.input("x", (i.size, k.size), "float16"), g.input("w", (k.size, j.size), "float16")
    how: dict[str, Any] = {}
    if choose.random() < 0.5:
        row = choose.choice((at(i), at(0)))
        how["where"] = g.input("m", (i.size, k.size), "bool")[row, k]
    if choose.random() < 0.5:
        low, high = sorted((choose.randint(-9, 9), choose.randint(-9, 9)))
        column, row = choose.choice((("k", "i"), ("i", "k"), ("k", "j")))
        how["band"] = Band(
            column, row, Const(low - 0.5), choose.choice((None, Const(high + 0.5), Const(math.inf)))
        )
    if choose.random() < 0.5:
        start = choose.choice((None, Const(2.0)))
        how["start"] = start or g.input("s", (i.size, j.size), "float32")[i, j]
    make = choose.choice((g.sum, g.max))
    g.output(make("y", (i, j), (k,), x[i, k] * w[k, j], **how))
    return g.graph()


def integers(choose: random.Random) -> Graph:
    """Products of integers, in integers and in float32, times numbers, with a start."""
    g = GraphBuilder()
    i, j, k = (Axis(n, choose.choice((5, 16, 40, 64))) for n in "ijk")
    a, b = choose.choice(
        (
            ("int8", "int8"),
            ("uint8", "int8"),
            ("int8", "float16"),
            ("int32", "float16"),
            ("uint8", "uint8"),
        )
    )
    x, w = g.input("x", (i.size, k.size), a), g.input("w", (j.size, k.size), b)
    out = "float32" if "float" in b else choose.choice(("int32", "float32"))
    value = x[i, k] * w[j, k]
    value = value * 2.0 if choose.random() < 0.4 else value
    start = choose.choice((None, Const(3.0), Const(0.5) if out == "float32" else Const(1.0)))
    y = g.sum("y", (i, j), (k,), value, out, start=start)
    g.output(g.map("z", (i, j), y[i, j] * 0.5, "float32") if choose.random() < 0.5 else y)
    return g.graph()


def floats(choose: random.Random) -> Graph:
    """A product of two of all types of floats, and a second one of what it makes."""
    g = GraphBuilder()
    known = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
    i, j, k, h = (Axis(n, choose.choice((3, 16, 40))) for n in "ijkh")
    x = g.input("x", (i.size, k.size), choose.choice(known))
    w = g.input("w", (k.size, j.size), choose.choice(known))
    v = g.input("v", (j.size, h.size), choose.choice(known))
    y = g.sum("y", (i, j), (k,), x[i, k] * w[k, j], choose.choice(known[:3]))
    g.output(g.sum("z", (i, h), (j,), y[i, j] * v[j, h], choose.choice(known[:3])))
    return g.graph()


def coordinates(choose: random.Random) -> Graph:
    """Operands read along quotients, remainders, several axes, and from a start on."""
    g = GraphBuilder()
    i, j, k, e = Axis("i", 10), Axis("j", 12), Axis("k", 20), Axis("e", 3)
    x = g.input("x", (10 * 3 + 2, 20), "float16")
    w = g.input("w", (4, 20 + 3), "float16")
    r = g.input("r", (6, 5), "float32")
    rows = At((("i", 3), ("e", 1)), start=choose.choice((0, 2)))
    columns = choose.choice(
        (
            At((("j", 1),), div=3),
            At((("j", 1),), mod=4),
            At((("j", 1),), start=-2, mod=4),
            At((("j", 1),), start=2, div=4),
        )
    )
    y = g.sum("y", (i, e, j), (k,), x[rows, k] * w[columns, at(k) + choose.choice((0, 3))])
    other = At((("i", 1),), start=choose.choice((0, -3)), mod=6)
    g.output(g.map("z", (i, e, j), y[i, e, j] + r[other, At((("j", 1),), mod=5)], "float32"))
    return g.graph()


def two_loops(choose: random.Random) -> Graph:
    """Sums and maxima over two loops, of which one is rescaled by the other."""
    g = GraphBuilder()
    i, t, u, c = Axis("i", 3), Axis("t", choose.choice((1, 20))), Axis("u", 17), Axis("c", 4)
    x = g.input("x", (3, t.size, 17), "float32")
    v = g.input("v", (t.size, 17, 4), "float32")
    top = g.max("top", (i,), (t, u), x[i, t, u])
    p = g.map("p", (i, t, u), apply("exp", x[i, t, u] - top[i]), "float32")
    g.output(g.sum("total", (i,), (t, u), p[i, t, u]))
    if choose.random() < 0.7:
        g.output(g.sum("acc", (i, c), (t, u), p[i, t, u] * v[t, u, c]))
    return g.graph()


def factors(choose: random.Random) -> Graph:
    """Products of more than two factors: operands of other loops, numbers, scalars, axes."""
    g = GraphBuilder()
    i, j, k = (Axis(n, choose.choice((1, 16, 16, 33))) for n in "ijk")
    x, w = g.input("x", (i.size, k.size), "float16"), g.input("w", (j.size, k.size), "float16")
    more = [
        g.input("g", (k.size,), "float16")[k],
        g.input("r", (i.size,), "float32")[i],
        g.input("c", (j.size,), "float16")[j],
        g.input("o", (), "float32")[()],
        AxisValue("i"),
        Const(0.5),
        Size(k.size),
        x[i, k],
    ]
    found = [x[i, k], w[j, k], *choose.sample(more, choose.randint(1, 4))]
    found += [AxisValue("k")] * (choose.random() < 0.5)
    choose.shuffle(found)
    g.output(g.sum("y", (i, j), (k,), reduce(mul, found), choose.choice(("float32", "float16"))))
    graph = g.graph()
    return _without_idle(graph)


def _without_idle(graph: Graph) -> Graph:
    """Return a graph without operands that nothing reads."""
    text = str(graph)
    slots = tuple(s for s in graph.slots if s.role == "out" or f"{s.name}[" in text)
    names = {s.name for s in slots} | {b.out for b in graph.blocks}
    return Graph(tuple(t for t in graph.tensors if t.name in names), graph.blocks, slots)


def twice_scaled(choose: random.Random) -> Graph:
    """A sum of products of two exponentials that go by the same maximum, or by two."""
    g = GraphBuilder()
    i, t = Axis("i", 9), Axis("t", 40)
    x, y = g.input("x", (9, 40), "float32"), g.input("y", (9, 40), "float32")
    top = g.max("top", (i,), (t,), x[i, t])
    p = g.map("p", (i, t), apply("exp", x[i, t] - top[i]), "float32")
    other = top if choose.random() < 0.5 else g.max("high", (i,), (t,), y[i, t])
    q = g.map("q", (i, t), apply("exp", y[i, t] - other[i]), "float32")
    g.output(g.sum("s", (i,), (t,), p[i, t] * q[i, t]))
    return g.graph()


def numbers(choose: random.Random) -> Graph:
    """Maps of numbers alone, of sizes and axes; all functions; results that others read."""
    g = GraphBuilder()
    i, j = Axis("i", choose.choice((1, 20))), Axis("j", choose.choice((1, 33)))
    o = g.input("o", (), "float32")
    x = g.input("x", (i.size, j.size), "float32")
    n = g.map(
        "n",
        (j,),
        choose.choice(
            (
                Const(2.0),
                Size(j.size),
                AxisValue("j"),
                apply("exp", Const(0.5)),
                o[()],
                apply("sqrt", Size(j.size)),
                apply("maximum", Const(1.0), Const(2.0)),
                apply("finite", Const(-math.inf)),
                Const(math.inf),
                Const(math.nan),
                apply("ratio", Const(2.0), Const(0.0)),
                apply("rsqrt", Const(4.0)),
                apply("maximum", Const(1e-42), Const(2.0)),
                Const(1e39),
                apply("gelu", Const(0.5)),
                apply("log", Size(j.size)),
            )
        ),
        choose.choice(("float32", "float16")),
    )
    y = g.map(
        "y",
        (i, j),
        choose.choice(
            (
                x[i, j] * n[j],
                apply("minimum", x[i, j], n[j]),
                apply("ratio", x[i, j], n[j]),
                apply("finite", x[i, j] + n[j]),
                apply("softplus", x[i, j]) + n[j],
                apply("hard_swish", x[i, j] + n[j]),
                apply("tanh", x[i, j] * o[()]),
            )
        ),
        "float32",
    )
    g.output(y)
    g.output(g.sum("s", (j,), (i,), y[i, j]))
    m = g.max("m", (), (j,), n[j])
    g.output(m)
    return g.graph()


def repeated(choose: random.Random) -> Graph:
    """A product that is equal along a loop of its result, and a sum over that loop."""
    g = GraphBuilder()
    i, j, k, c = Axis("i", 16), Axis("j", 16), Axis("k", 16), Axis("c", choose.choice((3, 16)))
    x, w = g.input("x", (16, 16), "float16"), g.input("w", (16, 16), "float16")
    y = g.sum("y", (i, j, c), (k,), x[i, k] * w[k, j])
    if choose.random() < 0.3:
        g.output(y)
    g.output(g.sum("z", (i, j), (c,), y[i, j, c]))
    return g.graph()


def workloads(choose: random.Random) -> Graph:
    """A matmul, perhaps normalised, and the half of a feed-forward network."""
    kind = choose.choice(("rms", "layer"))
    bits = {"beta": choose.random() < 0.5, "residual": choose.random() < 0.5}
    norm = choose.choice((None, Norm(kind, 1e-5, **bits)))
    rows, k, n = choose.choice((1, 5, 17)), choose.choice((8, 24, 40)), choose.choice((16, 24, 33))
    layout, out = choose.choice(("nk", "kn")), choose.choice(("float16", "float32"))
    if choose.random() < 0.5:
        merged = choose.random() < 0.5
        act = choose.choice(("silu", "gelu", "gelu_tanh", "relu2", "quick_gelu"))
        how = {"bias": choose.random() < 0.5}
        return GatedFFN(rows, k, n, layout, merged, True, act, norm, "float16", out, **how).graph
    steps = choose.sample(("bias", "relu", "residual", "tanh", 0.5), choose.randint(0, 3))
    return NormMatmul(rows, k, (Projection(n, layout, tuple(steps)),), norm, "float16", out).graph


def shared(choose: random.Random) -> Graph:
    """A matrix times its own transpose, and a result that another sum reads."""
    g = GraphBuilder()
    i, j, k = Axis("i", choose.choice((16, 33))), Axis("j", 0), Axis("k", choose.choice((5, 24)))
    j = Axis("j", i.size)
    x = g.input("x", (i.size, k.size), "float16")
    y = g.sum("y", (i, j), (k,), x[i, k] * x[j, k], "float16")
    g.output(y)
    h = Axis("h", 20)
    w = g.input("w", (j.size, 20), "float16")
    g.output(g.sum("z", (i, h), (j,), y[i, j] * w[j, h], "float32"))
    return g.graph()


def anything(choose: random.Random) -> Graph:
    """Statements of any kind, of operands and of one another, along axes in any order."""
    g = GraphBuilder()
    loops = [
        Axis(n, size) for n, size in zip("mnkh", choose.sample((1, 5, 16, 33), 4), strict=True)
    ]
    loops = loops[: choose.randint(2, 4)]
    made: list[tuple[Handle, list[Axis]]] = []
    for number in range(choose.randint(2, 5)):
        axes = choose.sample(loops, choose.randint(1, len(loops)))
        values = [h[tuple(over)] for h, over in made if {*over} <= {*axes}][-2:]
        for which in range(choose.randint(1, 2)):
            over = choose.sample(axes, choose.randint(0, len(axes)))
            dtype = choose.choice(("float16", "bfloat16", "float32", "int8"))
            x = g.input(f"x{number}{which}", [a.size for a in over], dtype)
            values.append(x[tuple(over)] * (0.0625 if dtype == "int8" else 1.0))
        choose.shuffle(values)
        steps = [choose.choice((mul, Expr.__add__, Expr.__sub__)) for _ in values[1:]]
        value = values[0]
        for step, other in zip(steps, values[1:], strict=True):
            value = step(value, other)
        name, kept = f"t{number}", axes[: choose.randint(0, len(axes))]
        dtype = choose.choice(("float16", "float32", "float32"))
        if len(kept) == len(axes):
            function = choose.choice(("tanh", "sigmoid", "relu", "finite"))
            handle = g.map(name, axes, apply(function, value), dtype)
        else:
            handle = choose.choice((g.sum, g.max))(name, kept, axes[len(kept) :], value, dtype)
        made.append((handle, kept))
    for handle, _ in [made[-1], *choose.sample(made[:-1], 1)]:
        g.output(handle)
    return g.graph()


KINDS = {
    kind.__name__: kind
    for kind in (
        *(attention, masked, integers, floats, coordinates, two_loops, factors, twice_scaled),
        *(numbers, repeated, workloads, shared, anything),
    )
}
"""What draws a graph, by name."""
