"""Launches of the matmul kernel in CUDA C++."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any

from tvm import tirx

from ..cuda_kernels.source import matmul_source
from ..cuda_kernels.text import MatmulForm
from ..estimator.families.cuda_matmul.tiles import LINE_K, PART, CudaPlan
from ..launch.arguments import Part, TensorMap
from .operands import Product, given_or
from .steps import AnyStep, Contraction, SourceStep, ceil_div
from .unpacked import with_copies


def cuda_steps(c: Contraction, products: Sequence[Product], x: Any) -> Iterator[AnyStep]:
    """Yield a launch for all products next to each other that are alike but for their features.

    In front of it, where the plan says so, those that unpack weights to a copy.
    """
    plan = CudaPlan.of(c.plan)
    if plan.copied:
        copies = [with_copies(c, product) for product in products]
        yield from (step for _, steps in copies for step in steps)
        products = [product for product, _ in copies]
    for _, group in groupby(products, _likeness):
        alike = list(group)
        one = alike[0]
        form = MatmulForm(
            plan,
            c.work.dtype,
            one.activation if one.up is not None else "",
            one.bias is not None,
            tuple(one.steps.split()),
            len(alike),
            one.layout == "kn",
            one.packed,
            c.dependent,
            c.early(alike, x),
        )
        args = _arguments(c, plan, alike, x)
        yield SourceStep(matmul_source(form), (_clusters(c, plan, alike),), args)


def _likeness(product: Product) -> tuple[Any, ...]:
    """Return what products that share a kernel have in common."""
    biased = product.bias is not None
    gated = product.up is not None
    return product.layout, product.steps, biased, gated, product.activation, product.packed


def _arguments(c: Contraction, plan: CudaPlan, products: Sequence[Product], x: Any) -> list[Any]:
    """Return the arguments in the order of the kernel's parameters."""
    rows: list[Any] = [TensorMap(x, (plan.box_m, LINE_K))]
    found: list[Any] = []
    for product in products:
        operands = [product.out, *_scales(product), *_biases(product), *_in_order(product)]
        sizes = [product.n] if found else [c.m, product.n, c.work.k]
        found += [*_weights(plan, product, c.work.k), *([] if found else rows), *operands, *sizes]
    return found


def _weights(plan: CudaPlan, product: Product, k: int) -> list[TensorMap]:
    """Return the maps of the weights of gate and up, or of the only one twice."""
    n, is_kn = product.n, product.layout == "kn"
    both = product.weight, given_or(product.up, product.weight)
    packed, step = product.packed, LINE_K
    if packed is not None:  # counted in words
        k, step = packed.words(k), plan.block_k // packed.fields
    width = n if is_kn else k
    if product.merged != "no":
        both = _halves(product.weight, n if is_kn else n * k, product.merged)
        width *= 2 if is_kn else 1
    shape, box = ((k, n), (step, PART)) if is_kn else ((n, k), (plan.box_n, step))
    return [TensorMap(weight, box, shape, (width, 1)) for weight in both]


def _scales(product: Product) -> list[Any]:
    if product.packed is None:
        return []
    if product.merged != "no":
        elements = prod(map(int, product.scale.ty.shape.values)) // 2
        return [*_halves(product.scale, elements, product.merged)]
    return [scale for scale in (product.scale, product.up_scale) if scale is not None]


def _biases(product: Product) -> list[Any]:
    if product.bias is None:
        return []
    if product.up is None:
        return [product.bias]
    if product.merged == "no":
        return [product.bias, product.up_bias]
    return [*_halves(product.bias, product.n, product.merged)]


def _halves(both: Any, elements: int, merged: str) -> tuple[Any, Any]:
    """Return the gate's and the up's half of a tensor."""
    first, second = both, Part(both, elements)
    return (first, second) if merged == "gate_first" else (second, first)


def _in_order(product: Product) -> list[Any]:
    """Return the operands of the steps: those along the features, then the residual."""
    kinds = [step.split(":")[2] for step in product.steps.split() if step.count(":") == 2]
    along = zip(kinds, product.operands, strict=True)
    ordered = sorted(along, key=lambda each: each[0] == "whole")
    return [operand for _, operand in ordered]


def _clusters(c: Contraction, plan: CudaPlan, products: Sequence[Product]) -> Any:
    """Return how many clusters are launched: as many as have tiles, or as run at once."""
    across = sum(-(-p.n // (plan.block_n * plan.cluster_n)) for p in products)
    tiles = ceil_div(c.rows, plan.block_m * plan.cluster_m) * across
    if plan.split_k > 1:  # a cluster computes one tile
        return tiles
    most = c.dev.sm_count * plan.blocks // plan.cluster
    if isinstance(tiles, int):
        return min(tiles, most)
    return tirx.min(tiles, tirx.IntImm("int64", most))
