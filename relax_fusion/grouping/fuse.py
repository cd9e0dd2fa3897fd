"""FuseGroups: operators that no pattern took, as few kernels as pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm import ir, relax, tirx
from tvm.target import Target

from ..hardware.target import device_of, is_cpu
from ..inventory.record_graph import width_of
from ..matching.bindings import items_of
from ..matching.effects import free_vars
from ..matching.pattern import is_call
from ..matching.shapes import has_computed_sizes
from ..matching.stages import read_stages
from ..report.decision import Joining
from ..transforms.modules import OPAQUE, functions_of, is_narrow, module_pass, with_functions
from ..tvm_ir import structural_map
from .functions import fits, group_function
from .mapping import Edge, Kind, Operator, elements, operator_of
from .numbers import Meeting, Meetings
from .plan import MOST_MEMBERS, Group, Node, Plan

_ITEM = Operator(Kind.ONE_TO_ONE, (Edge(Kind.ONE_TO_ONE, 1.0, 1, False),), 0.0, False)
"""What takes an item of a tuple."""


@module_pass
class AnnotateOperators:
    """TVM's AnnotateTIROpPattern, but for what it does not know.

    A PrimFunc that looks elements up gets no ``op_pattern``; 8 means that somebody wants it alone.
    """

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with attributes."""
        made = relax.transform.AnnotateTIROpPattern()(mod)
        unknown = {}
        for gvar, func in functions_of(mod, tirx.PrimFunc).items():
            if "op_pattern" not in (func.attrs or {}) and made[gvar].attrs["op_pattern"] == OPAQUE:
                unknown[gvar] = func
        return with_functions(made, unknown)


@module_pass
class FuseGroups:
    """Make functions of groups of PrimFunc calls, of each of which FuseTIR makes one PrimFunc.

    rewrite::

        a = R.call_tir(f, (x,))            y = cls.fused_f_g(x)
        y = R.call_tir(g, (a,))      ->

    leaves:
        PrimFuncs with ``op_pattern`` 8; those of which neither the body nor TVM's annotation tells
        how they map elements; with sizes of int32 or computed ones, as of ``x[m - n : m]``, which
        FuseTIR does not take; numbers in groups whose sizes no parameter has.
    """

    target: Target
    """What the kernels are for."""
    record: list[Joining] | None = field(default=None)
    """Receives the groups, and pairs of groups that were left for their price."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Return the module with groups."""
        builder = relax.BlockBuilder(mod)
        for gvar, func in functions_of(mod, relax.Function).items():
            attrs = func.attrs or {}
            if "Primitive" not in attrs and "Codegen" not in attrs:
                rewriter = _Rewriter(mod, builder, self, gvar.name_hint)
                changed = structural_map(func, (relax.DataflowBlock, rewriter.block))
                builder.update_func(gvar, changed)
        return builder.get()


@dataclass(frozen=True)
class _Rewriter:
    """Rewrites the blocks of one function."""

    mod: ir.IRModule
    builder: relax.BlockBuilder
    options: FuseGroups
    function: str

    def block(self, block: relax.DataflowBlock) -> relax.DataflowBlock:
        """Return a block with calls of groups in the place of their results."""
        bindings = items_of(block.bindings)
        nodes = _nodes(self.mod, bindings)
        target = self.options.target
        most = int(target.attrs.get("max_function_args", 0))
        plan = Plan(
            nodes,
            device_of(target),
            lambda members: fits([bindings[n.index] for n in members], most),
        )
        computed = {group: _computed(group) for group in plan.groups}
        found = self._meetings(bindings, computed) if is_cpu(target) else {}
        alone = [g for g, ns in computed.items() if g not in found and _calls(ns) > 1]
        joined = [Meeting(computed[g], [g.sink], (g.sink.index, 0)) for g in alone]
        joined += {meeting.place: meeting for meeting in found.values()}.values()
        self._tell(plan, joined)
        inside = {n.index for each in joined for n in each.nodes}
        made = {(i, 0): [b] for i, b in enumerate(bindings) if i not in inside}
        for each in joined:
            parts = [bindings[n.index] for n in each.nodes]
            results = [bindings[n.index].var for n in each.results]
            made[each.place] = group_function(self.builder, parts, results)
        every = [binding for place in sorted(made) for binding in made[place]]
        return relax.DataflowBlock(every) if joined else block

    def _meetings(
        self, bindings: Sequence[relax.Binding], groups: Mapping[Group, Sequence[Node]]
    ) -> dict[Group, Meeting]:
        """Return the groups that meet in numbers."""
        index = {hash(b.var): i for i, b in enumerate(bindings)}
        casts = [i for i, b in enumerate(bindings) if isinstance(b, relax.MatchCast)]
        reads = {
            i: [index[hash(v)] for v in free_vars(b.value) if hash(v) in index]
            + [j for j in casts if j < i]  # which may bind its sizes
            for i, b in enumerate(bindings)
        }

        def fit(nodes: Sequence[Node], results: Sequence[Node]) -> bool:
            parts = [bindings[n.index] for n in nodes]
            values = [part.value for part in parts if isinstance(part.value, relax.Call)]
            read = all(read_stages(self.mod[call.args[0]]) is not None for call in values)
            return read and bool(results) and len(nodes) <= MOST_MEMBERS and fits(parts, 0)

        return Meetings(groups, reads, fit).found

    def _tell(self, plan: Plan, joined: Sequence[Meeting]) -> None:
        """Record what was joined, and what was left for its price."""
        record, name = self.options.record, self.function
        if record is None:
            return
        for nodes, results, _ in sorted(joined, key=lambda each: each.results[-1].index):
            names = tuple(n.name for n in nodes if n.operator is not _ITEM)
            record.append(Joining(name, results[-1].where, names))
        for (one, two), price in plan.declined.items():
            record.append(Joining(name, two.where, (one.name, two.name), *price))


