"""What each worker of a model that is spread does: it draws its part, and times steps of it.

Everything is drawn on the worker's device, of a seed for each tensor, so that any number of workers
have parts of one model, and of a large one in seconds.
"""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi
from torch import distributed
from tvm import relax

from benchmarks import gpu_timing
from benchmarks.suites.decode.sharded_peer import spread_peer
from relax_fusion.models import ExportedModel
from relax_fusion.models.cuts import Cut, Segment
from relax_fusion.parallel import Worker
from relax_fusion.timing import host_and_device

REPEATS = 7
REDUCTIONS = 20
"""All-reduces in a graph of nothing else, by which one is timed."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Job:
    """A step that workers time.

    Parameters
    ----------
    exported : ExportedModel
        For as many shards as there are workers, without its module.
    name : str
        ``"decode"`` or ``"prefill"``.
    total : int
        Tokens in the caches after the step.
    device : str
        ``"cuda"``; a test has ``"cpu"``.
    """

    exported: ExportedModel
    name: str
    total: int
    device: str = "cuda"

    @property
    def calls(self) -> int:
        """Calls of a time; of all workers alike, for they wait for one another."""
        return 20 if self.name == "decode" else 3

    @property
    def ids(self) -> np.ndarray:
        """The tokens, ``[batch, 1]`` or ``[batch, total]``."""
        batch, vocab = int(self.exported.batch), self.exported.config.vocab_size
        if self.name == "decode":
            return np.arange(batch, dtype="int32")[:, None] + 7
        return np.random.default_rng(0).integers(vocab, size=(batch, self.total), dtype="int32")

    def place(self, worker: Worker) -> torch.device:
        """Return the device of a worker, which torch's current one is then."""
        if self.device == "cpu":
            return torch.device("cpu")
        torch.cuda.set_device(worker.rank)
        return torch.device("cuda", worker.rank)

    def sync(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()


def drawn(name: str, shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Return what all workers draw for a name, normal with deviation 1."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=getattr(torch, dtype))


def part(value: torch.Tensor, cut: Cut | None, rank: int) -> torch.Tensor:
    """Return a worker's part of a tensor on its device."""
    if cut is None:
        return value
    if not cut.segments:
        return value if rank == 0 else torch.zeros_like(value)
    # From 1 on, for a part that is not full has zeros
    count = np.arange(1, value.shape[cut.axis] + 1)
    rows = torch.from_numpy(replace(cut, axis=0).part(count, rank)).to(value.device)
    found = value.index_select(cut.axis, (rows - 1).clamp(min=0))
    return found.index_fill_(cut.axis, torch.nonzero(rows == 0)[:, 0], 0)


def weights(job: Job, rank: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a worker's parameters, in their order, by name."""
    for param in job.exported.params:
        recipe, cut = param.recipe, param.recipe.cut
        if recipe.compute is not None:
            # A copy by torch, where TVM wants more alignment than NumPy has
            whole = torch.from_numpy(np.asarray(recipe.compute())).clone().to(device)
        else:
            shape = param.shape if cut is None else cut.whole(param.shape)
            whole = drawn("+".join(recipe.names), shape, param.dtype, device)
            scale = 0.0 if param.name.endswith("bias") else 0.02
            whole = torch.ones_like(whole) if len(shape) == 1 and scale else whole.mul_(scale)
        yield param.name, part(whole, cut, rank)


def caches(job: Job, rank: int, device: torch.device) -> list[torch.Tensor]:
    """Return a worker's caches, full of what is drawn."""
    made, kv = job.exported, job.exported.config.num_kv_heads
    cut = Cut(made.shards, 2, (Segment(kv, min(kv, made.shards)),))
    batch, rows, _, dim = map(int, made.cache_shapes[0])
    return [
        part(drawn(f"cache {i}", (batch, rows, kv, dim), made.dtype, device), cut, rank)
        for i in range(len(made.cache_shapes))
    ]


def timed(job: Job, call: Call) -> dict[str, float]:
    """Return the seconds of a call, and of it the host's."""
    host, device = host_and_device(call, job.sync, job.calls, REPEATS)
    return {"s": statistics.median(device), "host_s": statistics.median(host)}


# --- ours ------------------------------------------------------------------------------------


def ours(worker: Worker, job: Job, library: str) -> dict[str, Any]:
    """Return the times of a compiled step, and the logits of worker 0."""
    place, device, ids = job.place(worker), worker.tvm_device, job.ids
    began = time.perf_counter()
    values = [t for _, t in weights(job, worker.rank, place)]
    job.sync()
    drawing_s = time.perf_counter() - began
    # Lists are converted once, not in every call
    lists = [
        tvm_ffi.convert([tvm.runtime.from_dlpack(t) for t in tensors])
        for tensors in (caches(job, worker.rank, place), values)
    ]
    machine = relax.VirtualMachine(tvm.runtime.load_module(library), device)
    given = [tvm.runtime.tensor(ids, device)]
    if job.name == "decode":
        given.append(tvm.runtime.tensor(np.array([job.total - 1], "int32"), device))
    step, shape = machine[job.name], tvm.runtime.ShapeTuple([job.total])

    def call() -> Any:
        return step(*given, shape, *lists)[0]

    for _ in range(3):  # the last are replays
        given[0].copyfrom(ids)
        if job.name == "decode":
            given[1].copyfrom(np.array([job.total - 1], "int32"))
        logits = call().numpy()
    return {**timed(job, call), "logits": kept(worker, logits), "drawing_s": drawing_s}


def kept(worker: Worker, logits: np.ndarray) -> np.ndarray | None:
    """Return the logits of worker 0; of others nothing, for all have them."""
    return logits.astype("float32") if worker.rank == 0 else None


# --- PyTorch's ----------------------------------------------------------------------------------


def begin_torch(worker: Worker, job: Job, store: str) -> dict[str, Any]:
    """Have a worker's part of PyTorch's model; return logits in float32 and of eager calls."""
    place = job.place(worker)
    backend = "gloo" if job.device == "cpu" else "nccl"
    ranks = {"rank": worker.rank, "world_size": worker.count}
    distributed.init_process_group(backend, init_method=f"file://{store}", **ranks)
    values = dict(weights(job, worker.rank, place))
    table = "model.embed_tokens.weight"
    shape = job.exported.config.vocab_size, job.exported.config.hidden_size
    whole = drawn(table, shape, job.exported.dtype, place).mul_(0.02)
    given = job, values, whole, caches(job, worker.rank, place)
    worker.kept["torch"] = given
    ids = torch.from_numpy(job.ids).to(place)
    with torch.no_grad():
        exact, eager = (
            spread_peer(job, values, whole, stored)(ids)
            for stored in ([c.float() for c in given[3]], given[3])
        )
        job.sync()
        reduced = _seconds_of_reduction(job, place)
    found = {"exact": exact, "eager": eager}
    logits = {name: kept(worker, t.float().cpu().numpy()) for name, t in found.items()}
    return {**logits, "all_reduce_s": reduced}


def _seconds_of_reduction(job: Job, place: torch.device) -> float:
    """Return what one of the sums of a step takes, among others in a graph."""
    shape = *job.ids.shape, job.exported.config.hidden_size
    value = torch.zeros(shape, dtype=getattr(torch, job.exported.dtype), device=place)

    def reductions() -> torch.Tensor:
        for _ in range(REDUCTIONS):
            distributed.all_reduce(value)
        return value

    return timed(job, _captured(job, reductions))["s"] / REDUCTIONS


def time_torch(worker: Worker, is_compiled: bool) -> dict[str, Any]:
    """Return the times of PyTorch's step as a CUDA graph, and the logits of worker 0."""
    job, *given = worker.kept["torch"]
    place, began = job.place(worker), time.perf_counter()
    ids = torch.from_numpy(job.ids).to(place)
    with torch.no_grad():
        step = spread_peer(job, *given, is_compiled=is_compiled)
        call = _captured(job, lambda: step(ids))
        logits = call().clone()
        job.sync()
        compile_s = time.perf_counter() - began
        taken = timed(job, call)
    return {**taken, "logits": kept(worker, logits.float().cpu().numpy()), "compile_s": compile_s}


def _captured(job: Job, call: Call) -> Call:
    """Return a call as a CUDA graph.

    Raises
    ------
    RuntimeError
        If it cannot be captured.
    """
    if job.device == "cpu":
        return call
    made = gpu_timing.Call(call)
    if made.graph is None:
        raise RuntimeError(made.why_no_graph)
    launch: Call = made.launch
    return launch
