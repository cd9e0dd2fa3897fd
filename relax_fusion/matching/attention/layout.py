"""How the operands of an attention lie in memory: which of their sources a kernel can read."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ...errors import Reason
from ...workload import HeadLayout, Heads
from ..axes import Atom, ahead, quotient, size_of
from ..pattern import BlockView, KernelArg, PrimExpr, Refused, guard
from ..shapes import dtype_of, same_shape, shape_of, shape_text, static
from .chain import AttentionChain
from .operands import WIDENED, Operand, read_by, sources
from .shared_keys import apart, one_for_all


@dataclass(frozen=True)
class Laid:
    """Operands and result in layouts that a kernel has."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    batch: PrimExpr | int
    q_heads: int
    kv_heads: int
    q_layout: HeadLayout
    kv_layout: HeadLayout
    out_layout: HeadLayout

    @property
    def q_len(self) -> PrimExpr | int:
        """How many queries there are."""
        return _size(self.q.positions)

    @property
    def kv_len(self) -> PrimExpr | int:
        """How many keys there are."""
        return _size(self.k.positions) if self.k.length is None else self.k.length

    @property
    def factor(self) -> float:
        """What queries and keys are multiplied by on their way."""
        return self.q.factor * self.k.factor

    @property
    def parts(self) -> tuple[Heads | None, ...]:
        """Which heads of merged tensors query, key and value are; None: tensors of their own."""
        every = (self.q, self.k, self.v)
        return tuple(at.heads_of(self.batch) if at.kept else None for at in every)

    @property
    def shared(self) -> Operand | None:
        """The features of keys that all heads share."""
        return self.k.shared[0] if self.k.shared else None

    @property
    def paths(self) -> tuple[relax.Var, ...]:
        """The bindings between operands and the matmuls."""
        found = (self.q, self.k, self.v, *self.k.shared)
        return tuple(dict.fromkeys(var for at in found for var in at.path))

    def args(self) -> dict[str, KernelArg]:
        """Return query, key and value, by name, as tensors of four dimensions."""
        layouts = (self.q_layout, self.kv_layout, self.kv_layout)
        own = (self.q_heads, self.kv_heads, self.kv_heads)
        heads = (n if part is None else part.total for n, part in zip(own, self.parts, strict=True))
        found = zip("qkv", (self.q, self.k, self.v), layouts, heads, strict=True)
        args = {x: KernelArg(o.at.expr, self.shape(o, n, layout)) for x, o, layout, n in found}
        if (at := self.shared) is not None:
            sizes = (self.batch, _size(at.positions), _size(at.features))
            args["shared"] = KernelArg(at.at.expr, sizes)
        return args

    def shape(self, at: Operand, heads: int, layout: HeadLayout) -> tuple[PrimExpr | int, ...]:
        """Return the four dimensions of an operand or of the result."""
        sizes = {"b": self.batch, "s": _size(at.positions), "n": heads, "h": _size(at.features)}
        return tuple(sizes[letter] for letter in layout)


def _size(atom: Atom | None) -> PrimExpr | int:
    return 1 if atom is None else atom.size


def laid(view: BlockView, chain: AttentionChain, *, shares: bool) -> Laid:
    """Look through the movements around an attention, as far as a kernel can do without them.

    `shares`: a kernel reads features that heads share apart from those of each head.
    """
    *operands, out = chain.operands
    found = [list(sources(view, o)) for o in operands]
    found[1] += apart(view, found[1]) if shares else ()
    ends = (at for every in found for last in every for at in (last, *last.shared))
    inner = read_by(view, (v for at in ends for v in at.path), chain.scores.covers)
    ranked = [_by_movements(view, every, inner) for every in found]
    results = list(results_of(view, out))
    results = _by_movements(view, results, set(results[-1].path))
    batch = chain.batch
    if batch is None:
        batch = _batch_of([*ranked, results], chain.outermost)
    ranked = [[at for at in found if _readable(at, batch)] for found in ranked]
    refusal: Refused | None = None
    for choice in _combinations(ranked):
        try:
            return _checked(choice, results, batch, chain.layout)
        except Refused as refused:
            refusal = refusal or refused
    assert refusal is not None
    raise refusal


def _readable(at: Operand, batch: PrimExpr | int) -> bool:
    """Tell whether a tensor is all heads, or has those that are read at equal steps."""
    return not at.kept or at.heads_of(batch) is not None


def _by_movements(
    view: BlockView, found: list[Operand], inner: Collection[relax.Var]
) -> list[Operand]:
    """Sort tensors by how many movements a kernel would save that reads them, most first.

    Those are in `inner`; what others read is done anyway.  Reshapes cost nothing: among tensors
    that save as much, the nearest to the matmul comes first.
    """

    def moves(at: Operand) -> int:
        return sum(v in inner and view.call(v, "relax.reshape") is None for v in at.path)

    return sorted(found, key=lambda at: (-moves(at), at.steps))


def _combinations(ranked: Sequence[list[Operand]]) -> Iterator[tuple[Operand, Operand, Operand]]:
    """Yield choices of query, key and value, those with the most movements absorbed first."""
    places = itertools.product(*(range(len(found)) for found in ranked))
    for i, j, k in sorted(places, key=lambda place: (sum(place), place)):
        yield ranked[0][i], ranked[1][j], ranked[2][k]


def _batch_of(ranked: Sequence[list[Operand]], outermost: PrimExpr | None) -> PrimExpr | int:
    """Tell batch from heads: positions stand between them, or they are two dimensions somewhere."""
    every = [at for found in ranked for at in found]
    for at in every:
        outer = at.outer
        if outer is not None and outer < len(at.stored):
            return size_of(at.stored[:outer])
    if outermost is not None:
        return outermost
    wide = next((at for at in every if at.outer is not None and len(at.at.axes) == 4), None)
    return size_of(every[0].at.order if wide is None else wide.at.axes[0])


