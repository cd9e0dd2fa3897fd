"""Online softmax: which statements may see a maximum before it is complete."""

from __future__ import annotations

from collections.abc import Mapping

from ..workload.graph import Block, Graph
from ..workload.values import Expr, Op, Read, reads


def is_rescaled(
    graph: Graph, loops: Mapping[tuple[str, str], str], block: Block, maximum: str
) -> bool:
    """Tell whether a statement may see a maximum before it is complete.

    ``exp(value - maximum)`` may, where only sums over the loops of the maximum read it: what they
    have added so far is multiplied by the exponential of the change, as in online softmax.  No sum
    may start with an element of its own, or leave elements out by the exponential.

    Parameters
    ----------
    graph : Graph
        The statements.
    loops : mapping of (str, str) to str
        By what a statement makes and the name of its axis.
    block : Block
        The statement.
    maximum : str
        What it reads.
    """
    source = next(b for b in graph.blocks if b.out == maximum)
    if source.combine != "max" or block.combine or not _subtracts(block.value, maximum):
        return False
    over = {loops[source.out, a.name] for a in source.reduced}
    readers = [b for b in graph.blocks if block.out in _reads(b)]
    kept = {s.name for s in graph.slots if s.role == "out"}
    return block.out not in kept and all(
        b.combine == "sum"
        and {loops[b.out, a.name] for a in b.reduced} == over
        and _is_linear(b.value, block.out)
        and b.start is None
        and (b.where is None or block.out not in _tensors(b.where))
        for b in readers
    )


def _subtracts(value: Expr, maximum: str) -> bool:
    """Tell whether a value is the exponential of a difference to a maximum."""
    if not isinstance(value, Op) or value.name != "exp":
        return False
    inner = value.args[0]
    if not isinstance(inner, Op) or inner.name != "subtract":
        return False
    least, most = inner.args
    if isinstance(most, Op) and most.name == "finite":
        most = most.args[0]
    return isinstance(most, Read) and most.tensor == maximum and maximum not in _tensors(least)


def _is_linear(value: Expr, tensor: str) -> bool:
    """Tell whether a value is an element of a tensor, or its product with others."""
    if isinstance(value, Read):
        return value.tensor == tensor
    if not isinstance(value, Op) or value.name != "multiply":
        return False
    first, second = value.args
    return (_is_linear(first, tensor) and tensor not in _tensors(second)) or (
        _is_linear(second, tensor) and tensor not in _tensors(first)
    )


def _tensors(value: Expr) -> set[str]:
    return {r.tensor for r in reads(value)}


def _reads(block: Block) -> set[str]:
    return {r.tensor for value in block.values() for r in reads(value)}
