"""Rows that a model sorts by expert, left where they are.

What transformers 5 exports of a mixture of experts sorts the rows by their expert, multiplies each
group by the expert's weight, and puts the rows back.  Between the two, each row is computed for
itself.  So they need not move: row s is multiplied by the weight ``ids[s]``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from .promotion import inserted, operator_name

aten = torch.ops.aten

GROUPED = ("grouped_mm_fallback", "_grouped_mm")
"""Operators that multiply groups of rows by a matrix each."""

_DIMENSION = {
    **dict.fromkeys(("unsqueeze", "select", "slice"), 1),
    **dict.fromkeys(("split", "split_with_sizes"), 2),
}
"""Operators on one dimension, and the place of its number among their arguments."""


def in_token_order(module: GraphModule) -> None:
    """Leave rows unsorted that are sorted by expert, and multiply each by the weight of its own.

    rewrite::

        sorted, perm = sort(ids); back = index_put(empty, [perm], arange)
        y = f(x[perm], sorted, grouped_mm(x[perm], W, cumsum(histc(sorted))))[back]
            ->
        y = f(x, ids, bmm(W[ids], x))

    declines when:
        anything between computes a row of others, or is read beside ``[back]``.
    """
    sorts = module.graph.find_nodes(op="call_function", target=aten.sort.default)
    found = [each for each in map(_Sorted.of, sorts) if each is not None]
    for each in found:
        each.unsort()
    if found:
        module.graph.eliminate_dead_code(_writes)
        module.recompile()


def _writes(node: Node) -> bool:
    """Tell whether a node does something beside its result: PyTorch takes writes for nothing."""
    schema = getattr(node.target, "_schema", None)
    return node.is_impure() or (schema is not None and schema.is_mutable)


class _Sorted:
    """Rows in the order in which integers are sorted, from the sort to where it is undone."""

    def __init__(self, ids: Node, ordered: Node | None, places: Node):
        self.ids, self.ordered, self.places = ids, ordered, places
        self.rows = ids.meta["val"].shape[0]
        self.moved: dict[Node, None] = {node: None for node in (places, ordered) if node}
        back = [user for user in places.users if self._is_place_of_each(user)]
        self.restored = [user for node in back for user in node.users]
        self._back = back

    @staticmethod
    def of(sort: Node) -> _Sorted | None:
        """Return the rows that go by a sort; None where some of them are not put back."""
        ids = sort.args[0]
        if not isinstance(ids, Node) or ids.meta["val"].ndim != 1 or len(sort.args) > 2:
            return None
        items = {user.args[1]: user for user in sort.users if user.target is operator.getitem}
        if ids.meta["val"].is_floating_point() or len(items) < len(sort.users) or 1 not in items:
            return None
        found = _Sorted(ids, items.get(0), items[1])
        return found if found._follow() else None

    def _follow(self) -> bool:
        """Find everything that is in the sorted order; False where it is read by what minds."""
        waiting = list(self.moved)
        while waiting:
            for user in waiting.pop().users:
                ends = user in self._back or user in self.restored or operator_name(user) == "histc"
                if user not in self.moved and not ends:
                    self.moved[user] = None
                    waiting.append(user)
        restored = all(any(_indexes(u, by=b) for b in self._back) for u in self.restored)
        made = [node for node in self.moved if node not in (self.places, self.ordered)]
        restored &= all(user.args[0] in self.moved for user in self.restored)
        return bool(self.restored) and restored and all(map(self._keeps_rows, made))

    def _is_place_of_each(self, node: Node) -> bool:
        """Tell whether a node has, for each row, its place in the sorted order."""
        if operator_name(node) != "index_put":
            return False
        values: Any = node.args[2]
        is_count = isinstance(values, Node) and operator_name(values) == "arange"
        if node.args[1] != [self.places] or not is_count or len(node.args) > 3:
            return False
        start = 0 if values.target is aten.arange.default else values.args[0]
        return bool(start == 0 and values.meta["val"].shape[0] == self.rows)

    def _keeps_rows(self, node: Node) -> bool:
        """Tell whether row s of a node is computed of row s of what is sorted, and of no other."""
        name, first = operator_name(node), node.args[0]
        if name == "index":
            index = cast("Sequence[Any]", node.args[1])
            return len(index) == 1 and index[0] in self.moved and first not in self.moved
        if name in _DIMENSION:
            place, value = _DIMENSION[name], cast("Node", first).meta["val"]
            dim: Any = node.args[place] if len(node.args) > place else 0
            return bool(dim % (value.ndim + (name == "unsqueeze")))
        if name in GROUPED:
            return first in self.moved and self._groups_by(node) is not None
        if node.target is operator.getitem or name in ("_to_copy", "_assert_tensor_metadata"):
            return True
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return is_pointwise and all(self._lies_along(node, x) for x in node.all_input_nodes)

    def _lies_along(self, node: Node, operand: Node) -> bool:
        """Tell whether an operand of a function of elements has the same rows, or one for all."""
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return True
        rank = node.meta["val"].ndim
        if operand in self.moved:
            return bool(value.ndim == rank)
        return value.ndim < rank or bool(value.shape[0] == 1)

    def _groups_by(self, node: Node) -> Node | None:
        """Return the weights of a grouped matmul, if its groups are those of the sorted rows."""
        counts = node.args[2] if len(node.args) == 3 else node.kwargs.get("offs")
        weight = node.args[1]
        if not isinstance(counts, Node) or operator_name(counts) != "cumsum":
            return None
        bins = counts.args[0]
        if not isinstance(bins, Node) or operator_name(bins) != "histc" or len(bins.args) != 4:
            return None
        source, count, least, most = bins.args
        while isinstance(source, Node) and operator_name(source) == "_to_copy":
            source = source.args[0]
        experts = cast("Node", weight).meta["val"].shape[0]
        whole = (count, least, most) == (experts, 0, experts - 1) and experts > 1
        known = whole and _chosen_of(self.ids) == experts
        return cast("Node", weight) if source is self.ordered and known else None

    def unsort(self) -> None:
        """Rewrite the graph."""
        for node in [node for node in self.moved if operator_name(node) in GROUPED]:
            node.replace_all_uses_with(self._by_expert(node))
        for node in self.restored:
            node.replace_all_uses_with(cast("Node", node.args[0]))
        if self.ordered is not None:
            self.ordered.replace_all_uses_with(self.ids)
        for user in list(self.places.users):
            if _indexes(user, by=self.places) and self._has_all_rows(user.args[0]):
                user.replace_all_uses_with(cast("Node", user.args[0]))
            for taken in self._repeated(user):
                taken.replace_all_uses_with(_repeat(taken, cast("int", user.args[1])))
        count = inserted(self.places, aten.arange.default, (self._rows(),))
        self.places.replace_all_uses_with(count)

    def _has_all_rows(self, table: Any, times: int = 1) -> bool:
        return bool(table.meta["val"].shape[0] * times == self.rows)

    def _repeated(self, node: Node) -> list[Node]:
        """Return what takes each row of a tensor as often as there are experts for it."""
        if operator_name(node) not in ("div", "floor_divide") or not isinstance(node.args[1], int):
            return []
        times = node.args[1]
        users = [user for user in node.users if _indexes(user, by=node)]
        return [user for user in users if self._has_all_rows(user.args[0], times)]

    def _rows(self) -> Any:
        """Return the number of rows, as a node where it is symbolic."""
        if isinstance(self.rows, int):
            return self.rows
        return inserted(self.places, aten.sym_size.int, (self.ids, 0))

    def _by_expert(self, node: Node) -> Node:
        """Insert what multiplies each row by the weight of its expert, with no copy transposed."""
        x, weight = node.args[0], cast("Node", self._groups_by(node))
        swapped = operator_name(weight) in ("permute", "transpose") and _swaps(weight)
        table = weight.args[0] if swapped else weight
        chosen = inserted(node, aten.index.Tensor, (table, [self.ids]))
        column = inserted(node, aten.unsqueeze.default, (x, -1 if swapped else 1))
        operands = (chosen, column) if swapped else (column, chosen)
        product = inserted(node, aten.bmm.default, operands)
        return inserted(node, aten.squeeze.dim, (product, -1 if swapped else 1))


def _chosen_of(ids: Node) -> int | None:
    """Return how many experts there are of which some are chosen; None where it is not known."""
    while operator_name(ids) in ("view", "reshape", "_to_copy", "alias"):
        ids = cast("Node", ids.args[0])
    chosen = ids.args[0] if ids.target is operator.getitem and ids.args[1] == 1 else None
    if not isinstance(chosen, Node) or operator_name(chosen) != "topk":
        return None
    scores, _, dim, *_ = (*chosen.args, -1)
    value = cast("Node", scores).meta["val"]
    return value.shape[-1] if dim in (-1, value.ndim - 1) else None


def _swaps(node: Node) -> bool:
    """Tell whether a node swaps the last two dimensions of three."""
    if operator_name(node) == "permute":
        return [int(d) % 3 for d in cast("Sequence[int]", node.args[1])] == [0, 2, 1]
    return {int(cast("int", d)) % 3 for d in node.args[1:3]} == {1, 2}


def _indexes(node: Node, by: Node) -> bool:
    """Tell whether a node chooses rows of a tensor."""
    return operator_name(node) == "index" and node.args[1] == [by]


def _repeat(node: Node, times: int) -> Node:
    """Insert a copy of each row behind itself, so often in all."""
    table = cast("Node", node.args[0])
    width = list(table.meta["val"].shape[1:])
    wide = inserted(node, aten.unsqueeze.default, (table, 1))
    wide = inserted(node, aten.expand.default, (wide, [-1, times, *(-1 for _ in width)]))
    return inserted(node, aten.reshape.default, (wide, [-1, *width]))
