"""Decoding with CUDA graphs against decoding without, on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_fusion import models
from relax_fusion.models import ExportedModel
from relax_fusion.transforms.cuda_graph import ADDRESSES, CONFIG
from relax_fusion.transforms.whole_graph import RUN_OR_CAPTURE

from ..support.gpu import gpu_target, needs_gpu
from ..support.steps import logits_of_step
from . import small_decoders

pytestmark = [pytest.mark.gpu, needs_gpu]

NAMES = ("demo-llama", "demo-gpt2")
STEPS, PROMPT, MAX_SEQ_LEN = 10, 33, 64


@cache
def exported(name: str, batch: int | str = 1) -> ExportedModel:
    return models.export(
        models.zoo_config(name), dtype="float16", max_seq_len=MAX_SEQ_LEN, batch=batch
    )


@cache
def compiled(name: str, graphs: bool, batch: int | str = 1) -> relax.VMExecutable:
    """Compile with the defaults; a symbolic batch is bounded, and recorded for each value."""
    hints = {"decode": [batch]} if isinstance(batch, str) else None
    bounds = {batch: 4} if isinstance(batch, str) else None
    target = gpu_target()
    pipeline = relax.get_pipeline(
        "relax_fusion",
        target=target,
        use_cuda_graph=graphs,
        variable_bounds=bounds,
        cuda_graph_symbolic_capture_hints=hints,
    )
    return tvm.compile(exported(name, batch).mod, target=target, relax_pipeline=pipeline)


@cache
def weights(name: str, seed: int = 0) -> list[np.ndarray]:
    return models.random_weights(exported(name), seed)


def decode(session: models.Generator, steps: int = STEPS) -> np.ndarray:
    """Return the logits of a prompt and of the tokens after it."""
    session.reset()
    prompt = np.tile(np.arange(1, PROMPT + 1, dtype="int32"), (session.batch, 1))
    logits = [session.prefill(prompt)]
    for i in range(steps):
        logits.append(session.decode(np.full(session.batch, 7 * i + 3, "int32")))
    return np.stack(logits)


def session(name: str, graphs: bool, **options: Any) -> models.Generator:
    batch = options.get("batch", 1)
    symbolic = "batch_size" if "batch" in options else 1
    made = compiled(name, graphs, symbolic)
    model = exported(name, symbolic)
    return models.Generator(made, model, weights(name), device=tvm.cuda(0), batch=batch)


@pytest.mark.parametrize("name", NAMES)
def test_graphs_change_no_bit(name: str) -> None:
    for graphs in (True, False):
        assert (RUN_OR_CAPTURE in compiled(name, graphs).as_text()) == graphs
    with_graphs, without = (session(name, graphs) for graphs in (True, False))
    expected = decode(without)
    assert np.isfinite(expected).all() and expected.std() > 0
    for _ in range(2):  # the first decode step records, all others replay
        np.testing.assert_array_equal(decode(with_graphs), expected)


@pytest.mark.parametrize("name", NAMES)
def test_one_recording_for_each_batch(name: str) -> None:
    assert RUN_OR_CAPTURE in compiled(name, True, "batch_size").as_text()
    machines = {batch: session(name, True, batch=batch) for batch in (1, 3)}
    for batch in (1, 3, 1):
        np.testing.assert_array_equal(
            decode(machines[batch]), decode(session(name, False, batch=batch))
        )


def test_batches_in_one_machine() -> None:
    """The same VM, called with one batch size and another in turn."""
    name, dev = "demo-gpt2", tvm.cuda(0)
    model = exported(name, "batch_size")
    params = [tvm.runtime.tensor(w, dev) for w in weights(name)]
    machines = [
        relax.VirtualMachine(compiled(name, graphs, "batch_size"), dev) for graphs in (True, False)
    ]
    for batch in (2, 4, 2, 1, 4):
        ids = np.arange(batch, dtype="int32")[:, None] + 5
        results = []
        for vm in machines:
            caches = [
                tvm.runtime.tensor(np.zeros((batch, *map(int, s[1:])), "float16"), dev)
                for s in model.cache_shapes
            ]
            results.append(logits_of_step(vm["decode"], ids, 1, caches, params, dev))
        np.testing.assert_array_equal(*results)


def test_weights_and_caches_at_other_addresses() -> None:
    """Every call of one VM reads the weights that it is given."""
    name, dev = "demo-llama", tvm.cuda(0)
    model = exported(name)
    assert ADDRESSES in compiled(name, True).as_text()
    sets = [[tvm.runtime.tensor(w, dev) for w in weights(name, seed)] for seed in range(2)]
    machines = [relax.VirtualMachine(compiled(name, graphs), dev) for graphs in (True, False)]
    kept: list[list[np.ndarray]] = [[], []]
    for params in (sets[0], sets[1], sets[0], sets[1]):
        for vm, results in zip(machines, kept, strict=True):
            caches = [
                tvm.runtime.tensor(np.zeros(tuple(map(int, s)), "float16"), dev)
                for s in model.cache_shapes
            ]
            for position in range(2):
                ids = np.array([[11 * position + 2]], "int32")
                found = logits_of_step(vm["decode"], ids, position + 1, caches, params, dev)
                results.append(found)
    with_graphs, without = map(np.stack, kept)
    np.testing.assert_array_equal(with_graphs, without)
    assert (without[0] != without[2]).any(), "the two sets of weights give the same"


def test_a_library_that_was_exported(tmp_path: Any) -> None:
    name = "demo-gpt2"
    file = str(tmp_path / "lib.so")
    compiled(name, True).export_library(file)
    loaded = models.Generator(
        tvm.runtime.load_module(file), exported(name), weights(name), device=tvm.cuda(0)
    )
    np.testing.assert_array_equal(decode(loaded), decode(session(name, False)))


def test_the_pass_context_of_tvm() -> None:
    """TVM's own switch gives the same numbers, with its own pass."""
    name, target = "demo-gpt2", gpu_target()
    pipeline = relax.get_pipeline("relax_fusion", target=target, use_cuda_graph=False)
    with tvm.transform.PassContext(config={CONFIG: True}):
        made = tvm.compile(exported(name).mod, target=target, relax_pipeline=pipeline)
    assert RUN_OR_CAPTURE in made.as_text() and ADDRESSES not in made.as_text()
    own = models.Generator(made, exported(name), weights(name), device=tvm.cuda(0))
    np.testing.assert_array_equal(decode(own), decode(session(name, False)))


