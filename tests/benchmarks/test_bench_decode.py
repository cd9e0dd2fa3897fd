"""The suites decode and prefill: what needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from benchmarks.runner import main
from benchmarks.suites.decode import launches, parallel, peers, prefill, shard, step, timeline
from benchmarks.suites.decode.suite import Decode
from benchmarks.suites.decode.weights import random_weights
from relax_fusion import make_target
from relax_fusion.models import Config, GPT2Config, export
from relax_fusion.models.expert_config import Experts
from tests.parallel import functions
from tests.support.accuracy import assert_accurate, nudged
from tests.support.quick import LIBRARIES, machine, quick_host, quickly
from tests.support.slow import quick_if
from tests.support.steps import logits_of_step
from tests.support.tiny_llama import TWO_LAYERS

COMPILE = tvm.compile
KINDS = ("layer", "layer_in_graphs", "rest")
TINY = replace(TWO_LAYERS, vocab_size=96)
GPT2 = GPT2Config(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, max_position=64
)
EXPERTS = replace(TINY, qk_norm=True, experts=Experts(6, 2, 32))
BIASED = replace(TINY, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
    ("config", "stored", "tokens"),
    [
        *((TINY, "q4f32_1", 1), (BIASED, None, 1), (TINY, None, 8), (GPT2, None, 8)),
        (EXPERTS, None, 1),
        *(pytest.param(c, None, 1, marks=pytest.mark.slow) for c in (TINY, GPT2)),
    ],
)
def test_the_twin_computes_what_the_model_does(
    config: Config, stored: str | None, tokens: int
) -> None:
    name = "decode" if tokens == 1 else "prefill"
    exported = export(config, max_seq_len=16, batch=3, quantization=stored)
    del exported.mod["prefill" if name == "decode" else "decode"]
    dev, total = tvm.cpu(), 8
    arrays_of_params, whole = random_weights(exported)
    params = [tvm.runtime.tensor(array, dev) for array in arrays_of_params]
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, shape)) for shape in exported.cache_shapes]
    arrays = [rng.standard_normal(shape, "float32") for shape in shapes]
    ids = rng.integers(96, size=(3, tokens), dtype="int32")

    def twin(make: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Return the logits, and the caches as they are after the step."""
        weights = {
            name: torch.from_numpy(make(array))
            for name, array in whole.items()
            if not name.startswith("model.rope")
        }
        copies = [torch.from_numpy(a.astype("float64")) for a in arrays]
        made = peers.peer(exported.config, weights, copies, total, tokens)
        logits = torch.compile(made, backend="eager", fullgraph=True)(torch.from_numpy(ids))
        return [t.numpy() for t in (logits, *copies)]

    cpu = quick_host()
    run = machine(quickly(exported.mod, relax.get_default_pipeline(cpu)))[name]
    caches = [tvm.runtime.tensor(a, dev) for a in arrays]
    if name == "decode":
        logits = logits_of_step(run, ids, total, caches, params)
    else:
        given = tvm.runtime.tensor(ids, dev), tvm.runtime.ShapeTuple([total])
        logits = run(*given, caches, params)[0].numpy()
    got = [logits, *(t.numpy() for t in caches)]
    exact, moved = twin(lambda w: w.astype("float64")), twin(lambda w: nudged(w, "float32"))
    for ours, best, near in zip(got, exact, moved, strict=True):
        assert_accurate(ours, best, near, "float32", TINY.intermediate_size)


def test_the_floor_counts_experts_that_tokens_choose() -> None:
    exported = export(EXPERTS, dtype="float32", max_seq_len=16)
    every = step.floor_bytes(exported, 1000, 8)
    cached = 2 * 2 * 8 * 2 * 16 * 4
    one, two = (step.floor_bytes(exported, n, 8) - n * cached for n in (1, 2))
    weights = 2 * 6 * 3 * 32 * 64 * 4
    whole = every - 1000 * cached
    assert whole - one == pytest.approx(weights * (1 - 2 / 6), abs=8)
    assert whole - two == pytest.approx(weights * (1 - 2 / 6) ** 2, abs=8)


def test_models_without_a_twin(capsys) -> None:
    assert peers.refusal(TINY) == peers.refusal(BIASED) == peers.refusal(GPT2) == ""
    gemma = replace(TINY, norm_offset=True, hidden_act="gelu")
    assert peers.refusal(gemma) == "PyTorch's side computes no hidden_act, norm_offset"
    assert peers.refusal(EXPERTS, 32) == ""
    assert peers.refusal(EXPERTS, 33) == "PyTorch's side has experts for 32 tokens at most"
    as_they_are = replace(EXPERTS, experts=replace(EXPERTS.experts, renormalised=False))
    assert "by their sum" in peers.refusal(as_they_are)
    for arguments, told in {
        "--model bert-base": "--model bert-base: it is no decoder",
        "--model mixtral-8x7b --batch 33": "has experts for 32 tokens at most",
        "--model x": "no bundled config is called 'x'; there are llama-3.1-8b",
        "--model gpt2 --layers 1": "--layers must be at least 2",
        "--model gpt2 --context 1024": "--context must be from 1 to 1023",
        "--without Nothing": "invalid choice: 'Nothing'",
    }.items():
        with pytest.raises(SystemExit):
            Decode.arguments(arguments.split())
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        prefill.Prefill.arguments(["--model", "gpt2", "--tokens", "1025"])
    assert "--tokens must be at most 1024" in capsys.readouterr().err
    assert prefill.Prefill.arguments(["--model", "gpt2"]).tokens == [128, 1024]
    assert Decode.arguments(["--model", "gpt2"]).context == 1023


