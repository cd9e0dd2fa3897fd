"""The launches of each kernel family for a case, its tile sizes scaled by one number."""

from __future__ import annotations

from ...support.interpreted import Launch
from .cases import EPS, Case

OUTPUTS = ("bias", "up_bias", "operands", "out")
WEIGHTS = ("w", "up", *OUTPUTS)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def gemv(case: Case) -> list[Launch]:
    constants = {"LAYOUT": case.layout, "NORM": case.norm, "HAS_BETA": case.beta}
    return [
        Launch(
            "gemv",
            (cdiv(case.n, 4), case.rows),
            {
                **case.pointers("x", "gamma", "beta", *WEIGHTS),
                **case.rope(),
                "M": case.rows,
                "eps": EPS,
            },
            {**case.constants(), **constants, "BLOCK_N": 4, "BLOCK_K": 16},
        )
    ]


def matmul_pointer(case: Case, split: int, swap: bool, tile: int = 16) -> list[Launch]:
    tiles = {"BLOCK_M": tile, "BLOCK_N": tile, "BLOCK_K": tile, "SPLIT_K": split, "GROUP_M": 2}
    scalars = {**case.rope(), "M": case.rows, "eps": EPS}
    first = Launch(
        "matmul_pointer",
        (cdiv(case.rows, tile) * cdiv(case.n, tile), split),
        {**case.pointers("x", "gamma", *WEIGHTS, "workspace"), **scalars},
        {
            **case.constants(),
            **tiles,
            "LAYOUT": case.layout,
            "NORM": case.norm,
            "SWAP": swap,
            "NUM_STAGES": 2,
        },
    )
    if split == 1:
        return [first]
    second = Launch(
        "split_reduce",
        (cdiv(case.rows, 2), cdiv(case.n, 16)),
        {**case.pointers("workspace", *OUTPUTS), **scalars},
        {**case.constants(), "NORM": case.norm, "SPLIT_K": split, "BLOCK_M": 2, "BLOCK_N": 16},
    )
    return [first, second]
