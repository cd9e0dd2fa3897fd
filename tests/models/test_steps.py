"""Steps of a decoder that count on themselves: their tokens, and the rows that they write."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import make_target
from relax_fusion.models import ExportedModel, Generator, export, kv_cache
from relax_fusion.models.kv_cache import Heads
from relax_fusion.transforms.whole_graph import RUN_OR_CAPTURE

from ..support.models import compile_for_test
from ..support.quick import quick_host
from ..support.slow import quick_if, sampled
from ..support.steps import various_weights
from ..support.tiny_llama import TINY
from .test_quantized import BERT

NEW, PROMPT = 20, 3
CASES = [(batch, quantization) for batch in (1, 8) for quantization in (None, "q4f16_1")]
NAME = "{0[0]}-{0[1]}".format


def tiny(batch: int, quantization: str | None) -> ExportedModel:
    rows = PROMPT + NEW - 1
    return export(TINY, dtype="float16", max_seq_len=rows, batch=batch, quantization=quantization)


@cache
def compiled_tiny(batch: int, quantization: str | None) -> tuple[ExportedModel, tvm.runtime.Module]:
    model = tiny(batch, quantization)
    return model, compile_for_test(model)


@pytest.mark.parametrize(("batch", "quantization"), sampled(CASES, 3))
def test_tokens_are_those_that_the_host_would_choose(batch: int, quantization: str | None) -> None:
    model, compiled = compiled_tiny(batch, quantization)
    session = Generator(compiled, model, various_weights(model))
    prompt = np.random.default_rng(0).integers(0, TINY.vocab_size, (batch, PROMPT))
    found = session.generate(prompt, NEW)
    session.reset()
    chosen = [session.prefill(prompt).argmax(-1)]
    while len(chosen) < NEW:
        chosen.append(session.decode(chosen[-1]).argmax(-1))
    np.testing.assert_array_equal(found, np.stack(chosen, axis=1))
    assert len(np.unique(found)) > NEW // 4


@pytest.mark.parametrize("name", quick_if("8-q4f16_1".__eq__, [*map(NAME, CASES), "encoder"]))
def test_one_graph_compiles_for_a_gpu(name: str) -> None:
    """Steps, and an encoder that always takes as many tokens."""
    cases = {NAME(case): case for case in CASES}
    encoder = export(BERT, dtype="float16", max_seq_len=8, seq_len=8)
    model = tiny(*cases[name]) if name in cases else encoder
    kept = {g: f for g, f in model.mod.functions.items() if g.name_hint != "prefill"}
    target = make_target("h200")
    pipeline = relax.get_pipeline("relax_fusion", target=target)
    compiled = tvm.compile(tvm.IRModule(kept), target, relax_pipeline=pipeline)
    assert RUN_OR_CAPTURE in compiled.as_text()


@pytest.mark.parametrize(
    ("name", "tokens", "total", "numbers"),
    [
        ("decode", 1, 23, "23 vs. 22"),
        ("prefill", 23, 23, "23 vs. 22"),
        ("prefill", 5, 3, "2 vs. 0"),
    ],
)
def test_caches_that_are_too_short_are_an_error_with_both_numbers(
    name: str, tokens: int, total: int, numbers: str
) -> None:
    model, compiled = compiled_tiny(1, None)
    machine = relax.VirtualMachine(compiled, tvm.cpu())
    zeros = lambda shape, dtype: tvm.runtime.tensor(np.zeros(shape, dtype))  # noqa: E731
    caches = [zeros(shape, "float16") for shape in model.cache_shapes]
    params = [zeros(p.shape, p.dtype) for p in model.params]
    length = [zeros((1,), "int32")] if name == "decode" else []
    shape = tvm.runtime.ShapeTuple([total])
    with pytest.raises(RuntimeError, match=numbers):
        machine[name](zeros((1, tokens), "int32"), *length, shape, caches, params)
    assert not any(cache.numpy().any() for cache in caches)


@pytest.mark.parametrize("length", [0, 3, 4, 9])
@pytest.mark.parametrize("merged", [True, False])
def test_no_row_behind_a_cache_is_written(length: int, merged: bool) -> None:
    """Two caches of four rows stand one behind the other, in front of one that nobody passes."""
    made, given = (
        kv_cache.kv_write(1, (2, 2), 4, "float32", True),
        [np.ones((2, 1, 1, 2), "float32")] * 2,
    )
    if merged:
        made = kv_cache.kv_append(Heads(1, 1, 2), 4, "float32", True)
        given = [np.ones((2, 1, 6), "float32")]
    memory = [tvm.runtime.tensor(np.zeros((3, 4, 1, 2), "float32")) for _ in "kv"]
    caches: list[Any] = [m._create_view((2, 4, 1, 2), "float32", 0) for m in memory]
    count = tvm.runtime.tensor(np.array([length], "int32"))
    run = tvm.compile(made.with_attr("global_symbol", "main"), quick_host())["main"]
    run(*map(tvm.runtime.tensor, given), *caches, count)
    expected = np.zeros((3, 4, 1, 2), "float32")
    expected[:2, min(length, 3)] = 1
    for found in memory:
        np.testing.assert_array_equal(found.numpy(), expected)
