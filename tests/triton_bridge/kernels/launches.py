"""The launches of each kernel family for a case, its tile sizes scaled by one number."""

from __future__ import annotations

from typing import Any

from relax_fusion.triton_bridge.kernels.products import Constants

from ...support.interpreted import Launch
from .cases import EPS, Case


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def constants(case: Case, *blocks: int, **others: Any) -> Constants:
    beta = {"has_beta": True} if case.beta else {}
    return Constants(case.k, *blocks, pdl=False, norm=case.norm, **beta, **others)


def launch(
    kernel: str, grid: tuple[int, ...], case: Case, made: tuple[dict[str, Any], Constants]
) -> Launch:
    product, constants = made
    rows = {"x_ptr": "x", "gamma_ptr": "gamma"} if kernel != "split_reduce" else {}
    rows |= {"beta_ptr": "beta"} if kernel == "gemv" else {}
    scalars = {"M": case.rows, "eps": EPS, "p0": product["p0"]}
    return Launch(kernel, grid, {**rows, **scalars}, {"F0": product["F0"], "C": constants})


def gemv(case: Case) -> list[Launch]:
    made = case.product(4), constants(case, 1, 4, 16)
    return [launch("gemv", (cdiv(case.n, 4), case.rows), case, made)]


def matmul_pointer(case: Case, split: int, swap: bool, tile: int = 16) -> list[Launch]:
    how = {"split_k": split, "group_m": 2, "swap": swap, "stages": 2}
    tiles = cdiv(case.rows, tile) * cdiv(case.n, tile)
    made = case.product(tile, split), constants(case, tile, tile, tile, **how)
    found = [launch("matmul_pointer", (tiles, split), case, made)]
    if split > 1:
        reduced = case.product(16, split), constants(case, 2, 16, 0, split_k=split)
        grid = (cdiv(case.rows, 2), cdiv(case.n, 16))
        found.append(launch("split_reduce", grid, case, reduced))
    return found
