"""The suite decode: what needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from benchmarks.runner import main
from benchmarks.suites.decode import suite as bench
from benchmarks.suites.decode.peers import Decoder
from benchmarks.suites.decode.weights import random_weights
from relax_fusion import make_target
from relax_fusion.models import export
from tests.support.accuracy import assert_accurate, nudged
from tests.support.quick import machine, quick_host, quickly
from tests.support.steps import logits_of_step
from tests.support.tiny_llama import TWO_LAYERS

KINDS = ("layer", "layer_in_graphs", "rest")
TINY = replace(TWO_LAYERS, vocab_size=96)


@pytest.mark.parametrize("stored", [None, "q4f32_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_twin_computes_what_the_model_does(tied: bool, stored: str | None) -> None:
    config = replace(TINY, tie_word_embeddings=tied)
    exported = export(config, max_seq_len=16, batch=3, quantization=stored)
    bench.decode_only(exported)
    dev, total = tvm.cpu(), 8
    arrays_of_params, whole = random_weights(exported)
    params = [tvm.runtime.tensor(array, dev) for array in arrays_of_params]
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, shape)) for shape in exported.cache_shapes]
    arrays = [rng.standard_normal(shape, "float32") for shape in shapes]
    ids = np.array([[3], [90], [41]], "int32")

    def twin(make: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Return the logits, and the caches as they are after the step."""
        weights = {
            name: torch.from_numpy(make(array))
            for name, array in whole.items()
            if not name.startswith("model.rope")
        }
        copies = [torch.from_numpy(a.astype("float64")) for a in arrays]
        logits = Decoder(exported.config, weights, copies, total)(torch.from_numpy(ids))
        return [t.numpy() for t in (logits, *copies)]

    cpu = quick_host()
    built = quickly(exported.mod, relax.get_default_pipeline(cpu))
    caches = [tvm.runtime.tensor(a, dev) for a in arrays]
    logits = logits_of_step(machine(built)["decode"], ids, total, caches, params)
    got = [logits, *(t.numpy() for t in caches)]
    exact, moved = twin(lambda w: w.astype("float64")), twin(lambda w: nudged(w, "float32"))
    for ours, best, near in zip(got, exact, moved, strict=True):
        assert_accurate(ours, best, near, "float32", TINY.intermediate_size)


@pytest.mark.parametrize("stored", ["", "q4f16_1"])
def test_a_run_with_a_cpu_in_the_place_of_the_gpu(
    tmp_path, monkeypatch, cpu_in_place_of_a_gpu, stored
) -> None:
    cpu = quick_host()
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    monkeypatch.setattr(bench, "make_target", lambda _: cpu)
    monkeypatch.setattr(bench, "CALLS", 2)
    monkeypatch.setattr(bench, "count_launches", lambda *_: dict.fromkeys(KINDS, 1.0))
    monkeypatch.setattr(bench.models, "zoo_config", lambda _: TINY)
    arguments = ["--layers", "2", "--batch", "2", "--context", "5", "--vocab", "96", "--no-compile"]
    arguments += ["--quantization", stored]
    assert main(bench.Decode, [*arguments, "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob(f"*-bench_decode-batch2{stored and '-'}{stored}.json")
    (entry,) = json.loads(file.read_text())["cases"]
    assert not entry["wrong"] and set(entry["times"]) == {"eager", "graphs", "no graphs"}
    assert all(t["token_s"] >= t["host_s"] > 0 for t in entry["times"].values())
    assert entry["errors"]["graphs"] == entry["errors"]["no graphs"] > 0


def test_launches_of_a_layer() -> None:
    models = [export(replace(TINY, num_layers=n), dtype="float16", max_seq_len=32) for n in (2, 1)]
    found, less = (bench.launches(bench.decode_only(m), make_target("h200")) for m in models)
    layer, inside = (a - b for a, b in zip(found, less, strict=True))
    assert layer == inside >= 6, "qkv, cache, attention, output, gate and up, down"
    assert found[0] == found[1], "all of a step is in a graph"


def test_floor_counts_what_a_token_reads() -> None:
    h, f, v, q, kv = 64, 96, 96, 64, 32
    layer = h * (q + 2 * kv) + q * h + 3 * h * f + 2 * h
    cache = 2 * 2 * 3 * 8 * kv
    for tied in (False, True):
        exported = export(
            replace(TINY, tie_word_embeddings=tied), dtype="float16", max_seq_len=16, batch=3
        )
        assert bench.floor_bytes(exported, 3, 8) == 2 * (2 * layer + h + v * h + cache)
