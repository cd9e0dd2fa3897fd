"""Complex numbers of an exported graph as pairs of real ones: TVM has no complex dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .promotion import inserted

aten = torch.ops.aten

Pair = tuple[Node, Node]
"""The real and the imaginary part of a tensor."""

_END = 2**63 - 1

MOVED = (
    *(aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.expand.default),
    *(aten.slice.Tensor, aten.select.int, aten.permute.default, aten.transpose.int),
    *(aten.squeeze.dims, aten.clone.default, aten.alias.default, aten.neg.default),
)
"""What does with both parts as it does with the whole."""


def written_as_pairs(module: GraphModule) -> None:
    """Write products of complex numbers, and what moves them, as those of real numbers.

    rewrite: ``view_as_real(view_as_complex(x) * polar(1, a))`` ->
    ``stack([x0 * cos(a) - x1 * sin(a), x0 * sin(a) + x1 * cos(a)], -1)``

    What it does not know stays, and is refused by the importer.
    """
    pairs: dict[Node, Pair] = {}
    gone: set[Node] = set()
    for node in list(module.graph.nodes):
        parts = [pairs.get(arg) for arg in node.args if isinstance(arg, Node)]
        known = all(arg in pairs for arg in node.args if isinstance(arg, Node) and _is_complex(arg))
        if node.op != "call_function" or not known or not (any(parts) or _is_complex(node)):
            continue
        if node.target == aten._assert_tensor_metadata.default:
            gone.add(node)  # which pairs of real numbers would not satisfy
            continue
        made = _made(node, pairs)
        if isinstance(made, Node):
            node.replace_all_uses_with(made)
            gone.add(node)
        elif made is not None:
            pairs[node] = made
            gone.add(node)
    for node in reversed(list(module.graph.nodes)):
        if node in gone and not node.users:
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _made(node: Node, pairs: dict[Node, Pair]) -> Node | Pair | None:
    """Return what stands for a node: a pair, a tensor where it is real, None if it is unknown."""

    def call(target: Any, *args: Any) -> Node:
        return inserted(node, target, args)

    target, args = node.target, list[Any](node.args)
    if target in MOVED and args[0] in pairs:
        real, imaginary = (call(target, part, *args[1:]) for part in pairs[args[0]])
        return real, imaginary
    if target == aten.polar.default:
        real, imaginary = (
            call(aten.mul.Tensor, args[0], call(turn.default, args[1]))
            for turn in (aten.cos, aten.sin)
        )
        return real, imaginary
    if target == aten.view_as_complex.default:
        flat = call(aten.flatten.using_ints, args[0], -2, -1)  # each second one is a neighbour
        real, imaginary = (call(aten.slice.Tensor, flat, -1, i, _END, 2) for i in (0, 1))
        return real, imaginary
    if target == aten.complex.default:
        return args[0], args[1]
    if target == aten._conj.default:
        real, imaginary = pairs[args[0]]
        return real, call(aten.neg.default, imaginary)
    if target == aten.view_as_real.default:
        return call(aten.stack.default, list(pairs[args[0]]), -1)
    return _combined(call, target, args, pairs)


def _combined(
    call: Callable[..., Node], target: Any, args: list[Any], pairs: dict[Node, Pair]
) -> Pair | None:
    """Return a sum, a difference or a product."""
    if target not in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor) or len(args) != 2:
        return None
    first, second = (pairs.get(arg) for arg in args)
    if target == aten.mul.Tensor and first is not None and second is not None:
        (a, b), (c, d) = first, second
        low = call(aten.sub.Tensor, call(target, a, c), call(target, b, d))
        return low, call(aten.add.Tensor, call(target, b, c), call(target, a, d))
    if target == aten.mul.Tensor:
        whole, number = (first, args[1]) if first is not None else (second, args[0])
        return (call(target, whole[0], number), call(target, whole[1], number)) if whole else None
    if first is None or second is None:
        return None
    return call(target, first[0], second[0]), call(target, first[1], second[1])
