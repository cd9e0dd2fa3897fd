"""Programs that ``torch.export`` made, through TVM's importer."""

from __future__ import annotations

import logging
import operator
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import tvm
from tvm import ir, relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from ..errors import MissingPackageError, ModelFileError
from ..matching.pattern import is_call
from ..matching.shapes import dtype_of, same_shape
from ..mend.nan import keys_of
from ..validation import reason
from .complex_numbers import written_as_pairs
from .experts import GROUPED, in_token_order
from .imported import FUNCTION, ImportedModel, signature_of, with_clipped_indices
from .promotion import decompositions, written_out

_OUTPUT = re.compile(rb'\\"type\\": \\"(transformers[\w.]*)\.\w+\\"')
"""The module of a type in JSON within JSON, as `torch.export.save` writes what is returned."""

_HALVES = ("float16", "bfloat16")


class _Builder(relax.BlockBuilder):
    """Gives results of half or double precision, or integers, to products of such."""

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        """Bind a value."""
        if not isinstance(expr, relax.Call) or getattr(expr.attrs, "out_dtype", None) != "float32":
            return super().emit(expr, name_hint)
        operands = {dtype_of(arg) for arg in expr.args}
        integers = all(dtype.startswith(("int", "uint")) for dtype in operands)
        if len(operands) != 1 or not (operands <= {*_HALVES, "float64"} or integers):
            return super().emit(expr, name_hint)
        if is_call(expr, "relax.matmul"):
            return super().emit(relax.op.matmul(*expr.args), name_hint)
        if operands == {"float64"}:
            return super().emit(expr, name_hint)
        return super().emit(relax.op.astype(super().emit(expr, name_hint), operands.pop()))


