"""A model that came from a file: its module, what goes in and comes out, and its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from tvm import ir, relax, tirx

from ..canonical.rewriter import LOWER, UPPER
from ..errors import ModelFileError
from ..inventory.operators import extent
from ..matching.pattern import is_call
from ..matching.shapes import shape_of
from ..transforms.modules import rewritten
from ..tvm_ir import GenericConst
from ..validation import MAX_INT32, Natural, shown

FUNCTION = "main"
"""TVM's importers give the function of a model this name."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or an output.

    Parameters
    ----------
    name : str
        As the file calls it.
    shape : tuple of int or str, optional
        Sizes; symbolic ones by name, or as an expression of names.  None where even their number is
        not known.
    dtype : str
        Element type.
    """

    name: str
    shape: tuple[Natural | str, ...] | None
    dtype: str

    def __str__(self) -> str:
        """Render as ``float32 [batch, 8]``."""
        return f"{self.dtype} {shape_text(self.shape)}"


def shape_text(shape: tuple[int | str, ...] | None) -> str:
    """Write a shape as ``[batch, 8]``."""
    return "of any shape" if shape is None else f"[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class Signature:
    """What a function takes and returns, without its weights.

    Parameters
    ----------
    inputs, outputs : tuple of TensorSpec
        In order.
    sizes : mapping of str to tuple
        By the name of a symbolic size: the smallest that it can be, and the largest or None.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: dict[str, tuple[Natural, Natural | None]]


@dataclass(frozen=True)
class ImportedModel:
    """A model as a Relax function that takes its inputs, then its weights.

    Parameters
    ----------
    mod : IRModule
        The function is ``main``.
    signature : Signature
        Its inputs and outputs.
    weights : mapping of str to numpy.ndarray
        In the order in which the function takes them.
    """

    functions: ClassVar[tuple[str, ...]] = (FUNCTION,)

    mod: ir.IRModule
    signature: Signature
    weights: Mapping[str, np.ndarray]

    @property
    def dtype(self) -> str:
        """Element type of most weights, or of the first input where there are none."""
        count: Counter[str] = Counter()
        for array in self.weights.values():
            count[str(array.dtype)] += array.size
        specs = (*self.signature.inputs, *self.signature.outputs)
        return count.most_common(1)[0][0] if count else specs[0].dtype


def signature_of(mod: ir.IRModule, inputs: list[str], outputs: list[str]) -> Signature:
    """Describe the function of an imported module.

    `mod`: as TVM's importers make it.
    `inputs`, `outputs`: the names of its first parameters, and of what it returns; outputs are
    numbered where their number is another.
    Raises `ModelFileError` if an input is no tensor of a known rank.
    """
    func = mod[FUNCTION]
    taken = list(zip(inputs, func.params[: len(inputs)], strict=True))
    for name, var in taken:
        if shape_of(var) is None:
            raise ModelFileError(f"the input {shown(name)} is {var.ty}; must be a tensor with axes")
    returned = _tensors(func.ret_ty)
    if len(outputs) != len(returned):
        outputs = [f"output_{n}" for n in range(len(returned))] if len(returned) > 1 else ["output"]
    return Signature(
        tuple(_spec(name, var.ty) for name, var in taken),
        tuple(_spec(name, ty) for name, ty in zip(outputs, returned, strict=True)),
        _sizes(func, [var for _, var in taken]),
    )


def _tensors(ty: relax.Type) -> list[relax.Type]:
    if isinstance(ty, relax.TupleType):
        return [inner for field in ty.fields for inner in _tensors(field)]
    return [ty]


def _spec(name: str, ty: relax.Type) -> TensorSpec:
    if not isinstance(ty, relax.TensorType):
        return TensorSpec(name, None, "int64" if isinstance(ty, relax.ShapeType) else str(ty))
    if not isinstance(ty.shape, relax.ShapeExpr):
        return TensorSpec(name, None, str(ty.dtype))
    return TensorSpec(name, tuple(map(extent, ty.shape.values)), str(ty.dtype))


def _sizes(
    func: relax.Function, inputs: list[relax.Var]
) -> dict[str, tuple[Natural, Natural | None]]:
    """Return the range of every size that an input names."""
    attrs = func.attrs or {}
    lower, upper = attrs.get(LOWER, {}), attrs.get(UPPER, {})
    found: dict[str, tuple[int, int | None]] = {}
    for var in inputs:
        for dim in shape_of(var) or []:
            if isinstance(dim, tirx.Var):
                most = int(upper.get(dim.name, MAX_INT32 + 1))
                least = max(int(lower.get(dim.name, 0)), 0)
                found[dim.name] = (least, most if most <= MAX_INT32 else None)
    return found


def with_clipped_indices(mod: ir.IRModule) -> ir.IRModule:
    """Let lookups read the nearest row where an index is beyond the table.

    rewrite: ``R.take(table, ids, mode="fast")`` -> ``R.take(table, ids, mode="clip")``

    TVM's importers promise that indices are in bounds, which nobody checks: with a wrong token, a
    kernel would read memory that is not the table's.
    """
    return rewritten(mod, _Clip(mod))


@relax.expr_functor.mutator
class _Clip(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not is_call(call, "relax.take") or call.attrs.mode != "fast":
            return call
        if isinstance(call.args[1], GenericConst):
            return call
        return relax.op.take(*call.args, axis=call.attrs.axis, mode="clip")
