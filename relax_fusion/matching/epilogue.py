"""The steps after a projection that its kernel takes along."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import relax

from ..errors import Decline
from ..workload import ACTIVATIONS, Projection, Step, per_rows
from ..workload.dtypes import accumulator, step_dtype
from .activations import activation
from .bindings import Identity
from .constants import binary, scaled
from .linear import Linear
from .movements import keeps_features
from .pattern import BlockView, KernelArg, is_call
from .roundings import narrows
from .shapes import as_dim, dtype_of, groups_of, is_one, period_of, same_shape, shape_of

MOST_ACTIVATIONS = 1
"""A kernel takes along so many activations.  Each repeats up to four times what is in front of it:
LLVM takes minutes for one of another, and TVM refuses some of the conditions that come out."""

MOST_SHARES = 64
"""What is added may be divided by a power of two up to this, the number of workers."""

MOST_BINDINGS = 9
"""An activation that is written out has at most so many bindings along any way through it."""


@dataclass(frozen=True)
class FusedProjection:
    """A projection with the steps after it that one kernel can take along.

    `args` are the operands of its steps, in order, residuals in their own shape.  `adapter` has A
    and B of what is added before them.  `angles` are the
    cosines and sines of a rotation, `after` bindings that move its result to where the graph wants
    it.  `declined` has what else could not be taken along, and why.  Where heads are normalised,
    `gamma` has by what they are multiplied, and `plain` is the chain that ends in front of that.
    """

    linear: Linear
    projection: Projection
    args: tuple[KernelArg, ...]
    covers: tuple[relax.Var, ...]
    out: relax.Var
    out_dtype: str
    angles: tuple[KernelArg, ...] = ()
    after: tuple[tuple[relax.Var, relax.Expr], ...] = ()
    declined: tuple[tuple[str, Decline], ...] = ()
    adapter: tuple[KernelArg, ...] = ()
    gamma: tuple[KernelArg, ...] = ()
    plain: FusedProjection | None = None


def epilogue(
    view: BlockView,
    start: Linear,
    forbidden: set[relax.Var],
    accepts: Callable[[tuple[Step, ...]], bool] = lambda steps: True,
) -> FusedProjection:
    """Follow the single-use steps after a projection as far as a kernel can absorb them.

    They end before a step that another kernel has taken: two sums of one addition share it.

    `forbidden`: results of the same kernel: a step that needs one of them cannot be part of it.
    `accepts`: whether a kernel can take these steps; what it cannot is left behind.
    """
    chain = FusedProjection(
        start,
        Projection(as_dim(start.n, view.bounds), start.layout, packed=start.form),
        (),
        start.covers,
        start.var,
        dtype_of(start.var),
    )
    return extended(view, chain, forbidden, accepts)


def extended(
    view: BlockView,
    chain: FusedProjection,
    forbidden: set[relax.Var],
    accepts: Callable[[tuple[Step, ...]], bool] = lambda steps: True,
) -> FusedProjection:
    """Follow the steps after a chain, as `epilogue` does those after a projection."""
    while True:
        longer = _extend(view, chain, forbidden | set(chain.covers))
        if longer is None or not accepts(longer.projection.epilogue):
            return chain
        if sum(step in ACTIVATIONS for step in longer.projection.epilogue) > MOST_ACTIVATIONS:
            return chain
        chain = longer


def named(steps: Sequence[Step]) -> list[str]:
    """Return what reports call the steps."""
    return ["scale" if isinstance(step, float) else per_rows(step)[0] for step in steps]


def _extend(
    view: BlockView, chain: FusedProjection, forbidden: set[relax.Var]
) -> FusedProjection | None:
    """Absorb the next step, if it is one: an activation, a cast, a sum or a product.

    A reshape in front of it may group the rows anew.
    """
    users = view.uses(chain.out)
    if view.escapes(chain.out) or not users or _is_rounded(chain):
        return None
    are_sums = chain.out_dtype == "int32"  # a step of these is none of float32
    step = None if are_sums else _activation_after(view, chain)
    if step is not None:
        return step
    if len(users) != 1:
        return None
    user = users[0]
    if is_call(view.defs[user], "relax.reshape") and keeps_features(chain.out, user):
        return _extend(view, replace(chain, covers=(*chain.covers, user), out=user), forbidden)
    if is_call(view.defs[user], "relax.astype"):
        dtype = dtype_of(user)
        if dtype not in ("float16", "bfloat16", "float32"):
            return None
        widens = dtype == "float32" != chain.out_dtype
        if widens and (narrows(view, chain.out) or _is_for_a_norm(view, user)):
            return None  # rounded on purpose, or widened by a norm's kernel
        return replace(chain, covers=(*chain.covers, user), out=user, out_dtype=dtype)
    if are_sums:
        return None
    number = scaled(view, user)
    if number is not None and number[0].same_as(chain.out):
        return _longer(chain, user, number[1])
    for operator in ("add", "multiply"):
        for data, other in binary(view, user, f"relax.{operator}"):
            if data.same_as(chain.out) and not view.depends_on(other, forbidden):
                return _combined(view, chain, user, other, operator)
    return None


def _is_for_a_norm(view: BlockView, widened: relax.Var) -> bool:
    """Tell whether rows are widened for a norm only, whose result is rounded again."""
    norm = view.only_user(widened)
    if norm is None or not is_call(view.defs[norm], "relax.nn.rms_norm", "relax.nn.layer_norm"):
        return False
    end = view.only_user(norm)
    rounded = view.call(end, "relax.astype") if end is not None else None
    return rounded is not None and dtype_of(rounded) in ("float16", "bfloat16")


def _longer(
    chain: FusedProjection, out: relax.Var, step: Step, *args: KernelArg
) -> FusedProjection:
    """Return the chain with one more step, which `out` is."""
    steps = (*chain.projection.epilogue, step)
    projection = replace(chain.projection, epilogue=steps)
    args, covers = (*chain.args, *args), (*chain.covers, out)
    return replace(chain, projection=projection, args=args, covers=covers, out=out)


def _is_rounded(chain: FusedProjection) -> bool:
    """Tell whether a chain's result is rounded to less than a kernel keeps in between."""
    dtype = dtype_of(chain.linear.x)
    return chain.out_dtype not in ("float32", dtype, accumulator(dtype))