@pytest.mark.parametrize("case", small_decoders.CASES, ids=str)
def test_greedy_tokens_without_the_host(case: small_decoders.Case) -> None:
    """What the steps choose themselves is what the host would; lengths cross a capture."""
    new, prompt, found = small_decoders.NEW, small_decoders.prompt(case), []
    for graphs in (True, False):
        own = small_decoders.session(case, graphs)
        found += [own.generate(prompt, new) for _ in range(2)]
        own.reset()
        chosen = [own.prefill(prompt).argmax(-1)]
        while len(chosen) < new:
            chosen.append(own.decode(chosen[-1]).argmax(-1))
        found.append(np.stack(chosen, axis=1))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    assert min(len(np.unique(row)) for row in found[0]) > new // 4


def test_replaying_takes_no_more_memory() -> None:
    """An allocation a step takes pages of the driver in each window; a neighbour misses one."""
    torch = pytest.importorskip("torch")
    case = small_decoders.CASES[0]
    machine, steps = small_decoders.session(case, True), 5_000

    def taken() -> int:
        before, _ = torch.cuda.mem_get_info()
        for _ in range(steps // small_decoders.NEW):
            machine.generate(small_decoders.prompt(case), small_decoders.NEW)
        return before - torch.cuda.mem_get_info()[0]

    taken()
    assert any(taken() == 0 for _ in range(20))
