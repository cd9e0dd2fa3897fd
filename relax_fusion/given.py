"""What an entry point takes is a module; whoever brings something else is told what makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvm import ir, relax, tirx

from .errors import ModuleTypeError
from .validation import shown

_FILE = "read it by relax_fusion.frontends.read_model, and pass the result's .mod"
_TORCH = "relax_fusion.frontends.torch.from_exported_program"
_BY_CLASS = {
    "torch.nn.modules.module.Module": f"export it by torch.export.export, and call {_TORCH}",
    "torch.export.exported_program.ExportedProgram": f"call {_TORCH} first",
    "tvm.relax.frontend.nn.core.Module": "call its export_tvm first",
    "onnx.onnx_ml_pb2.ModelProto": "call tvm.relax.frontend.onnx.from_onnx first, or save it and "
    + _FILE,
}
"""By the full name of a class, whose package is not imported for it: what makes a module of it."""


def check_module(given: Any) -> None:
    """Refuse what is no module.

    Raises
    ------
    ModuleTypeError
        If it is none; the message says how to get one.
    """
    if not isinstance(given, ir.IRModule):
        kind = type(given)
        what = "None" if given is None else f"a {kind.__module__}.{kind.__qualname__}"
        raise ModuleTypeError(f"mod is {what}; must be a tvm.IRModule: {_advice(given)}")


def _advice(given: Any) -> str:
    if isinstance(getattr(given, "mod", None), ir.IRModule):
        return "pass its .mod"
    if isinstance(given, relax.Function):
        return "pass tvm.IRModule.from_expr(function)"
    if isinstance(given, tirx.PrimFunc):
        return "call it by R.call_tir in a function of Relax, in a module with both"
    if isinstance(given, str | Path):
        return f"{shown(str(given))} may be a file; {_FILE}"
    classes = [f"{each.__module__}.{each.__qualname__}" for each in type(given).__mro__]
    found = next((_BY_CLASS[name] for name in classes if name in _BY_CLASS), None)
    return found or "write one in TVMScript, or import a model by relax_fusion.frontends.read_model"
