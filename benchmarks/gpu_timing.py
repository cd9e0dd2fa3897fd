"""Timing on an NVIDIA GPU: calls captured into CUDA graphs, a cold L2, contenders in turn.

Needs torch; TVM's stream is set where a call is one of TVM's.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
import tvm_ffi

from relax_fusion.timing import FLUSH_BYTES

DEVICE = "cuda"
WARMUP = 3
COPY_ELEMENTS = 1 << 30

SAMPLES = ((1.0, 60), (5.0, 24), (float("inf"), 8))
"""How often to time: the least for calls of up to so many ms."""


class Call:
    """A call that gives a tensor, as a CUDA graph where it can be captured.

    Parameters
    ----------
    call : callable
        Launches work on torch's current stream, which is TVM's too while it runs, and returns the
        result: a tensor of torch, or of TVM.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        torch.cuda.synchronize()
        with torch.cuda.stream(_capture_stream()):
            for _ in range(WARMUP):  # modules are loaded, and the allocators get what they need
                self._run()
        torch.cuda.synchronize()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.why_no_graph = ""
        self._result: Any = None
        try:
            self._capture()
        except Exception as err:
            self.why_no_graph = f"{type(err).__name__}: {str(err)[:200]}"
            self.graph = None
            torch.cuda.synchronize()

    def _run(self) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        with tvm_ffi.use_raw_stream(tvm_ffi.device(f"cuda:{torch.cuda.current_device()}"), stream):
            return self._call()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties caches at every capture, and there are thousands
        with torch.cuda.stream(_capture_stream()):
            # Relaxed: TVM's allocator may ask for memory, which it keeps
            graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._result = self._run()
            except Exception:
                with suppress(RuntimeError):  # that the capture failed; the cause is known
                    graph.capture_end()
                raise
            graph.capture_end()
        self.graph = graph

    def launch(self) -> Any:
        """Do the work once, without waiting for it, and return where the result will be."""
        if self.graph is None:
            self._result = self._run()
        else:
            self.graph.replay()
        return self._result

    def checked_result(self) -> torch.Tensor:
        """Return what one more launch computes, by `side_by_side`.

        It cannot be a left-over of an earlier one.
        """
        if self.graph is not None:
            for part in parts_of(self._result):
                part.fill_(float("nan"))
        self.launch()
        torch.cuda.synchronize()
        return side_by_side(self._result)


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def as_torch(tensor: Any) -> torch.Tensor:
    """Return a tensor of TVM as one of torch, sharing its memory."""
    return tensor if isinstance(tensor, torch.Tensor) else torch.from_dlpack(tensor)


def parts_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    alone = hasattr(result, "shape")
    return [as_torch(part) for part in ([result] if alone else result)]


def side_by_side(result: Any) -> torch.Tensor:
    """Return the tensors of a result as one: along their last axis, or flat if they differ else."""
    parts = parts_of(result)
    if len({part.shape[:-1] for part in parts}) > 1:
        return torch.cat([part.flatten() for part in parts])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class Sampler:
    """Times calls in turn, each with a cold L2 cache; holds what is read to flush it."""

    def __init__(self) -> None:
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=DEVICE, dtype=torch.float32)

    def _events(self, launch: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.sum()  # by reading: dirty lines would be written back while we are timed
        start.record()
        launch()
        end.record()
        return start, end

    def once_ms(self, launch: Callable[[], Any]) -> float:
        """Return the time of one launch, the second of two."""
        for _ in range(2):
            start, end = self._events(launch)
            torch.cuda.synchronize()
        return start.elapsed_time(end)

    def sample_ms(self, launches: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        """Return the times of every launch, one of each in turn, so that drift hits all alike."""
        counts = {name: samples_for(self.once_ms(launch)) for name, launch in launches.items()}
        rounds = max(counts.values(), default=0)
        events: dict[str, list] = {name: [] for name in launches}
        gc.collect()
        gc.disable()
        try:
            for i in range(rounds):
                for name, launch in launches.items():
                    if (i + 1) * counts[name] // rounds > i * counts[name] // rounds:
                        events[name].append(self._events(launch))
            torch.cuda.synchronize()
        finally:
            gc.enable()
        return {name: [s.elapsed_time(e) for s, e in pairs] for name, pairs in events.items()}

    def median_ms(self, work: Callable[[], Any]) -> float:
        """Return the median time of `work` as a graph."""
        return statistics.median(self.sample_ms({"": Call(work).launch})[""])


def samples_for(milliseconds: float) -> int:
    """Return how many samples a call of this length gets."""
    return next(count for limit, count in SAMPLES if milliseconds <= limit)


def ceilings(sampler: Sampler) -> dict[str, float]:
    """Measure the bandwidth of a copy and of reading (TB/s), and what launching takes (us)."""
    source = torch.zeros(COPY_ELEMENTS, device=DEVICE, dtype=torch.float32)
    target = torch.empty_like(source)
    copies = (lambda: torch.mul(source, 2.0, out=target), lambda: target.copy_(source))
    copy_ms = min(sampler.median_ms(copy) for copy in copies)
    tiny = torch.zeros(1, device=DEVICE)
    found = {
        "copy_tb_s": 2 * source.nbytes / copy_ms / 1e9,
        "read_tb_s": source.nbytes / sampler.median_ms(source.sum) / 1e9,
        "launch_us": 1e3 * sampler.median_ms(lambda: tiny.add_(1)),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the graph is empty
        found["empty_graph_us"] = 1e3 * sampler.median_ms(lambda: tiny)
    return found


def error_of(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest error over the largest value of `reference`, which is in float64."""
    worst = (out.reshape(reference.shape).double() - reference).abs().max()
    return float(worst / reference.abs().max())


def errors_of(out: torch.Tensor, reference: torch.Tensor) -> list[float]:
    """Return `error_of`, and the mean error over the mean magnitude."""
    off = (out.double() - reference).abs()
    parts = (off.max() / reference.abs().max(), off.mean() / reference.abs().mean())
    return [float(part) for part in parts]


def allowed_error(eager: float, dtype: str) -> float:
    """Return twice the error of separate operators and one rounding step at the largest value."""
    return 2 * eager + torch.finfo(getattr(torch, dtype)).eps
