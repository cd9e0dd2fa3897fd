"""What the projection passes share: putting norms, matmuls and outputs together into a match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ..errors import Reason
from ..workload import INTEGER_DTYPES, Norm, NormMatmul, operand_names
from ..workload.dtypes import step_dtype
from .constants import binary
from .epilogue import FusedProjection, epilogue, named
from .linear import Linear, linear
from .movements import keeps_features
from .norms import Normed
from .pattern import BlockView, KernelArg, KernelOut, Match, PrimExpr, check_inner, guard
from .rope import with_rope
from .shapes import (
    as_dim,
    check_dtype,
    check_operands,
    dtype_of,
    groups_of,
    known_shape,
    product,
    same_shape,
    shape_of,
    static,
)


@dataclass(frozen=True)
class Rows:
    """The input of a projection, seen as a matrix.

    `expr` is the tensor, `rows` the product of its leading dimensions, `k` its last dimension.
    """

    expr: relax.Expr
    rows: PrimExpr | int
    k: int

    @staticmethod
    def of(expr: relax.Expr) -> Rows:
        """Read the matrix view of a tensor, refusing an unknown shape or a dynamic last axis."""
        shape = known_shape(expr, "the input")
        rows = product(shape[:-1])
        guard(rows != 0, Reason.SHAPE, "the input has no rows")
        return Rows(expr, rows, static(shape[-1], "the input's features"))

    def arg(self) -> KernelArg:
        """Return the kernel argument: the tensor as ``[rows, k]``."""
        return KernelArg(self.expr, (self.rows, self.k))


@dataclass(frozen=True)
class Prologue:
    """What stands in front of the matmuls: operands and outputs of the norm, and its bindings."""

    source: Rows
    norm: Norm | None
    args: Mapping[str, KernelArg]
    outs: Mapping[str, KernelOut]
    covers: tuple[relax.Var, ...]
    spelling: str


def plain_prologue(x: relax.Expr) -> Prologue:
    """Return the prologue of a matmul that reads `x` as it is."""
    source = Rows.of(x)
    return Prologue(source, None, {"x": source.arg()}, {}, (), "matmul")


def norm_prologue(view: BlockView, normed: Normed, readers: set[relax.Var]) -> Prologue:
    """Describe a norm, and the residual add in front of it, as the prologue of `readers`.

    A residual add stays out if one of its operands is the single-use result of a matmul: that
    matmul's epilogue adds it without reading the sum back.  The normalised value and the sum become
    outputs of the kernel where anything else reads them.
    """
    norm, covers = normed.norm, normed.covers
    check_inner(view, covers, {normed.var})
    source = Rows.of(normed.source)
    params = {"gamma": normed.gamma, "beta": normed.beta}
    scaled = groups_of(shape_of(normed.gamma) or [], shape_of(normed.source) or [])
    shape = (scaled[0], source.k) if norm.each else None
    args = {name: KernelArg(param, shape) for name, param in params.items() if param is not None}
    for param in (arg.expr for arg in args.values()):
        fits = shape is not None or same_shape(shape_of(param), (source.k,))
        detail = f"a norm parameter has shape {shape_of(param)}, not ({source.k},)"
        guard(fits, Reason.SHAPE, detail)
    args["x"] = source.arg()
    outs: dict[str, KernelOut] = {}
    added = _residual(view, normed)
    if added is not None:
        first, second = (Rows.of(e) for e in added)
        args |= {"x": first.arg(), "residual": second.arg()}
        returned = set(view.uses(normed.source)) - set(covers) or view.escapes(normed.source)
        norm = replace(norm, residual=True, returns_sum=bool(returned))
        if returned:
            outs["x_sum"] = _out(normed.source, source, source.k)
        covers = (normed.source, *covers)
    if set(view.uses(normed.var)) - readers or view.escapes(normed.var):
        norm = replace(norm, returns_norm=True)
        outs["x_norm"] = _out(normed.var, source, source.k)
    return Prologue(source, norm, args, outs, covers, normed.spelling)


def _residual(view: BlockView, normed: Normed) -> tuple[relax.Expr, relax.Expr] | None:
    """Return the operands of the add in front of a norm, if the norm's kernel should do it."""
    for a, b in binary(view, normed.source, "relax.add")[:1]:
        if not isinstance(normed.source, relax.Var) or not same_shape(shape_of(a), shape_of(b)):
            return None
        if dtype_of(a) != dtype_of(b) or _made_by_matmul(view, a) or _made_by_matmul(view, b):
            return None
        return a, b
    return None


