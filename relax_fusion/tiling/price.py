"""What a schedule moves, computes and occupies, by MCFuser's formulas.

Bytes and operations of a statement are those of its tile, times the tiles of the loops around it.
Time is ``(bytes / bandwidth + operations / peak) * (blocks + multiprocessors) / blocks``: memory
and arithmetic do not overlap, and there is no cache.  Whole tiles count, padding included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..hardware import DeviceSpec
from .space import IterationSpace, Step
from .structure import Compute, Load, Structure

Places = tuple[int, ...]
"""Numbers of loops in the space."""


@dataclass(frozen=True)
class _Term:
    """A number, times the tiles of some loops, times the trips of others."""

    factor: float
    tiles: Places
    trips: Places

    def at(self, tiles: Sequence[int], trips: Sequence[int]) -> float:
        value = self.factor
        for n in self.tiles:
            value *= tiles[n]
        for n in self.trips:
            value *= trips[n]
        return value


class Cost:
    """The formulas of one structure, for tiles of any size.

    Parameters
    ----------
    space : IterationSpace
        The loops and statements.
    structure : Structure
        Their order.
    dev : DeviceSpec
        Whose bandwidth and rates are taken.
    """

    def __init__(self, space: IterationSpace, structure: Structure, dev: DeviceSpec):
        self._numbers = {a.name: n for n, a in enumerate(space.loops)}
        self._sizes = tuple(a.size for a in space.loops)
        self._dev = dev
        self._bytes = dict(space.element_bytes)
        self._grid = self._places(structure.grid)
        self._moved: list[_Term] = []
        self._computed: list[_Term] = []
        for statement, around in structure.statements:
            trips = self._places(around)
            if isinstance(statement, Compute):
                step = space.step[statement.tensor]
                each = step.flops / _rate(step, dev)
                self._computed.append(_Term(each, self._places(step.loops), trips))
            else:
                own = self._places(statement.what.loops)
                self._moved.append(_Term(self._bytes[statement.tensor], own, trips))
        kept = dict(structure.kept)
        self._held = [
            _Term(self._bytes[name], self._places(loops), self._places(kept.get(name, ())))
            for name, loops in _tiles(space, structure)
        ]

    def trips(self, tiles: Sequence[int]) -> tuple[int, ...]:
        """Return how many tiles each loop has."""
        return tuple(-(-size // tile) for size, tile in zip(self._sizes, tiles, strict=True))

    def traffic(self, tiles: Sequence[int]) -> float:
        """Return the bytes that are loaded and stored."""
        trips = self.trips(tiles)
        return sum(term.at(tiles, trips) for term in self._moved)

    def footprint(self, tiles: Sequence[int]) -> int:
        """Return the bytes of one tile of every tensor: MCFuser's shared memory."""
        return int(sum(term.factor * prod(tiles[n] for n in term.tiles) for term in self._held))

    def resident(self, tiles: Sequence[int]) -> int:
        """Return the bytes of all tiles that are kept at a time."""
        trips = self.trips(tiles)
        return int(sum(term.at(tiles, trips) for term in self._held))

    def seconds(self, tiles: Sequence[int]) -> float:
        """Return the time that MCFuser predicts."""
        trips = self.trips(tiles)
        moved = sum(term.at(tiles, trips) for term in self._moved)
        computed = sum(term.at(tiles, trips) for term in self._computed)
        blocks = prod(trips[n] for n in self._grid)
        slowdown = (blocks + self._dev.sm_count) / blocks
        return (moved / self._dev.dram_bytes_per_s + computed) * slowdown

    def _places(self, names: Iterable[str]) -> Places:
        return tuple(sorted(self._numbers[name] for name in names))


def _tiles(space: IterationSpace, structure: Structure) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the tensors that have a tile on the chip, each with its loops.

    A map takes the place of an intermediate of the same loops that it reads.
    """
    loads = (s.what for s, _ in structure.statements if isinstance(s, Load))
    for read in dict.fromkeys(loads):
        yield read.tensor, read.loops
    for step in space.steps:
        own = step.loops - step.reduced
        in_place = not step.reduced and any(
            read.tensor in space.step and {*read.loops} == own for read in step.reads
        )
        if not in_place:
            yield step.out, step.makes.loops


def _rate(step: Step, dev: DeviceSpec) -> float:
    """Return the operations a second of a statement: of tensor cores where it is a contraction."""
    tensor = dev.tensor_flops_per_s(step.dtype) if step.dtype else 0.0
    return tensor or dev.fma_float32_flops_per_s
