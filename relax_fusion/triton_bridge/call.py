"""`call_tir_extern`: a Triton kernel as an operation of a Relax module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import tvm
from triton.runtime.jit import JITFunction
from tvm import ir, relax
from tvm.target import Target

from ..errors import KernelError
from ..hardware.target import compute_capability, make_target
from ..launch.arguments import InOut, Out, TensorMap, is_number
from ..launch.branches import Branch, Launch
from ..launch.prim_func import ExternFunc
from ..validation import shown
from .compile import compile_kernels
from .kernel import KernelOptions
from .specialize import all_constexprs, bind, specialize

Grid = Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Variant:
    """What replaces the kernel of a call where `when` holds.

    Parameters
    ----------
    when : PrimExpr
        A condition over the symbolic dims of the inputs, such as ``n <= 16``.
    constexprs, options : mapping
        Values that differ from those of the call.
    grid : sequence or callable, optional
        As in `call_tir_extern`; the call's own by default.
    kernel : triton.JITFunction, optional
        Another kernel with the same run-time parameters; then `constexprs` are all of its own.
    """

    when: ir.Expr
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Grid | None = None
    kernel: JITFunction | None = None


def call_tir_extern(
    kernel: JITFunction,
    grid: Grid,
    args: Sequence[Any] | Mapping[str, Any],
    out_ty: relax.TensorType | Sequence[relax.TensorType],
    *,
    constexprs: Mapping[str, Any] | None = None,
    variants: Sequence[Variant] = (),
    **options: Any,
) -> relax.Expr:
    """Compile a Triton kernel for a CUDA target and return the call of it.

    The kernel is compiled at once, with no GPU, and added to the module of the current
    `relax.BlockBuilder` inside a PrimFunc that launches it.  `EmbedTritonKernels`, which the
    pipeline runs by itself, turns what was compiled into the code of the library.

    Parameters
    ----------
    kernel : triton.JITFunction
        A ``@triton.jit`` function.
    grid : sequence of int or PrimExpr, or callable
        Up to three numbers of programs; may use the symbolic dims of the inputs.  A callable gets
        the constexprs: ``lambda c: (T.ceildiv(n, c["BLOCK"]),)``.
    args : sequence or mapping
        The run-time arguments in the order of the kernel's parameters, or by name:

        - a tensor: a pointer to it;
        - `Out`, `InOut`, `Workspace`: a pointer to an output, to a tensor that is changed in place
          and is an output, to memory for this call only;
        - `TensorMap`: a TMA descriptor of any of these;
        - an int, float or bool, or an expression over symbolic dims;
        - None: no argument, which the kernel sees as the constant None.
    out_ty : TensorType or sequence of TensorType
        The outputs.
    constexprs : mapping of str to object, optional
        Values of the kernel's ``tl.constexpr`` parameters, of any type that Triton takes.
    variants : sequence of Variant
        Kernels for some values of the symbolic dims; the first whose condition holds runs.
    **options
        ``target``, as `relax_fusion.make_target` takes it (by default the one in scope), and the
        fields of `KernelOptions`: ``num_warps``, ``num_stages``, ``num_ctas``, ``maxnreg``,
        ``cooperative``, ``dependent_launch``.

    Returns
    -------
    relax.Expr
        The output, or a tuple of several, to be emitted.

    Raises
    ------
    KernelError
        If the arguments don't match the kernel, the kernel does not compile, or the device lacks
        what it needs.
    TargetError
        If the target is no CUDA target with an architecture.

    Examples
    --------
    ::

        with bb.function("main", [x, y]), bb.dataflow():
            z = bb.emit_output(
                call_tir_extern(add, (T.ceildiv(n, 256),), [x, y, OUT, n], x.ty,
                                constexprs={"BLOCK": 256}, target=target))
    """
    target = options.pop("target", None) or Target.current(allow_none=True)
    if target is None:
        raise KernelError("no target: pass target=... or call within `with target:`")
    capability = compute_capability(make_target(target))
    builder = relax.BlockBuilder.current()
    if builder is None:
        raise KernelError("call_tir_extern adds a function: call it where a BlockBuilder is active")
    if not isinstance(args, Mapping | Sequence):
        raise KernelError(f"args is {shown(args)}; must be a sequence, or a mapping by name")
    if not isinstance(constexprs, Mapping | None):
        raise KernelError(f"constexprs is {shown(constexprs)}; must be a mapping by name")
    # `R.Tensor(...)` outside of TVMScript stands for a type
    outputs = [
        tvm.runtime.convert(o) for o in (out_ty if isinstance(out_ty, Sequence) else [out_ty])
    ]
    base = Variant(True, dict(constexprs or {}), options, grid, kernel)
    choices = [*(_filled(variant, base) for variant in variants), base]
    for choice in choices:
        if not isinstance(choice.kernel, JITFunction):
            raise KernelError(f"{choice.kernel!r} is no @triton.jit function")
    bound = [bind(c.kernel, args, c.constexprs) for c in choices]
    _check_outputs(kernel.__name__, bound, outputs)
    special = [
        specialize(c.kernel, b, c.constexprs, _compile_options(c), outputs, capability)
        for c, b in zip(choices, bound, strict=True)
    ]
    compiled = compile_kernels([source for source, _ in special])
    branches = [
        Branch(choice.when, [Launch(kernel, _programs(choice), passed)])
        for choice, kernel, (_, passed) in zip(choices, compiled, special, strict=True)
    ]
    extern = ExternFunc.of(outputs, branches)
    return extern.call(builder, builder.add_func(extern.func, compiled[-1].symbol))


def _filled(variant: Variant, base: Variant) -> Variant:
    """Return a variant with what it leaves out as the call has it."""
    own = variant.kernel is not None and variant.kernel is not base.kernel
    return Variant(
        variant.when,
        {**({} if own else base.constexprs), **variant.constexprs},
        {**base.options, **variant.options},
        variant.grid if variant.grid is not None else base.grid,
        variant.kernel or base.kernel,
    )


def _programs(choice: Variant) -> list[Any]:
    """Return the dimensions of the grid."""
    grid, kernel = choice.grid, cast(Any, choice.kernel)
    if callable(grid) and not isinstance(grid, ir.Expr):
        grid = grid(all_constexprs(kernel, choice.constexprs))
    dims = list(grid) if isinstance(grid, Sequence) else []
    known = all(is_number(n) or (type(n) is int and n >= 0) for n in dims)
    if not known or not 1 <= len(dims) <= 3:
        raise KernelError(
            f"{kernel.__name__}: the grid is {grid!r}; it must be one to three numbers"
        )
    return dims


def _compile_options(choice: Variant) -> KernelOptions:
    """Return the options with their names checked."""
    known = [f.name for f in fields(KernelOptions)]
    for name in choice.options:
        if name not in known:
            raise KernelError(f"no option {name!r}; there are target, {', '.join(known)}")
    return KernelOptions(**choice.options)


def _check_outputs(name: str, bound: Sequence[Mapping[str, Any]], outputs: Sequence[Any]) -> None:
    """Check that every output is an argument, and every argument that is an output exists."""
    for ty in outputs:
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise KernelError(f"{name}: out_ty has {ty}; it must be a tensor type with a shape")
    for values in bound:
        plain = [v.of if isinstance(v, TensorMap) else v for v in values.values()]
        written = [v for v in plain if isinstance(v, Out | InOut)]
        for index in sorted({v.index for v in written} | set(range(len(outputs)))):
            if not 0 <= index < len(outputs):
                raise KernelError(f"{name}: Out({index}) is used; out_ty has {len(outputs)} types")
            here = [v for v in written if v.index == index]
            if not here:
                raise KernelError(f"{name}: nothing writes output {index}; pass Out({index})")
            if len({id(v.tensor) for v in here if isinstance(v, InOut)}) > 1:
                raise KernelError(f"{name}: two tensors are to be output {index} in place")
