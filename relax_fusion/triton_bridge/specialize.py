"""From a kernel and its arguments to what is compiled, as Triton's JIT finds out at a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from ..errors import KernelError
from ..launch.arguments import InOut, Out, Part, TensorMap, Workspace, is_tensor, scalar
from ..launch.kernel import ALIGNMENT
from ..tvm_ir import structural_equal
from ..workload.dtypes import STORED_BYTES
from .kernel import CONSTEXPR, KernelOptions, KernelSource, flat_fields

_TRITON_DTYPES = {
    **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "bf16",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}


def triton_dtype(dtype: str, what: str) -> str:
    """Return Triton's name of a dtype of TVM.

    Raises `KernelError` if it has none; the message begins with `what`.
    """
    if dtype not in _TRITON_DTYPES:
        raise KernelError(f"{what} has dtype {dtype}; Triton has {', '.join(_TRITON_DTYPES)}")
    return _TRITON_DTYPES[dtype]


def bind(
    function: JITFunction, args: Sequence[Any] | Mapping[str, Any], constexprs: Mapping[str, Any]
) -> dict[str, Any]:
    """Match arguments with the run-time parameters of a kernel, in the order of its signature.

    Raises `KernelError` if there are too many or too few, or a name is no parameter.
    """
    name = function.__name__
    runtime = [p for p in function.params if not p.is_constexpr and p.name not in constexprs]
    names = [p.name for p in runtime]
    all_names = [p.name for p in function.params]
    fixed = [p for p in function.params if p.is_constexpr or p.name in constexprs]
    for given in constexprs:
        if given not in all_names:
            raise KernelError(f"{name} has no parameter {given!r}; it has {', '.join(all_names)}")
    for p in fixed:
        if p.name not in constexprs and not p.has_default:
            raise KernelError(f"{name} needs a value for its constexpr {p.name!r}")
    if isinstance(args, Mapping):
        bound = dict(args)
    else:
        if len(args) > len(names):
            raise KernelError(_count(name, len(args), names))
        bound = dict(zip(names, args, strict=False))
    for given in bound:
        if given not in names:
            raise KernelError(f"{name} has no run-time parameter {given!r}; {_list(names)}")
    missing = [p.name for p in runtime if p.name not in bound and not p.has_default]
    if missing:
        raise KernelError(_count(name, len(bound), names) + f"; {missing[0]!r} is missing")
    return {p.name: bound.get(p.name, p.default) for p in runtime}


def _count(name: str, given: int, names: list[str]) -> str:
    return f"{name} takes {len(names)} run-time arguments ({', '.join(names)}), {given} were given"


def _list(names: list[str]) -> str:
    return f"it takes {', '.join(names)}" if names else "it takes none"


def all_constexprs(function: JITFunction, constexprs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `constexprs` and the defaults of those that were left out."""
    defaults = {p.name: p.default for p in function.params if p.is_constexpr and p.has_default}
    return {**defaults, **constexprs}


def specialize(
    function: JITFunction,
    args: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    options: KernelOptions,
    outputs: Sequence[Any],
    capability: int,
) -> tuple[KernelSource, list[Any]]:
    """Return what to compile, and the arguments that are left for run time.

    `function`: the kernel.
    `args`: what `bind` returned.  A named tuple is as many arguments; a `constexpr` in one is
    fixed.
    `constexprs`: values of constexpr parameters, without those that keep their defaults.
    `options`: how it is compiled and launched.
    `outputs`: what `Out` and `InOut` count.
    `capability`: compute capability, ten times major plus minor.
    Raises `KernelError` if an argument has a type that a kernel, or this one, does not take.
    """
    types: dict[str, str] = {}
    passed: dict[str, Any] = {}
    aligned = set()
    constants = all_constexprs(function, constexprs)
    for p in function.params:
        if p.name not in args:
            types[p.name] = CONSTEXPR
            constants.setdefault(p.name, p.default)
            continue
        for name, value in flat_fields(p.name, args[p.name]).items():
            passed[name] = value
            what = f"{function.__name__}: argument {name!r}"
            if isinstance(value, tl.constexpr):
                types[name], constants[name] = CONSTEXPR, value.value
                continue
            if isinstance(value, TensorMap):
                dtype = _dtype(value, outputs, what)
                types[name] = _map_type(value, dtype, outputs, what, function.is_gluon())
                continue
            types[name], multiple = _type_of(p, value, outputs, what)
            if types[name] == CONSTEXPR:
                constants[name] = None if value is None else 1
            elif multiple and not (p.do_not_specialize or p.do_not_specialize_on_alignment):
                aligned.add(name)
    source = KernelSource(function, types, constants, frozenset(aligned), capability, options)
    return source, [passed[name] for name, kind in types.items() if kind != CONSTEXPR]