class Importer(ExportedProgramImporter):
    """TVM's importer, but for the dtype of products, and with some operators that it lacks."""

    def create_convert_map(self) -> dict[str, Callable[[torch.fx.Node], relax.Expr]]:
        """Return what converts a node, by the name of its function."""
        known = super().create_convert_map()
        return {
            **known,
            "amax.default": lambda node: self._extreme(relax.op.max, node),
            "amin.default": lambda node: self._extreme(relax.op.min, node),
            "prod.dim_int": known["prod.default"],
            "sort.default": self._sort,
            "sort.stable": self._sort,
            "argsort.default": lambda node: self._sort(node, places_only=True),
            "topk.default": lambda node: known["topk.default"](_sorted(node)),
            "empty.memory_format": self._empty_of,
            "histc.default": self._histogram,
            **{f"{name}.default": self._grouped_matmul for name in GROUPED},
            **dict.fromkeys(("reshape.default", "view.default"), self._reshaped),
            **{
                f"__{name[0]}shift__.{kind}": self._binary_op(op, scalar)
                for name, op, scalar in (
                    ("left", relax.op.left_shift, operator.lshift),
                    ("right", relax.op.right_shift, operator.rshift),
                )
                for kind in ("Scalar", "Tensor")
            },
        }

    @staticmethod
    def _convert_pytorch_tensor_to_tvm(tensor_value: torch.Tensor) -> tvm.runtime.Tensor:
        """Return a weight or a constant; of a view that negates another tensor, its own numbers."""
        convert = ExportedProgramImporter._convert_pytorch_tensor_to_tvm
        return convert(tensor_value.resolve_conj().resolve_neg())

    def _sort(self, node: torch.fx.Node, *, places_only: bool = False) -> relax.Var:
        """Sort by integers: TVM's order of floats is none where NaN is among them."""
        given = dict(zip(("x", "dim", "descending"), node.args, strict=False)) | dict(node.kwargs)
        x, builder = self.env[node.args[0]], self.block_builder
        dim, descending = given.get("dim", -1), given.get("descending", False)
        keys = builder.emit_te(keys_of, x, primfunc_name_hint="keys")
        places = builder.emit(relax.op.argsort(keys, dim, descending, dtype="int64"))
        if places_only:
            return places
        values = builder.emit(relax.op.gather_elements(x, places, axis=dim))
        return builder.emit(relax.Tuple([values, places]))

    def _reshaped(self, node: torch.fx.Node) -> relax.Var:
        """Reshape; TVM compares symbolic sizes in Python, which they refuse."""
        x, dims = self.retrieve_args(node)
        shape = self.shape_of(x)
        same = same_shape(list(shape), list(dims))
        return x if same else self._emit_torch_reshape(x, dims)

    def _empty_of(self, node: torch.fx.Node) -> relax.Var:
        """Make a tensor of symbolic sizes, which TVM's own refuses."""
        shape, dtype = self.retrieve_args(node)[0], str(node.meta["val"].dtype)
        return self._emitted(relax.op.zeros(shape, dtype.removeprefix("torch.")))

    def _histogram(self, node: torch.fx.Node) -> relax.Var:
        """Count how many numbers are in each of the bins between two numbers."""
        given: list[Any] = [*self.retrieve_args(node)]
        given += (100, 0, 0)[len(given) - 1 :]
        x, bins, least, most = given
        if least >= most:
            raise ValueError(f"histc from {least} to {most}: bins of the numbers' own range")
        emit, op, dtype = self._emitted, relax.op, dtype_of(x)
        number = partial(relax.const, dtype=dtype)
        place = emit(op.multiply(op.subtract(x, number(least)), number(bins / (most - least))))
        place = emit(op.minimum(op.floor(place), number(bins - 1)))
        inside = emit(op.less_equal(x, number(most)))
        place = emit(op.where(inside, place, number(-1)))
        hits = emit(op.equal(op.expand_dims(place, 1), number(np.arange(bins))))
        return emit(op.sum(op.astype(hits, dtype), axis=0))

    def _grouped_matmul(self, node: torch.fx.Node) -> relax.Var:
        """Multiply each row by the matrix of its group; rows behind the last group are zero."""
        x, weight, ends = (self.env[arg] for arg in node.all_input_nodes)
        emit, op = self._emitted, relax.op
        groups = int(self.shape_of(weight)[0])
        places = emit(op.arange(0, self.shape_of(x)[0], 1, dtype_of(ends)))
        passed = emit(op.less_equal(op.expand_dims(ends, 0), op.expand_dims(places, 1)))
        group = emit(op.sum(op.astype(passed, "int64"), axis=1))
        known = emit(op.minimum(group, relax.const(groups - 1, "int64")))
        product = emit(op.matmul(op.expand_dims(x, 1), op.take(weight, known, axis=0)))
        grouped = emit(op.expand_dims(op.less(group, relax.const(groups, "int64")), 1))
        return emit(op.where(grouped, op.squeeze(product, [1]), relax.const(0, dtype_of(x))))

    def _emitted(self, expr: relax.Expr) -> relax.Var:
        return self.block_builder.emit(expr)

    def _extreme(self, op: Callable[..., relax.Call], node: torch.fx.Node) -> relax.Var:
        given: list[Any] = [*self.retrieve_args(node), *([], False)[len(node.args) - 1 :]]
        return self._emitted(op(given[0], given[1] or None, keepdims=given[2]))

    @property
    def block_builder(self) -> relax.BlockBuilder:
        """What emits the calls."""
        assert self._builder is not None, "it is there once a module is begun"
        return self._builder

    @block_builder.setter
    def block_builder(self, builder: relax.BlockBuilder | None) -> None:
        self._builder = None if builder is None else _Builder()


def _sorted(node: torch.fx.Node) -> torch.fx.Node:
    """Ask for a sorted result, where any order will do."""
    node.args = (*node.args[:4], *(True for _ in node.args[4:]))
    return node


@contextmanager
def _copying_views(graph: torch.fx.Graph) -> Iterator[None]:
    """Have views copy where they must, as long as the graph is decomposed.

    Attention is decomposed to a layout that is not that of its kernel, by which a model may view
    it.
    """
    aten = torch.ops.aten
    views = graph.find_nodes(op="call_function", target=aten.view.default)
    try:
        for node in views:
            node.target = aten.reshape.default
        yield
    finally:
        for node in views:
            node.target = aten.view.default


