"""All-reduces of ours: their kernels by threads in the place of GPUs, and what they take."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np
import pytest

from relax_fusion.launch.nvrtc import find_nvrtc
from relax_fusion.parallel import Worker, all_reduce
from relax_fusion.parallel.all_reduce import ONE_SHOT, TWO_SHOT, Kernel
from relax_fusion.parallel.collectives import reduced

from .all_reduce_on_cpu import Grid, all_workers, emulated


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ctypes.CDLL]:
    """Return the kernels for a type, compiled once."""
    return cache(lambda dtype: emulated(dtype, tmp_path_factory.mktemp(dtype)))


def drawn(count: int, dtype: str, sizes: list[int]) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(count)
    return [[rng.standard_normal(n, "float32").astype(dtype) for n in sizes] for _ in range(count)]


SIZES = {
    ONE_SHOT: [8, 4096, 8 * 33, 4096, 8192, 8] * 3,
    TWO_SHOT: [1000, 8, 4096, 4104, 8192, 3992, 504] * 4,
}
"""Elements of calls: of one vector, of all blocks or some, and more than one chunk of each."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have little memory, and many small chunks."""
    for name, value in (("FEW", 1 << 17), ("MOST", 1 << 14), ("CHUNK", 16), ("EACH", 2)):
        monkeypatch.setattr(all_reduce, name, value)


@pytest.mark.parametrize(
    ("kernel", "count", "dtype", "grid"),
    [
        (ONE_SHOT, 2, "float16", Grid(32)),
        (ONE_SHOT, 3, "bfloat16", Grid()),
        (ONE_SHOT, 8, "float16", Grid()),
        (ONE_SHOT, 2, "float16", Grid(3, 2, 3)),
        (TWO_SHOT, 2, "float16", Grid(132)),
        (TWO_SHOT, 2, "float16", Grid(6, 3, 6)),
        (TWO_SHOT, 2, "bfloat16", Grid(9, 2, 2)),
        (TWO_SHOT, 3, "bfloat16", Grid(3)),
        (TWO_SHOT, 4, "float16", Grid(6, 1, 3)),
        (TWO_SHOT, 8, "float16", Grid(3)),
    ],
    ids=lambda value: value.name[:3] if isinstance(value, Kernel) else None,
)
def test_all_workers_have_the_same_sum(
    kernel: Kernel, count: int, dtype: str, grid: Grid, libraries: Callable[[str], ctypes.CDLL]
) -> None:
    calls = [n for n in SIZES[kernel] if kernel == ONE_SHOT or n >= 8 * count * count]
    sent = drawn(count, dtype, calls)
    received = all_workers(libraries(dtype), kernel, grid, sent)
    for call in range(len(calls)):
        expected = reduced([arrays[call] for arrays in sent], 0)
        for rank in range(count):
            found = received[rank][call]
            np.testing.assert_array_equal(found.view("uint16"), expected.view("uint16"))


@pytest.mark.parametrize(
    ("kernel", "grid", "broken", "by"),
    [
        (ONE_SHOT, Grid(2, 2, 2), "*calls = call;", "wait_for_those_in_front(), *calls = call;"),
        (ONE_SHOT, Grid(), "(call & 1) * count", "0 * count"),
        (ONE_SHOT, Grid(), "come.y != call || come.w != call", "0"),
        (ONE_SHOT, Grid(), "|| come.w != call", ""),
        (ONE_SHOT, Grid(), "come.y != call ||", ""),
        (TWO_SHOT, Grid(6, 2, 6), "what * (count - 1)", "0"),
        (TWO_SHOT, Grid(6, 2, 6), "all.await(NUMBERS, n);", ""),
        (TWO_SHOT, Grid(6, 2, 6), "all.await(SUMS, n);", "{}"),
        (TWO_SHOT, Grid(6, 2, 6), "const {\n    __syncthreads();", "const {"),
        (TWO_SHOT, Grid(6, 2, 6), "}\n    __syncthreads();\n  }", "}\n  }"),
        (TWO_SHOT, Grid(3), "all.tell(NUMBERS, n);", "{}"),
        (TWO_SHOT, Grid(3), "role == 1", "role == 2"),
    ],
)
def test_what_it_waits_for_is_needed(
    kernel: Kernel, grid: Grid, broken: str, by: str, tmp_path: Path
) -> None:
    text = all_reduce.source("float16")
    assert broken in text
    sent = drawn(3, "float16", [1 << 12] * 40)
    library = emulated("float16", tmp_path, text.replace(broken, by))
    sums = [reduced([calls[call] for calls in sent], 0) for call in range(40)]
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        for calls in all_workers(library, kernel, grid, sent, patience_s=1):
            np.testing.assert_array_equal(calls, sums)


