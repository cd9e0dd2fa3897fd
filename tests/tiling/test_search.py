"""Prices by hand, and candidates in their order."""

from __future__ import annotations

import pytest

from relax_fusion.errors import TilingError
from relax_fusion.hardware import DEVICES, generic_cpu
from relax_fusion.tiling import Cost, Schedule, candidates, iteration_space, parse, place, volumes
from relax_fusion.tiling.pruning import fits
from relax_fusion.workload import Attention, DynamicDim, MatmulChain
from relax_fusion.workload.builder import GraphBuilder

from .graphs import chain, norm_mlp

H200 = DEVICES["h200"]
SPACE = iteration_space(chain(1024, 512, 1024, 512))
TILES = (128, 64, 32, 256)  # of m, n, k, h: 8, 16, 16 and 2 of them
CHAINS = {
    "G1": (1, 512, 256, 64, 64),
    "G2": (1, 512, 256, 64, 128),
    "G3": (1, 512, 256, 64, 256),
    "G4": (1, 512, 512, 256, 256),
    "G5": (1, 512, 512, 512, 256),
    "G6": (1, 512, 512, 1024, 256),
    "G7": (1, 512, 512, 128, 128),
    "G8": (1, 1024, 512, 128, 128),
    "G9": (1, 2048, 512, 128, 128),
    "G10": (1, 1024, 1024, 128, 128),
    "G11": (4, 1024, 1024, 128, 128),
    "G12": (8, 1024, 1024, 128, 128),
}
"""Batch, M, N, K and H of MCFuser's chains of matmuls."""


def test_volumes_are_tiles_times_the_loops_around() -> None:
    schedule = Schedule(SPACE, place(SPACE, parse("mhnk", SPACE.ordered)), TILES)
    assert schedule.blocks == 8 * 2
    assert volumes(schedule) == {
        "L_A": 2 * (128 * 32) * (8 * 2 * 16 * 16),
        "L_B": 2 * (32 * 64) * (8 * 2 * 16 * 16),
        "L_D": 2 * (64 * 256) * (8 * 2 * 16),
        "S_E": 2 * (128 * 256) * (8 * 2),
    }
    whole = Schedule(SPACE, place(SPACE, parse("mhnk", SPACE.ordered), "k"), (128, 64, 512, 256))
    assert volumes(whole)["L_A"] == 2 * (128 * 512) * (8 * 2)  # no longer for each n


def test_a_price_by_hand() -> None:
    structure = place(SPACE, parse("mhnk", SPACE.ordered))
    cost = Cost(SPACE, structure, H200)
    moved = sum(volumes(Schedule(SPACE, structure, TILES)).values())
    assert cost.traffic(TILES) == moved
    flops = 2 * 1024 * 1024 * 512 * 2 + 2 * 1024 * 1024 * 512  # C is computed for each tile of h
    seconds = moved / H200.dram_bytes_per_s + flops / H200.tensor_float16_flops_per_s
    assert cost.seconds(TILES) == pytest.approx(seconds * (16 + 132) / 16)
    tiles = 128 * 32 + 32 * 64 + 128 * 64 + 64 * 256 + 128 * 256
    assert cost.footprint(TILES) == cost.resident(TILES) == 2 * tiles


def test_all_tiles_that_are_kept_count_as_resident() -> None:
    cost = Cost(SPACE, place(SPACE, parse("mn(k,h)", SPACE.ordered)), H200)
    tiles = 128 * 32 + 32 * 64 + 128 * 64 + 64 * 256
    assert cost.footprint(TILES) == 2 * (tiles + 128 * 256)
    assert cost.resident(TILES) == 2 * (tiles + 128 * 512)


def test_a_map_takes_the_place_of_what_it_reads() -> None:
    work = MatmulChain(512, 64, 256, 64, ("kn", "kn"), ("bias",), (), "float16", "float16")
    space = iteration_space(work.graph)
    structure = place(space, parse("ij0j1k", space.ordered))
    tiles = {"i": 64, "j0": 32, "k": 16, "j1": 48}
    operands = 2 * (64 * 16 + 16 * 32 + 32 + 32 * 48)
    sums = 4 * (64 * 32 + 64 * 48)
    given = tuple(tiles[a.name] for a in space.loops)
    assert Cost(space, structure, H200).footprint(given) == operands + sums


def test_padding_is_paid_for() -> None:
    space = iteration_space(chain(100, 64, 64, 64))
    structure = place(space, parse("mhnk", space.ordered))
    schedule = Schedule(space, structure, (64, 64, 64, 64))
    assert schedule.trips["m"] == 2 and volumes(schedule)["S_E"] == 2 * 128 * 64


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_mcfuser_have_candidates(name: str) -> None:
    batch, m, n, k, h = CHAINS[name]
    work = MatmulChain(m, k, n, h, ("kn", "kn"), (), (), "float16", "float16", batch=batch)
    found = list(candidates(work.graph, H200))
    seconds = [c.seconds for c in found]
    assert seconds == sorted(seconds) and 100 < len(found) < 5000
    assert len({(c.schedule.structure, c.schedule.tiles) for c in found}) == len(found)
    for each in found:
        assert fits(each.footprint, H200) and each.footprint <= each.resident
    # the least that has to move, and the least that has to be computed
    best = found[0]
    least = 2 * batch * (m * k + k * n + n * h + m * h)
    assert least <= sum(volumes(best.schedule).values())
    assert best.seconds > 2 * batch * m * n * (k + h) / H200.tensor_float16_flops_per_s


@pytest.mark.parametrize("dev", [H200, generic_cpu(4)], ids=["gpu", "cpu"])
def test_other_graphs_have_candidates(dev) -> None:
    attention = Attention(1, 512, 512, 8, 2, 64, 64, 0.125, "none", None, "float16", "float16")
    for graph in (attention.graph, norm_mlp(128, 256, 512, 256), chain(256, 128, 128, 128, 128)):
        assert next(candidates(graph, dev)).seconds > 0


def test_attention_ends_as_one_loop_over_keys() -> None:
    work = Attention(4, 512, 512, 8, 8, 64, 64, 0.125, "none", None, "float16", "float16")
    first = next(candidates(work.graph, H200))
    loops = [str(node) for node in first.schedule.structure.body if str(node).startswith("t(")]
    assert len(loops) == 1 and "C_row_max, C_weight, C_row_sum" in loops[0]


def test_dynamic_sizes_are_given() -> None:
    work = MatmulChain(DynamicDim("n"), 64, 256, 64, ("kn", "kn"), (), (), "float16", "float16")
    few, many = (next(candidates(work.graph, H200, {"rows": rows})) for rows in (8, 4096))
    assert few.schedule.tile["i"] == 8 and many.schedule.tile["i"] >= 64
    assert few.seconds < many.seconds


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


def test_refusals_come_at_once() -> None:
    with pytest.raises(TilingError, match="no statement"):
        candidates(GraphBuilder().graph(), H200)