def _type_of(p: Any, value: Any, outputs: Sequence[Any], what: str) -> tuple[str, bool]:
    """Return the Triton type of an argument and whether it is a multiple of `ALIGNMENT`."""
    dtype = _dtype(value, outputs, what)
    if dtype is not None:
        kind = f"*{'k' if p.is_const else ''}{triton_dtype(dtype, what)}"
        skipped = value.start * STORED_BYTES[dtype] if isinstance(value, Part) else 0
        # TVM's tensors begin at multiples of 64
        return _declared(p, kind, {kind}, what), skipped % ALIGNMENT == 0
    number = scalar(value, what)
    if value is None:
        return CONSTEXPR, False
    if number is None:  # a 1
        declared = _declared(p, "i32", _INTEGERS, what)
        return (declared if p.do_not_specialize else CONSTEXPR), False
    allowed = {"fp32", "fp64"} if number.kind == "fp32" else _INTEGERS
    return _declared(p, number.kind, allowed, what), number.aligned


_INTEGERS = {"i1", "u1", *(f"{s}{bits}" for s in "iu" for bits in (8, 16, 32, 64))}


def _declared(p: Any, kind: str, allowed: set[str], what: str) -> str:
    """Return the type that the kernel declares for a parameter, `kind` if it declares none."""
    wanted = p.annotation_type or kind
    if wanted != kind and wanted not in allowed:
        raise KernelError(f"{what} is {kind}; the kernel declares {wanted}")
    return wanted


def _map_type(
    value: TensorMap, dtype: str | None, outputs: Sequence[Any], what: str, gluon: bool
) -> str:
    if dtype is None:
        raise KernelError(f"{what}: a tensor map must be of a tensor, not {value.of!r}")
    rank = _rank(value.of, outputs) if value.shape is None else len(value.shape)
    if rank is not None and rank != len(value.block):
        raise KernelError(
            f"{what}: the tile {list(value.block)} of a tensor map has {len(value.block)} "
            f"dimensions, its tensor has {rank}"
        )
    block = [int(n) for n in value.block]
    name = triton_dtype(dtype, what)
    # In Gluon, the layout of a tile in shared memory is part of the type
    layout = f",{_tile_layout(block, name)!r}" if gluon else ""
    return f"tensordesc<{name}{block}{layout}>"


def _tile_layout(block: list[int], dtype: str) -> Any:
    """Return the layout in which tiles are copied: the widest swizzle that they allow."""
    return gl.NVMMASharedLayout.get_default_for(block, gl.dtype(dtype))


def _rank(value: Any, outputs: Sequence[Any]) -> int | None:
    """Return the number of dims of a tensor argument; None where it is not known."""
    if isinstance(value, Workspace):
        return len(value.shape)
    value = value.of if isinstance(value, Part) else value
    ty = outputs[value.index] if isinstance(value, Out | InOut) else value.ty
    return int(ty.ndim) if int(ty.ndim) >= 0 else None


def _dtype(value: Any, outputs: Sequence[Any], what: str) -> str | None:
    """Return the dtype of a tensor argument; None for a number."""
    if isinstance(value, TensorMap | Part):
        return _dtype(value.of, outputs, what)
    if isinstance(value, Out):
        return str(outputs[value.index].dtype)
    if isinstance(value, InOut):
        if not is_tensor(value.tensor):
            raise KernelError(f"{what}: InOut takes a tensor, not {value.tensor!r}")
        if not structural_equal(value.tensor.ty, outputs[value.index]):
            is_, wanted = value.tensor.ty, outputs[value.index]
            raise KernelError(f"{what} is {is_}; as output {value.index} it is to be {wanted}")
        return str(value.tensor.ty.dtype)
    if isinstance(value, Workspace):
        return value.dtype
    return str(value.ty.dtype) if is_tensor(value) else None
