"""Launches of the matmul kernel in CUDA C++."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tvm import tirx

from ..cuda_kernels.kernel_text import MatmulForm, RotatedForm
from ..cuda_kernels.launch import matmul_source
from ..estimator.families.cuda_matmul.adapters import narrow_plan
from ..estimator.families.cuda_matmul.tiles import (
    HALF_K,
    PART,
    CudaPlan,
    angles_of,
    block_k,
    split_alike,
    unit_bytes,
)
from ..estimator.registry import family_of
from ..launch.arguments import InOut, Out, Part, TensorMap, Workspace, is_tensor
from ..workload import Packed, Rope, narrow_matmuls
from .kernels.unpack_weights import unpack_weights
from .launches import AnyStep, Contraction, SourceStep, Step, ceil_div
from .operands import AdapterWeights, Product, given_or


def cuda_steps(c: Contraction, products: Sequence[Product], x: Any) -> Iterator[AnyStep]:
    """Yield a launch for all products next to each other that are alike but for their features.

    In front of it, where the plan says so, those that unpack weights to a copy.
    """
    if CudaPlan.of(c.plan).copied:
        copies = [with_copies(c, product) for product in products]
        yield from (step for _, steps in copies for step in steps)
        products = [product for product, _ in copies]
    for alike in split_alike(products, _likeness, _rope_of):
        adapters = [p.adapter for p in alike if p.adapter is not None]
        if adapters:  # in front, what makes x A
            narrow = [_narrow(c, p, adapter) for p, adapter in zip(alike, adapters, strict=True)]
            work = narrow_matmuls(c.work, [adapter.form for adapter in adapters])
            plan = narrow_plan(family_of(c.plan), work, c.dev, c.most_rows)
            yield _step(replace(c, work=work, plan=plan), narrow, x, released=c.dependent)
        yield _step(c, alike, x)


def _step(c: Contraction, alike: Sequence[Product], x: Any, released: bool = False) -> SourceStep:
    """Return the launch of products that are alike."""
    one = alike[0]
    form = MatmulForm(
        CudaPlan.of(c.plan),
        c.work.dtype,
        one.activation if one.up is not None else "",
        one.bias is not None,
        tuple(one.steps.split()),
        len(alike),
        one.layout == "kn",
        one.packed,
        c.dependent,
        # Behind a launch that makes x A, nothing but that is waited for
        one.adapter is None and c.early(alike, x),
        c.work.out_dtype,
        _rotated_form(alike),
        released,
        _adapter_steps(one),
        unit_bytes((p.n for p in alike), c.work.out_dtype),
    )
    args = _arguments(c, form, alike, x)
    # Loads of 16 bytes; of what is a part, no more is known than where the whole begins
    aligned = tuple(is_tensor(a) or isinstance(a, Out | InOut | Workspace) for a in args)
    source = replace(matmul_source(form), aligned=aligned)
    return SourceStep(source, (_clusters(c, form, alike),), args)


def _likeness(product: Product) -> tuple[Any, ...]:
    """Return what products that share a kernel have in common."""
    biased, low = product.bias is not None, product.adapter and product.adapter.form
    form = low and (_adapter_steps(product), low.layout, low.scale)
    gate = product.up is not None, product.activation
    return product.layout, product.packed, product.steps, biased, gate, form


def _adapter_steps(product: Product) -> int:
    return ceil_div(product.adapter.form.rank, HALF_K) if product.adapter is not None else 0


def _narrow(c: Contraction, product: Product, adapter: AdapterWeights) -> Product:
    """Return the product that makes ``scale x A``, in a workspace."""
    form = adapter.form
    out = c.workspace(("adapter", product.out), (c.rows, form.rank), c.work.dtype)
    steps = f"times:{form.scale!r}" if form.scale != 1 else ""
    return Product(adapter.a, form.rank, form.layout, out, steps=steps)


def _rope_of(product: Product) -> Rope | None:
    return product.angles.rope if product.angles else None


def _rotated_form(products: Sequence[Product]) -> RotatedForm | None:
    """Return how products turn, of which at least one does."""
    ropes = list(map(_rope_of, products))
    heads = tuple(
        None if rope is None else _heads(rope, p.n) for rope, p in zip(ropes, products, strict=True)
    )
    return next((RotatedForm(*angles_of(rope), heads) for rope in ropes if rope), None)


def _heads(rope: Rope, n: int) -> tuple[int, int]:
    period = rope.period or n
    return 0 if rope.features == n else rope.features, 0 if period == n else period


def _arguments(c: Contraction, form: MatmulForm, products: Sequence[Product], x: Any) -> list[Any]:
    """Return the arguments in the order of the kernel's parameters."""
    rows: list[Any] = [TensorMap(x, (form.plan.box_m, block_k(form.dtype)))]
    found: list[Any] = []
    for product in products:
        vectors, residuals = _operands(product)
        maps = []
        if form.copies_residual:
            maps, residuals = [TensorMap(r, (form.plan.box_m, PART)) for r in residuals], []
        sizes = [product.n] if found else [c.m, product.n, c.work.k]
        found += [*_weights(form, product, c.work.k), *([] if found else rows)]
        if product.adapter is not None:
            narrow = _narrow(c, product, product.adapter)
            added = replace(product, weight=product.adapter.b)
            found += [_weights(form, added, narrow.n)[0], TensorMap(narrow.out, rows[0].block)]
        found += [*maps, product.out, *_scales(product), *_biases(product, form.half)]
        found += [*vectors, *residuals]
        if product.angles:
            turns = product.angles
            found += [turns.cos, turns.sin, given_or(turns.positions, c.m)]
        found += sizes
    return found


