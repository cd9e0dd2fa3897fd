"""The single statement of what a plan may not do."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import DeviceSpec
from ..tile_plan import TilePlan
from ..workload import INTEGER_DTYPES, Attention, GatedFFN, MatmulChain, NormMatmul, Workload
from . import chain, mma, mma_attention, skinny, triton, triton_attention
from .cpu_limits import cpu_limits
from .footprint import footprint, is_gemv
from .gpu_limits import gpu_limits
from .panels import FAMILY as PANELS
from .panels import violations as panel_violations
from .shape import matmul_shape


def violations(plan: TilePlan, work: Workload, dev: DeviceSpec) -> tuple[str, ...]:
    """Return why `plan` cannot run `work` on `dev`: one sentence each, with both numbers.

    This is the only statement of the constraint set: candidates are filtered by it and a user's
    own plan is refused by it.  Empty: the plan fits.
    """
    return tuple(_violations(plan, work, dev))


def fits(plan: TilePlan, work: Workload, dev: DeviceSpec) -> bool:
    """Tell whether `violations` is empty, without collecting it."""
    return next(_violations(plan, work, dev), None) is None


def _violations(plan: TilePlan, work: Workload, dev: DeviceSpec) -> Iterator[str]:
    if isinstance(work, MatmulChain):
        yield from chain.violations(plan, work, dev)
        limits = cpu_limits if dev.kind == "cpu" else gpu_limits
        yield from limits(footprint(work, plan, dev), plan, work, dev)
        return
    if plan.split_m != 1 and plan.family != PANELS:
        yield f"split_m is {plan.split_m}, only family {PANELS!r} cuts rows into parts"
    if plan.backend == "triton":
        attends = isinstance(work, Attention)
        yield from (triton_attention if attends else triton).violations(plan, work, dev)
        return
    if not isinstance(work, Attention) and work.dtype in INTEGER_DTYPES:
        yield from _integers(plan, work, dev)
    if plan.family == PANELS and not isinstance(work, Attention):
        yield from panel_violations(plan, matmul_shape(work), dev)
        if dev.kind == "cpu":
            yield from cpu_limits(footprint(work, plan, dev), plan, work, dev)
        return
    if plan.family:
        yield from _family(plan, work, dev)
    else:
        yield from _backend(plan)
    if dev.kind == "gpu" and plan.num_warps == 0:  # what follows divides by its threads
        yield f"num_warps is 0, a kernel for the {dev.label} needs 1 or more"
        return
    foot = footprint(work, plan, dev)
    if isinstance(work, Attention):
        if plan.block_k != work.head_dim:
            yield f"block_k is {plan.block_k}, attention holds all {work.head_dim} of head_dim"
    elif plan.block_k > work.k and not (plan.family == skinny.FAMILY or _is_gemv(work, plan, dev)):
        yield f"block_k is {plan.block_k}, the reduction has {work.k} elements"
    if dev.kind == "cpu":
        yield from cpu_limits(foot, plan, work, dev)
    else:
        yield from gpu_limits(foot, plan, work, dev)


def _integers(plan: TilePlan, work: NormMatmul | GatedFFN, dev: DeviceSpec) -> Iterator[str]:
    """Check that a kernel adds up integers: those for tensor cores do, and dot products do."""
    dots = plan.family == "" and _is_gemv(work, plan, dev)
    missing = mma.unsupported(matmul_shape(work), dev)
    if missing is not None:
        yield missing
    elif plan.family not in mma.FAMILIES and not dots:
        known = " and ".join(map(repr, mma.FAMILIES))
        yield f"dtype is {work.dtype}; it is multiplied by families {known}, or by dot products"


def _family(
    plan: TilePlan, work: NormMatmul | GatedFFN | Attention, dev: DeviceSpec
) -> Iterator[str]:
    """Check a plan that names its kernel."""
    attends = isinstance(work, Attention)
    if dev.kind == "cpu":
        families: tuple[str, ...] = ("",) if attends else ("", PANELS)
    else:
        families = (mma.FAMILY,) if attends else (*mma.FAMILIES, skinny.FAMILY)
    if plan.family not in families:
        known = " and ".join(map(repr, families)) + (" for attention" if attends else "")
        yield f"family is {plan.family!r}, backend 'tir' has {known} on a {dev.kind}"
    elif isinstance(work, Attention):
        yield from mma_attention.violations(plan, work, dev)
    elif plan.family in mma.FAMILIES:
        yield from mma.violations(plan, matmul_shape(work), dev)
    else:
        yield from skinny.violations(plan, work, matmul_shape(work), dev)


def _is_gemv(work: NormMatmul | GatedFFN, plan: TilePlan, dev: DeviceSpec) -> bool:
    return dev.kind == "gpu" and is_gemv(plan, matmul_shape(work).layouts)


def _backend(plan: TilePlan) -> Iterator[str]:
    if plan.num_stages != 1:
        yield f"num_stages is {plan.num_stages}, backend 'tir' loads in 1 stage"
    if plan.split_k != 1:
        yield f"split_k is {plan.split_k}, backend 'tir' reduces in 1 part"
