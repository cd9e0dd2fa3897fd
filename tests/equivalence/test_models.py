"""Every match in the models that the library builds is checked."""

from __future__ import annotations

import pytest
import tvm

from relax_fusion import PipelineOptions, Report, make_target
from relax_fusion.models import BertConfig, GPT2Config, LlamaConfig, export
from relax_fusion.pipeline import phase0_annotate, phase1_fuse

from ..support.slow import sampled

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=8192,
)
GPT2 = GPT2Config(
    vocab_size=50257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=2,
    num_heads=12,
    max_position=1024,
)
BERT = BertConfig(
    vocab_size=30522,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=2,
    num_heads=12,
    max_position=512,
)


@pytest.mark.parametrize("config", sampled([LLAMA, GPT2, BERT]), ids=lambda c: c.family)
@pytest.mark.parametrize("target", sampled(["h200", "llvm"]))
def test_every_match_is_checked(config: LlamaConfig, target: str) -> None:
    report = Report()
    options = PipelineOptions(make_target(target), report=report, validate="strict")
    mod = export(config, dtype="float16" if target == "h200" else "float32").mod
    with options.target:
        tvm.transform.Sequential([*phase0_annotate(options), *phase1_fuse(options)])(mod)
    assert {d.validation for d in report.fused} == {"checked"}
