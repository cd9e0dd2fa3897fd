"""What PyTorch's operators do on their own, written out for TVM 0.27's importer.

That computes in the dtype of an operand: it divides integers as integers, and cuts ``x > 0.5`` to
``x > 0`` where x is one.  It also drops ``alpha``.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch._decomp import get_decompositions
from torch.fx import GraphModule, Node

aten = torch.ops.aten

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
LOGIC = {
    **dict.fromkeys(("add", "maximum"), aten.bitwise_or.Tensor),
    **dict.fromkeys(("mul", "minimum"), aten.bitwise_and.Tensor),
}
"""What operators on booleans become."""
_EXTREMES = ("amax", "amin", "max", "min")
_IN_FLOAT32 = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "sinh", "tan"),
    *("cumsum", "cumprod", "linalg_vector_norm", "std", "var", "fmod"),
)
"""What PyTorch computes of float16 and bfloat16 in float32, and TVM not at all, or in steps that
are each rounded."""
_REDUCED = ("sum", "prod", "cumsum", "cumprod", "mean")
_JOINED = ("cat", "stack")
_MASKED = {"where": 0, "masked_fill": 1}
"""The operand of each operator that chooses elements and is no part of the result."""
_AS_THEY_ARE = ("_to_copy", "clone", "copy", "copy_", "isfinite", "isinf", "isnan", "to", "type_as")
_TENSORS_ONLY = ("div.Tensor_mode", "floor_divide.default")


def written_out(module: GraphModule) -> None:
    """Write casts, ``alpha`` and numbers out that operators of a graph imply."""
    for node in list(module.graph.nodes):
        target = node.target
        value = node.meta.get("val")
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
            continue
        _without_alpha(node)
        _with_both_ends(node, value)
        dtype = _computed_in(node, value)
        if dtype is not None:
            _cast(node, dtype, value.dtype)
    module.graph.lint()
    module.recompile()


def operator_name(node: Node) -> str:
    """Return the name of an operator of PyTorch without its overload; that of none is empty."""
    schema = getattr(node.target, "_schema", None)
    return "" if schema is None else str(schema.name.split("::")[-1])


def _without_alpha(node: Node) -> None:
    """``add(a, b, alpha=c)`` is ``a + c * b``."""
    alpha = node.kwargs.get("alpha", 1)
    if operator_name(node) not in ("add", "sub", "rsub") or alpha == 1:
        return
    # rsub(a, b) is b - c * a
    place = 0 if operator_name(node) == "rsub" else 1
    args = list(node.args)
    number: Any = args[place]
    is_tensor = isinstance(number, Node)
    args[place] = inserted(node, aten.mul.Tensor, (number, alpha)) if is_tensor else number * alpha
    node.args, node.kwargs = tuple(args), {k: v for k, v in node.kwargs.items() if k != "alpha"}


def _with_both_ends(node: Node, value: torch.Tensor) -> None:
    """Clamp integers at the end of their dtype where there is one end only: TVM needs both."""
    if operator_name(node) not in ("clamp", "clamp_min", "clamp_max") or not _is_integer(
        value.dtype
    ):
        return
    places = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[
        operator_name(node)
    ]
    given = dict(zip(places, node.args[1:], strict=False)) | dict(node.kwargs)
    info = torch.iinfo(value.dtype)
    ends = [given.get("min"), given.get("max")]
    if any(isinstance(end, Node) for end in ends):
        return
    low, high = (e if e is not None else w for e, w in zip(ends, (info.min, info.max), strict=True))
    node.target, node.args, node.kwargs = aten.clamp.default, (node.args[0], low, high), {}


def _computed_in(node: Node, value: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that an operator's operands are converted to, or None."""
    name, result, target = operator_name(node), value.dtype, cast("Any", node.target)
    operands = [_value(arg) for arg in node.args]
    is_complex = any(isinstance(x, torch.Tensor) and x.is_complex() for x in operands)
    if name in _AS_THEY_ARE or result.is_complex or is_complex:
        return None
    if name in COMPARISONS:
        found = torch.result_type(*(_value(a) for a in node.args))
        return torch.int32 if found == torch.bool else found
    if name.startswith("logical") or name in ("any", "all"):
        return torch.bool
    if name == "pow" and not result.is_floating_point:
        known = isinstance(node.args[1], int) and 0 <= node.args[1] <= 3
        return result if known else torch.float64
    if name in _EXTREMES and result == torch.bool:
        return torch.int32
    if name in _IN_FLOAT32 and result in (torch.float16, torch.bfloat16):
        return torch.float32
    if name in (*_REDUCED, *_JOINED) or torch.Tag.pointwise in target.tags:
        return result
    return None


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _cast(node: Node, dtype: torch.dtype, result: torch.dtype) -> None:
    """Convert the operands of a node, and what it makes of them."""
    name, kept = operator_name(node), _MASKED.get(operator_name(node))
    if dtype == result == torch.bool and name in LOGIC:
        node.target = LOGIC[name]
    numbers = str(node.target).removeprefix("aten.") in _TENSORS_ONLY
    args = [
        arg if place == kept else _operand(node, arg, dtype, numbers)
        for place, arg in enumerate(node.args)
    ]
    node.args = tuple(args)
    if node.kwargs.get("dtype") is not None:
        node.kwargs = {**node.kwargs, "dtype": dtype}
    if dtype != result and name not in COMPARISONS:
        with node.graph.inserting_after(node):
            back = node.graph.call_function(aten._to_copy.default, (node,), {"dtype": result})
        back.meta = dict(node.meta)
        node.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)


