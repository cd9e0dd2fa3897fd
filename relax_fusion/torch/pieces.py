"""Pieces of a graph, compiled by TVM; imported where the disk cache does not have them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_as_graphmodule, topo_sort
from tvm import ir
from tvm.target import Target

from ..entry import build, partition
from ..errors import PipelineError, warn
from ..frontends.imported import with_clipped_indices
from ..report import Report
from ..validation import reason
from .graph import import_graph, refusals
from .messages import LOG, check_strict, verdict
from .options import TorchOptions
from .record import GraphRecord, PieceRecord
from .sizes import Refusal
from .split import operator_name, split

MOST_ROUNDS = 4
"""So often a graph is cut anew without what could not be compiled; then whole pieces are left."""

Made = tuple[PieceRecord, str, Any]
"""How a piece is called, what the report has of it, and its code; None in a dry run."""


def compile_pieces(
    module: GraphModule,
    device: torch.device,
    weights: set[int],
    options: TorchOptions,
    target: Target,
) -> tuple[GraphRecord, list[Any]]:
    """Choose the pieces of a graph, which is not changed, and compile them.

    Where a piece cannot be compiled, the operator at fault is looked for, and it and those like it
    stay in PyTorch; the rest is cut anew.  Returns the pieces with what is left, and their code.

    `device`: where its tensors are.
    `weights`: which arguments are the same tensors in every call.
    Raises `RelaxFusionError` if `options` are strict, and an operator stays in PyTorch.
    """
    compiler = Compiler(module, weights, options, target)
    refused = refusals(module)
    made: dict[tuple[Node, ...], Made] = {}
    for last in (*[False] * MOST_ROUNDS, True):
        pieces, left = split(module, device, refused, options.min_block_size)
        check_strict(options, list(left.values()))
        faults: dict[Node, str] = {}
        for nodes in pieces:
            if nodes in made:
                continue
            try:
                made[nodes] = compiler.compile(nodes)
            except PipelineError:  # an option that the target does not have
                raise
            except Exception as err:  # whatever stands in the way, PyTorch can run it
                LOG.debug("a piece cannot be compiled", exc_info=True)
                found = list(nodes) if last else compiler.at_fault(nodes, err)
                why = f"cannot be compiled: {reason(err)}"
                name = "a piece" if last else f"{len(found)} x {operator_name(found[0])}"
                warn(f"relax_fusion: {name} stays in PyTorch, it {why}")
                faults |= {node: f"{operator_name(node)} {why}" for node in found}
        if last or not faults:
            break
        refused |= faults
    left |= faults
    check_strict(options, list(left.values()))
    pieces = [nodes for nodes in pieces if nodes in made]
    numbers = {node: n for n, node in enumerate(module.graph.nodes)}
    done = [made[nodes] for nodes in pieces]
    record = GraphRecord(
        tuple(tuple(numbers[node] for node in nodes) for nodes in pieces),
        tuple(how for how, _, _ in done),
        tuple(told for _, told, _ in done),
        tuple(left.values()),
    )
    return record, [code for _, _, code in done]


class Compiler:
    """Compiles operators of one graph, and finds those that cannot be compiled."""

    def __init__(
        self, module: GraphModule, weights: set[int], options: TorchOptions, target: Target
    ):
        self._module, self._options, self._target = module, options, target
        arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
        self._fixed = {arguments[n] for n in weights}

    def compile(self, nodes: Sequence[Node]) -> Made:
        """Return the code of some operators, as a piece of the graph."""
        mod, record = self._imported(nodes)
        report = Report()
        pipeline = self._options.pipeline(self._target)
        make: Callable[..., Any] = partition if self._options.dryrun else build
        made = make(mod, self._target, report=report, **pipeline)
        return record, verdict(report), None if self._options.dryrun else made

    def _imported(self, nodes: Sequence[Node]) -> tuple[ir.IRModule, PieceRecord]:
        piece, inputs, _ = fuse_as_graphmodule(self._module, topo_sort(list(nodes)), "piece")
        mod, record = import_graph(piece, lambda n: inputs[n] in self._fixed)
        return with_clipped_indices(mod), record

    def at_fault(self, nodes: Sequence[Node], err: Exception) -> list[Node]:
        """Return the operators of a piece because of which compiling it raised an error."""
        attempt: Callable[..., Any] = self._imported if isinstance(err, Refusal) else self.compile

        def raises(some: list[Node]) -> bool:
            try:
                attempt(some)
            except Exception:  # of any part of TVM, with no common class
                return True
            return False

        node = _at_fault(nodes, raises)
        return [each for each in nodes if _kind(each) == _kind(node)]


def _at_fault(nodes: Sequence[Node], fails: Callable[[list[Node]], bool]) -> Node:
    """Return the operator that fails alone, or else the one from which on nothing compiles.

    Each step halves what is looked at: the first search compiles as many operators as the piece
    has, in all; the second is for an operator that fails beside others only.
    """
    operators = [node for node in nodes if node.target is not operator.getitem]

    def part(first: int, end: int) -> list[Node]:
        chosen = operators[first:end]
        values = [u for n in chosen for u in n.users if u.target is operator.getitem and u in nodes]
        return [*chosen, *values]

    for alone in (True, False):
        first, end = 0, len(operators)
        while end - first > 1:
            middle = (first + end) // 2
            if fails(part(first if alone else 0, middle)):
                end = middle
            else:
                first = middle
        if alone and fails(part(first, end)):
            break
    return operators[first]


def _kind(node: Node) -> str:
    """Return what operators have in common that are compiled alike."""

    def shown(arg: Node) -> str:
        value = arg.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return str(value)
        return f"{value.dtype} {list(value.shape)}"

    return f"{node.target} {torch.fx.map_arg((node.args, node.kwargs), shown)}"
