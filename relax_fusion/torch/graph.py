"""From a graph of ATen operators to a function of Relax.

The importer is the one of `relax_fusion.frontends`.  A graph of `torch.compile` has no program
around it, sizes that are arguments, and inputs of any strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from tvm import ir, relax, tirx

from ..frontends.torch import Importer, array_of
from ..matching.shapes import same_shape, shape_of
from ..validation import reason
from .program import MAIN
from .record import PieceRecord, inverse, is_row_major, order_of
from .sizes import Refusal, Sizes, bounds, dtype_name, loose_sizes, tensor_type
from .split import DTYPES, is_operator, operator_name
from .unfit import counts_from_the_start, indices_of, unfit
from .write_kernel import write_call
from .writes import chosen_rows, write_rows


class Translator(Importer):
    """Translates the operators of one piece, whose sizes it knows."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.block_builder = relax.BlockBuilder()
        self._sizes = sizes

    def create_convert_map(self) -> dict[str, Callable[[Node], relax.Expr]]:
        """Return what converts a node; shapes are those that PyTorch found."""
        known = super().create_convert_map()
        shaped = ("view", "reshape", "_unsafe_view", "_reshape_copy", "unflatten")
        return {
            **known,
            **{f"{name}.default": self._reshape for name in shaped},
            "unflatten.int": self._reshape,
            "expand.default": self._expand,
            "alias.default": lambda node: self.env[node.args[0]],
            "detach.default": lambda node: self.env[node.args[0]],
            "index_put.default": self._index_put,
            write_rows.__name__: self._write,
        }

    def _shape(self, node: Node) -> list[Any]:
        return [self._sizes.expr(size) for size in node.meta["val"].shape]

    def _reshape(self, node: Node) -> relax.Var:
        return self._emitted(relax.op.reshape(self.env[node.args[0]], self._shape(node)))

    def _expand(self, node: Node) -> relax.Var:
        return self._emitted(relax.op.broadcast_to(self.env[node.args[0]], self._shape(node)))

    def _write(self, node: Node) -> relax.Var:
        cache, axis, rows, values = self.retrieve_args(node)
        return write_call(self.block_builder, cache, axis, rows, values, in_place=True)

    def _index_put(self, node: Node) -> relax.Var:
        found = chosen_rows(node)
        if found is None:
            return super()._index_put(node)
        axis, rows = found
        cache, values = self.env[node.args[0]], self.env[node.args[2]]
        args = (cache, axis, self.env[rows], values)
        return write_call(self.block_builder, *args, in_place=False)

    def translate(self, module: GraphModule, node: Node) -> None:
        """Translate a node; arguments and sizes are known without.

        Raises `Refusal` if the importer does not take it.
        """
        if node.op == "get_attr":
            self.env[node] = _constant(module, node)
        elif is_operator(node):
            self.env[node] = self._translated(node)

    def _translated(self, node: Node) -> Any:
        for arg in node.all_input_nodes:
            if isinstance(value := arg.meta.get("val"), torch.SymInt):
                self.env[arg] = self._sizes.expr(value)
        name = getattr(node.target, "__name__", str(node.target))
        if name not in self.convert_map:
            raise Refusal(f"TVM's importer does not know {node.target}")
        if why := unfit(node):
            raise Refusal(why)
        if unknown := [a.name for a in node.all_input_nodes if self.env.get(a) is None]:
            raise Refusal(f"{operator_name(node)} reads {unknown[0]}, which has no form in Relax")
        try:
            with self._counted_from_the_start(node):
                made = self.convert_map[name](node)
        except Refusal:
            raise
        except Exception as err:  # of TVM's importer, with no common class
            raise Refusal(f"TVM's importer raises {reason(err)}") from err
        self._check(node, made)
        return self._sized(node.meta["val"], made)

    def _sized(self, value: Any, made: Any) -> Any:
        """Give a result the sizes that PyTorch knows, where Relax finds others or none.

        ``x[:n]`` of 64 rows has ``min(n, 64)`` for Relax, and nothing that reads it a known shape.
        """
        if isinstance(value, torch.Tensor) and isinstance(made, relax.Expr):
            with suppress(Refusal):
                shape = [self._sizes.expr(size) for size in value.shape]
                if not same_shape(shape_of(made), shape):
                    return self._emitted(relax.op.reshape(made, shape))
        return made

    @contextmanager
    def _counted_from_the_start(self, node: Node) -> Iterator[None]:
        """Let an operator see indices that count from the end as such that count from the start.

        TVM takes an index below zero for the first place, or reads in front of the tensor.
        """
        changed: dict[Node, Any] = {}
        for index, size in indices_of(node):
            if index in changed:
                raise Refusal("one tensor of indices looks up along dimensions of several sizes")
            changed[index] = self.env[index]
            self.env[index] = self._within(self.env[index], self._sizes.expr(size), index)
        yield
        self.env.update(changed)

    def _within(self, index: relax.Expr, size: Any, node: Node) -> relax.Expr:
        if not isinstance(size, int):
            if counts_from_the_start(node):
                return index
            raise Refusal("an index may count from the end of a dimension of symbolic size")
        dtype = str(index.ty.dtype)
        zero, whole, last = (relax.const(n, dtype) for n in (0, size, size - 1))
        wrapped = relax.op.where(relax.op.less(index, zero), relax.op.add(index, whole), index)
        return self._emitted(relax.op.maximum(relax.op.minimum(wrapped, last), zero))

    def _check(self, node: Node, made: Any) -> None:
        """Refuse what has another dtype or shape than in PyTorch."""
        value = node.meta["val"]
        if not isinstance(value, tuple | list):
            if isinstance(value, torch.Tensor) and isinstance(made, relax.Expr):
                self._check_type(value, made.ty)
            return
        places: list[Any] = [u.args[1] for u in node.users if u.target is operator.getitem]
        if isinstance(made, relax.Expr) and isinstance(made.ty, relax.TensorType):
            if any(places):
                raise Refusal(f"TVM's importer gives the first result of {node.target} only")
            self._check_type(value[0], made.ty)
            return
        types = made.ty.fields if isinstance(made, relax.Var) else [each.ty for each in made]
        for place in places:
            self._check_type(value[place], types[place])

    def _check_type(self, value: Any, made: Any) -> None:
        want, got = dtype_name(value.dtype), str(getattr(made, "dtype", ""))
        if got != want:
            raise Refusal(f"TVM's importer gives {got} in place of {want}")
        shape = getattr(made, "shape", None)
        if not isinstance(shape, relax.ShapeExpr):
            return
        sizes = [int(s) if isinstance(s, tirx.IntImm) else None for s in shape.values]
        fits = len(sizes) == value.dim() and all(
            got is None or not isinstance(want, int) or got == want
            for got, want in zip(sizes, value.shape, strict=True)
        )
        if not fits:
            raise Refusal(f"TVM's importer gives the shape {shape}, not {list(value.shape)}")