@pytest.fixture
def run(tmp_path, monkeypatch, cpu_in_place_of_a_gpu):
    """Run a suite on a small model, the CPU in the place of the GPU; return its only entry."""
    cpu = quick_host()
    monkeypatch.setattr(tvm, "cuda", tvm.cpu)
    monkeypatch.setattr(step, "make_target", lambda _: cpu)
    monkeypatch.setattr(step, "CALLS", 2)
    monkeypatch.setattr(
        step, "count_launches", lambda *given: [dict.fromkeys(KINDS, 1.0) for _ in given[3]]
    )

    def call(suite: type, config: Config, words: str, name: str) -> tuple[dict, str]:
        monkeypatch.setattr(step.models, "zoo_config", lambda _: config)
        words = f"--layers 2 --batch 2 --vocab 96 --no-compile {words} --results {tmp_path}"
        assert main(suite, words.split()) == 0
        (file,) = tmp_path.glob(f"*-{name}.json")
        (entry,) = json.loads(file.read_text())["cases"]
        return entry, file.with_suffix(".md").read_text()

    return call


@pytest.mark.parametrize("stored", quick_if(bool, ["", "q4f16_1"]))
def test_a_token_with_a_cpu_in_the_place_of_the_gpu(run, stored) -> None:
    words = f"--context 5 {'--quantization ' + stored if stored else ''}"
    entry, _ = run(Decode, TINY, words, f"bench_decode-batch2{stored and '-'}{stored}")
    assert not entry["wrong"] and set(entry["times"]) == {"eager", "graphs", "no graphs"}
    assert entry["timeline"] == {}
    assert all(t["token_s"] >= t["host_s"] > 0 for t in entry["times"].values())
    assert entry["errors"]["graphs"] == entry["errors"]["no graphs"] > 0


def test_when_kernels_run(run, monkeypatch, tmp_path) -> None:
    kernels = [("a", 0.0, 3.0), ("waits", 1.0, 5.5), ("hidden", 2.0, 4.0), ("late", 7.0, 8.25)]
    monkeypatch.setattr(timeline, "timeline", lambda *_: [timeline.Kernel(*k) for k in kernels])
    entry, text = run(
        Decode, TINY, "--context 5 --timeline --contenders graphs", "bench_decode-batch2"
    )
    assert [tuple(k) for k in entry["timeline"]["graphs"]] == kernels
    assert "| `waits` | 1.00 | 4.50 | 2.50 |\n| `hidden` | 2.00 | 2.00 | 0.00 |" in text
    assert "| `late` | 7.00 | 1.25 | 2.75 |" in text
    pytest.importorskip("matplotlib")
    (picture,) = tmp_path.glob("*.svg")
    assert all(name in picture.read_text() for name in ("waits", "late", "us; light"))


def test_a_prompt_with_a_cpu_in_the_place_of_the_gpu(run, monkeypatch) -> None:
    def captured(self, call):
        return call

    monkeypatch.setattr(prefill.Prefill, "captured", captured)
    words = "--model gpt2 --tokens 7 --without MoveSlices --contenders eager graph"
    entry, text = run(prefill.Prefill, TINY, words, "bench_prefill-batch2-gpt2-without_MoveSlices")
    assert not entry["wrong"] and not entry["failed"]
    assert set(entry["us"]) == {"eager", "graph"} and entry["errors"]["graph"] > 0
    assert "float16, batch 2, ours without MoveSlices" in text
    assert text.count("vs PyTorch") == 1 and f"| 7 | {1e-3 * entry['floor_us']:.3f} |" in text


def test_launches_of_a_layer(monkeypatch) -> None:
    monkeypatch.setattr(step.models, "zoo_config", lambda _: TINY)
    args, at = Decode.arguments(["--layers", "2"]), {"total_len": 32}
    (found,) = step.count_launches(args, step.export_model(args, 2, "decode", 32), "decode", [at])
    assert found["layer"] == found["layer_in_graphs"] >= 6, "qkv, cache, attention, output, FFN"
    mod = launches.lowered(step.export_model(args, 1, "decode", 32).mod, make_target("h200"))
    every, inside = launches.launches(mod, "decode", at)
    assert every == inside, "all of a step is in a graph"


