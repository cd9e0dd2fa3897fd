"""Targets of PrimFuncs in modules with virtual devices."""

from __future__ import annotations

from tvm import ir, relax, tirx
from tvm.target import Target

from ..matching.pattern import calls_kernel
from ..transforms.modules import module_pass, rewritten


@module_pass
class BindDeviceTargets:
    """Compile every PrimFunc for the virtual device that its results are on.

    rewrite::

        R.call_tir(f, (x,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
            ->
        R.call_tir(f_llvm, (x,), out_ty=R.Tensor((n,), "float32", "llvm:0"))
        # f_llvm: f with the attribute target = llvm

    `LegalizeOps` does so for single operators; what `FuseTIR` makes of several has no target any
    more (TVM 0.27), and would be compiled for a GPU though its tensors are on the host.
    """

    target: Target
    """Of functions whose results name no virtual device, and of all virtual devices of its kind: a
    module is compiled for one target of each kind."""

    def _rewrite(self, mod: ir.IRModule) -> ir.IRModule:
        """Rewrite the calls of every Relax function; a module without virtual devices has none."""
        if "vdevice" not in mod.global_infos:
            return mod
        return rewritten(mod, _Bind(mod, self.target))


@relax.expr_functor.mutator
class _Bind(relax.PyExprMutator):
    def __init__(self, mod: ir.IRModule, target: Target):
        super().__init__(mod)
        self.mod, self.target = mod, target
        self.bound: dict[tuple[ir.GlobalVar, str], ir.GlobalVar] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Call the function for the device of the first result."""
        call = super().visit_call_(call)
        if not calls_kernel(call):
            return call
        target = self._target_of(call.ty_args[0])
        func = self.mod[call.args[0]]
        if target is None or not isinstance(func, tirx.PrimFunc):
            return call
        given = (func.attrs or {}).get("target", self.target)
        if _without_host(given) == _without_host(target):
            return call
        args = [self._bound(call.args[0], func, target), *call.args[1:]]
        return relax.Call(call.op, args, call.attrs, call.ty_args)

    def _target_of(self, out: ir.Type) -> Target | None:
        """Return the target of the device that a result is on, if it names one."""
        first = out.fields[0] if isinstance(out, ir.TupleType) and len(out.fields) else out
        device = first.vdevice if isinstance(first, relax.TensorType) else None
        if device is None:
            return None
        return self.target if device.target.kind.name == self.target.kind.name else device.target

    def _bound(self, gvar: ir.GlobalVar, func: tirx.PrimFunc, target: Target) -> ir.GlobalVar:
        """Return the function for `target`, made at its first call."""
        kind = target.kind.name
        if (gvar, kind) not in self.bound:
            own = func.without_attr("global_symbol").with_attr("target", target)
            self.bound[gvar, kind] = self.builder_.add_func(own, f"{gvar.name_hint}_{kind}")
        return self.bound[gvar, kind]


def _without_host(target: Target) -> dict[str, object]:
    return {name: value for name, value in target.export().items() if name != "host"}