def _made_by_matmul(view: BlockView, expr: relax.Expr) -> bool:
    """Tell whether `expr` is the single-use result of a projection, with or without its bias."""
    if not isinstance(expr, relax.Var) or view.only_user(expr) is None:
        return False
    candidates = [expr, *(a for pair in binary(view, expr, "relax.add")[:1] for a in pair)]
    return any(_is_projection(view, c) for c in candidates)


def _is_projection(view: BlockView, expr: relax.Expr) -> bool:
    call = view.call(expr, "relax.matmul")
    weight = shape_of(call.args[1]) if call is not None else None
    return weight is not None and len(weight) == 2


def readers_of(view: BlockView, var: relax.Var) -> list[Linear]:
    """Return the projections whose input is `var`, or a reshape of it that keeps its features."""
    found = [lin for user in view.uses(var) for lin in _linear_of(view, user, var)]
    for rows in view.uses(var):
        if view.call(rows, "relax.reshape") is None or not keeps_features(var, rows):
            continue
        behind = [lin for user in view.uses(rows) for lin in _linear_of(view, user, rows)]
        if len(behind) == len(view.uses(rows)) and not view.escapes(rows):
            behind = [replace(lin, covers=(rows, *lin.covers)) for lin in behind]
        found += behind
    return found


def _linear_of(view: BlockView, user: relax.Var, var: relax.Var) -> list[Linear]:
    """Return the projection of `var` that `user` is; none if it is another, or `var` its weight."""
    call = view.call(user, "relax.matmul")
    if call is not None and not call.args[0].same_as(var):
        return []
    lin = linear(view, user)
    return [lin] if lin is not None and lin.x.same_as(var) else []


def fused_projections(
    view: BlockView, linears: Sequence[Linear], made: set[relax.Var], bounds: Mapping[str, int]
) -> list[FusedProjection]:
    """Return projections with the steps after each that one kernel of all of them takes along.

    Nothing of it reads what the kernel makes: what is `made` in front, and other projections.
    """
    results, chains = {lin.var for lin in linears}, list[FusedProjection]()
    for lin in linears:
        forbidden = (made | results - {lin.var}).union(*(c.covers for c in chains))
        chain = epilogue(view, lin, forbidden)
        chains.append(with_rope(view, chain, forbidden, bounds))
    return chains


def made_by(view: BlockView, normed: Normed) -> set[relax.Var]:
    """Return what the kernel of a norm makes: its result and, where it adds it, the sum."""
    return {normed.var, normed.source} if _residual(view, normed) is not None else {normed.var}


def _out(
    var: relax.Var, source: Rows, features: PrimExpr | int, dtype: str | None = None
) -> KernelOut:
    return KernelOut(var, (source.rows, features), dtype or dtype_of(var))


def norm_matmuls(
    view: BlockView,
    before: Prologue,
    chains: Sequence[FusedProjection],
    bounds: Mapping[str, int],
    integers: bool = False,
) -> list[Match]:
    """Return the match of a prologue and its matmuls, as `norm_matmul` describes it.

    If it normalises heads, there is another one, which leaves them to a kernel of their own.
    """
    every = [chains]
    if any(c.plain for c in chains):
        every.append([c.plain or c for c in chains])
    return [norm_matmul(view, before, some, bounds, integers) for some in every]


