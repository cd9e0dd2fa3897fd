"""LLaMA of transformers, as PyTorch's exporter and Relax's importer hand it over."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from relax_fusion import Report

from ..support import models
from ..support.accuracy import assert_accurate
from ..support.quick import machine, quick_host, quickly
from ..support.slow import sampled

LENGTH = 12


class Layers(torch.nn.Module):
    """The decoder layers as a function of hidden states and their positions.

    TVM 0.27 cannot compile the masks that transformers makes in front of them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model.model

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = self.model.rotary_emb(x, positions)
        for layer in self.model.layers:
            x = layer(x, attention_mask=None, position_embeddings=angles)
        return x


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return models.llama(attention_bias=True)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("batch", sampled([2, 1]))
def test_heads_are_rotated_by_the_projections(model: torch.nn.Module, batch: int) -> None:
    layers = Layers(model)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, LENGTH, model.config.hidden_size, generator=generator)
    positions = torch.arange(3, LENGTH + 3)[None]
    mod = from_exported_program(torch.export.export(layers, (x, positions)))
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    built = quickly(mod, pipeline)
    qkv = [d.workload.outputs for d in report.decisions if d.fused and "rope" in d.spelling]
    ropes = [[p.rope and (p.rope.features, p.rope.positions) for p in outputs] for outputs in qkv]
    shared = None if batch == 1 else LENGTH
    assert ropes == [[(128, shared), (64, shared), None]] * 2
    inputs = (tvm.runtime.tensor(t.numpy()) for t in (x, positions))
    got = machine(built)["main"](*inputs)[0].numpy()
    with torch.no_grad():
        both = (Layers(models.to_float64(model)), Layers(models.nudge(model, "float32")))
        exact, moved = (made(x.double(), positions).numpy() for made in both)
    assert_accurate(got, exact, moved, "float32", models.longest_sum(model.config))
