"""A graph cut behind its products: each part is a kernel, or a loop, of its own."""

from __future__ import annotations

from ..workload.graph import Block, Graph, Slot
from ..workload.roofline import is_contraction
from ..workload.values import reads


def product_parts(graph: Graph) -> tuple[Graph, ...]:
    """Return graphs of one product each, with the statements up to the next product behind it.

    A part reads what those before it store, by the names that the graph has.
    """
    groups: list[list[Block]] = [[]]
    for block in graph.blocks:
        if is_contraction(block) and any(map(is_contraction, groups[-1])):
            groups.append([])
        groups[-1].append(block)
    wanted = {slot.name for slot in graph.slots if slot.role == "out"}
    found: list[Graph] = []
    for blocks in reversed(groups):
        made = {block.out for block in blocks}
        read = {r.tensor for b in blocks for value in b.values() for r in reads(value)} - made
        slots = [s for s in graph.slots if s.role != "out" and s.name in read]
        given = {slot.name for slot in slots}
        slots += [Slot(t.name, "in") for t in graph.tensors if t.name in read - given]
        slots += [Slot(block.out, "out") for block in blocks if block.out in wanted]
        tensors = tuple(t for t in graph.tensors if t.name in made | read)
        found.append(Graph(tensors, tuple(blocks), tuple(slots)))
        wanted |= read
    return tuple(reversed(found))
