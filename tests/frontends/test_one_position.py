"""Imported models whose head reads one position: of the last layer, that position is computed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import transformers
import tvm
from torch.export import Dim
from tvm import relax

from relax_fusion import Report
from relax_fusion.frontends.torch import from_exported_program

from ..support.quick import machine, quick_host, quickly
from ..support.slow import quick_if

BATCH, LENGTH, WIDTH, FFN = 2, 7, 32, 48
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
SIZES |= {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": FFN}


class Pooled(torch.nn.Module):
    """BERT, of which the first position is pooled."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        config = transformers.BertConfig(**SIZES, attn_implementation=attention)
        self.model = transformers.BertModel(config).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, attention_mask=mask).pooler_output


class Last(torch.nn.Module):
    """LLaMA, of which the last position gives logits."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**SIZES, attn_implementation=attention)
        self.model = transformers.LlamaForCausalLM(config).eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits[:, -1]


CASES = list(itertools.product((Pooled, Last), ("sdpa", "eager"), (True, False)))


@pytest.mark.parametrize(
    ("model", "attention", "dynamic"), quick_if(lambda case: case == (Last, "sdpa", False), CASES)
)
def test_one_position(model: type, attention: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    net, ids = model(attention), torch.randint(0, 64, (BATCH, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0 if model is Pooled else 1
    mask[1, :2] = 0 if model is Last else 1
    length = {1: Dim("s", min=2, max=32)}
    dims = (length, length) if dynamic else None
    exported = torch.export.export(net, (ids, mask), dynamic_shapes=dims)
    mod, report = from_exported_program(exported), Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    vm = machine(quickly(mod, pipeline, quick_host()))
    (got,) = vm["main"](*(tvm.runtime.tensor(t.numpy()) for t in (ids, mask)))
    with torch.no_grad():
        np.testing.assert_allclose(got.numpy(), net(ids, mask).numpy(), rtol=1e-5, atol=1e-6)

    rows: dict[tuple[object, object], list[object]] = {}
    for item in report.work:
        for product in item.products:
            size = product.n, product.k
            rows.setdefault(size, []).extend([product.m] * item.count)
    assert rows[FFN, WIDTH].count(BATCH) == rows[WIDTH, FFN].count(BATCH) * (1 + (model is Last))
    assert rows[WIDTH, FFN].count(BATCH) == 1 and len(rows[WIDTH, FFN]) == 2
    # Queries and output of the last layer, and BERT's pooler; keys and values are of all rows
    assert rows[WIDTH, WIDTH].count(BATCH) == 2 + (model is Pooled)
    assert len(rows[WIDTH, WIDTH]) == 8 + (model is Pooled)
    attentions = [item for item in report.work if item.kind == "attention"]
    (last,) = (item for item in attentions if item.products[0].m == 1)
    assert last.count == 1 and last.status == "fused" and len(attentions) == 2
