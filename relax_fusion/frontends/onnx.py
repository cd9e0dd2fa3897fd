"""Models in ONNX, through TVM's importer."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from traceback import walk_tb

import numpy as np
import onnx
from onnx.inliner import inline_local_functions
from onnx.numpy_helper import to_array
from tvm import ir, relax
from tvm.relax.frontend.onnx import from_onnx

from ..canonical import CANONICAL
from ..errors import ModelFileError
from ..matching.pattern import is_call
from ..transforms.modules import with_functions
from ..tvm_ir import GenericConst, structural_map
from ..validation import reason, shown
from .imported import FUNCTION, ImportedModel, signature_of, with_clipped_indices

LARGEST_CONSTANT = 4096
"""A constant of at most this many elements stays in the code: passes look into such ones."""

MOST_NODES = 1_000_000
"""A graph, with functions in the places of their calls, has at most this many nodes."""

MOST_TERMS = 100
"""The expression of a size has at most this many names and numbers."""

_READERS = (
    *("relax.matmul", "relax.take", "relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d"),
    *("relax.nn.conv1d_transpose", "relax.nn.conv2d_transpose", "relax.nn.conv3d_transpose"),
)
_MOVEMENTS = (
    *("relax.permute_dims", "relax.reshape", "relax.astype"),
    *("relax.expand_dims", "relax.squeeze", "relax.broadcast_to"),
)


def read_onnx(path: Path) -> ImportedModel:
    """Import an ONNX file.

    Constants of more than `LARGEST_CONSTANT` elements that are factors of a matmul, kernels of a
    convolution or tables become weights; the others stay in the module.

    `path`: the file; data that it keeps in others is read from beside it.
    Raises `ModelFileError` if the file cannot be read, or holds what TVM's importer does not take.
    """
    try:
        model = onnx.load(path)
    except Exception as err:  # of protobuf and of onnx, with no common class
        external = isinstance(err, onnx.checker.ValidationError)  # of data in other files
        why = "it is truncated, or another file"
        if external:
            why = "data that it keeps in other files is missing"
        raise ModelFileError(f"{path} cannot be read as ONNX ({reason(err)}); {why}") from err
    if not model.graph.output:
        raise ModelFileError(f"{path} holds no ONNX graph with outputs; it is truncated, or empty")
    remedy = fixing_sizes(model, path)  # by the names that the file has
    try:
        return _imported(model)
    except ModelFileError as err:
        raise ModelFileError(f"{path}: {err}") from err
    except Exception as err:  # whatever stands in the way of TVM's importer
        why = refusal(err, remedy)
        raise ModelFileError(f"TVM's importer does not take {path}: {why}") from err


def _imported(model: onnx.ModelProto) -> ImportedModel:
    if model.functions:
        functions = {(f.domain, f.name, f.overload): f.node for f in model.functions}
        nodes = _inlined(model.graph.node, functions, {})
        if nodes > MOST_NODES:
            raise ModelFileError(
                f"its functions come to {nodes} nodes where they are called; at most {MOST_NODES} "
                "are imported"
            )
        model = inline_local_functions(model)
    _check_opset(model)
    names = _named(model)
    mod = CANONICAL["MultiplyBytes"]()(from_onnx(model))  # sums of weights are constants as yet
    signature = signature_of(mod, names, [output.name for output in model.graph.output])
    mod, weights = _with_weights(with_clipped_indices(mod), _names(model))
    return ImportedModel(mod, signature, weights)


def _check_opset(model: onnx.ModelProto) -> None:
    """Refuse versions of operators that are not known, for which TVM takes others."""
    newest = onnx.defs.onnx_opset_version()
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), None)
    if opset is None or not 1 <= opset <= newest:
        told = "names no opset of ai.onnx" if opset is None else f"is of opset {opset}"
        raise ModelFileError(f"it {told}; must be 1 to {newest}")


def _inlined(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[tuple[str, str, str], Iterable[onnx.NodeProto]],
    known: dict[tuple[str, str, str], int],
) -> int:
    """Count nodes, those of functions wherever they are called."""
    total = 0
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        if key in functions and key not in known:
            known[key] = 0  # in a circle, which the inliner refuses
            known[key] = _inlined(functions[key], functions, known)
        graphs = [graph for a in node.attribute for graph in (a.g, *a.graphs)]
        inner = sum(_inlined(graph.node, functions, known) for graph in graphs)
        total += 1 + known.get(key, 0) + inner
    return total


def _named(model: onnx.ModelProto) -> list[str]:
    """Return the names of the inputs; their axes without a size or a name get one."""
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [taken for taken in model.graph.input if taken.name not in stored]
    for taken in inputs:
        if taken.type.WhichOneof("value") != "tensor_type":
            raise ModelFileError(f"the input {taken.name!r} is no tensor")
    dims = [(t, n, d) for t in inputs for n, d in enumerate(t.type.tensor_type.shape.dim)]
    alone = {dim.dim_param for *_, dim in dims if dim.dim_param.isidentifier()}
    for taken, axis, dim in dims:
        words = re.split(r"[-+*/ ]+", dim.dim_param)
        if len(words) > MOST_TERMS:  # TVM follows each by a call
            raise ModelFileError(
                f"a size of the input {taken.name!r} has {len(words)} terms; at most {MOST_TERMS} "
                "are imported"
            )
        if dim.dim_value or all(word in alone or word.isdecimal() for word in words):
            continue
        stem = re.sub(r"\W", "_", dim.dim_param or f"{taken.name}_{axis}")
        dim.dim_param = stem if stem.isidentifier() else f"size_{stem}"
    return [taken.name for taken in inputs]


def _names(model: onnx.ModelProto) -> dict[bytes, str]:
    """Return the names of large initialisers by what they hold."""
    large = (t for t in model.graph.initializer if prod(t.dims) > LARGEST_CONSTANT)
    return {_digest(to_array(tensor)): tensor.name for tensor in large}


def _digest(array: np.ndarray) -> bytes:
    header = f"{array.dtype} {array.shape}".encode()
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.blake2b(content, key=header[:64]).digest()


def _with_weights(
    mod: ir.IRModule, names: Mapping[bytes, str]
) -> tuple[ir.IRModule, dict[str, np.ndarray]]:
    """Make parameters of the large constants that `_READERS` read, and return what they hold."""
    func = mod[FUNCTION]
    weights: dict[str, np.ndarray] = {}
    params: dict[GenericConst, relax.Var] = {}
    for const in _read_constants(func):
        array = const.value.numpy()
        if array.size > LARGEST_CONSTANT and const not in params:
            name = names.get(_digest(array), f"weight_{len(weights)}")
            while name in weights:
                name += "_"
            weights[name] = array
            params[const] = relax.Var(re.sub(r"\W", "_", name), const.ty)
    body = structural_map(func.body, (GenericConst, lambda c: params.get(c, c)))
    every = [*func.params, *params.values()]
    new = relax.Function(every, body, func.ret_ty, func.is_pure, func.attrs)
    return with_functions(mod, {mod.get_global_var(FUNCTION): new}), weights


def _read_constants(func: relax.Function) -> Iterator[GenericConst]:
    """Return the constants that stand, moved or not, as operands of `_READERS`."""
    bindings = [b for block in func.body.blocks for b in block.bindings]
    values = {b.var: b.value for b in bindings if isinstance(b, relax.VarBinding)}
    for binding in bindings:
        value = values.get(binding.var)
        for arg in value.args if is_call(value, *_READERS) else ():
            arg = values.get(arg, arg) if isinstance(arg, relax.Var) else arg
            while is_call(arg, *_MOVEMENTS):
                arg = arg.args[0]
                arg = values.get(arg, arg) if isinstance(arg, relax.Var) else arg
            if isinstance(arg, GenericConst) and hasattr(arg.value, "numpy"):
                yield arg


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
