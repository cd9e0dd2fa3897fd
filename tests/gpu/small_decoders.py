"""Decoders of small widths on a GPU, with CUDA graphs and without, whose tokens are various."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax

from relax_fusion import models
from relax_fusion.models import ExportedModel, Generator
from relax_fusion.models.session import LEAST_REACH
from relax_fusion.transforms.whole_graph import RUN_OR_CAPTURE

from ..support.gpu import gpu_target
from ..support.steps import various_weights

Case: TypeAlias = tuple[str, int, str | None]
"""Of a configuration, how many sequences, and how weights are stored."""

CASES: list[Case] = [
    (name, batch, quantization)
    for name in ("demo-llama", "demo-gpt2")
    for batch in (1, 8)
    for quantization in (None, "q4f16_1")
]
NEW = 2 * LEAST_REACH
"""Tokens after a prompt, so that lengths cross a capture."""

VOCAB = 4096


@cache
def exported(case: Case) -> ExportedModel:
    """Return a model of two layers that has room for a prompt and `NEW` tokens."""
    name, batch, quantization = case
    sizes = {"vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8}
    if name == "demo-llama":
        sizes["num_kv_heads"] = 2
    config = replace(models.zoo_config(name), **sizes)
    rows = prompt(case).shape[1] + NEW
    return models.export(
        config, dtype="float16", max_seq_len=rows, batch=batch, quantization=quantization
    )


def prompt(case: Case) -> np.ndarray:
    """Return three tokens for each sequence."""
    return np.random.default_rng(0).integers(0, VOCAB, (case[1], 3))


@cache
def session(case: Case, graphs: bool) -> Generator:
    """Return a session of a model, compiled for prompts that are as short."""
    model, target = exported(case), gpu_target()
    bounds = {"seq_len": prompt(case).shape[1]}
    pipeline = relax.get_pipeline(
        "relax_fusion", target=target, use_cuda_graph=graphs, variable_bounds=bounds
    )
    compiled = tvm.compile(model.mod, target=target, relax_pipeline=pipeline)
    assert (RUN_OR_CAPTURE in compiled.as_text()) == graphs
    return Generator(compiled, model, various_weights(model), device=tvm.cuda(0))
