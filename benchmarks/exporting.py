"""Modules of PyTorch as ones of Relax, with the weights as operands."""

from __future__ import annotations

import torch
from tvm import ir, relax

from relax_fusion.frontends.torch import from_exported_program


def as_relax(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[ir.IRModule, list[torch.Tensor]]:
    """Return a module as our importer brings it, and its weights, operands behind the inputs."""
    program = torch.export.export(module, inputs, strict=False)
    imported = from_exported_program(program, keep_params_as_input=True)
    mod, params = relax.frontend.detach_params(imported)
    return mod, [torch.from_dlpack(p) for p in params["main"]]