def import_graph(
    module: GraphModule,
    is_weight: Callable[[int], bool],
    ranges: Mapping[sympy.Symbol, Any] | None = None,
) -> tuple[ir.IRModule, PieceRecord]:
    """Translate a graph of ATen operators; its function is `MAIN`, and returns a tuple.

    `module`: its nodes have their values, fake, as ``meta["val"]``; casts are written out.
    `is_weight`: tells whether the argument of that number is the same tensor in every call.
    `ranges`: the ranges of symbolic sizes, where they are others than tracing found.
    Raises `Refusal` if an operator, a size or a dtype has no form in Relax.
    """
    nodes = list(module.graph.nodes)
    arguments = [node for node in nodes if node.op == "placeholder"]
    outputs = _outputs(nodes[-1])
    tensors = [n for n, node in enumerate(arguments) if is_tensor(node)]
    caches = {node.args[0] for node in nodes if node.target is write_rows}
    weights = [n for n in tensors if is_weight(n) and arguments[n] not in caches]
    inputs = [*(n for n in tensors if n not in weights), *weights]
    values = [arguments[n].meta["val"] for n in inputs]

    sizes = Sizes()
    taken = [
        tuple(range(value.dim())) if arguments[n] in caches else order_of(value)
        for n, value in zip(inputs, values, strict=True)
    ]
    returned = [order_of(node.meta["val"]) for node in outputs]
    params = [
        relax.Var(arguments[n].name, tensor_type(value, order, sizes))
        for n, value, order in zip(inputs, values, taken, strict=True)
    ]
    loose, shape = loose_sizes(arguments, params, sizes)
    at = len(inputs) - len(weights)
    signature = [*params[:at], *shape, *params[at:]]
    attrs = {"num_input": at + len(shape), **bounds(arguments, sizes, ranges or {})}
    translator = Translator(sizes)
    builder = translator.block_builder
    with builder.function(MAIN, signature, attrs):
        with builder.dataflow():
            for n, var, order in zip(inputs, params, taken, strict=True):
                translator.env[arguments[n]] = _permuted(builder, var, inverse(order))
            for node in nodes[:-1]:
                translator.translate(module, node)
            made = [translator.env[node] for node in outputs]
            made = [_permuted(builder, v, order) for v, order in zip(made, returned, strict=True)]
            # written in place, whether or not the results depend on it
            made += [translator.env[node] for node in nodes if node.target is write_rows]
            result = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(result)
    record = PieceRecord(
        tuple(inputs),
        len(weights),
        loose,
        tuple(taken),
        tuple(returned),
        tuple(place for place, n in enumerate(inputs) if arguments[n] in caches),
        tuple(n for n, node in enumerate(outputs) if not _depends(node)),
    )
    return builder.get(), record


