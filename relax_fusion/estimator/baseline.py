"""The best plan of some, and what a chain costs that is left apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, pairwise

from ..hardware import DeviceSpec
from ..workload import Atom, NormMatmul, Workload
from . import separate
from .measured import Times
from .prediction import DRAM_EFFICIENCY, Prediction, in_a_row, next_power, repeated
from .registry import ON_CHANGE, Family, Option, options
from .shape import Size, sizes_of, tiled_rows
from .tile_plan import TilePlan

MOST_KERNELS = 3
"""Plans for the cells of one range of rows: each is a kernel to compile."""

WORTH_A_KERNEL = 1.05
"""By what factor the worst cell has to gain by as many plans as may be, for not taking fewer."""


def best(
    found: Sequence[Option],
    work: Workload,
    dev: DeviceSpec,
    cells: Sequence[Sequence[Size]],
    told: Size,
    measured: Sequence[Times] = (),
) -> tuple[list[Option], Prediction]:
    """Return a plan for each cell, of as few plans as do, and the least price at the size `told`.

    One plan is that which loses least over all sizes; of several, the worst cell decides.  What
    counts is the mean of a plan's time over the best time at each size of a cell: a plan that pads
    few rows to many is fast at the end of a range only.  Of equals, the first that was generated.

    Parameters
    ----------
    measured : sequence of Times
        For each cell what was measured in it; nothing by default.
    """
    worth = worth_pricing(found, work, dev, list(chain.from_iterable(cells)))
    timed = {plan for times in measured for column in times.values() for plan in column}
    timed -= {option.plan for option in worth}
    worth += [option for option in found if option.plan in timed]
    losses, least = losses_of(worth, work, dev, cells, told)
    every = range(len(worth))
    for loss, times in zip(losses, measured, strict=False):
        loss[:] = _by_measurement(loss, [option.plan for option in worth], times)
    weighed = [sum(len(c) * loss[i] for c, loss in zip(cells, losses, strict=True)) for i in every]
    single = weighed.index(min(weighed))
    bests = dict.fromkeys([single, *(loss.index(min(loss)) for loss in losses)])

    def worst(plans: Sequence[int]) -> float:
        return max(min(loss[i] for i in plans) for loss in losses)

    few: list[tuple[int, ...]] = [(single,)]
    for count in range(2, min(MOST_KERNELS, len(bests)) + 1):
        few.append(min(combinations(bests, count), key=worst))
    enough = WORTH_A_KERNEL * worst(few[-1])
    chosen = next(plans for plans in few if worst(plans) <= enough)
    served_by = [worth[min(chosen, key=loss.__getitem__)] for loss in losses]
    return served_by, least


def losses_of(
    worth: Sequence[Option],
    work: Workload,
    dev: DeviceSpec,
    cells: Sequence[Sequence[Size]],
    told: Size,
) -> tuple[list[list[float]], Prediction]:
    """Return for each cell the mean loss of every plan, and the least price at the size `told`."""
    prices = {
        size: [o.family.predict(o.plan, work, dev, size) for o in worth]
        for size in dict.fromkeys([*chain.from_iterable(cells), told])
    }
    least = {size: min(p.seconds for p in column) for size, column in prices.items()}
    losses = [
        [sum(prices[s][i].seconds / least[s] for s in cell) / len(cell) for i in range(len(worth))]
        for cell in cells
    ]
    return losses, min(prices[told], key=lambda p: p.seconds)


def _by_measurement(loss: list[float], plans: Sequence[TilePlan], times: Times) -> list[float]:
    """Return losses by measured times; what was not measured comes behind, by its price."""
    found: dict[int, list[float]] = {}
    for column in times.values():
        known = {i: column[plan] for i, plan in enumerate(plans) if plan in column}
        for i, seconds in known.items():
            found.setdefault(i, []).append(seconds / min(known.values()))
    means = {i: sum(each) / len(each) for i, each in found.items()}
    most = max(means.values(), default=0.0)
    return [means.get(i, most + loss[i]) for i in range(len(plans))]


def worth_pricing(
    found: Sequence[Option], work: Workload, dev: DeviceSpec, sizes: Sequence[Size]
) -> list[Option]:
    """Return the plans that can be best at some of the sizes, as their families say.

    Where no family offers one, the lowest tiles must do.
    """
    tiled = [tiled_rows(work, size) for size in sizes]
    rows = min(tiled), next_power(max(tiled))
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
    seconds = parts[0].prediction.seconds
    for before, part in pairwise(parts):
        seconds += part.prediction.seconds - dev.launch_s + part.start_s
        seconds -= part.early_s if before.is_matmul else 0.0
    return replace(in_a_row([part.prediction for part in parts]), seconds=seconds)


@dataclass(frozen=True)
class _Kernel:
    """What a kernel costs.

    Parameters
    ----------
    prediction : Prediction
        By itself.
    start_s : float
        What launching it takes behind another kernel.
    is_matmul : bool
        Whether it is Triton's matmul.
    early_s : float
        What is done of it before another of these ends.
    """

    prediction: Prediction
    start_s: float
    is_matmul: bool = False
    early_s: float = 0.0


@lru_cache(maxsize=4096)  # chains of a model have the same parts
def _kernel(atom: Atom, dev: DeviceSpec, backend: str) -> _Kernel:
    """Return what one of the kernels costs.

    A matmul has the best plan of ours, or else TVM's schedule.  The matrices of a batch fill a GPU
    together, and follow each other on a CPU.
    """
    found = _plans(atom.matmul, dev, backend) if atom.matmul and atom.maker != "tvm" else []
    if not found:
        return _Kernel(separate.price(atom, dev), separate.start_s(dev))
    on_gpu, matmul = dev.kind == "gpu", atom.matmul
    rows = atom.rows * (atom.matrices if on_gpu else 1)
    (option,), _ = best(found, matmul, dev, [[rows]], rows)
    priced = option.family.predict(option.plan, matmul, dev, rows)
    is_triton = option.plan.backend == "triton"
    start_s = separate.start_s(dev) if is_triton else dev.launch_s
    if not on_gpu and atom.matrices > 1:
        priced = repeated(priced, atom.matrices, dev)
    elif atom.matrices > 1:
        moved = separate.moved_bytes(atom)  # each matrix has a weight of its own
        rest_s = (moved - priced.dram_bytes) / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
        longer = priced.seconds + max(0.0, rest_s)
        priced = replace(priced, seconds=longer, dram_bytes=moved)
    return _Kernel(priced, start_s, is_triton, option.family.early_s(option.plan, dev))


@lru_cache(maxsize=256)
def _plans(matmul: NormMatmul, dev: DeviceSpec, backend: str) -> list[Option]:
    return list(options(matmul, dev, backend))


ON_CHANGE.extend((_kernel.cache_clear, _plans.cache_clear))