def from_exported_program(
    program: torch.export.ExportedProgram,
    *,
    keep_params_as_input: bool = False,
    unwrap_unit_return_tuple: bool = False,
) -> ir.IRModule:
    """Import a program as `tvm.relax.frontend.torch.from_exported_program` does.

    TVM 0.27 gives every matmul and convolution a float32 result.  In a model of half precision,
    biases do not fit it then, and what follows is float32 as well.  Here results have the dtype of
    their operands, as in PyTorch.  A pass could not tell afterwards which values were meant to be
    float32.  Operators on integers, booleans and several dtypes give what they give in PyTorch:
    TVM 0.27 divides integers as integers, and takes ``x > 0.5`` for ``x > 0`` where x is one.

    Parameters
    ----------
    program : torch.export.ExportedProgram
        What ``torch.export.export`` returned.
    keep_params_as_input : bool
        Whether weights are parameters of the function, instead of constants; their values are then
        its attribute ``params``, for `tvm.relax.frontend.detach_params`.
    unwrap_unit_return_tuple : bool
        Whether a single result is returned as it is, instead of as a tuple.

    Returns
    -------
    IRModule
        Its function is ``main``.
    """
    with _copying_views(program.graph):
        program = program.run_decompositions(decompositions())
    written_as_pairs(program.graph_module)
    in_token_order(program.graph_module)
    written_out(program.graph_module)
    return Importer().from_exported_program(
        program, keep_params_as_input, unwrap_unit_return_tuple, False, None
    )


def read_exported(path: Path) -> ImportedModel:
    """Import a file that ``torch.export.save`` wrote.

    PyTorch unpickles parts of such files: open those only whose origin you trust.

    `path`: the file.
    Raises `MissingPackageError` if it holds a model of transformers, which is not installed.
    Raises `ModelFileError` if the file cannot be read, or holds what TVM's importer does not take.
    """
    if not zipfile.is_zipfile(path):
        raise ModelFileError(
            f"{path} cannot be read as a program of torch.export (it is no archive); it is "
            "truncated, or another file"
        )
    _import_outputs(path)
    logger = logging.getLogger("torch.export")
    disabled = logger.disabled
    logger.disabled = True  # it would print tracebacks of what is raised here
    try:
        program = torch.export.load(path)
    except Exception as err:  # of zipfile, pickle, json and torch, with no common class
        raise ModelFileError(
            f"{path} cannot be read as a program of torch.export ({reason(err)}); it is truncated, "
            "or another file"
        ) from err
    finally:
        logger.disabled = disabled
    try:
        return _imported(program)
    except ModelFileError as err:
        raise ModelFileError(f"{path}: {err}") from err
    except Exception as err:  # whatever stands in the way of TVM's importer
        raise ModelFileError(f"TVM's importer does not take {path}: {reason(err)}") from err


def _import_outputs(path: Path) -> None:
    """Import what defines the outputs of a model: torch must know them to read it."""
    with zipfile.ZipFile(path) as archive:
        graphs = [n for n in archive.namelist() if re.fullmatch(r"[^/]+/models/[^/]+\.json", n)]
        found = {name.decode() for n in graphs for name in _OUTPUT.findall(archive.read(n))}
    for name in sorted(found):
        try:
            import_module(name)
        except ImportError as err:
            raise MissingPackageError(
                f"{path} takes or returns what {name} defines ({err}); pip install transformers"
            ) from err


def _imported(program: torch.export.ExportedProgram) -> ImportedModel:
    mod = from_exported_program(program, keep_params_as_input=True)
    mod, _ = relax.frontend.detach_params(with_clipped_indices(mod))
    func = mod[FUNCTION]
    count = int(func.attrs["num_input"])
    names = [var.name for var in func.params]
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    weights = {targets[name]: array_of(program.state_dict[targets[name]]) for name in names[count:]}
    return ImportedModel(mod, signature_of(mod, names[:count], []), weights)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor of any dtype that NumPy knows, by ml_dtypes, as an array."""
    kept = tensor.detach().cpu().contiguous()
    if kept.dtype == torch.bfloat16:
        return kept.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return kept.numpy()
