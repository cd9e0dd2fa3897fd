"""Steps of a decoder while other kernels take up places: blocks begin late, and out of order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from ..support.gpu import gpu_target, needs_gpu
from .small_decoders import CASES, NEW, VOCAB, Case, prompt, session

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, needs_gpu]

ROUNDS = 4
FULL = 32
"""Warps of a block of which a multiprocessor holds two."""


@triton.jit(do_not_specialize=["most", "seed"])
def spin(most, seed):
    """Take up a place for less than `most` nanoseconds, other ones in each block."""
    begun = globaltimer()
    length = (tl.program_id(0) * 7919 + seed) % most
    while globaltimer() - begun < length:
        pass


@triton.jit
def write(values, begun, length):
    """Add 1 to an element `length` nanoseconds after the next kernel may begin."""
    i = tl.program_id(0)
    now = globaltimer()
    tl.store(begun + i, now)
    gdc_launch_dependents()
    while globaltimer() - now < length:
        pass
    tl.store(values + i, tl.load(values + i) + 1)


@triton.jit
def read(values, copied, WAITS: tl.constexpr):
    """Copy elements, those first that were written last."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    if WAITS:
        gdc_wait()
    tl.store(copied + i, tl.load(values + i))


def places() -> int:
    """Return how many blocks of `FULL` warps are on the device at once."""
    return 2 * torch.cuda.get_device_properties(0).multi_processor_count


def wrong_steps(
    step: Callable[[int], np.ndarray], expected: Sequence[np.ndarray], seed: int
) -> int:
    """Count the steps that give other bits than expected while random kernels are beside them."""
    random, stream, found = np.random.default_rng(seed), torch.cuda.Stream(), 0
    for i, wanted in enumerate(expected):
        with torch.cuda.stream(stream):
            for _ in range(3):
                grid = (int(random.integers(1, places(), endpoint=True)),)
                most, own = (int(random.integers(1_000, 100_000)) for _ in range(2))
                spin[grid](most, own, num_warps=int(random.choice([4, FULL])))
        found += step(i).tobytes() != wanted.tobytes()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_gives_the_same_bits(case: Case) -> None:
    machine = session(case, True)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (NEW, case[1]))

    def step(i: int) -> np.ndarray:
        if i == 0:
            machine.reset()
            machine.prefill(prompt(case))
        return machine.decode(tokens[i])

    expected = [step(i) for i in range(NEW)]
    assert np.isfinite(expected).all() and len(np.unique(np.argmax(expected, -1))) > NEW // 4
    for seed in range(ROUNDS):
        assert wrong_steps(step, expected, seed) == 0


def chain(waits: bool, apart: list[int]) -> Callable[[int], np.ndarray]:
    """Return a step of two dependent launches, which appends how far apart the first's begin."""
    values, copied = (torch.zeros(places(), dtype=torch.int32, device="cuda") for _ in range(2))
    begun = torch.zeros(places(), dtype=torch.int64, device="cuda")

    def launch() -> None:
        write[(places(),)](values, begun, 20_000, num_warps=FULL)
        read[(places(),)](values, copied, waits, num_warps=FULL, launch_pdl=True)

    launch()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def step(i: int) -> np.ndarray:
        values.fill_(i)  # and the graph's memory lives as long as what replays it
        graph.replay()
        apart.append(int(begun.max() - begun.min()))
        return copied.cpu().numpy()

    return step


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_that_is_missing_is_found(waits: bool) -> None:
    """What reads begins once all blocks of what writes have, of which late ones are at work yet."""
    if not gpu_target().attrs["arch"].startswith("sm_90"):
        pytest.skip("needs a GPU of compute capability 9.0")
    apart: list[int] = []
    expected = [np.full(places(), i + 1, "int32") for i in range(NEW)]
    assert (wrong_steps(chain(waits, apart), expected, 0) == 0) == waits
    assert max(apart) > 10_000, "no block began late"