def refusals(module: GraphModule) -> dict[Node, str]:
    """Return why TVM's importer does not take operators of a graph, each looked at by itself."""
    sizes = Sizes()
    translator = Translator(sizes)
    found, builder = {}, translator.block_builder
    with builder.function(MAIN, []):
        with builder.dataflow():
            for node in module.graph.nodes:
                if node.op == "output":
                    break
                try:
                    translator.translate(module, node)
                except Refusal as err:
                    found[node] = str(err)
                if node not in translator.env:
                    with suppress(Refusal):  # what takes it is refused then, too
                        translator.env[node] = _unknown(node, sizes)
            result = builder.emit_output(relax.Tuple([]))
        builder.emit_func_output(result)
    return found


def is_tensor(node: Node) -> bool:
    """Tell whether a node's value is a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _outputs(node: Node) -> list[Node]:
    """Return what a graph returns, one or several."""
    found: Any = node.args[0]
    return list(found) if isinstance(found, tuple | list) else [found]


def _constant(module: GraphModule, node: Node) -> relax.Constant:
    """Return a tensor that is a part of the graph."""
    found: Any = module
    for name in str(node.target).split("."):
        found = getattr(found, name)
    if not isinstance(found, torch.Tensor):
        raise Refusal(f"{node.target} is no tensor")
    return relax.const(array_of(found))


def _unknown(node: Node, sizes: Sizes) -> Any:
    """Return a variable in the place of a value that could not be translated; None for others."""

    def one(value: Any) -> relax.Var | None:
        if not isinstance(value, torch.Tensor) or value.dtype not in DTYPES:
            return None
        return relax.Var(node.name, tensor_type(value, tuple(range(value.dim())), sizes))

    value = node.meta.get("val")
    return [one(each) for each in value] if isinstance(value, tuple | list) else one(value)


def _permuted(builder: relax.BlockBuilder, value: relax.Expr, axes: tuple[int, ...]) -> relax.Expr:
    if is_row_major(axes):
        return value
    return builder.emit(relax.op.permute_dims(value, list(axes)))


def _depends(node: Node) -> bool:
    """Tell whether a node's value depends on an argument that is a tensor."""
    seen, todo = set(), [node]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.op == "placeholder" and is_tensor(each):
            return True
        todo += each.all_input_nodes
    return False
