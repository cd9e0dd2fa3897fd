"""A graph that is being written: nodes are appended, their types follow from their operands."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from .graph import Graph, Node, Shape, Size, const


class Draft:
    """The nodes so far, and the choices of one drawn example.

    Methods named after operators append a node and return its number.
    """

    def __init__(self, random: Random, dtype: str):
        self.random, self.dtype = random, dtype
        self.nodes: list[Node] = []
        self.weights: dict[tuple[int, int, str], list[int]] = {}
        self.extra: list[int] = []

    # --- choices ---------------------------------------------------------------------------

    def chance(self, percent: int) -> bool:
        """Draw true in about `percent` of the cases."""
        return self.random.randrange(100) < percent

    def pick(self, *options: Any) -> Any:
        """Draw one of the options."""
        return self.random.choice(options)

    # --- types -----------------------------------------------------------------------------

    def shape(self, x: int) -> Shape:
        """Return the shape of a node."""
        return self.nodes[x].shape

    def is_tensor(self, x: int) -> bool:
        """Tell whether a node is one tensor, not a tuple of them."""
        return self.nodes[x].op != "split"

    def width(self, x: int) -> int:
        """Return the last, static, dimension."""
        return self.shape(x)[-1].factor

    def add_node(
        self, op: str, args: tuple[int, ...], shape: Shape, dtype: str | None = None, **attrs: Any
    ) -> int:
        """Append a node; its dtype is that of its first operand if none is given."""
        self.nodes.append(Node(op, args, shape, dtype or self.nodes[args[0]].dtype, attrs))
        return len(self.nodes) - 1

    # --- leaves ----------------------------------------------------------------------------

    def param(self, shape: Shape, kind: str = "data", dtype: str | None = None) -> int:
        """Append a parameter of the function, or sometimes a constant where its size is known."""
        fixed = not any(d.symbols for d in shape) and kind != "data"
        op = "const" if fixed and self.chance(10) else "param"
        return self.add_node(op, (), shape, dtype or self.dtype, kind=kind)

    def scalar(self, value: float, like: int) -> int:
        """Append a constant of one element."""
        return self.add_node("scalar", (), (), self.nodes[like].dtype, value=value)

    # --- operators -------------------------------------------------------------------------

    def unary(self, op: str, x: int) -> int:
        """Append an element-wise function."""
        return self.add_node(op, (x,), self.shape(x))

    def binary(self, op: str, a: int, b: int, swap: bool = False) -> int:
        """Append an element-wise function of two tensors, the operands in either order."""
        sa, sb = self.shape(a), self.shape(b)
        rank = max(len(sa), len(sb))
        one = const(1)
        pa, pb = (one,) * (rank - len(sa)) + sa, (one,) * (rank - len(sb)) + sb
        shape = tuple(y if x == one else x for x, y in zip(pa, pb, strict=True))
        return self.add_node(op, (b, a) if swap else (a, b), shape)

    def either(self, op: str, a: int, b: int) -> int:
        """Append a commutative function with its operands in a drawn order."""
        return self.binary(op, a, b, swap=self.chance(50))

    def matmul(self, a: int, b: int, out_dtype: str | None = None) -> int:
        """Append a matmul; batch dimensions broadcast from the operand of higher rank."""
        sa, sb = self.shape(a), self.shape(b)
        batch = sa[:-2] if len(sa) >= len(sb) else sb[:-2]
        shape = (*batch, sa[-2], sb[-1])
        return self.add_node("matmul", (a, b), shape, out_dtype, out_dtype=out_dtype)

    def permute(self, x: int, *axes: int) -> int:
        """Append a permute_dims."""
        shape = tuple(self.shape(x)[a] for a in axes)
        plain = axes == tuple(range(len(axes)))[::-1] and self.chance(70)
        return self.add_node("permute_dims", (x,), shape, axes=axes, plain=plain)

    def reshape(self, x: int, shape: Shape) -> int:
        """Append a reshape."""
        return self.add_node("reshape", (x,), shape)

    def astype(self, x: int, dtype: str) -> int:
        """Append a cast."""
        return self.add_node("astype", (x,), self.shape(x), dtype)

    def reduce(self, op: str, x: int, axis: int, **attrs: Any) -> int:
        """Append a mean over an axis (its size kept as 1) or a softmax."""
        shape = list(self.shape(x))
        if op == "mean":
            shape[axis] = const(1)
            attrs = {"keepdims": True, **attrs}
        return self.add_node(op, (x,), tuple(shape), axis=axis, **attrs)

    def split(self, x: int, sizes: tuple[int, ...], axis: int = -1) -> list[int]:
        """Append a split along an axis into parts of the given sizes, and its items."""
        shape = self.shape(x)
        at = tuple(sum(sizes[: i + 1]) for i in range(len(sizes) - 1))
        equal = len(set(sizes)) == 1 and self.chance(60)
        sections = len(sizes) if equal else 0
        where = axis % len(shape) if self.chance(50) else axis
        whole = self.add_node("split", (x,), shape, at=at, sections=sections, axis=where)
        items = []
        for index, size in enumerate(sizes):
            part = list(shape)
            part[axis] = const(size)
            items.append(self.add_node("item", (whole,), tuple(part), index=index))
        return items

    def slice(self, x: int, axis: int, begin: int, length: Size) -> int:
        """Append a strided_slice of `length` positions."""
        shape = list(self.shape(x))
        shape[axis] = length
        inbound = True if length.symbols else self.chance(50)
        return self.add_node(
            "strided_slice", (x,), tuple(shape), axis=axis, begin=begin, inbound=inbound
        )

    def repeat(self, x: int, times: int, axis: int) -> int:
        """Append a repeat of each element along an axis."""
        shape = list(self.shape(x))
        shape[axis] = shape[axis] * const(times)
        return self.add_node("repeat", (x,), tuple(shape), times=times, axis=axis)

    def attention(self, q: int, k: int, v: int, bias: int | None, **attrs: Any) -> int:
        """Append the attention operator."""
        shape = (*self.shape(q)[:3], self.shape(v)[3])
        args = (q, k, v) if bias is None else (q, k, v, bias)
        return self.add_node("attention", args, shape, **attrs)

    # --- the result ------------------------------------------------------------------------

    def finish(self, outputs: list[int], runs: tuple[dict[str, int], ...], seed: int) -> Graph:
        """Return the graph with these outputs; parameters that nothing reads stay."""
        leaves = ("param", "const", "scalar")
        tensors = [o for o in dict.fromkeys(outputs) if self.nodes[o].op not in leaves]
        cut = None
        spans = [i for i, n in enumerate(self.nodes) if n.op not in leaves]
        cuts = [i for i in spans[1:] if self.nodes[i].op != "item"]
        if len(cuts) > 3 and self.chance(12):
            cut = self.random.choice(cuts)
        dataflow = cut is not None or not self.chance(6)
        return Graph(tuple(self.nodes), tuple(tensors), runs, cut, dataflow, seed)


def heads_of(width: int) -> list[tuple[int, int]]:
    """Return the ways to cut `width` features into (heads, features of one)."""
    return [(h, width // h) for h in (1, 2, 3, 4) if width % h == 0]


def default_scale(dim: int) -> float:
    """Return the scale that attention has by custom."""
    return 1.0 / math.sqrt(dim)
