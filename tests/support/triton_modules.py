"""Running a workload's Triton kernels: one call in a Relax module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.target import Target

from relax_fusion.compute import build_prim_func
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.launch.arguments import is_number
from relax_fusion.triton_bridge import EmbedTritonKernels, EmitTritonKernels
from relax_fusion.workload import Workload


def module_of(work: Workload, *tables: PlanTable, outputs: int) -> ir.IRModule:
    """Return a module whose main calls the PrimFunc of `work` with all of its parameters.

    A number among them, such as the keys to read of a cache, is given to main as a shape.  Where
    there are several tables of plans, the functions main0, main1 ... call a PrimFunc for each.
    """
    builder = relax.BlockBuilder()
    for i, plans in enumerate(tables):
        _add(builder, work, plans, outputs, str(i) if len(tables) > 1 else "")
    return builder.get()


def _add(
    builder: relax.BlockBuilder, work: Workload, plans: PlanTable, outputs: int, number: str
) -> None:
    func = build_prim_func(work, plans).without_attr("global_symbol")
    names: dict[ir.Var, ir.Var] = {}

    def size(dim: ir.Expr) -> ir.Expr:
        return names.setdefault(dim, tirx.Var("n", "int64")) if isinstance(dim, ir.Var) else dim

    def type_of(param: ir.Var) -> relax.Type:
        if is_number(param):
            return relax.ShapeType([size(param)])
        return relax.TensorType([size(d) for d in param.ty.shape], str(param.ty.dtype))

    types = [type_of(p) for p in func.params]
    count = len(types) - outputs
    params = [relax.Var(f"p{i}", ty) for i, ty in enumerate(types[:count])]
    args = [p.ty.values[0] if isinstance(p.ty, relax.ShapeType) else p for p in params]
    gvar = builder.add_func(func, f"fused{number}")
    with builder.function(f"main{number}", params):
        with builder.dataflow():
            call = relax.op.call_tir(gvar, relax.Tuple(args), types[count:])
            out = builder.emit_output(call)
        builder.emit_func_output(out)


def build_triton(
    work: Workload, *tables: PlanTable, outputs: int, target: Target
) -> tvm.runtime.Executable:
    """Compile the kernels of all `tables`, side by side, as `module_of` names them."""
    mod = EmitTritonKernels(target)(module_of(work, *tables, outputs=outputs))
    return tvm.compile(EmbedTritonKernels()(mod), target)


def run_triton(
    executable: tvm.runtime.Executable, arrays: Sequence[np.ndarray | int], function: str = "main"
) -> list[np.ndarray]:
    """Run a function on the GPU and return its results."""
    dev = tvm.cuda(0)
    out = relax.VirtualMachine(executable, dev)[function](
        *(tvm_ffi.Shape([a]) if isinstance(a, int) else tvm.runtime.tensor(a, dev) for a in arrays)
    )
    tensors = [out] if isinstance(out, tvm.runtime.Tensor) else list(out)
    return [t.numpy() for t in tensors]
