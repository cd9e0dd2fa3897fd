"""The body of a PrimFunc that launches kernels: conditions, calls of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import ir, tirx

from ..transforms.modules import KERNELS_ATTR
from ..tvm_ir import IRBuilder, SBlock, SBlockRealize, T, structural_map
from .arguments import Part, TensorMap, Workspace, scalar
from .branches import PLACE, Branch, Buffer, Launch, Memory, every_launch
from .kernel import CompiledKernel


class _Own:
    """Expressions over variables of the PrimFunc's own instead of the caller's."""

    def __init__(self) -> None:
        self._vars: dict[ir.Var, ir.Var] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return tirx.IntImm("int64", value)
        if not isinstance(value, ir.Expr):
            return value
        return structural_map(value, (ir.Var, self._renamed))

    def _renamed(self, var: ir.Var) -> ir.Var:
        return self._vars.setdefault(var, tirx.Var(var.name, str(var.ty.dtype)))


def write(
    memory: Memory, numbers: Sequence[ir.Var], branches: Sequence[Branch], scratch: Workspace | None
) -> tirx.PrimFunc:
    """Return the PrimFunc that runs the first of `branches` whose condition holds.

    Where the last one's condition is not True, `PLACE` is what else there is to do.  `numbers` are
    the parameters behind the tensors that are read, `scratch` is memory of launches that need some.
    """
    writer = _Writer(memory, scratch, branches[-1].when is not True)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        kernels = {x.kernel.symbol: x.kernel for x in every_launch(branches)}
        attrs = {name: kernel_attr(k) for name, k in kernels.items()}
        T.func_attr({"op_pattern": 8, "tirx.is_scheduled": 1, KERNELS_ATTR: attrs})
        writer.declare(memory.read())
        for var in numbers:
            T.arg(var.name, writer.own(var))
        writer.declare(memory.written())
        writer.dispatch(*branches)
    func = builder.get().without_attr("global_symbol")
    # Relax's passes expect the root block that TVMScript would have put around the body
    root = SBlock([], [], [], "root", func.body)
    return func.with_body(SBlockRealize([], True, root))


class _Writer:
    """Writes parameters and statements of one PrimFunc into the builder in scope."""

    def __init__(self, memory: Memory, scratch: Workspace | None, mixed: bool):
        self.memory, self.scratch = memory, scratch
        self.mixed = mixed  # kernels inside of conditions may have barriers
        self.own = _Own()
        self.data: dict[str, Any] = {}

    def declare(self, buffers: Sequence[Buffer]) -> None:
        """Write parameters."""
        for b in buffers:
            made = T.arg(b.name, T.buffer([self.own(d) for d in b.shape], b.dtype))
            self.data[b.name] = made

    def dispatch(self, branch: Branch, *rest: Branch) -> None:
        """Write the first of some branches whose condition holds."""
        if not rest and branch.when is True:
            self._run(branch)
            return
        when = self.own(branch.when)
        with T.If(tirx.op.tvm_thread_invariant(when) if self.mixed else when):
            with T.Then():
                self._run(branch)
            with T.Else():
                if rest:
                    self.dispatch(*rest)
                else:
                    T.evaluate(PLACE)

    def _run(self, branch: Branch) -> None:
        for launch in branch.launches:
            T.evaluate(self._launch(launch))

    def _launch(self, launch: Launch) -> tirx.Call:
        """Return the call of the launcher: arguments, scratch memory, grid."""
        args: list[Any] = []
        for value in launch.args:
            buffer = self.memory.buffer_of(value)
            if buffer is None:
                number = scalar(value, "a number")
                args.append(self.own(number.value if number is not None else value))
                continue
            args.append(_pointer(value, self.data[buffer.name]))
            if isinstance(value, TensorMap):
                shape, strides = self.memory.layout_of(value)
                args += [self.own(n) for n in (*shape, *strides)]
        scratch = self.memory.buffer_of(self.scratch) if self.scratch is not None else None
        if scratch is not None and launch.kernel.scratch_bytes:
            args.append(self.data[scratch.name].data)
        grid = [*launch.grid, *[1] * (3 - len(launch.grid))]
        return tirx.call_cpacked(launch.kernel.launcher, *args, *map(self.own, grid))


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
