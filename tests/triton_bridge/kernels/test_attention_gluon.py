"""The numbers of `attention_groups` and `attention_halves`, emulated, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relax_fusion.triton_bridge.kernels.attention_fragments import tile_widths
from relax_fusion.triton_bridge.kernels.attention_groups import attention_groups
from relax_fusion.triton_bridge.kernels.attention_halves import attention_halves

from .gluon_on_cpu import Map, Pointer, launch, values
from .test_attention_pointer import ALL, Heads, label

KINDS = {"slopes": np.float32, "bias": np.float32, "mask": np.bool_}


def arguments(case: Heads, t: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return what both kernels take."""
    pointers = {n: Pointer(x.astype(KINDS.get(n, np.float16)).reshape(-1)) for n, x in t.items()}
    tensors = {n: case.tensor(n, t, pointers[n]) for n in ("q", "k", "v", "bias", "mask", "out")}
    lengths = {"Q_LEN": values(case.q_len), "KV_LEN": values(case.kv_len)}
    vectors = {f"{n}_ptr": pointers[n] for n in ("slopes", "sinks")}
    return {**tensors, **vectors, **lengths}


def result(case: Heads, t: dict[str, np.ndarray], given: dict[str, Any]) -> np.ndarray:
    return case.by_head(given["out"].ptr.array.reshape(t["out"].shape)).astype(np.float64)


def in_groups(case: Heads, t: dict[str, np.ndarray], rows: int, keys: int, groups: int) -> Any:
    packed = case.q_len * case.group
    even = {"even_rows": packed % rows == 0, "even_keys": case.kv_len == keys * groups}
    constants = case.constants(block_m=rows, block_n=keys, groups=groups, **even)
    given = {**arguments(case, t), "C": constants}
    grid = (case.batch, case.heads // case.group, math.ceil(packed / rows))
    launch(attention_groups, grid, given)
    return result(case, t, given)


def in_halves(case: Heads, t: dict[str, np.ndarray], keys: int) -> Any:
    given = arguments(case, t)
    given["C"] = case.constants(block_n=keys, even_keys=case.kv_len == 4 * keys)
    for name, rows in (("q", 64), ("k", 2 * keys), ("v", 2 * keys)):
        tensor = case.by_head(t[name].astype(np.float16))
        tensor = tensor if name == "q" else tensor[:, :, : case.kv_len]
        block = (1, 1, rows, max(16, 1 << (tensor.shape[3] - 1).bit_length()))
        given[name] = Map(tensor, block)
    grid = (case.batch, case.heads, math.ceil(case.q_len / 64))
    launch(attention_halves, grid, given)
    return result(case, t, given)


def check(case: Heads, t: dict[str, np.ndarray], got: np.ndarray) -> None:
    """Compare with float64: weights are rounded to float16 before the second product."""
    want = case.reference(t)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    values = np.abs(case.by_head(t["v"])[:, :, : case.kv_len])
    bound = 2.0**-11 * (np.abs(want) + 2 * np.nanmax(values, initial=0, where=np.isfinite(values)))
    assert np.all((np.abs(got - want) <= bound) | np.isnan(want))


CASES = [
    Heads(),
    Heads(heads=2, group=1, kv_len=64, q_len=16, layout="bnsh"),
    Heads(heads=6, group=3, q_len=7),
    Heads(kv_len=1, q_len=1),
    Heads(head_dim=64, v_dim=64, kv_len=50, q_len=9),
    Heads(head_dim=80, v_dim=80, layout="bnsh"),
    Heads(head_dim=72, v_dim=16),
    Heads(head_dim=112, v_dim=128),
    Heads(causal="top_left", q_len=21),
    Heads(causal="bottom_right", q_len=21, kv_len=9),
    Heads(causal="bottom_right", window=5, q_len=19, kv_len=50),
    Heads(causal="none", window=6, q_len=40, kv_len=33),
    Heads(softcap=3.0, causal="top_left"),
    Heads(bias="add", bias_dims=(False, True, False, True), layout="bnsh"),
    Heads(bias="add", bias_dims=(True, False, True, False)),
    Heads(bias="min"),
    Heads(mask_dims=(True, True, True, True), sinks=True),
    Heads(mask_dims=(False, True, True, False), bias="min"),
    Heads(alibi=True, causal="bottom_right"),
    Heads(sinks=True, causal="top_left"),
    ALL,
]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_groups_against_float64(case: Heads) -> None:
    t = case.tensors()
    check(case, t, in_groups(case, t, 16, 16, 4))


@pytest.mark.parametrize("case", [*CASES, replace(ALL, q_len=70)], ids=label)
def test_halves_against_float64(case: Heads) -> None:
    t = case.tensors()
    check(case, t, in_halves(case, t, 16))


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("keys", "groups"), [(32, 2), (16, 8)])
def test_tiles_of_groups(rows: int, keys: int, groups: int) -> None:
    case = replace(ALL, q_len=13, group=4, head_dim=64, v_dim=80)
    t = case.tensors()
    check(case, t, in_groups(case, t, rows, keys, groups))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("family", ["groups", "halves"])
def test_zeros_and_nan_stay_in_their_rows(family: str, sinks: bool) -> None:
    case = Heads(bias="add", mask_dims=(True,) * 4, sinks=sinks)
    t = case.tensors()
    t["mask"][0, 1, 2] = 0
    t["bias"][1, 2, 0] = -np.inf
    case.by_head(t["q"])[1, 3, 1] = np.nan
    got = in_groups(case, t, 16, 16, 4) if family == "groups" else in_halves(case, t, 16)
    assert not got[0, 1, 2].any() and not got[1, 2, 0].any()
    assert np.isnan(got[1, 3, 1]).all() and np.isnan(got).sum() == case.v_dim
    check(case, t, got)


@pytest.mark.parametrize(
    ("width", "tiles"),
    [(16, [16]), (64, [64]), (72, [64, 16]), (80, [64, 16]), (112, [64, 32, 16]), (128, [128])],
)
def test_tiles_of_features(width: int, tiles: list[int]) -> None:
    assert tile_widths(width) == tiles
