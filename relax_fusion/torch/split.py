"""Which operators of a graph a piece of Relax can take, and how they are cut into pieces."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from .writes import write_rows

DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes of tensors that a piece takes, makes and returns."""


class _Support(OperatorSupportBase):
    """Tells what a piece can take, and keeps why it cannot take the others."""

    def __init__(self, device: torch.device, refused: Mapping[Node, str]):
        self.device = device
        self.refusals: dict[Node, str] = dict(refused)

    def is_node_supported(self, submodules: Mapping[str, Any], node: Node) -> bool:
        """Tell whether a piece can take a node."""
        if not is_operator(node):
            return False
        if node.target is torch.ops.aten.copy_.default:
            into: Any = node.args[0]
            if into.op == "placeholder" and into.meta["val"].dim() == 0:
                return False  # how the caller gets a cache's count of tokens that a piece computed
        if node not in self.refusals and (why := self._refusal(node)):
            self.refusals[node] = why
        return node not in self.refusals

    def _refusal(self, node: Node) -> str:
        if node.target in (operator.getitem, write_rows):
            return ""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return f"{getattr(target, '__name__', target)} is no operator of ATen"
        if target._schema.is_mutable:
            return f"{target} writes to its arguments"
        values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
        return next((why for value in values if (why := self._unfit(value))), "")

    def _unfit(self, value: Any) -> str:
        for each in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(each, torch.Tensor):
                continue
            if each.dtype not in DTYPES:
                return f"a tensor has the dtype {each.dtype}"
            if each.layout != torch.strided or each.is_quantized:
                return f"a tensor has the layout {each.layout}"
            if each.device != self.device:
                return f"a tensor is on {each.device}, not on {self.device}"
        return ""


def split(
    module: GraphModule, device: torch.device, refused: Mapping[Node, str], least: int
) -> tuple[list[tuple[Node, ...]], dict[Node, str]]:
    """Choose pieces of a functional graph of ATen operators, as few and as large as possible.

    Returns the operators of each, and why the operators that no piece has are left.

    `device`: where the tensors of pieces are.
    `refused`: nodes that no piece may take, and why.
    `least`: the fewest operators that a piece has.
    """
    support = _Support(device, refused)
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
    pieces = []
    for part in partitioner.propose_partitions():
        found = _worth_telling(part.nodes)
        if len(found) >= least:
            pieces.append(tuple(part.nodes))
            continue
        why = f"its piece has {len(found)} operators, fewer than min_block_size={least}"
        support.refusals |= dict.fromkeys(found, why)
    left = {}
    for node in _worth_telling(support.refusals):
        name, why = operator_name(node), support.refusals[node]
        left[node] = why if name in why else f"{name}: {why}"
    return pieces, left


def check_cut(module: GraphModule, pieces: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if a graph has no operators of these numbers, or one is in two pieces."""
    nodes = list(module.graph.nodes)
    chosen = [n for piece in pieces for n in piece]
    fits = len(set(chosen)) == len(chosen) and all(
        n < len(nodes) and nodes[n].op == "call_function" for n in chosen
    )
    if not fits or not all(pieces):
        raise ValueError("it is of another graph")


def cut(module: GraphModule, pieces: Sequence[Sequence[int]]) -> list[str]:
    """Replace operators, by their numbers in a graph, by submodules; return their names."""
    nodes = list(module.graph.nodes)
    before = {name for name, _ in module.named_children()}
    fuse_by_partitions(module, [{nodes[n]: None for n in piece} for piece in pieces])
    return [name for name, _ in module.named_children() if name not in before]


def is_operator(node: Node) -> bool:
    """Tell whether a node computes tensors; numbers are computed by PyTorch, which is faster."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    return node.op == "call_function" and not isinstance(node.meta.get("val"), numbers)


def operator_name(node: Node) -> str:
    """Return the name of an operator, as PyTorch writes it."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return str(node.target if is_operator else getattr(node.target, "__name__", node.target))


def _worth_telling(nodes: Collection[Node]) -> list[Node]:
    """Return the nodes that are more than a part of a tuple."""
    return [node for node in nodes if node.target is not operator.getitem]
