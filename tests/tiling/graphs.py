"""Block graphs that the tests of tilings have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import reduce
from itertools import chain as joined
from itertools import combinations, pairwise
from operator import mul

from relax_fusion.tiling import IterationSpace, Structure, expressions
from relax_fusion.tiling.placement import distinct
from relax_fusion.workload.builder import GraphBuilder, Handle
from relax_fusion.workload.graph import Graph
from relax_fusion.workload.values import Axis, apply


def chain(rows: int, *sizes: int, batch: int = 0, dtype: str = "float16") -> Graph:
    """C = A B, E = C D, G = E F: rows m, and sizes of k, n, h, p."""
    g = GraphBuilder()
    lead = [Axis("b", batch)] if batch else []
    m, axes = Axis("m", rows), [Axis(n, size) for n, size in zip("knhp", sizes, strict=False)]
    left = g.input("A", [a.size for a in (*lead, m, axes[0])], dtype)
    for number, (inner, outer) in enumerate(pairwise(axes)):
        right = g.input("BDF"[number], [a.size for a in (*lead, inner, outer)], dtype)
        value = left[(*lead, m, inner)] * right[(*lead, inner, outer)]
        left = g.sum("CEG"[number], (*lead, m, outer), (inner,), value, dtype)
    g.output(left)
    return g.graph()


def norm_mlp(rows: int, k: int, j: int, o: int) -> Graph:
    """y = x + silu(rms_norm(x) w) v."""
    g = GraphBuilder()
    r, kk, jj, oo = Axis("r", rows), Axis("k", k), Axis("j", j), Axis("o", o)
    x = g.input("x", (rows, k), "float16")
    w, v = g.input("w", (k, j), "float16"), g.input("v", (j, o), "float16")
    q = g.sum("q", (r,), (kk,), x[r, kk] * x[r, kk])
    norm = g.map("n", (r, kk), x[r, kk] * apply("rsqrt", q[r] / float(k)), "float16")
    a = g.sum("a", (r, jj), (kk,), norm[r, kk] * w[kk, jj])
    s = g.map("s", (r, jj), apply("silu", a[r, jj]), "float16")
    c = g.sum("c", (r, oo), (jj,), s[r, jj] * v[jj, oo])
    g.output(g.map("y", (r, oo), c[r, oo] + x[r, oo], "float16"))
    return g.graph()


def softmax(rows: int, columns: int, divided_late: bool = True) -> Graph:
    """Softmax of rows; `divided_late`: of which only the product with v is needed."""
    g = GraphBuilder()
    i, t, c = Axis("i", rows), Axis("t", columns), Axis("c", 64)
    x, v = g.input("x", (rows, columns), "float32"), g.input("v", (columns, 64), "float32")
    top = g.max("top", (i,), (t,), x[i, t])
    e = g.map("e", (i, t), apply("exp", x[i, t] - top[i]), "float32")
    total = g.sum("total", (i,), (t,), e[i, t])
    if divided_late:
        acc = g.sum("acc", (i, c), (t,), e[i, t] * v[t, c])
        g.output(g.map("y", (i, c), acc[i, c] / total[i], "float32"))
    else:
        p = g.map("p", (i, t), e[i, t] / total[i], "float32")
        g.output(g.sum("y", (i, c), (t,), p[i, t] * v[t, c]))
    return g.graph()


def projected_keys(rows: int, columns: int) -> Graph:
    """Online softmax of ``q k^T`` for keys that are projected first, and then v."""
    g = GraphBuilder()
    i, t, c = Axis("i", rows), Axis("t", columns), Axis("c", 32)
    d, e = Axis("d", 32), Axis("e", 48)
    q, x = g.input("q", (rows, 32), "float16"), g.input("x", (columns, 48), "float16")
    w, v = g.input("w", (48, 32), "float16"), g.input("v", (columns, 32), "float16")
    k = g.sum("k", (t, d), (e,), x[t, e] * w[e, d], "float16")
    s = g.sum("s", (i, t), (d,), q[i, d] * k[t, d])
    top = g.max("top", (i,), (t,), s[i, t])
    p = g.map("p", (i, t), apply("exp", s[i, t] - top[i]), "float16")
    total = g.sum("total", (i,), (t,), p[i, t])
    acc = g.sum("acc", (i, c), (t,), p[i, t] * v[t, c])
    g.output(g.map("y", (i, c), acc[i, c] / total[i], "float16"))
    return g.graph()


def row_sums(*columns: str) -> Graph:
    """Sums of rows, each over another axis, or the same again, of which each needs the one before.

    `columns` are the names of the axes.
    """
    g = GraphBuilder()
    m = Axis("m", 32)
    last = None
    for number, name in enumerate(columns):
        axis = Axis(name, 48)
        x = g.input(f"x{number}", (32, 48), "float32")
        value = x[m, axis] if last is None else x[m, axis] * last[m]
        last = g.sum(f"r{number}", (m,), (axis,), value)
    g.output(last)
    return g.graph()


def random_graph(choose: random.Random) -> Graph:
    """Draw maps, sums, maxima and exponentials of differences, of operands and of one another."""
    g = GraphBuilder()
    loops = [Axis(name, choose.choice((32, 48))) for name in "mnkh"[: choose.randint(2, 4)]]
    made: list[tuple[Handle, list[Axis]]] = []
    for number in range(choose.randint(1, 5)):
        kind = choose.choice(("map", "exp", "sum", "max"))
        axes = choose.sample(loops, choose.randint(1, len(loops)))
        known = [each for each in made if set(each[1]) <= set(axes)]
        values = [h[tuple(over)] for h, over in choose.sample(known, min(len(known), 2))]
        over = choose.sample(axes, choose.randint(1, len(axes)))
        values.append(g.input(f"x{number}", [a.size for a in over], "float32")[tuple(over)])
        value = apply("exp", values[-1] - values[0]) if kind == "exp" else reduce(mul, values)
        name, kept = f"t{number}", axes[:-1]
        if kind in ("sum", "max") and kept:
            made.append((getattr(g, kind)(name, kept, axes[-1:], value), kept))
        else:
            made.append((g.map(name, axes, value, "float32"), axes))
    for handle, _ in [made[-1], *choose.sample(made[:-1], min(1, len(made) - 1))]:
        g.output(handle)
    return g.graph()


def structures(space: IterationSpace) -> Iterator[tuple[frozenset[str], Structure]]:
    """Yield the structures of a space, each with the loops that are one tile."""
    names, every = space.ordered, expressions(space)
    subsets = joined.from_iterable(combinations(names, n) for n in range(len(names) + 1))
    for single in map(frozenset, subsets):
        yield from ((single, structure) for structure in distinct(space, every, single))