@pytest.mark.skipif(find_nvrtc() is None, reason="there is no NVRTC")
@pytest.mark.parametrize("dtype", all_reduce.DTYPES)
def test_it_compiles(dtype: str) -> None:
    found = find_nvrtc()
    assert found is not None
    for arch in ("sm_80", "sm_90"):
        cubin, _ = found.compile("all_reduce", all_reduce.source(dtype), arch)
        assert all(kernel.name.encode() in cubin for kernel in (ONE_SHOT, TWO_SHOT))


class Sent:
    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.array = np.ones(shape, dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data


@pytest.fixture
def driver(libraries: Callable[[str], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    library = libraries("float16")
    for name in ("_runtime", "_driver"):
        monkeypatch.setattr(all_reduce, name, lambda: library)
    device = SimpleNamespace(compute_version="9.0")
    monkeypatch.setattr(Worker, "tvm_device", property(lambda _: device))
    return library


@pytest.mark.skipif(find_nvrtc() is None, reason="there is no NVRTC")
def test_what_cuda_is_told(driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers share their memories, load the kernels and launch them, on the host.

    What is sent takes four calls of the two-shot kernel, and one of the other.
    """
    workers = [Worker(rank, 2, "cuda") for rank in range(2)]
    handles = [all_reduce.share(worker) for worker in workers]
    monkeypatch.setattr(all_reduce, "FEW", 32)
    size = 4 * all_reduce.MOST + 24
    pairs = [(Sent((1, size // 2), "float16"), Sent((1, size // 2), "float16")) for _ in workers]
    launched: list[tuple[str, int]] = []

    def reduce_on(worker: Worker) -> None:
        sent, received = pairs[worker.rank]
        sent.array[:] = np.arange(size // 2) % 512 * (worker.rank + 1)
        assert all_reduce.join(worker, handles)
        (launcher,) = (v for v in worker.kept.values() if isinstance(v, all_reduce.Launcher))

        def launch(kernel: Kernel, *given: Any) -> None:
            launched.append((kernel.name[:3], given[-1]))
            launcher(kernel, *given)

        all_reduce.reducing(launch, lambda *_: None, 2)(sent, 0, True, received)

    threads = [Thread(target=reduce_on, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all((pair[1].array == np.arange(size // 2) % 512 * 3).all() for pair in pairs)
    assert sorted(launched) == [("one", 24)] * 2 + [("two", all_reduce.MOST)] * 8


def test_gpus_that_share_nothing_are_left_to_nccl(
    driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_reduce.share(Worker(0, 2, "cuda"))
    with monkeypatch.context() as patch:
        patch.setattr(ctypes.c_int.in_dll(driver, "linked"), "value", 0)
        assert not all_reduce.share(Worker(0, 2, "cuda"))
    with pytest.warns(RuntimeWarning, match="NCCL's: cudaSetDevice failed with the CUDA error 1"):
        assert not all_reduce.share(Worker(2, 3, "cuda"))
    with pytest.warns(RuntimeWarning, match="cudaIpcOpenMemHandle failed with the CUDA error 1"):
        worker = Worker(0, 2, "cuda")
        handles = [all_reduce.share(worker), b"closed".ljust(64)]
        assert not all_reduce.join(worker, handles)


@pytest.mark.parametrize(
    ("sent", "kind", "taken"),
    [
        (Sent((1, 8, 64), "float16"), 0, ["one 1024 at 0"]),
        (Sent((1, 8, 64), "bfloat16"), 0, ["one 1024 at 0"]),
        (Sent((1, 8, 64), "float32"), 0, []),
        (Sent((1, 8, 64), "float16"), 4, []),
        (Sent((1, 9, 64), "float16"), 0, ["two 1152 at 0"]),
        (Sent((1, 580), "float16"), 0, ["two 1152 at 0", "one 8 at 1152"]),
        (Sent((17, 512), "float16"), 0, ["two 16384 at 0", "one 1024 at 16384"]),
        (Sent((1, 6), "float16"), 0, []),
        (Sent((0, 8), "float16"), 0, []),
    ],
    ids=["float16", "bfloat16", "float32", "mean", "many", "odd", "parts", "no pairs", "empty"],
)
def test_what_is_left_to_nccl(
    sent: Sent, kind: int, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "FEW", 1024)
    calls: list[str] = []

    def launch(kernel: Kernel, _send: Any, _received: Any, at: int, size: int) -> None:
        calls.append(f"{kernel.name[:3]} {size} at {at}")

    def nccl(*_: Any) -> None:
        calls.append("nccl")

    all_reduce.reducing(launch, nccl, 2)(sent, kind, True, None)
    assert calls == (taken or ["nccl"])
