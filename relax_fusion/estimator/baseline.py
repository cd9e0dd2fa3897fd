"""What a chain costs that is left apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from ..hardware import DeviceSpec
from ..workload import Atom, NormMatmul, Workload
from . import separate
from .family import Backend
from .prediction import DRAM_EFFICIENCY, Prediction, in_a_row, repeated
from .priced import asked_in, price
from .registry import ON_CHANGE, Option, options
from .shape import Size, sizes_of


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

    Parameters
    ----------
    size : int or AttentionSize
        As for `predict`.
    backend : {"auto", "tir", "triton"}
        Which families the matmuls that later passes fuse may be of.
    alone : Prediction, optional
        What `work` costs by its best plan, if that is known: a matmul by itself has no parts.
    """
    return unfused_at(work, dev, {size: alone}, backend)[0]


def unfused_at(
    work: Workload, dev: DeviceSpec, sizes: Mapping[Size, Prediction | None], backend: Backend
) -> list[Prediction]:
    """Return what `predict_unfused` does at several sizes, of which matmuls are priced together.

    Parameters
    ----------
    sizes : mapping of Size to Prediction
        Sizes, each with what `work` costs there by its best plan, if that is known.
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

    Parameters
    ----------
    atoms : sequence of Atom
        The kernels; at least one.
    backend : {"auto", "tir", "triton"}
        Which families the matmuls that later passes fuse may be of.
    """
    kernels = _kernels(atoms, dev, backend)
    return _one_after_the_other([kernels[atom] for atom in atoms], dev)


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
        Whether it is a matmul that is launched early, and lets the next kernel begin early.
    early_s : float
        What is done of it before another of these ends.
    """

    prediction: Prediction
    start_s: float
    is_matmul: bool = False
    early_s: float = 0.0


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


_Best = dict[int, tuple[Option, Prediction]]
"""The best plan of a matmul by its rows, and its price."""


@lru_cache(maxsize=1024)  # chains of a model have the same parts
def _best(matmul: NormMatmul, backend: Backend, dev: DeviceSpec, rows: tuple[int, ...]) -> _Best:
    """Return the best plans of a matmul; nothing where there is none of ours."""
    found = _plans(matmul, dev, backend)
    if not found:
        return {}
    columns = price(matmul, dev, [asked_in(found, matmul, dev, [[n]], n) for n in rows])
    best = {n: column.cheapest(n) for n, column in zip(rows, columns, strict=True)}
    return {n: (o, o.family.predict(o.plan, matmul, dev, n)) for n, o in best.items()}


def _kernel(atom: Atom, dev: DeviceSpec, best: _Best) -> _Kernel:
    """Return what one of the kernels costs.

    A matmul has the best plan of ours, or else TVM's schedule.  The matrices of a batch fill a GPU
    together, and follow each other on a CPU.
    """
    if not best:
        return _Kernel(separate.price(atom, dev), separate.start_s(dev))
    option, priced = best[_rows(atom, dev)]
    on_gpu = dev.kind == "gpu"
    is_early = not option.family.fallback
    start_s = separate.start_s(dev) if is_early else dev.launch_s
    if not on_gpu:
        priced = repeated(priced, atom.matrices, dev)
        priced = replace(priced, seconds=priced.seconds + separate.rows_s(atom, dev))
    elif atom.matrices > 1:
        moved = separate.moved_bytes(atom)  # each matrix has a weight of its own
        rest_s = (moved - priced.dram_bytes) / (dev.dram_bytes_per_s * DRAM_EFFICIENCY)
        longer = priced.seconds + max(0.0, rest_s)
        priced = replace(priced, seconds=longer, dram_bytes=moved)
    return _Kernel(priced, start_s, is_early, option.family.early_s(option.plan, dev))


@lru_cache(maxsize=256)
def _plans(matmul: NormMatmul, dev: DeviceSpec, backend: Backend) -> list[Option]:
    return list(options(matmul, dev, backend))


ON_CHANGE.extend((_best.cache_clear, _plans.cache_clear))
