"""Launches of the matmul kernel in CUDA C++."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from tvm import tirx

from ..cuda_kernels.source import matmul_source
from ..cuda_kernels.text import MatmulForm
from ..estimator.families.cuda_matmul.adapters import narrow_plan
from ..estimator.families.cuda_matmul.tiles import BLOCK_K, PART, CudaPlan
from ..estimator.registry import family_of
from ..launch.arguments import Part, TensorMap
from ..workload import narrow_matmuls
from .operands import AdapterWeights, Product, given_or
from .steps import Contraction, SourceStep, ceil_div


def cuda_steps(c: Contraction, products: Sequence[Product], x: Any) -> Iterator[SourceStep]:
    """Yield a launch for all products next to each other that are alike but for their features."""
    for _, group in groupby(products, _likeness):
        alike = list(group)
        adapters = [p.adapter for p in alike if p.adapter is not None]
        if adapters:  # in front, what makes x A
            narrow = [_narrow(c, p, adapter) for p, adapter in zip(alike, adapters, strict=True)]
            work = narrow_matmuls(c.work, [adapter.form for adapter in adapters])
            plan = narrow_plan(family_of(c.plan, c.work, c.dev), work, c.dev, c.most_rows)
            yield _step(replace(c, work=work, plan=plan), narrow, x, released=c.dependent)
        yield _step(c, alike, x)


def _step(c: Contraction, alike: Sequence[Product], x: Any, released: bool = False) -> SourceStep:
    """Return the launch of products that are alike."""
    plan, one = CudaPlan.of(c.plan), alike[0]
    form = MatmulForm(
        plan,
        c.work.dtype,
        one.activation if one.up is not None else "",
        one.bias is not None,
        tuple(one.steps.split()),
        len(alike),
        one.layout == "kn",
        c.dependent,
        # Behind a launch that makes x A, nothing but that is waited for
        one.adapter is None and c.early(alike, x),
        released,
        _adapter_steps(one),
    )
    args = _arguments(c, plan, alike, x)
    return SourceStep(matmul_source(form), (_clusters(c, plan, alike),), args)


def _likeness(product: Product) -> tuple[Any, ...]:
    """Return what products that share a kernel have in common."""
    biased, low = product.bias is not None, product.adapter and product.adapter.form
    form = low and (_adapter_steps(product), low.layout, low.scale)
    return product.layout, product.steps, biased, product.up is not None, product.activation, form


def _adapter_steps(product: Product) -> int:
    return ceil_div(product.adapter.form.rank, BLOCK_K) if product.adapter is not None else 0


def _narrow(c: Contraction, product: Product, adapter: AdapterWeights) -> Product:
    """Return the product that makes ``scale x A``, in a workspace."""
    form = adapter.form
    out = c.workspace(("adapter", product.out), (c.rows, form.rank), c.work.dtype)
    steps = f"times:{form.scale!r}" if form.scale != 1 else ""
    return Product(adapter.a, form.rank, form.layout, out, steps=steps)


def _arguments(c: Contraction, plan: CudaPlan, products: Sequence[Product], x: Any) -> list[Any]:
    """Return the arguments in the order of the kernel's parameters."""
    rows: list[Any] = [TensorMap(x, (plan.box_m, BLOCK_K))]
    found: list[Any] = []
    for product in products:
        operands = [product.out, *_biases(product), *_in_order(product)]
        sizes = [product.n] if found else [c.m, product.n, c.work.k]
        maps = [*_weights(plan, product, c.work.k), *([] if found else rows)]
        if product.adapter is not None:
            narrow = _narrow(c, product, product.adapter)
            added = replace(product, weight=product.adapter.b)
            maps += [_weights(plan, added, narrow.n)[0], TensorMap(narrow.out, rows[0].block)]
        found += [*maps, *operands, *sizes]
    return found


def _weights(plan: CudaPlan, product: Product, k: int) -> list[TensorMap]:
    """Return the maps of the weights of gate and up, or of the only one twice."""
    n, is_kn = product.n, product.layout == "kn"
    both = product.weight, given_or(product.up, product.weight)
    width = n if is_kn else k
    if product.merged != "no":
        both = _halves(product.weight, n if is_kn else n * k, product.merged)
        width *= 2 if is_kn else 1
    shape, box = ((k, n), (BLOCK_K, PART)) if is_kn else ((n, k), (plan.box_n, BLOCK_K))
    return [TensorMap(weight, box, shape, (width, 1)) for weight in both]


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
