"""Rows of a cache, written where they are.

A decoder with a static cache writes the keys and values of new tokens into a buffer.  AOTAutograd
makes a copy of the whole buffer of it, with other rows, and copies all that back at the end.  Where
nothing else reads the buffer, here the rows alone are written.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from .record import Uses

_aten = torch.ops.aten


def write_rows(cache: torch.Tensor, axis: int, rows: torch.Tensor, values: torch.Tensor) -> Any:
    """Write `values` to the places `rows` along an axis of `cache`, and return `cache`."""
    return cache.index_copy_(axis, rows.long(), values)


def write_in_place(module: GraphModule) -> None:
    """Replace copies of caches with other rows by writes of those rows.

    rewrite: ``new = index_put(cache, [None, rows], values); ...; copy_(cache, new)`` ->
    ``new = write_rows(cache, 1, rows, values); ...``

    declines when: something else reads the cache, rows are chosen along several axes, or by
    masks, or values are broadcast.
    """
    graph = module.graph
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        cache, new, *_ = cast("tuple[Node, ...]", copy.args)
        if new.args[:1] != (cache,) or cache.op != "placeholder" or set(cache.users) != {new, copy}:
            continue
        found = chosen_rows(new)
        if found is None or copy.users:
            continue
        axis, rows = found
        new.target, new.args, new.kwargs = write_rows, (cache, axis, rows, new.args[2]), {}
        graph.erase_node(copy)


def results_of(module: GraphModule, name: str, inputs: Sequence[int]) -> Uses:
    """Return what becomes of a piece's results.

    The copies are taken out of the graph: the piece makes them, so that they are captured with it.

    `inputs` are the arguments of the piece that it takes as tensors.  The module is changed.
    """
    (call,) = module.graph.find_nodes(op="call_module", target=name)
    several = all(user.target is operator.getitem for user in call.users)
    values = {int(u.args[1]): u for u in call.users} if several else {0: call}
    copies = []
    for n, value in values.items():
        for copy in [user for user in value.users if user.target is _aten.copy_.default]:
            into = copy.args[0]
            if into.op != "placeholder" or set(into.users) != {call, copy} or copy.users:
                continue
            if copy.args[1] is value and call.args.index(into) in inputs:
                copies.append((call.args.index(into), n))
                module.graph.erase_node(copy)
    return Uses(tuple(copies), frozenset(n for n, value in values.items() if value.users))


def chosen_rows(new: Node) -> tuple[int, Node] | None:
    """Return along which axis, and where, an ``index_put`` writes whole rows; None if not so."""
    if new.target is not _aten.index_put.default:
        return None
    cache, indices, values, *accumulate = cast("tuple[Any, ...]", new.args)
    chosen = [(axis, rows) for axis, rows in enumerate(indices) if rows is not None]
    if any(accumulate) or len(chosen) != 1:
        return None
    axis, rows = chosen[0]
    index, written, whole = (node.meta["val"] for node in (rows, values, cache))
    if index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
        return None
    shape = [*whole.shape[:axis], index.shape[0], *whole.shape[axis + 1 :]]
    same = len(shape) == written.dim() and list(written.shape) == shape
    return (axis, rows) if same and written.dtype == whole.dtype else None