def norm_matmul(
    view: BlockView,
    before: Prologue,
    chains: Sequence[FusedProjection],
    bounds: Mapping[str, int],
    integers: bool = False,
) -> Match:
    """Put a prologue and its matmuls together into the match of a `NormMatmul`.

    `integers`: whether x may be of integers, whose results are int32 or what steps make of it.
    """
    source = before.source
    others = INTEGER_DTYPES if integers else ()
    dtype = check_dtype(dtype_of(source.expr), "the input", others)
    args, outs, covers = dict(before.args), dict(before.outs), list(before.covers)
    weights: dict[str, KernelArg] = {}
    for index, chain in enumerate(chains):
        guard(
            chain.linear.k == source.k,
            Reason.SHAPE,
            f"the weight takes {chain.linear.k} features, the input has {source.k}",
        )
        n = chain.linear.n
        rows = (KernelArg(a.expr, a.shape or (source.rows, n)) for a in chain.args)
        names = operand_names(chain.projection.epilogue, index)
        args |= zip(names, rows, strict=True)
        weights |= chain.linear.weights(f"w{index}")
        weights |= zip((f"w{index}_a", f"w{index}_b"), chain.adapter, strict=False)
        outs[f"out{index}"] = _out(chain.out, source, n, chain.out_dtype)
        covers += chain.covers
    factors = [*(a.expr for a in before.args.values()), *_weights_of(chains)]
    check_operands(factors, dtype, others)
    behind = [a.expr for name, a in args.items() if name not in before.args]
    check_operands(behind, step_dtype(dtype))
    args |= weights
    for index, chain in enumerate(chains):  # of any dtype
        args |= zip((f"cos{index}", f"sin{index}"), chain.angles, strict=False)
        args |= zip((f"gamma{index}",), chain.gamma, strict=False)
    forms = {c.linear.form for c in chains}
    guard(len(forms) == 1, Reason.LAYOUT, "the weights are stored in different formats")
    out_dtypes = {c.out_dtype for c in chains}
    guard(len(out_dtypes) == 1, Reason.DTYPE, f"the results are of {', '.join(sorted(out_dtypes))}")
    check_dtype(next(iter(out_dtypes)), "the result", ("int32",) * (dtype in INTEGER_DTYPES))
    work = NormMatmul(
        as_dim(source.rows, bounds),
        source.k,
        tuple(c.projection for c in chains),
        before.norm,
        dtype,
        next(iter(out_dtypes)),
    )
    spelling = _spelling(before, chains)
    covers_tuple = tuple(dict.fromkeys(covers))
    after = tuple(binding for c in chains for binding in c.after)
    made = {o.var for o in outs.values()} | {var for var, _ in after}
    check_inner(view, covers_tuple, made)
    declined = tuple(d for c in chains for d in c.declined)
    return Match.of(spelling, covers_tuple, (args, outs), work, after, declined)


def _weights_of(chains: Sequence[FusedProjection]) -> Iterator[relax.Expr]:
    for chain in chains:
        yield from (chain.linear.weight, *(arg.expr for arg in chain.adapter))


def _spelling(before: Prologue, chains: Sequence[FusedProjection]) -> str:
    layouts = {c.projection.layout for c in chains}
    parts = [before.spelling] if before.norm else []
    parts.append("matmul" if len(chains) == 1 else f"{len(chains)} matmuls")
    parts += sorted({"nk": "NT", "kn": "NN"}[layout] for layout in layouts)
    parts += ["packed"] if any(c.linear.packed for c in chains) else []
    parts += ["adapter"] if any(c.adapter for c in chains) else []
    parts += named(chains[0].projection.epilogue)
    parts += ["norm of heads"] if any(c.gamma for c in chains) else []
    parts += ["rope"] if any(c.projection.rope for c in chains) else []
    return " ".join(parts)
