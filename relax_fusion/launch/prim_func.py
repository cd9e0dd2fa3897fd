"""The PrimFunc around a kernel: its parameters, its launches, and the call of it.

rewrite::

    add[(ceildiv(n, 256),)](x, y, out, n)
    ->
    @T.prim_func
    def add_1f2e(in0: T.Buffer((n,)), in1: T.Buffer((n,)), out0: T.Buffer((n,))):
        T.call_cpacked("launch_add_1f2e", in0.data, in1.data, out0.data, n, (n + 255) // 256, 1, 1)
    z = R.call_tir(add_1f2e, (x, y), out_ty)

A launch is opaque to TVM (``op_pattern`` 8) and already scheduled.  Workspaces are outputs that
nobody reads, so that Relax plans their memory together with all other tensors, and a CUDA graph
holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..transforms.modules import KERNELS_ATTR
from .arguments import Part, TensorMap, Workspace, is_number, scalar
from .kernel import CompiledKernel
from .memory import Buffer, Memory
from .mixed import PLACE, Others, with_others


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, one to three numbers of programs, and its run-time arguments."""

    kernel: CompiledKernel
    grid: Sequence[Any]
    args: Sequence[Any]


@dataclass(frozen=True)
class Branch:
    """Launches that run one after the other where `when` holds (the last branch: in any case)."""

    when: Any
    launches: Sequence[Launch]


@dataclass(frozen=True)
class ExternFunc:
    """A PrimFunc of launches and the signature of its calls, in the variables of `branches`.

    Parameters
    ----------
    func : tirx.PrimFunc
        Takes `inputs`, `numbers`, the `outputs` that are not in place, and `workspaces`.
    inputs : tuple of relax.Expr
        Tensors that are read, or changed in place.
    numbers : tuple of Var
        Symbolic dims that no tensor's shape tells the value of.
    outputs : tuple of TensorType
        What a call returns.
    in_place : mapping of int to int
        By output, the input that it is.
    workspaces : tuple of Workspace
        Memory for one call.
    """

    func: tirx.PrimFunc
    inputs: tuple[relax.Expr, ...]
    numbers: tuple[ir.Var, ...]
    outputs: tuple[relax.TensorType, ...]
    in_place: Mapping[int, int]
    workspaces: tuple[Workspace, ...]

    @staticmethod
    def of(
        outputs: Sequence[relax.TensorType],
        branches: Sequence[Branch],
        others: Others | None = None,
    ) -> ExternFunc:
        """Write the function that runs the first of `branches` whose condition holds.

        Where none does, `others`; without them the last branch, in any case.
        """
        memory = Memory(outputs)
        for value in others.inputs if others is not None else ():
            memory.add(value)
        for launch in _launches(branches):
            for value in launch.args:
                memory.add(value)
        scratch = _scratch(branches)
        if scratch is not None:
            memory.add(scratch)
        numbers = _unknown_variables(memory, branches, others)
        func = _prim_func(memory, numbers, branches, scratch)
        return ExternFunc(
            func if others is None else with_others(func, (*memory.inputs, *numbers), others),
            tuple(memory.inputs),
            tuple(numbers),
            tuple(outputs),
            memory.in_place,
            tuple(memory.workspaces),
        )

    def call(
        self,
        builder: relax.BlockBuilder,
        gvar: ir.GlobalVar,
        tensors: Mapping[relax.Expr, relax.Expr] | None = None,
        dims: Mapping[ir.Var, ir.Expr] | None = None,
        place: relax.VDevice | None = None,
    ) -> relax.Expr:
        """Return a call of the function under the name `gvar`.

        Parameters
        ----------
        builder : relax.BlockBuilder
            Gets a binding if there are workspaces, which are results that nobody reads.
        tensors, dims : mapping, optional
            What stands for the inputs and their symbolic dims here; by default themselves.
        place : relax.VDevice, optional
            Where the kernel runs; by default where its first output says.
        """
        place = place or self.outputs[0].vdevice

        def here(value: Any) -> Any:
            return _substituted(value, dims or {})

        args = [(tensors or {}).get(t, t) for t in self.inputs] + [here(n) for n in self.numbers]
        types = [
            _type(o.shape.values, str(o.dtype), here, o.vdevice or place) for o in self.outputs
        ]
        types += [_type(w.shape, w.dtype, here, place) for w in self.workspaces]
        if self.in_place:
            aliases = [self.in_place.get(i, -1) for i in range(len(types))]
            call = relax.op.call_tir_inplace(gvar, relax.Tuple(args), aliases, types)
        else:
            call = relax.op.call_tir(gvar, relax.Tuple(args), types)
        if not self.workspaces:
            return call
        packed = builder.emit(call)
        results = [relax.TupleGetItem(packed, i) for i in range(len(self.outputs))]
        return results[0] if len(results) == 1 else relax.Tuple(results)


def _type(shape: Iterable[Any], dtype: str, here: Any, vdevice: Any) -> relax.TensorType:
    return relax.TensorType([here(d) for d in shape], dtype, vdevice)


def _substituted(value: Any, dims: Mapping[ir.Var, ir.Expr]) -> Any:
    if not isinstance(value, ir.Expr) or not dims:
        return value
    return tvm_ffi.structural_map(value, (ir.Var, lambda v: dims.get(v, v)))


def _launches(branches: Sequence[Branch]) -> list[Launch]:
    return [launch for branch in branches for launch in branch.launches]


