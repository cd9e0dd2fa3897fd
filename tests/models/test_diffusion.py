"""A block of a diffusion transformer: norms that are scaled and shifted for each sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
from torch.nn import functional
from tvm import relax

from relax_fusion import Report
from relax_fusion.frontends.torch import from_exported_program
from relax_fusion.pipeline import relax_fusion_pipeline

from ..support.quick import machine, quick_host, quickly

WIDTH, HEADS, LENGTH = 64, 2, 12


class Block(torch.nn.Module):
    """Attention and a feed-forward network, each with a scale, a shift and a gate of the step."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.norm = torch.nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)
        self.steps = linear(WIDTH, 6 * WIDTH)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        parts = self.steps(functional.silu(step)).chunk(6, 1)
        shift, scale, gate, shift2, scale2, gate2 = (part.unsqueeze(1) for part in parts)
        y = self.norm(x) * (1 + scale) + shift
        heads = (
            self.qkv(y).view(x.shape[0], LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        )
        made = functional.scaled_dot_product_attention(*heads.unbind(0))
        x = x + gate * self.out(made.transpose(1, 2).reshape(x.shape))
        y = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(functional.gelu(self.up(y), approximate="tanh"))


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, LENGTH, WIDTH), torch.randn(batch, WIDTH)


@pytest.mark.parametrize(
    ("batch", "runs"), [(1, (1,)), pytest.param(3, (3,), marks=pytest.mark.slow), (None, (2, 3, 7))]
)
def test_a_block_takes_seven_launches(batch: int | None, runs: tuple[int, ...]) -> None:
    """Whether the number of sequences is known or not."""
    torch.manual_seed(0)
    block, of_any = Block().eval(), torch.export.Dim("batch", min=2, max=64)
    shapes = None if batch else ({0: of_any}, {0: of_any})
    with torch.no_grad():
        exported = torch.export.export(block, inputs(batch or 3), dynamic_shapes=shapes)
        mod = from_exported_program(exported, keep_params_as_input=True)
    mod, params = relax.frontend.detach_params(mod)
    report = Report()
    pipeline = relax_fusion_pipeline(quick_host(), report=report)
    main = machine(quickly(mod, pipeline))["main"]
    for given in map(inputs, runs):
        with torch.no_grad():
            wanted = block(*given).numpy()
        got = main(*(tvm.runtime.tensor(a.numpy()) for a in given), *params["main"])
        np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-4, atol=1e-5)
    # silu, its projection, both with the norm, attention, the output's, and what comes down
    (coverage,) = report.coverage
    assert len(coverage.launches.kernels) == 7 and not coverage.launches.copies
    assert coverage.chains["norm -> projection"] == (2, 2)
    assert not [left for left in report.leftovers if left.kind == "norm"]