def _weights(form: MatmulForm, product: Product, k: int) -> list[TensorMap]:
    """Return the maps of the weights of gate and up, of pairs, or of the only one twice."""
    n, is_kn = product.n, product.layout == "kn"
    both = product.weight, given_or(product.up, product.weight)
    step = block_k(form.dtype)
    if product.packed is not None:  # counted in words
        k, step = product.packed.words(k), form.units
    width = n if is_kn else k
    box = (step, PART) if is_kn else (form.run, step)
    if form.half:
        both = product.weight, Part(product.weight, form.half * (1 if is_kn else k))
    sizes = [(k, each) if is_kn else (each, k) for each in (n, n - form.half)]
    if product.merged != "no":
        both = _halves(product.weight, n if is_kn else n * k, product.merged)
        width *= 2 if is_kn else 1
    return [TensorMap(w, box, s, (width, 1)) for w, s in zip(both, sizes, strict=True)]


def _scales(product: Product) -> list[Any]:
    if product.packed is None:
        return []
    if product.merged != "no":
        elements = prod(map(int, product.scale.ty.shape.values)) // 2
        return [*_halves(product.scale, elements, product.merged)]
    return [scale for scale in (product.scale, product.up_scale) if scale is not None]


def _biases(product: Product, half: int) -> list[Any]:
    if product.bias is None:
        return []
    if product.up is None:
        return [product.bias, *([Part(product.bias, half)] if half else [])]
    if product.merged == "no":
        return [product.bias, product.up_bias]
    return [*_halves(product.bias, product.n, product.merged)]


def _halves(both: Any, elements: int, merged: str) -> tuple[Any, Any]:
    """Return the gate's and the up's half of a tensor."""
    first, second = both, Part(both, elements)
    return (first, second) if merged == "gate_first" else (second, first)


def _operands(product: Product) -> tuple[list[Any], list[Any]]:
    """Return the operands of the steps: those along the features, and residuals."""
    kinds = [step.split(":")[2] for step in product.steps.split() if step.count(":") == 2]
    both: tuple[list[Any], list[Any]] = [], []
    for kind, operand in zip(kinds, product.operands, strict=True):
        both[kind == "whole"].append(operand)
    return both


def _clusters(c: Contraction, form: MatmulForm, products: Sequence[Product]) -> Any:
    """Return how many clusters are launched: as many as have tiles, or as run at once."""
    plan = form.plan
    features = plan.block_n * plan.cluster_n * (2 if form.half else 1)
    across = sum(-(-p.n // features) for p in products)
    tiles = ceil_div(c.rows, plan.block_m * plan.cluster_m) * across
    if plan.parts > 1:  # a cluster computes one tile
        return tiles
    most = c.dev.sm_count * plan.blocks // plan.cluster
    if isinstance(tiles, int):
        return min(tiles, most)
    return tirx.min(tiles, tirx.IntImm("int64", most))


WORDS = 512
"""A program of `unpack_weights` unpacks this many words."""


def with_copies(c: Contraction, product: Product) -> tuple[Product, list[Step]]:
    """Return a product that reads copies of its packed weights, and the launches that make them."""
    packed, merged = product.packed, product.merged != "no"
    assert packed is not None
    shape = product.n * (2 if merged else 1), c.work.k
    weight, up = c.workspace(("weight", product.out), shape, c.work.dtype), None
    steps = [_unpack(c, packed, (product.weight, product.scale), weight)]
    if product.up is not None and merged:
        up = weight
    elif product.up is not None:
        up = c.workspace(("up", product.out), shape, c.work.dtype)
        steps.append(_unpack(c, packed, (product.up, product.up_scale), up))
    plain = replace(product, weight=weight, up=up, packed=None, scale=None, up_scale=None)
    return plain, steps


def _unpack(c: Contraction, packed: Packed, stored: tuple[Any, Any], copy: Workspace) -> Step:
    """Return the launch that unpacks one weight."""
    n, k = copy.shape
    words, group = packed.words(k), packed.group if packed.group > 0 else k
    constants = {
        "COUNT": n * words,
        "K": k,
        "WORDS": words,
        "GROUP": group,
        "GROUPS": ceil_div(k, group),
        "BITS": packed.bits,
        "FIELDS": packed.fields,
        "ZERO": packed.zero,
        "SIGNED": packed.number != "",
        "BLOCK": WORDS,
        "PDL": c.dependent,
    }
    args = {"words_ptr": stored[0], "scales_ptr": stored[1], "out_ptr": copy}
    options = c.options(num_warps=4)
    return Step(unpack_weights, (ceil_div(n * words, WORDS),), args, constants, options)