def _scratch(branches: Sequence[Branch]) -> Workspace | None:
    """Return the global memory that Triton's compiler asked for, enough for the largest launch."""
    sizes = []
    for launch in _launches(branches):
        per_program = launch.kernel.scratch_bytes * launch.kernel.options.num_ctas
        if per_program:
            size: Any = tirx.IntImm("int64", per_program)
            for count in launch.grid:
                size = size * count
            sizes.append(size)
    if not sizes:
        return None
    most = sizes[0]
    for size in sizes[1:]:
        most = tirx.max(most, size)
    return Workspace((tvm.sym.Analyzer().simplify(most),), "uint8")


def _unknown_variables(
    memory: Memory, branches: Sequence[Branch], others: Others | None
) -> list[ir.Var]:
    """Return the symbolic dims in use that are no dim of a parameter: they are passed by value."""
    shapes = [b.shape for b in (*memory.read(), *memory.written())]
    told = {d for shape in shapes for d in shape if isinstance(d, ir.Var)}
    used = [d for shape in shapes for d in shape]
    used += [branch.when for branch in branches]
    used += [v for v in (others.inputs if others is not None else ()) if is_number(v)]
    for launch in _launches(branches):
        used += [*launch.grid, *(v for v in launch.args if memory.buffer_of(v) is None)]
        maps = [v for v in launch.args if isinstance(v, TensorMap)]
        used += [n for m in maps for n in (*(m.shape or ()), *(m.strides or ()))]
    return [v for v in dict.fromkeys(_variables(used)) if v not in told]


def _variables(values: Iterable[Any]) -> list[ir.Var]:
    found: list[ir.Var] = []
    for value in values:
        if isinstance(value, ir.Expr):
            tvm_ffi.structural_walk(value, (ir.Var, found.append))
    return found


class _Own:
    """Expressions over variables of the PrimFunc's own instead of the caller's."""

    def __init__(self) -> None:
        self._vars: dict[ir.Var, ir.Var] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return tirx.IntImm("int64", value)
        if not isinstance(value, ir.Expr):
            return value
        return tvm_ffi.structural_map(value, (ir.Var, self._renamed))

    def _renamed(self, var: ir.Var) -> ir.Var:
        return self._vars.setdefault(var, tirx.Var(var.name, str(var.ty.dtype)))


def _prim_func(
    memory: Memory,
    numbers: Sequence[ir.Var],
    branches: Sequence[Branch],
    scratch: Workspace | None,
) -> tirx.PrimFunc:
    """Write the PrimFunc."""
    own = _Own()
    mixed = branches[-1].when is not True  # kernels inside of conditions may have barriers
    data: dict[str, Any] = {}

    def declare(buffers: Sequence[Buffer]) -> None:
        for b in buffers:
            made = T.arg(b.name, T.buffer([own(d) for d in b.shape], b.dtype))
            data[b.name] = made

    def run(branch: Branch) -> None:
        for launch in branch.launches:
            T.evaluate(_launch(launch, memory, data, scratch, own))

    def dispatch(branch: Branch, *rest: Branch) -> None:
        if not rest and branch.when is True:
            run(branch)
            return
        when = own(branch.when)
        with T.If(tirx.op.tvm_thread_invariant(when) if mixed else when):
            with T.Then():
                run(branch)
            with T.Else():
                if rest:
                    dispatch(*rest)
                else:
                    T.evaluate(PLACE)

    with IRBuilder() as builder, T.prim_func(s_tir=True):
        kernels = {x.kernel.symbol: x.kernel for x in _launches(branches)}
        attrs = {name: kernel_attr(k) for name, k in kernels.items()}
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": 1, KERNELS_ATTR: attrs})
        declare(memory.read())
        for var in numbers:
            T.arg(var.name, own(var))
        declare(memory.written())
        dispatch(*branches)
    func = builder.get().without_attr("global_symbol")
    # Relax's passes expect the root block that TVMScript would have put around the body
    root = s_tir.SBlock([], [], [], "root", func.body)
    return func.with_body(s_tir.SBlockRealize([], True, root))


def _launch(
    launch: Launch, memory: Memory, data: dict[str, Any], scratch: Workspace | None, own: _Own
) -> tirx.Call:
    """Return the call of the launcher: arguments, scratch memory, grid."""
    args: list[Any] = []
    for value in launch.args:
        buffer = memory.buffer_of(value)
        if buffer is None:
            number = scalar(value, "a number")
            args.append(own(number.value if number is not None else value))
            continue
        args.append(_pointer(value, data[buffer.name]))
        if isinstance(value, TensorMap):
            shape, strides = value.layout(buffer.shape)
            args += [own(n) for n in (*shape, *strides)]
    room = memory.buffer_of(scratch) if scratch is not None else None
    if room is not None and launch.kernel.scratch_bytes:
        args.append(data[room.name].data)
    grid = [*launch.grid, *[1] * (3 - len(launch.grid))]
    return tirx.call_cpacked(launch.kernel.launcher, *args, *map(own, grid))


def _pointer(value: Any, buffer: tirx.Var) -> ir.Expr:
    """Return where an argument begins that is memory."""
    part = value.of if isinstance(value, TensorMap) else value
    start = part.start if isinstance(part, Part) else 0
    width = tvm.DataType(str(buffer.dtype)).itemsize
    # `access_ptr` has the element type, which TVM replaces where it stores bfloat16 as uint16
    return tirx.handle_add_byte_offset(buffer.data, start * width) if start else buffer.data


def kernel_attr(kernel: CompiledKernel) -> dict[str, Any]:
    """Return a kernel as an attribute that TVMScript prints in one line."""
    image = np.frombuffer(kernel.image, dtype="uint8")
    return {"kernel": kernel.to_json(), "image": tvm.runtime.tensor(image)}


def kernel_of_attr(attr: Any) -> CompiledKernel:
    """Return the kernel that `kernel_attr` stored."""
    return CompiledKernel.from_json(str(attr["kernel"]), attr["image"].numpy().tobytes())