def _operand(node: Node, arg: Any, dtype: torch.dtype, numbers: bool) -> Any:
    if isinstance(arg, list | tuple) and any(isinstance(a, Node) for a in arg):
        return type(arg)(_operand(node, a, dtype, numbers) for a in arg)
    if isinstance(arg, int | float) and not isinstance(arg, bool) and numbers:
        return inserted(node, aten.full.default, ([], arg), {"dtype": dtype})
    target: Any = node.target
    if isinstance(arg, int) and _is_integer(dtype) and torch.Tag.pointwise in target.tags:
        # PyTorch takes it modulo the range of the dtype, as -3 for a byte
        info = torch.iinfo(dtype)
        return (arg - info.min) % (1 << info.bits) + info.min
    value = _value(arg)
    if not isinstance(arg, Node) or not isinstance(value, torch.Tensor) or value.dtype == dtype:
        return arg
    return inserted(node, aten._to_copy.default, (arg,), {"dtype": dtype})


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def inserted(node: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> Node:
    """Insert a call in front of a node."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs or {})
    mode = node.meta["val"].fake_mode
    with mode:
        values = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
        made.meta["val"] = target(*values, **(kwargs or {}))
    return made


def _remainder(x: torch.Tensor, y: torch.Tensor | float) -> Any:
    """Return what is left by a division that rounds down; TVM's is off by its rounding."""
    if not torch.result_type(x, y).is_floating_point:
        return NotImplemented
    rest = torch.fmod(x, y)
    return torch.where(_is_below(rest, y), rest + y, rest)


def _is_below(rest: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    """Tell where a rest has another sign than what was divided by."""
    return (rest != 0) & ((rest < 0) != (y < 0))


def _divided(x: Any, y: torch.Tensor | float, *, rounding_mode: str | None = None) -> Any:
    """Divide, and round down, as PyTorch does: by the rest."""
    if rounding_mode != "floor" or not torch.result_type(x, y).is_floating_point:
        return NotImplemented
    if not isinstance(x, torch.Tensor):
        x = torch.full_like(cast("torch.Tensor", y), x)
    rest = torch.fmod(x, y)
    share = (x - rest) / y
    share = torch.where(_is_below(rest, y), share - 1, share)
    down = torch.floor(share)
    down = torch.where(share - down > 0.5, down + 1, down)
    if isinstance(y, torch.Tensor):
        return torch.where(y == 0, x / y, down)
    return down if y else x / y


def _elu(x: torch.Tensor, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> torch.Tensor:
    """Compute ``torch.nn.ELU`` and SELU, of which TVM's importer leaves out the scales."""
    return torch.where(x > 0, x * scale, torch.expm1(x * input_scale) * (alpha * scale))


def _extreme_of(
    extreme: Any, place: Any, x: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest, or the smallest, elements along a dimension, and where they are."""
    ordered = x.to(torch.uint8) if x.dtype == torch.bool else x
    return extreme(x, [dim], keepdim), place(ordered, dim, keepdim)


def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    variance = aten.var.correction(x, dim, correction=correction, keepdim=keepdim)
    return variance, aten.mean.dim(x, dim, keepdim)


_WRITTEN_OUT = get_decompositions(
    [
        aten._native_batch_norm_legit_no_training,
        *(aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional),
    ]
)


def _batch_norm(x: torch.Tensor, *args: Any) -> Any:
    """Normalise by running statistics; TVM's gives float32 for a half."""
    if x.dtype == torch.float32:
        return NotImplemented
    return _WRITTEN_OUT[aten._native_batch_norm_legit_no_training.default](x, *args)


_DECOMPOSED: dict[Any, Any] = {
    **_WRITTEN_OUT,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.any.default: lambda x: aten.any.dims(x, list(range(x.ndim)), False),
    aten.elu.default: _elu,
    aten.neg.default: lambda x: NotImplemented if x.dtype != torch.uint8 else torch.rsub(x, 0),
    aten.max.dim: partial(_extreme_of, aten.amax, aten.argmax),
    aten.min.dim: partial(_extreme_of, aten.amin, aten.argmin),
    aten.var_mean.correction: _var_mean,
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar), _remainder),
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _divided),
    aten.exp2.default: lambda x: aten.exp.default(x * math.log(2)),
    aten.erfc.default: lambda x: 1 - aten.erf.default(x),
    aten.remainder.Scalar_Tensor: lambda x, y: aten.remainder.Tensor(
        aten.full_like.default(y, x), y
    ),
}
"""Operators that the importer lacks, each in terms of those that it has."""


def decompositions() -> dict[Any, Any]:
    """Return how operators are written out: those that TVM's importer knows are what is left."""
    key = "CompositeImplicitAutograd"
    composite = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {**_standard(tuple(composite)), **_DECOMPOSED}


@lru_cache(maxsize=1)
def _standard(_composite: tuple[str, ...]) -> dict[Any, Any]:
    """Return PyTorch's own, which it takes long to gather, anew if a program registered more."""
    return {**torch.export.default_decompositions()}
