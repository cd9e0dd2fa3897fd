"""Schedules: trips, what is moved, texts, and tiles that a structure cannot have."""

from __future__ import annotations

from math import prod

import pytest

from relax_fusion.errors import TilingError
from relax_fusion.tiling import Schedule, iteration_space, moves, parse, place

from .graphs import chain

SPACE = iteration_space(chain(1024, 512, 1024, 512))
TILES = (128, 64, 32, 256)  # of m, n, k, h: 8, 16, 16 and 2 of them


def moved(schedule: Schedule) -> list[int]:
    """Return the bytes of each load and store, in order."""
    return [size * prod(schedule.trips[n] for n in around) for around, size in moves(schedule)]


def test_what_is_moved_is_tiles_times_the_loops_around() -> None:
    schedule = Schedule(SPACE, place(SPACE, parse("mhnk", SPACE.ordered)), TILES)
    assert schedule.blocks == 8 * 2
    assert moved(schedule) == [
        2 * (128 * 32) * (8 * 2 * 16 * 16),
        2 * (32 * 64) * (8 * 2 * 16 * 16),
        2 * (64 * 256) * (8 * 2 * 16),
        2 * (128 * 256) * (8 * 2),
    ]
    whole = Schedule(SPACE, place(SPACE, parse("mhnk", SPACE.ordered), "k"), (128, 64, 512, 256))
    assert moved(whole)[0] == 2 * (128 * 512) * (8 * 2)  # no longer for each n


def test_padding_is_counted() -> None:
    space = iteration_space(chain(100, 64, 64, 64))
    structure = place(space, parse("mhnk", space.ordered))
    schedule = Schedule(space, structure, (64, 64, 64, 64))
    assert schedule.trips["m"] == 2 and moved(schedule)[-1] == 2 * 128 * 64


def test_a_schedule_is_readable() -> None:
    structure = place(SPACE, parse("mhnk", SPACE.ordered), "k")
    assert str(Schedule(SPACE, structure, (128, 64, 512, 256))).splitlines() == [
        "grid m 8 x 128, h 2 x 256",
        "  load A 128 x 512",
        "  for n: 16 x 64",
        "    load B 512 x 64",
        "    compute C 128 x 64 over 512",
        "    load D 64 x 256",
        "    compute E 128 x 256 over 64",
        "  store E 128 x 256",
    ]


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ((64, 64, 512), r"tiles are \(64, 64, 512\); must be one of each of m, n, k, h"),
        ((64, 64, 512, 0), "must be one of each of m, n, k, h, from 1 on"),
        ((64, 64, 256, 64), "k has 2 tiles of 256, and no loop in grid m h: L_A, n"),
    ],
)
def test_tiles_that_a_structure_cannot_have(tiles: tuple[int, ...], message: str) -> None:
    structure = place(SPACE, parse("mhnk", SPACE.ordered), "k")
    with pytest.raises(TilingError, match=message):
        Schedule(SPACE, structure, tiles)
