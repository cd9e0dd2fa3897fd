"""Models that are spread over workers compute what one worker does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tvm import relax

from relax_fusion import Report, make_target
from relax_fusion.models import (
    ConfigError,
    ExportedModel,
    Generator,
    InputError,
    ModelError,
    ParallelGenerator,
    WeightsError,
    config_from_dict,
    export,
    load_config,
    load_weights,
    random_weights,
)
from relax_fusion.models.cuts import Cut, Segment
from relax_fusion.models.expert_config import Experts
from relax_fusion.parallel import WorkerError, Workers
from relax_fusion.workload import Step

from ..support import models
from ..support.quick import LIBRARIES, quick_host, quickly
from ..support.slow import sampled
from ..support.tiny_llama import TINY, TWO_LAYERS
from .test_quantized import without

ODD = {"vocab_size": 161}
"""No number of workers divides it."""

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: models.llama(attention_bias=True, mlp_bias=True, **ODD),
    "gpt2": lambda: models.gpt2(**ODD),
    **{
        name: lambda name=name: models.decoder(name)
        for name in ("Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3Text")
    },
}
WIDE = replace(TINY, head_dim=32, intermediate_size=256)
"""One whose parts among four are whole groups of 32."""

PROMPT = np.array([3, 1, 4, 15, 9, 2, 6])


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS[request.param]()
    return models.save(model, tmp_path_factory.mktemp(request.param))


def compiled(exported: ExportedModel, path: Path) -> Path:
    pipeline = relax.get_pipeline(
        "relax_fusion", target=quick_host(), variable_bounds={"seq_len": models.SHORT_SEQ_LEN}
    )
    quickly(exported.mod, pipeline).export_library(str(path), options=LIBRARIES)
    return path


def together(
    exported: ExportedModel, weights: Path | int, directory: Path, kind: str = "threads"
) -> ParallelGenerator:
    library = compiled(exported, directory / f"{exported.shards}.so")
    return ParallelGenerator(Workers(exported.shards, kind=kind), library, exported, weights)


def assert_same(one: Generator, several: ParallelGenerator) -> None:
    """Compare logits, and the tokens that are chosen by them; what is refused ends no worker."""
    vocabulary = several.exported.config.vocab_size
    told = f"token ids must be in 0..{vocabulary - 1}, got {vocabulary}..{vocabulary}"
    with several:
        with pytest.raises(InputError, match=re.escape(told)):
            several.prefill([vocabulary])
        with pytest.raises(InputError, match="do not fit the context"):
            several.generate(PROMPT, 90)
        logits = [(one.prefill(PROMPT), several.prefill(PROMPT))]
        logits += [(one.decode(token), several.decode(token)) for token in (5, 11, 42)]
        for expected, found in logits:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(several.generate(PROMPT, 9), one.generate(PROMPT, 9))
    with pytest.raises(WorkerError, match="the workers have ended: they were closed"):
        several.prefill(PROMPT)


def run_both(config, weights, directory: Path, shards: int, **options) -> None:
    options = {"max_seq_len": models.SHORT_SEQ_LEN, **options}
    whole, spread = export(config, **options), export(config, shards=shards, **options)
    arrays = (
        random_weights(whole, weights) if type(weights) is int else load_weights(weights, whole)
    )
    one = Generator(models.compile_for_test(whole), whole, arrays)
    assert_same(one, together(spread, weights, directory))


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_workers_read_their_parts(saved: Path, shards: int, dtype: str) -> None:
    config = load_config(saved)
    spread = export(config, dtype=dtype, shards=shards)
    whole = export(config, dtype=dtype)
    arrays = {p.name: a for p, a in zip(whole.params, load_weights(saved, whole), strict=True)}
    names = {p.name.replace(".table", "") for p in spread.params}
    assert names - set(arrays) == {n for n in names if n.endswith("first_row")}
    for rank in range(shards):
        for param, array in zip(spread.params, load_weights(saved, spread, rank), strict=True):
            assert array.shape == param.shape and str(array.dtype) == param.dtype
            if not param.name.endswith("first_row"):
                value, cut = arrays[param.name.replace(".table", "")], param.recipe.cut
                part = value if cut is None else cut.part(value, rank)
                np.testing.assert_array_equal(array, part, err_msg=param.name)


def test_llama_on_two_workers(tmp_path: Path) -> None:
    path = models.save(MODELS["llama"](), tmp_path)
    run_both(load_config(path), path, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
def test_models_on_several_workers(saved: Path, shards: int, tmp_path: Path) -> None:
    run_both(load_config(saved), saved, tmp_path, shards)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [2, 4])
def test_quantised_models_on_several_workers(shards: int, tmp_path: Path) -> None:
    run_both(WIDE, 3, tmp_path, shards, quantization="q4f32_1")


@pytest.mark.slow
def test_a_batch_on_processes(tmp_path: Path) -> None:
    options = {"max_seq_len": models.SHORT_SEQ_LEN, "batch": 2}
    whole, spread = export(TINY, **options), export(TINY, shards=2, **options)
    one = Generator(models.compile_for_test(whole), whole, random_weights(whole, 3))
    prompts = np.stack([PROMPT, PROMPT[::-1]])
    with together(spread, 3, tmp_path, "processes") as several:
        np.testing.assert_array_equal(several.generate(prompts, 8), one.generate(prompts, 8))


@pytest.mark.parametrize("name", ["q4f16_0", "q4f16_1", "q8f16_1"])
def test_quantised_parts_are_parts_of_the_quantised(name: str) -> None:
    whole, spread = (export(WIDE, quantization=name, shards=n) for n in (1, 4))
    arrays = {p.name: a for p, a in zip(whole.params, random_weights(whole, 3), strict=True)}
    parts = [random_weights(spread, 3, rank) for rank in range(4)]
    joined = 0
    for i, param in enumerate(spread.params):
        cut = param.recipe.cut
        if param.form is None or cut is None or len(cut.segments) > 1:
            continue
        axis = cut.axis if param.form.axis == -1 else 1 - cut.axis
        every = np.concatenate([part[i] for part in parts], axis)
        np.testing.assert_array_equal(every, arrays[param.name.replace(".table", "")])
        joined += 1
    assert joined == 8, "words and scales of the table, the head and two projections"


def test_few_heads_are_several_workers() -> None:
    segment = Segment(2 * 8, 2)
    assert [segment.span(rank, 4) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    padded = Cut(3, 0, (Segment(7, 3),))
    parts = [padded.part(np.arange(1, 8), rank) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), [1, 2, 3, 4, 5, 6, 7, 0, 0])
    tiny = [Segment(3, 4).span(rank, 4) for rank in range(4)]
    assert tiny == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_as_many_workers_as_the_model_was_exported_for(tmp_path: Path) -> None:
    with Workers(2, kind="threads") as workers:
        spread = export(TINY, shards=2)
        with pytest.raises(ModelError, match="exported for 2 workers; run it with Parallel"):
            Generator(None, spread, [])
        text = "the model was exported for 1 worker(s), and there are 2"
        with pytest.raises(InputError, match=re.escape(text)):
            ParallelGenerator(workers, tmp_path, export(TINY), 0)
        with pytest.raises(WorkerError, match=r"worker \d of 2 failed: CheckpointFileError"):
            ParallelGenerator(workers, tmp_path, spread, tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (TINY, {"shards": 0}, "shards is 0; must be an integer of at least 1"),
        (TINY, {"shards": 2.5}, "shards is 2.5; must be an integer of at least 1"),
        (
            replace(TINY, experts=Experts(4, 2, 48)),
            {"shards": 2},
            "experts cannot be spread over 2 workers",
        ),
        (TINY, {"shards": 3}, "the 4 attention heads cannot be spread evenly over 3 workers"),
        (
            replace(TINY, intermediate_size=98),
            {"shards": 4},
            "the 98 features of the feed-forward network cannot be spread evenly over 4 workers",
        ),
        (
            replace(TINY, num_heads=12, num_kv_heads=3),
            {"shards": 2},
            "the 3 heads of keys and values cannot be spread over 2 workers; that must divide them "
            "or be a multiple",
        ),
        (
            TINY,
            {"shards": 2, "quantization": "q4f16_1"},
            "'model.layers.0.mlp.down_proj.weight' cannot be spread over 2 workers: each would "
            "have 48 features, which are no multiple of the 32 that share a scale",
        ),
        (
            config_from_dict(
                {
                    "model_type": "bert",
                    "vocab_size": 64,
                    "hidden_size": 64,
                    "intermediate_size": 96,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 4,
                }
            ),
            {"shards": 2},
            "an encoder cannot be spread over 2 workers",
        ),
    ],
)
def test_what_cannot_be_spread(config, options, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        export(config, **options)


def test_a_rank_is_one_of_the_workers() -> None:
    for shards, rank in ((1, 1), (2, 2), (2, -1)):
        with pytest.raises(WeightsError, match=f"^rank is {rank}; must be from 0 to {shards - 1}$"):
            random_weights(export(TINY, shards=shards), 0, rank)


LAUNCHED = replace(
    TWO_LAYERS,
    hidden_size=1024,
    intermediate_size=2048,
    head_dim=64,
    vocab_size=4096,
    num_heads=16,
    num_kv_heads=4,
    num_layers=3,
)
SPREAD = {
    "llama": (LAUNCHED, {"dtype": "float16"}, 7),
    "biases": (
        replace(LAUNCHED, attention_bias=True, output_bias=True, mlp_bias=True),
        {"dtype": "float16"},
        7,
    ),
    "q4f16_1": (LAUNCHED, {"quantization": "q4f16_1"}, 7),
    "qwen3": (replace(LAUNCHED, qk_norm=True), {"dtype": "float16"}, 8),
    "gemma2": (
        replace(LAUNCHED, norm_offset=True, post_norms=True, attention_softcap=50.0),
        {"dtype": "float16"},
        7,
    ),
    "gpt2": (
        config_from_dict(
            {"model_type": "gpt2", "vocab_size": 4001, "n_embd": 1024, "n_layer": 1, "n_head": 16}
        ),
        {"dtype": "float16", "max_seq_len": 64},
        7,
    ),
}
"""A configuration, how it is exported, and the launches of a layer when a token is decoded."""


@pytest.mark.parametrize("name", sampled(SPREAD, len(SPREAD)))
def test_launches_of_a_layer(name: str) -> None:
    config, options, expected = SPREAD[name]
    counts = []
    for layers in (1, 2):
        exported = export(replace(config, num_layers=layers), shards=2, **options)
        report = Report()
        pipeline = relax.get_pipeline("relax_fusion", target=make_target("h200"), report=report)
        pipeline(without(exported.mod, ["prefill"]))
        (run,) = (each for each in report.launches if each.function == "decode")
        sums = run.kernels.count("runtime.disco.allreduce")
        assert sums == 1 + 2 * layers and run.kernels.count("runtime.disco.allgather") == 1
        counts.append(len(run.kernels))
    assert counts[1] - counts[0] == expected


STEPS: dict[int, tuple[Step, ...]] = {
    1: ("residual",),
    2: (2.0, "residual", 0.5),
    3: (),
    4: (4.0, "residual", 0.25),
}
"""What is behind the projections in front of an all-reduce, by the number of workers."""


@pytest.mark.parametrize("shards", STEPS)
def test_workers_add_shares_of_a_residual_that_are_exact(shards: int, tmp_path: Path) -> None:
    config = replace(TINY, num_heads=12, num_kv_heads=12)
    report = Report()
    pipeline = relax.get_pipeline("relax_fusion", target=quick_host(), report=report)
    pipeline(without(export(config, shards=shards).mod, ["prefill"]))
    works = [d.workload for d in report.fused]
    behind = Counter(p.epilogue for w in works for p in getattr(w, "outputs", ()))
    assert behind[STEPS[shards]] >= 2 * config.num_layers
    norms = [w.norm for w in works if getattr(w, "norm", None)]
    assert norms and any(norm.residual for norm in norms) == (shards == 3)
    if shards == 3:
        run_both(config, 5, tmp_path, shards)
