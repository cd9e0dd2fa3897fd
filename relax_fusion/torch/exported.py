"""An exported program as one compiled function, and how that is called from outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import sympy
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node

from ..entry import build
from ..errors import RelaxFusionError
from ..frontends.experts import in_token_order
from ..frontends.imported import with_clipped_indices
from ..frontends.promotion import written_out
from ..report import Report
from ..validation import reason
from .graph import import_graph, refusals
from .interface import Interface
from .options import TorchOptions
from .pieces import Compiler
from .record import PieceRecord
from .sizes import dtype_name
from .split import is_operator, operator_name
from .writes import write_in_place

_aten = torch.ops.aten
_METADATA = _aten._assert_tensor_metadata.default


def compile_program(
    program: ExportedProgram,
    names: Mapping[str, Any],
    library: Path,
    options: TorchOptions,
    report: Report,
) -> tuple[Interface, PieceRecord]:
    """Compile a program.

    `program`: written out; it is changed.
    `names`: what the module and its arguments are called: ``module``, ``parameters``, ``places``,
    ``keywords`` and ``names`` of the interface.
    `library`: the file that gets the code.
    `options`: how it is compiled.
    `report`: gets what was fused.
    Raises `RelaxFusionError` if an operator cannot be compiled; the message names each.
    """
    graph = program.graph_module
    signature = program.graph_signature
    mutated, results = _with_mutations(graph, program)
    held = [spec.target for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in arguments]
    device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
    target = options.target_for(device)
    # says again of a tensor what tracing found, and calls are checked for
    for node in graph.graph.find_nodes(op="call_function", target=_METADATA):
        graph.graph.erase_node(node)
    in_token_order(graph)
    written_out(graph)
    if left := refusals(graph):
        told = "; ".join(f"{node.name}: {why}" for node, why in list(left.items())[:8])
        raise RelaxFusionError(f"{len(left)} operators cannot be compiled: {told}")
    fixed = set(range(len(held))) - {n for n, _ in mutated}
    try:
        mod, record = import_graph(graph, fixed.__contains__, program.range_constraints)
        mod = with_clipped_indices(mod)
        executable = build(mod, target, report=report, **options.pipeline(target))
    except RelaxFusionError:
        raise
    except Exception as err:  # of any part of TVM, with no common class
        operators = [node for node in graph.graph.nodes if is_operator(node)]
        compiler = Compiler(graph, fixed, options, target)
        found = compiler.at_fault(operators, err) if operators else []
        name = f"{len(found)} x {operator_name(found[0])}" if found else "the module"
        raise RelaxFusionError(f"{name} cannot be compiled: {reason(err)}") from err
    executable.export_library(str(library))
    inputs = values[len(held) :]
    interface = Interface(
        device=str(device),
        held=tuple(str(name) for name in held),
        shapes=tuple(_limits(value, program.range_constraints) for value in inputs),
        symbols=tuple(tuple(map(_symbol, getattr(value, "shape", ()))) for value in inputs),
        dtypes=tuple(dtype_name(v.dtype) if isinstance(v, torch.Tensor) else "" for v in inputs),
        constants=tuple(_constant(value) for value in inputs),
        mutated=tuple(mutated),
        results=results,
        replay=options.use_cuda_graph,
        **names,
    )
    return interface, record


def _with_mutations(
    module: GraphModule, program: ExportedProgram
) -> tuple[list[tuple[int, int]], tuple[tuple[bool, Any], ...]]:
    """Write rows of caches in place.

    Returns which arguments take which other results, and of each result of the program whether it
    is a tensor, and what it is if not.
    """
    graph = module.graph
    arguments = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    by_target = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs}
    output = graph.output_node()
    user = []
    with graph.inserting_before(output):
        made = cast("tuple[Any, ...]", output.args[0])
        for spec, value in zip(program.graph_signature.output_specs, made, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                user.append(value)
                continue
            name = spec.target if spec.kind is OutputKind.USER_INPUT_MUTATION else None
            into = arguments[name or by_target[spec.target]]
            graph.call_function(_aten.copy_.default, (into, value)).meta["val"] = value.meta["val"]
    results = tuple((True, None) if isinstance(v, Node) else (False, _constant(v)) for v in user)
    user = [value for value in user if isinstance(value, Node)]
    output.args = (tuple(user),)
    write_in_place(module)
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    places = {node: n for n, node in enumerate(arguments.values())}
    mutated = [(places[copy.args[0]], n) for n, copy in enumerate(copies)]
    output.args = ((*(copy.args[1] for copy in copies), *user),)
    for copy in copies:
        graph.erase_node(copy)
    module.recompile()
    return mutated, results


def _limits(value: Any, ranges: Mapping[Any, Any]) -> tuple[tuple[int, int | None], ...]:
    """Return the least and the largest size of each dimension of a fake tensor."""
    found = []
    for size in value.shape if isinstance(value, torch.Tensor) else ():
        if isinstance(size, int):
            found.append((size, size))
            continue
        expr = size.node.expr
        known = ranges[expr] if expr in ranges else size.node.shape_env.bound_sympy(expr)
        most = int(known.upper) if known.upper.is_Integer else None
        found.append((max(int(known.lower), 1), most))
    return tuple(found)


def _symbol(size: Any) -> tuple[str, int, int]:
    """Return a symbol, a factor and an offset that make a size; the symbol is empty if none do."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
    if len(expr.free_symbols) != 1:
        return "", 0, 0
    (symbol,) = expr.free_symbols
    factor, offset = expr.coeff(symbol, 1), expr.coeff(symbol, 0)
    if sympy.expand(factor * symbol + offset - expr) != 0 or not (factor.is_Integer and factor > 0):
        return "", 0, 0
    return str(symbol), int(factor), int(offset)


def _constant(value: Any) -> bool | int | float | str | None:
    if value is None or isinstance(value, torch.Tensor):
        return None
    if not isinstance(value, bool | int | float | str):
        raise RelaxFusionError(
            f"an argument or a result is {value!r}; must be a tensor, a number or a text"
        )
    return value
