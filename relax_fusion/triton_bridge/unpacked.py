"""Launches that unpack weights to copies, in front of a matmul that reads those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..launch.arguments import Workspace
from ..workload import Packed
from .kernels.unpack_weights import unpack_weights
from .operands import Product
from .steps import Contraction, Step, ceil_div

WORDS = 512
"""Words of a program of `unpack_weights`."""


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