def _combined(
    view: BlockView, chain: FusedProjection, user: relax.Var, other: relax.Expr, operator: str
) -> FusedProjection | None:
    """Absorb a sum or product with a vector along the last axis, or a sum with a whole tensor.

    Operands of steps are of the dtype of the rows, and read as float32: one that the graph widens
    to that is read as it was.
    """
    if operator == "add" and (longer := _shared(view, chain, user, other)) is not None:
        return longer
    dtype = step_dtype(dtype_of(chain.linear.x))
    if dtype_of(other) != dtype_of(chain.out):
        return None
    if dtype_of(other) == "float32" != dtype:
        cast = view.call(other, "relax.astype")
        if cast is None:
            return None
        alone = isinstance(other, relax.Var) and view.only_user(other) is not None
        if alone:
            chain = replace(chain, covers=(*chain.covers, other))
        other = cast.args[0]
    if dtype_of(other) != dtype:
        return None
    shape, other_shape = shape_of(chain.out), shape_of(other)
    if shape is None or other_shape is None or not same_shape(shape_of(user), shape):
        return None
    ones = all(map(is_one, other_shape[:-1]))
    if len(shape) > 1 and len(other_shape) > 1 and same_shape(other_shape, shape):
        return _longer(chain, user, "residual", KernelArg(other)) if operator == "add" else None
    if not (other_shape and same_shape(other_shape[-1:], shape[-1:])):
        return None
    step = "bias" if operator == "add" else "scale"
    if ones:
        return _longer(chain, user, step, KernelArg(other, (chain.linear.n,)))
    period = period_of(other_shape, shape)
    if operator == "add" and period:
        return _longer(
            chain, user, f"residual:{period}", KernelArg(other, (period, chain.linear.n))
        )
    groups, rows = groups_of(other_shape, shape)
    if not rows:
        return None
    return _longer(chain, user, f"{step}:{rows}", KernelArg(other, (groups, chain.linear.n)))


def _shared(
    view: BlockView, chain: FusedProjection, user: relax.Var, other: relax.Expr
) -> FusedProjection | None:
    """Absorb a sum with ``x / 2^n``: what all workers have, of which each adds a share.

    ``y + x / 2`` is computed as ``(2 y + x) / 2``, the same number.
    """
    found = scaled(view, other)
    if found is None or not 1 / MOST_SHARES <= found[1] < 1 or math.frexp(found[1])[0] != 0.5:
        return None
    data, share = found
    if isinstance(other, relax.Var) and view.only_user(other) is not None:
        chain = replace(chain, covers=(*chain.covers, other))
    longer = _combined(view, _times(chain, 1 / share), user, data, "add")
    return None if longer is None else _times(longer, share)


def _times(chain: FusedProjection, factor: float) -> FusedProjection:
    """Return the chain, of the same bindings, with one factor more; or without that it undoes."""
    steps = chain.projection.epilogue
    steps = steps[:-1] if steps[-1:] == (1 / factor,) else (*steps, factor)
    return replace(chain, projection=replace(chain.projection, epilogue=steps))


def _activation_after(view: BlockView, chain: FusedProjection) -> FusedProjection | None:
    """Absorb an activation all of whose bindings read nothing but the chain's result."""
    for end in reversed(_ends_after(view, chain.out)):  # the square of a ReLU holds a ReLU
        found = activation(view, end)
        if found is None or not found.source.same_as(chain.out):
            continue
        inside = set(found.covers)
        readers = set(view.uses(chain.out))
        inner_leak = any(
            view.escapes(v) or set(view.uses(v)) - inside for v in found.covers if v is not end
        )
        if readers <= inside and not inner_leak:
            projection = replace(
                chain.projection, epilogue=(*chain.projection.epilogue, found.name)
            )
            return replace(
                chain, projection=projection, covers=(*chain.covers, *found.covers), out=end
            )
    return None


def _ends_after(view: BlockView, var: relax.Var) -> list[relax.Var]:
    """Return the bindings reachable from `var` in few steps, nearest first."""
    found: dict[Identity, relax.Var] = {}
    level = [var]
    for _ in range(MOST_BINDINGS):
        level = list(
            {hash(u): u for v in level for u in view.uses(v) if hash(u) not in found}.values()
        )
        found |= {hash(u): u for u in level}
        if len(found) > 16:
            break
    return list(found.values())
