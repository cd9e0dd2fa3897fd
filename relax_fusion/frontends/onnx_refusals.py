"""What TVM's importer says of an ONNX model that it refuses: at which node, and what may help."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import walk_tb

import onnx

from ..validation import shown
from .imported import reason

_LOOKING_UP = ("from_onnx", "_construct_nodes", "_convert_subgraph")
"""Functions of the importer that look up tensors by name."""


def refusal(err: Exception, remedy: str) -> str:
    """Say which node the importer raised `err` at, and why.

    `remedy` is added where sizes may be the cause.
    """
    walked = [frame for frame, _ in walk_tb(err.__traceback__)]
    frames = {frame.f_code.co_name: frame.f_locals for frame in walked}
    if "_check_for_unsupported_ops" in frames:
        return _unknown(**frames["_check_for_unsupported_ops"])
    importer = frames.get("from_onnx", {})
    if "input_list" in importer:
        importer["self"].bb._end_block()  # an open one would be told of on stderr
    at = frames.get("_convert_subgraph", frames.get("_construct_nodes"))
    where = f"{_told(at['node'])}: " if at else ""
    if isinstance(err, KeyError) and walked[-1].f_code.co_name in _LOOKING_UP:
        return f"{where}nothing computes {shown(err.args[0])}"
    by_sizes = at and not isinstance(err, LookupError | NotImplementedError)
    return f"{where}{reason(err)}{remedy if by_sizes else ''}"


def _unknown(graph: onnx.GraphProto, unsupported_ops: Iterable[str], **_: object) -> str:
    """Name the operators that the importer does not have, and the first node of each."""
    every = list(_nodes(graph))
    found = []
    for operator in sorted(unsupported_ops):
        first, *others = (node for node in every if node.op_type == operator)
        found.append(f"{_told(first)}{f' and {len(others)} more' if others else ''}")
    return f"it has no operator for {'; '.join(found)}"


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Return the nodes of a graph, and of the graphs in them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _told(node: onnx.NodeProto) -> str:
    name = f" {shown(node.name)}" if node.name else ""
    inputs, outputs = (", ".join(filter(None, names)) for names in (node.input, node.output))
    return f"{node.op_type}{name} ({inputs} -> {outputs})"


def fixing_sizes(model: onnx.ModelProto, path: Path) -> str:
    """Name the symbolic sizes of a model, and the command that fixes one; empty without any."""
    stored = {tensor.name for tensor in model.graph.initializer}
    named: dict[str, None] = {}
    unnamed: dict[str, str] = {}
    for taken in model.graph.input:
        dims = taken.type.tensor_type.shape.dim if taken.name not in stored else ()
        named.update(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))
        if any(not dim.dim_param and not dim.HasField("dim_value") for dim in dims):
            unnamed[taken.name] = ",".join(str(d.dim_value) if d.dim_value else "N" for d in dims)
    if not named and not unnamed:
        return ""
    if named:
        name = next(iter(named))
        options = f"--dim_param {shlex.quote(name)} --dim_value N"
    else:
        name, shape = next(iter(unnamed.items()))
        options = f"--input_name {shlex.quote(name)} --input_shape {shape}"
    sizes = ", ".join([*map(shown, named), *(f"axes of {shown(name)}" for name in unnamed)])
    source, fixed = (shlex.quote(str(p)) for p in (path, path.with_stem(f"{path.stem}-fixed")))
    return (
        f"; its symbolic sizes ({sizes}) may be why: fix them one by one with `python -m "
        f"onnxruntime.tools.make_dynamic_shape_fixed {options} {source} {fixed}`, for --bound only "
        "bounds them"
    )
