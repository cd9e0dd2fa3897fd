"""The best plan of some, and what a chain costs that is left apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..hardware import DeviceSpec
from ..workload import Atom, NormMatmul, Workload
from . import separate
from .prediction import DRAM_EFFICIENCY, Prediction, in_a_row, next_power, repeated
from .registry import ON_CHANGE, Family, Option, options
from .shape import Size, sizes_of, tiled_rows
from .tile_plan import TilePlan


def best(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> tuple[Option, Prediction, Prediction]:
    """Return the plan that loses least over `sizes`, its price at the last, and the least there.

    What counts is the mean of its time over the best time at each size: a plan that pads few rows
    to many is fast at the end of a range only.  Of equals, the first that was generated.
    """
    worth = _worth_pricing(found, work, dev, sizes)
    priced = [[o.family.predict(o.plan, work, dev, size) for o in worth] for size in sizes]
    least = [min(p.seconds for p in column) for column in priced]
    losses = [
        sum(column[i].seconds / least_s for column, least_s in zip(priced, least, strict=True))
        for i in range(len(worth))
    ]
    index = losses.index(min(losses))
    return worth[index], priced[-1][index], min(priced[-1], key=lambda p: p.seconds)


def _worth_pricing(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> list[Option]:
    """Return the plans that can be best at some of the sizes, as their families say.

    Where no family offers one, the lowest tiles must do.
    """
    rows = tiled_rows(work, sizes[0]), next_power(tiled_rows(work, sizes[-1]))
    by_family: dict[Family, list[TilePlan]] = {}
    for option in found:
        by_family.setdefault(option.family, []).append(option.plan)
    worth = [Option(f, p) for f, own in by_family.items() for p in f.worth(own, work, dev, rows)]
    lowest = max(rows[1], min((option.plan.block_m for option in found), default=0))
    return worth or [option for option in found if option.plan.block_m <= lowest]


def predict_unfused(
    work: Workload,
    dev: DeviceSpec,
    size: Size,
    *,
    backend: str = "tir",
    alone: Prediction | None = None,
) -> Prediction:
    """Return what the chain costs at `size` if the pass that found it leaves it alone.

    That is the best that we would run for its parts (`Described.apart`), one after the other.

    Parameters
    ----------
    size : int or AttentionSize
        As for `predict`.
    backend : {"tir", "triton"}
        Who is to emit the matmuls that later passes fuse.
    alone : Prediction, optional
        What `work` costs by its best plan, if that is known: a matmul by itself has no parts.
    """
    atoms = work.apart(**sizes_of(work, size))
    if alone is not None and [atom.matmul for atom in atoms] == [work]:
        return alone
    parts = [_kernel(atom, dev, backend if atom.maker == "pass" else "tir") for atom in atoms]
    (first, _), *others = parts
    seconds = first.seconds + sum(p.seconds - dev.launch_s + start_s for p, start_s in others)
    return replace(in_a_row([p for p, _ in parts]), seconds=seconds)


@lru_cache(maxsize=4096)  # chains of a model have the same parts
def _kernel(atom: Atom, dev: DeviceSpec, backend: str) -> tuple[Prediction, float]:
    """Return what one of the kernels costs, and the part of it that is launching after another.

    A matmul has the best plan of ours, or else TVM's schedule.  The matrices of a batch fill a GPU
    together, and follow each other on a CPU.
    """
    found = _plans(atom.matmul, dev, backend) if atom.matmul and atom.maker != "tvm" else []
    if not found:
        return separate.price(atom, dev), separate.start_s(dev)
    on_gpu, matmul = dev.kind == "gpu", atom.matmul
    option, priced, _ = best(found, matmul, dev, [atom.rows * (atom.matrices if on_gpu else 1)])
    start_s = separate.start_s(dev) if option.plan.backend == "triton" else dev.launch_s
    if atom.matrices == 1:
        return priced, start_s
    if not on_gpu:
        return repeated(priced, atom.matrices, dev), start_s
    moved = separate.moved_bytes(atom)  # each matrix has a weight of its own
    rest_s = (moved - priced.dram_bytes) / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
    return replace(priced, seconds=priced.seconds + max(0.0, rest_s), dram_bytes=moved), start_s


@lru_cache(maxsize=256)
def _plans(matmul: NormMatmul, dev: DeviceSpec, backend: str) -> list[Option]:
    return list(options(matmul, dev, backend))


ON_CHANGE.extend((_kernel.cache_clear, _plans.cache_clear))