def _computed(group: Group) -> list[Node]:
    """Return the members of a group in order, without items of tuples that it does not compute."""
    inside = set(group.members)
    found = (
        node
        for node in group.members
        if node.operator is not _ITEM or any(s in inside for s, _ in node.sources)
    )
    return sorted(found, key=lambda n: n.index)


def _calls(nodes: Sequence[Node]) -> int:
    return sum(node.operator is not _ITEM for node in nodes)


def _nodes(mod: ir.IRModule, bindings: Sequence[relax.Binding]) -> list[Node]:
    """Return the bindings of a block that may be joined with others."""
    nodes: dict[int, Node] = {}
    for index, binding in enumerate(bindings):
        value, node = binding.value, None
        if isinstance(value, relax.TupleGetItem) and hash(value.tuple_value) in nodes:
            node = _item(index, binding, nodes[hash(value.tuple_value)])
        elif isinstance(binding, relax.VarBinding) and is_call(value, "relax.call_tir"):
            node = _call(mod, index, binding, nodes)
        if node is None:
            for var in free_vars(value):
                if hash(var) in nodes:
                    nodes[hash(var)].is_read_elsewhere = True
        else:
            node.is_read_elsewhere = not isinstance(binding.var, relax.DataflowVar)
            nodes[hash(binding.var)] = node
    return list(nodes.values())


def _call(
    mod: ir.IRModule, index: int, binding: relax.VarBinding, nodes: dict[int, Node]
) -> Node | None:
    """Return the node of a call, None if it is to stay alone."""
    call = binding.value
    func, args = mod[call.args[0]], items_of(call.args[1].fields)
    is_opaque = int((func.attrs or {}).get("op_pattern", 0)) == OPAQUE
    if is_opaque or is_narrow(func) or has_computed_sizes(call, call.args[1]):
        return None
    operator = operator_of(func, len(args))
    if operator is None:
        return None
    tensors = [a for a in args if isinstance(a.ty, relax.TensorType)]
    pairs = list(zip(tensors, operator.edges, strict=True))
    sources = [(nodes[hash(a)], edge) for a, edge in pairs if hash(a) in nodes]
    reads: dict[object, float] = {}
    for tensor, edge in pairs:
        part = _bytes(tensor.ty) * min(edge.repeats, 1.0)
        reads[hash(tensor)] = max(part, reads.get(hash(tensor), 0.0))
    return _node(index, call.args[0].name_hint, binding, operator, (sources, reads))


def _item(index: int, binding: relax.VarBinding, made: Node) -> Node:
    """Return the node of an item of a tuple that a node makes."""
    reads = {made.key: _bytes(binding.var.ty)}
    return _node(index, made.name, binding, _ITEM, ([(made, _ITEM.edges[0])], reads))


def _node(
    index: int,
    name: str,
    binding: relax.VarBinding,
    operator: Operator,
    inputs: tuple[Sequence[tuple[Node, Edge]], dict[object, float]],
) -> Node:
    ty = binding.var.ty
    tensors = list(ty.fields) if isinstance(ty, ir.TupleType) else [ty]
    shapes = [t.shape.values for t in tensors]
    place = tuple(str(t.vdevice) for t in tensors if t.vdevice)[:1]
    return Node(
        index,
        name,
        binding.var.name,
        operator,
        *inputs,
        hash(binding.var),
        sum(map(elements, shapes)),
        sum(map(_bytes, tensors)),
        place=place,
    )


def _bytes(ty: relax.TensorType) -> float:
    """Return the size of a tensor."""
    return elements(ty.shape.values) * width_of(str(ty.dtype))
