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

from tvm import ir, relax, tirx

from ..tvm_ir import structural_map, structural_walk
from .arguments import TensorMap, Workspace, is_number
from .body import write
from .branches import Branch, Memory, Others, every_launch, largest, shared_workspaces, with_others


@dataclass(frozen=True)
class ExternFunc:
    """A PrimFunc of launches and the signature of its calls, in the variables of `branches`."""

    func: tirx.PrimFunc
    """Takes `inputs`, `numbers`, the `outputs` that are not in place, and `workspaces`."""
    inputs: tuple[relax.Expr, ...]
    """Tensors that are read, or changed in place."""
    numbers: tuple[ir.Var, ...]
    """Symbolic dims that no tensor's shape tells the value of."""
    outputs: tuple[relax.TensorType, ...]
    """What a call returns."""
    in_place: Mapping[int, int]
    """By output, the input that it is."""
    workspaces: tuple[Workspace, ...]
    """Memory for one call."""

    @staticmethod
    def of(
        outputs: Sequence[relax.TensorType],
        branches: Sequence[Branch],
        others: Others | None = None,
    ) -> ExternFunc:
        """Write the function that runs the first of `branches` whose condition holds.

        Where none does, `others`; without them the last branch, in any case.
        """
        memory = Memory(outputs, shared_workspaces(branches))
        for value in others.inputs if others is not None else ():
            memory.add(value)
        for launch in every_launch(branches):
            for value in launch.args:
                memory.add(value)
        scratch = _scratch(branches)
        if scratch is not None:
            memory.add(scratch)
        numbers = _unknown_variables(memory, branches, others)
        func = write(memory, numbers, branches, scratch)
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

        `builder`: gets a binding if there are workspaces, which are results that nobody reads.
        `tensors`, `dims`: what stands for the inputs and their symbolic dims here; by default
        themselves.
        `place`: where the kernel runs; by default where its first output says.
        """
        place = place or self.outputs[0].vdevice

        def here(value: Any) -> Any:
            if not isinstance(value, ir.Expr) or not dims:
                return value
            return structural_map(value, (ir.Var, lambda v: dims.get(v, v)))

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


def _scratch(branches: Sequence[Branch]) -> Workspace | None:
    """Return the global memory that Triton's compiler asked for, enough for the largest launch."""
    sizes = []
    for launch in every_launch(branches):
        per_program = launch.kernel.scratch_bytes * launch.kernel.options.num_ctas
        if per_program:
            size: Any = tirx.IntImm("int64", per_program)
            for count in launch.grid:
                size = size * count
            sizes.append(size)
    return Workspace((largest(sizes),), "uint8") if sizes else None


def _unknown_variables(
    memory: Memory, branches: Sequence[Branch], others: Others | None
) -> list[ir.Var]:
    """Return the symbolic dims in use that are no dim of a parameter: they are passed by value."""
    shapes = [b.shape for b in (*memory.read(), *memory.written())]
    told = {d for shape in shapes for d in shape if isinstance(d, ir.Var)}
    used = [d for shape in shapes for d in shape]
    used += [branch.when for branch in branches]
    used += [v for v in (others.inputs if others is not None else ()) if is_number(v)]
    for launch in every_launch(branches):
        used += [*launch.grid, *(v for v in launch.args if memory.buffer_of(v) is None)]
        maps = [v for v in launch.args if isinstance(v, TensorMap)]
        used += [n for m in maps for sizes in memory.layout_of(m) for n in sizes]
    return [v for v in dict.fromkeys(_variables(used)) if v not in told]


def _variables(values: Iterable[Any]) -> list[ir.Var]:
    found: list[ir.Var] = []
    for value in values:
        if isinstance(value, ir.Expr):
            structural_walk(value, (ir.Var, found.append))
    return found
