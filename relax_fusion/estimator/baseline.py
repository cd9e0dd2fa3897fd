"""The baseline of fusing: what a chain costs in kernels of its own parts.

Matmuls have the best plan of ours.  Norms, softmax, element-wise steps, and matmuls that are left
to TVM, have no plan; `price_alone` prices these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ..hardware import DeviceSpec
from ..workload import Atom, NormMatmul, Workload
from ..workload.dtypes import STORED_BYTES
from .cpu_cost import NORM_CYCLES_PER_VECTOR, SLOT_CYCLES
from .family import Backend, Option
from .gpu_cost import LEAST_S, SFU_PER_CLOCK, SOFTMAX_FLOPS_PER_SCORE
from .prediction import DRAM_EFFICIENCY, Bound, Prediction, ceil_div, in_a_row, largest, repeated
from .ranges import Range
from .registry import ON_CHANGE, options
from .search import asked_in, price
from .shape import Problem, Size, matmul_shape, sizes_of

FOLLOWING_LAUNCH = 0.4
"""Part of a launch that a kernel adds behind another one, where their launches overlap: so do
Triton's, and kernels that do no more than read and write.  Fitted on an H200 to what a norm costs
more apart from Triton's matmul than with it (0.5 to 1.4 us up to 256 rows), and what the product
behind a gate and an up does; assumed elsewhere."""

FIRST_S = 1.28e-6
"""The first kernel of a graph takes 1.28e-6 seconds more than those behind it: so long the replay
of a graph without kernels takes on an H200, which is in all times that prices were fitted to."""

SIMT_EFFICIENCY = 0.42
"""Reached part of the FMA peak of TVM's own matmul schedule.  Measured on an H200: 27.6 and 28.8
of 66.9 Tflop/s at 1024 rows."""

SIMT_ROW_TILE, SIMT_COLUMN_TILE, SIMT_K_STEP = 32, 64, 16
"""Tile of that schedule (read in TVM 0.27's `dlight.gpu.Matmul`)."""

SIMT_STEP_S = 0.73e-6
"""Least time of one of its steps along k, which load, wait at a barrier, compute and wait again.
Measured on an H200: 0.196 ms for 16 x 6144 x 4096 and a norm, less two launches, over 256 steps."""

CPU_FLOPS_PER_CYCLE = 0.18
"""What TVM's default CPU pipeline reaches on a matmul: it schedules none, so loops are scalar and
run on one core.  Measured with TVM 0.27, 64 x 1024 x 1024, float32, "nk": 0.46 Gflop/s at 2.6
GHz."""


SOFTMAX_CYCLES, SOFTMAX_ROW_CYCLES = 22, 500
"""Cycles per vector and per row of a softmax that is a kernel by itself.  Fitted to 32, 64, 128 ...
1024 columns on Zen 4, which take 272, 144, 80, 57, 38 and 29 cycles a vector, all told."""


def predict_unfused(
    work: Workload,
    dev: DeviceSpec,
    size: Size,
    *,
    backend: Backend = "auto",
    alone: Prediction | None = None,
) -> Prediction:
    """Return what the chain costs at `size` if the pass that found it leaves it alone.

    That is the best that we would run for its parts (`Described.apart`), one after the other.

    `size`: as for `predict`.
    `backend`: which families the matmuls that later passes fuse may be of.
    `alone`: what `work` costs by its best plan, if that is known: a matmul by itself has no parts.
    """
    return unfused_at(work, dev, {size: alone}, backend)[0]


def unfused_at(
    work: Workload, dev: DeviceSpec, sizes: Mapping[Size, Prediction | None], backend: Backend
) -> list[Prediction]:
    """Return what `predict_unfused` does at several sizes, of which matmuls are priced together.

    `sizes`: sizes, each with what `work` costs there by its best plan, if that is known.
    """
    parts = {size: work.apart(**sizes_of(work, size)) for size in sizes}
    known = {s: p for s, p in sizes.items() if p and [a.matmul for a in parts[s]] == [work]}
    atoms = {atom for size in sizes if size not in known for atom in parts[size]}
    kernels = _kernels(atoms, dev, backend)
    return [
        known.get(size) or _one_after_the_other([kernels[a] for a in parts[size]], dev)
        for size in sizes
    ]


def predict_apart(atoms: Sequence[Atom], dev: DeviceSpec, backend: Backend) -> Prediction:
    """Return what kernels cost that run one after the other.

    `atoms`: the kernels; at least one.
    `backend`: which families the matmuls that later passes fuse may be of.
    """
    kernels = _kernels(atoms, dev, backend)
    return _one_after_the_other([kernels[atom] for atom in atoms], dev)


@dataclass(frozen=True)
class _Kernel:
    """What a kernel costs."""

    prediction: Prediction
    """By itself."""
    start_s: float
    """What launching it takes behind another kernel."""
    is_matmul: bool = False
    """Whether it is a matmul that is launched early, and lets the next kernel begin early."""
    early_s: float = 0.0
    """Seconds of it that are done before another of these ends."""


def _one_after_the_other(parts: Sequence[_Kernel], dev: DeviceSpec) -> Prediction:
    seconds = parts[0].prediction.seconds
    for before, part in pairwise(parts):
        seconds += part.prediction.seconds - dev.launch_s + part.start_s
        seconds -= part.early_s if before.is_matmul else 0.0
    return replace(in_a_row([part.prediction for part in parts]), seconds=seconds)


def _kernels(atoms: Iterable[Atom], dev: DeviceSpec, backend: Backend) -> dict[Atom, _Kernel]:
    """Return what each of some kernels costs."""
    rows: dict[tuple[NormMatmul, Backend], set[int]] = {}
    for atom in atoms:
        if atom.matmul and atom.maker != "tvm":
            rows.setdefault((atom.matmul, _maker(atom, backend)), set()).add(_rows(atom, dev))
    best = {key: _best(*key, dev, tuple(sorted(of))) for key, of in rows.items()}
    none: _Best = {}
    return {a: _kernel(a, dev, best.get((a.matmul, _maker(a, backend)), none)) for a in atoms}


def _maker(atom: Atom, backend: Backend) -> Backend:
    return backend if atom.maker == "pass" else "tir"


def _rows(atom: Atom, dev: DeviceSpec) -> int:
    """Return the rows of a matmul: on a GPU, of all matrices of a batch, which fill it together."""
    return atom.rows * (atom.matrices if dev.kind == "gpu" else 1)


_Best = dict[int, Option]
"""The best plan of a matmul by its rows."""


@lru_cache(maxsize=1024)  # chains of a model have the same parts
def _best(matmul: NormMatmul, backend: Backend, dev: DeviceSpec, rows: tuple[int, ...]) -> _Best:
    """Return the best plans of a matmul; nothing where there is none of ours."""
    found = list(options(Problem(matmul, dev), backend))
    if not found:
        return {}
    columns = price([asked_in(found, Range.of(n)) for n in rows])
    return {n: column.cheapest(n) for n, column in zip(rows, columns, strict=True)}


def _kernel(atom: Atom, dev: DeviceSpec, best: _Best) -> _Kernel:
    """Return what one of the kernels costs.

    A matmul has the best plan of ours, or else TVM's schedule.  The matrices of a batch fill a GPU
    together, and follow each other on a CPU.
    """
    if not best:
        return _Kernel(price_alone(atom, dev), start_s(dev))
    rows = _rows(atom, dev)
    option, on_gpu = best[rows], dev.kind == "gpu"
    priced = option.price.at(rows)
    is_early = not option.family.fallback or not on_gpu
    launch_s = start_s(dev) if is_early else dev.launch_s - FIRST_S
    if not on_gpu:
        priced = repeated(priced, atom.matrices, dev)
        priced = replace(priced, seconds=priced.seconds + rows_s(atom, dev))
    elif atom.matrices > 1:
        moved = moved_bytes(atom)  # each matrix has a weight of its own
        rest_s = (moved - priced.dram_bytes) / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
        longer = priced.seconds + max(0.0, rest_s)
        priced = replace(priced, seconds=longer, dram_bytes=moved)
    return _Kernel(priced, launch_s, is_early, option.price.early_s)


def start_s(dev: DeviceSpec) -> float:
    """Return what launching takes behind another kernel, where the launches overlap."""
    return dev.launch_s * (FOLLOWING_LAUNCH if dev.kind == "gpu" else 1.0)


def norm_s(elements: int, dtype: str, dev: DeviceSpec) -> float:
    """Return what a norm takes as a kernel behind another."""
    norm = Atom(2 * STORED_BYTES[dtype] * elements, normalised=elements)
    return price_alone(norm, dev).seconds - dev.launch_s + start_s(dev)


def moved_bytes(atom: Atom) -> float:
    """Return the bytes that a kernel reads and writes."""
    operands = sum(atom.matmul.bytes(rows=atom.rows).values()) if atom.matmul else 0
    return float(atom.moved + atom.matrices * operands)


def price_alone(atom: Atom, dev: DeviceSpec) -> Prediction:
    """Return what a kernel costs that waits for memory or for arithmetic."""
    moved = moved_bytes(atom)
    flops = atom.matrices * atom.matmul.flops(rows=atom.rows) if atom.matmul else 0.0
    terms: dict[Bound, float] = {
        "dram": moved / (dev.dram_bytes_per_s * DRAM_EFFICIENCY),
        "compute": _matmul_s(atom, flops, dev) + rows_s(atom, dev),
        "latency": LEAST_S if dev.kind == "gpu" else 0.0,
    }
    return Prediction(dev.launch_s + max(terms.values()), moved, flops, 1, largest(terms))


def _matmul_s(atom: Atom, flops: float, dev: DeviceSpec) -> float:
    """Return the seconds of the arithmetic of TVM's schedule, which on a GPU has whole tiles."""
    if atom.matmul is None:
        return 0.0
    if dev.kind == "cpu":
        slots = atom.matrices * atom.rows * matmul_shape(atom.matmul).row_slots
        return (flops / CPU_FLOPS_PER_CYCLE + slots * SLOT_CYCLES) / dev.clock_hz
    k, rate = atom.matmul.k, SIMT_EFFICIENCY * dev.fma_float32_flops_per_s
    columns = sum(ceil_div(p.columns, SIMT_COLUMN_TILE) for p in atom.matmul.outputs)
    tiles = atom.matrices * ceil_div(atom.rows, SIMT_ROW_TILE) * columns
    tile_s = 2.0 * SIMT_ROW_TILE * SIMT_COLUMN_TILE * k * dev.sm_count / rate
    return max(ceil_div(tiles, dev.sm_count) * tile_s, k / SIMT_K_STEP * SIMT_STEP_S)


def rows_s(atom: Atom, dev: DeviceSpec) -> float:
    """Return the seconds of the arithmetic of a norm, a softmax, or element-wise steps."""
    if dev.kind == "cpu":
        vectors = 4 / dev.vector_bytes / dev.sm_count
        each = atom.slots * SLOT_CYCLES
        each += atom.normalised * NORM_CYCLES_PER_VECTOR + atom.scores * SOFTMAX_CYCLES
        cycles = each * vectors
        if atom.scores:
            cycles += ceil_div(atom.rows, dev.sm_count) * SOFTMAX_ROW_CYCLES
        return cycles / dev.clock_hz
    exponentials = SFU_PER_CLOCK * dev.clock_hz * dev.sm_count
    each = 1 / exponentials + SOFTMAX_FLOPS_PER_SCORE / dev.fma_float32_flops_per_s
    return atom.scores * each


ON_CHANGE.append(_best.cache_clear)