def _layouts(at: Operand, batch: PrimExpr | int) -> tuple[HeadLayout, ...]:
    """Return the layouts that a tensor can be said to have."""
    if at.kept:
        return ("bsnh",)
    outer, stored = at.outer, at.stored
    if outer is None or at.at.order[: len(stored)] != stored:
        return ()
    found: tuple[HeadLayout, ...] = ()
    if outer == len(stored):
        found = ("bnsh",)
    if at.positions is None or same_shape((size_of(stored[:outer]),), (batch,)):
        found = (*found, "bsnh")
    return found


def _heads(at: Operand, batch: PrimExpr | int) -> int:
    """Return how many heads a tensor has."""
    stored = at.stored
    whole = (i for i in range(len(stored) + 1) if same_shape((size_of(stored[:i]),), (batch,)))
    first = next(whole, None)
    heads = quotient(size_of(stored), batch) if first is None else size_of(stored[first:])
    if heads is None:
        total = size_of(at.stored)
        raise Refused(Reason.SHAPE, f"{at.name} has {total} matrices for a batch of {batch}")
    return static(heads, f"the number of heads of {at.name}")


def _checked(
    choice: tuple[Operand, Operand, Operand],
    results: list[Operand],
    batch: PrimExpr | int,
    usual: HeadLayout,
) -> Laid:
    """Return operands and result if they fit together, refusing them otherwise."""
    q, k, v = choice
    for at in choice:
        detail = f"{at.name} is broadcast or repeated, other than head by head"
        guard(at.at.order[: len(at.stored)] == at.stored, Reason.SHAPE, detail)
        detail = f"{at.name} comes in another order than [b, s, n, h] or [b, n, s, h]"
        guard(bool(_layouts(at, batch)), Reason.LAYOUT, detail)
        guard(at.dtype == q.dtype, Reason.DTYPE, f"{at.name} is {at.dtype}, {q.name} {q.dtype}")
    guard(not q.at.copied, Reason.LAYOUT, f"{q.name} is broadcast")
    guard(v.factor == 1.0, Reason.ATTRIBUTE, f"the value is multiplied by {v.factor:g}")
    _check_positions(k, v)
    q_heads, kv_heads, v_heads = (_heads(at, batch) for at in choice)
    detail = f"heads of key and value differ: {kv_heads} and {v_heads}"
    guard(kv_heads == v_heads, Reason.SHAPE, detail)
    shared = one_for_all(k, batch)
    k = k if shared is None else replace(k, shared=(shared,))
    groups = size_of(a for a in k.at.order if a in k.at.copied)
    detail = f"{q_heads} query heads over {kv_heads} key heads repeated {groups} times"
    guard(same_shape((q_heads,), (kv_heads * groups,)), Reason.SHAPE, detail)
    both = [layout for layout in _layouts(k, batch) if layout in _layouts(v, batch)]
    detail = f"the key is {_layouts(k, batch)[0]}, the value {_layouts(v, batch)[0]}"
    guard(bool(both), Reason.LAYOUT, detail)
    rows = (q_heads, _size(q.positions)), (_heads(results[0], batch), _size(results[0].positions))
    detail = (
        f"queries are {shape_text(rows[0])} heads and rows, the result is {shape_text(rows[1])}"
    )
    guard(same_shape(*rows), Reason.LAYOUT, detail)
    rounded = (r for r in results if not v.widened or r.dtype == v.dtype)
    out = next((r for r in rounded if _layouts(r, batch)), None)
    if out is None:
        raise Refused(Reason.DTYPE, f"the value is {v.dtype}, the result {results[-1].dtype}")
    return Laid(
        *(q, k, v, out),
        batch,
        q_heads,
        kv_heads,
        _named(_layouts(q, batch), usual),
        _named([each for each in both if _is_stored(k, kv_heads, each)] or both, usual),
        _named(_layouts(out, batch), usual),
    )


def _is_stored(at: Operand, heads: int, layout: HeadLayout) -> bool:
    """Tell whether a tensor has a layout as it is, without a reshape."""
    dims = shape_of(at.at.expr)
    return dims is not None and len(dims) == 4 and same_shape((dims[layout.index("n")],), (heads,))


def _named(layouts: Sequence[HeadLayout], usual: HeadLayout) -> HeadLayout:
    return usual if usual in layouts else layouts[0]


def _check_positions(k: Operand, v: Operand) -> None:
    """Refuse keys and values that are not as many, or not the same part of their caches."""
    same = (k.length is None) == (v.length is None)
    if same and k.length is not None and v.length is not None:
        same = same_shape((k.length,), (v.length,))
    guard(same, Reason.SHAPE, "key and value are different parts of their caches")
    sizes = _size(k.positions), _size(v.positions)
    guard(same_shape(sizes[:1], sizes[1:]), Reason.SHAPE, f"{sizes[0]} keys, {sizes[1]} values")


def results_of(view: BlockView, at: Operand) -> Iterator[Operand]:
    """Yield the result and, one by one, the tensors that are all that is made of it."""
    yield at
    var = at.at.expr
    while (user := view.only_user(var)) is not None:
        cast = view.call(user, "relax.astype")
        if cast is not None and WIDENED.get(dtype_of(user)) == at.dtype:
            moved = replace(at.at, expr=user)
        else:
            after = ahead(view, at.at, user)
            if after is None:
                return
            moved = after
        at = replace(at, at=moved, path=(*at.path, user), steps=at.steps + 1)
        var = user
        yield at
