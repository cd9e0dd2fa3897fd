"""Complex numbers of exported graphs: pairs of real ones, a rotation by them one of neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from torch import Tensor

from relax_fusion import Report
from relax_fusion.equivalence.interpreter import evaluate
from relax_fusion.frontends.torch import from_exported_program
from relax_fusion.options import make_options
from relax_fusion.pipeline import phase1_fuse

from ..support.quick import quick_host


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads as Llama 4 does and DeepSeek-V2, which asks for the dtype that there is."""
    turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64) * 1.0
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, :, None]).flatten(3).type_as(x)


def mixed(x: Tensor, angles: Tensor) -> Tensor:
    """Add, conjugate, move and scale complex numbers."""
    a = torch.view_as_complex(x.reshape(2, 4, 8, 16, 2)).transpose(1, 2)
    b = torch.complex(angles, angles + 1)[:, :, None, :].expand(2, 8, 4, 16)
    return torch.view_as_real((a + b) * b.conj() - 2.0 * a)


class Model(torch.nn.Module):
    """A function of heads and angles, behind a projection if that has weights."""

    def __init__(self, function, width: int = 0) -> None:
        super().__init__()
        self.function = function
        self.project = torch.nn.Linear(width, 4 * 32, bias=False) if width else None

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.project is not None:
            x = self.project(x).unflatten(-1, (4, 32))
        return self.function(x, angles)


@pytest.mark.parametrize("function", [rotated, mixed])
def test_numbers_are_those_of_pytorch(function) -> None:
    x, angles = torch.randn(2, 8, 4, 32), torch.rand(2, 8, 16)
    model = Model(function)
    mod = from_exported_program(torch.export.export(model, (x, angles)))
    (found,) = evaluate(mod["main"], [x.numpy(), angles.numpy()])
    np.testing.assert_allclose(found, model(x, angles), rtol=1e-5, atol=1e-5)


def test_a_projection_rotates_by_complex_numbers() -> None:
    given = torch.randn(2, 8, 64), torch.rand(2, 8, 16)
    mod = from_exported_program(torch.export.export(Model(rotated, 64), given))
    report = Report()
    options = make_options(quick_host(), {"report": report, "always_fuse": True})
    with options.target:
        tvm.transform.Sequential(phase1_fuse(options))(mod)
    (coverage,) = report.coverage
    assert coverage.chains["rope"] == (1, 1)
