"""The feed-forward block of LLaMA of transformers, as PyTorch's exporter hands it over."""

from __future__ import annotations

import itertools

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

BATCH, LENGTH = 2, 12
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class Block(torch.nn.Module):
    """A decoder layer without its attention: norm, gated FFN and residual."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        layer = model.model.layers[0]
        self.norm, self.mlp = layer.post_attention_layernorm, layer.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def exported(block: Block, x: torch.Tensor, *, symbolic: bool) -> tvm.IRModule:
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")} if symbolic else None
    return from_exported_program(torch.export.export(block, (x,), dynamic_shapes=(dims,)))


def operators(mod: tvm.IRModule) -> list[str]:
    """Return the names of the operators of `main`."""
    bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
    return [b.value.op.name for b in bindings if isinstance(b.value, relax.Call)]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("activation", "symbolic"), sampled(zip(ACTIVATIONS, itertools.cycle([True, False])))
)
def test_two_kernels_and_numbers(activation: str, symbolic: bool) -> None:
    model = models.llama(hidden_act=activation, mlp_bias=symbolic)
    block = Block(model)
    x = torch.randn(BATCH, LENGTH, model.config.hidden_size, generator=torch.manual_seed(1))
    mod = exported(block, x, symbolic=symbolic)
    assert operators(mod).count("relax.matmul") == 3 <= operators(mod).count("relax.reshape")
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    built = quickly(mod, pipeline)
    assert [d.pattern for d in report.fused] == ["FuseGatedFFN", "FuseMatmulEpilogue"]
    assert report.declined == []  # what FuseChains declined, others took
    gated = report.fused[0].workload
    assert (gated.activation, gated.n) == (ACTIVATIONS[activation], model.config.intermediate_size)
    assert gated.norm is not None and gated.bias == symbolic
    got = machine(built)["main"](tvm.runtime.tensor(x.numpy()))[0].numpy()
    with torch.no_grad():
        both = (Block(models.to_float64(model)), Block(models.nudge(model, "float32")))
        exact, moved = (made(x.double()).numpy() for made in both)
    assert_accurate(got, exact, moved, "float32", models.longest_sum(model.config))