def test_launches_of_the_branch_that_is_taken() -> None:
    @I.ir_module(check_well_formed=False)
    class Module:
        @T.prim_func(private=True)
        def kernels(x: T.handle, y: T.handle) -> None:
            rows = T.int64()
            a, b = T.match_buffer(x, (rows, 4)), T.match_buffer(y, (rows, 4))
            if T.tvm_thread_invariant(rows <= 8):
                T.call_cpacked("first", a.data)
                T.call_cpacked("second", b.data)
            else:
                T.call_cpacked("third", a.data, b.data)

        @R.function
        def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("n", 4), "float32")) -> R.Tuple:
            Module.kernels(x, y)
            return R.tuple()

    assert [launches.launches(Module, "main", {"n": n}) for n in (8, 9)] == [(2, 0), (1, 0)]


def test_floor_counts_what_a_token_reads() -> None:
    h, f, v, q, kv = 64, 96, 96, 64, 32
    layer = h * (q + 2 * kv) + q * h + 3 * h * f
    cache = 2 * 2 * 3 * 8 * kv
    for tied in (False, True):
        exported = export(
            replace(TINY, tie_word_embeddings=tied), dtype="float16", max_seq_len=16, batch=3
        )
        weights = 2 * (layer + 2 * h) + h + v * h
        assert step.floor_bytes(exported, 3, 8) == 2 * (weights + cache)
        attended = 4 * q * (8 * 9 // 2)
        assert prefill.floor_flops(exported, 3, 8) == 3 * (2 * 8 * layer + attended + 2 * v * h)
    gpt2 = export(GPT2, dtype="float16", max_seq_len=16, batch=3)
    per_layer = 4 * h * h + 2 * h * f + (3 * h + h + f + h) + 4 * h  # matmuls, biases, norms
    assert step.floor_bytes(gpt2, 3, 8) == 2 * (2 * per_layer + 2 * h + v * h + 2 * 2 * 3 * 8 * h)


def test_workers_draw_parts_of_one_model() -> None:
    config = replace(BIASED, vocab_size=97)
    whole, *spread = (export(config, dtype="float16", max_seq_len=8, shards=n) for n in (1, 2, 4))
    place = torch.device("cpu")
    names = {"model.embed_tokens.table.weight": "model.embed_tokens.weight"}
    one = shard.Job(replace(whole, mod=None), "decode", 5, "cpu")
    drawn, kept = dict(shard.weights(one, 0, place)), shard.caches(one, 0, place)
    for exported in spread:
        job = replace(one, exported=replace(exported, mod=None))
        for rank in range(exported.shards):
            parts = dict(shard.weights(job, rank, place))
            for param in exported.params:
                value, cut = parts[param.name].numpy(), param.recipe.cut
                assert value.shape == param.shape and str(value.dtype) == param.dtype
                if (name := names.get(param.name, param.name)) in drawn:
                    expected = drawn[name].numpy()
                    expected = expected if cut is None else cut.part(expected, rank)
                    np.testing.assert_array_equal(value, expected, err_msg=name)
            heads = exported.cache_shapes[0][2]
            first = rank * config.num_kv_heads // exported.shards
            for part, all_of_it in zip(shard.caches(job, rank, place), kept, strict=True):
                assert torch.equal(part, all_of_it[:, :, first : first + heads])


def test_what_cannot_be_run_on_several_gpus(capsys) -> None:
    for arguments, told in {
        "--model gpt2": "--model gpt2: PyTorch's side is a LLaMA",
        "--quantization q4f16_1": "--quantization: weights are drawn on GPUs",
        "--compile-only": "--compile-only needs --libraries",
        "--workers 1": "--workers must be at least 2",
        "--workers 3": "--workers: the 32 attention heads cannot be spread evenly over 3 workers",
        "--tokens 1": "--tokens must be from 2 to 131072",
        "--context 131072": "--context must be from 1 to 131071",
    }.items():
        with pytest.raises(SystemExit):
            parallel.Parallel.arguments(arguments.split())
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_several_gpus_with_processes_in_their_place(run, monkeypatch) -> None:
    def built(library: parallel.Library):
        if not library.path.exists():
            pipeline = relax.get_pipeline("relax_fusion", target=quick_host())
            made = quickly(library.exported.mod, pipeline)
            made.export_library(str(library.path), options=LIBRARIES)
        return library.path

    monkeypatch.setattr(tvm, "compile", COMPILE)
    monkeypatch.setattr(parallel, "built", built)
    monkeypatch.setattr(parallel, "DEVICE", "cpu")
    monkeypatch.setattr(parallel, "ONE_SHOT_BYTES", 0)
    words = "--context 5 --cases decode"
    entry, text = run(parallel.Parallel, TINY, words, "bench_parallel-batch2-2gpus")
    assert not entry["wrong"] and not entry["failed"]
    assert set(entry["us"]) == {*parallel.OURS, "torch"}
    assert entry["errors"]["ours"] == entry["errors"]["no graph"] == entry["errors"]["NCCL"]
    assert 0 < entry["apart"] < 2e-3 and entry["sums_us"] == 4 * entry["all_reduce_us"]
    assert "| decode | 6 |" in text


def test_workers_that_take_too_long() -> None:
    with (
        pytest.raises(TimeoutError, match=r"^workers took longer than 0\.5 s$"),
        parallel.started(2, "cpu", 0.5) as workers,
    ):
        workers.call(functions.sleep_for_ever)
