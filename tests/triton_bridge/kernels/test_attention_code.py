"""What the compiler makes of the kernels of attention, for GPUs that need not be there."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.estimator.families.triton_attention.tiles import AttentionPlan
from relax_fusion.estimator.tile_plan import TilePlan
from relax_fusion.triton_bridge.kernels.attention_fragments import tile_widths
from relax_fusion.workload import Attention, DynamicDim

from ...support.attention_cases import BASE
from ...support.slow import sampled
from .compiled import NARROW, SIGNS, compiled, said_by, stack_bytes

EVERYTHING = {"q_heads": 32, "causal": "bottom_right", "window": 90, "softcap": 30.0}
EVERYTHING |= {"bias_dims": (True,) * 4, "mask_dims": (True,) * 4}
EVERYTHING |= {"alibi": "float32", "sinks": "float16"}


def work(keys: Any = 256, width: int = 64, **changes: Any) -> Attention:
    """Return an attention of 8 heads and of as many queries as keys."""
    sizes = {"q_len": keys, "kv_len": keys, "q_heads": 8, "kv_heads": 8}
    dims = {"head_dim": width, "v_dim": width, "dtype": "float16", "out_dtype": "float16"}
    return replace(BASE, **{**sizes, **dims, **changes})


def groups(rows: int, keys: int, count: int, width: int = 64) -> AttentionPlan:
    return AttentionPlan(rows, keys, width, groups=count, num_warps=count, family="groups")


GROUPS = {
    "256-keys": (work(), groups(16, 64, 4)),
    "512-keys": (work(512), groups(16, 64, 8)),
    "32-rows": (work(250), groups(32, 64, 4)),
    "32-rows-512-keys": (work(512), groups(32, 64, 8)),
    "80-features": (work(width=80), groups(16, 64, 4, 128)),
    "128-features": (work(width=128), groups(16, 32, 8, 128)),
    "16-warps": (work(250), groups(16, 16, 16)),
    "everything": (work(250, **EVERYTHING), groups(16, 64, 4)),
}


@pytest.mark.parametrize("name", sampled(GROUPS))
def test_groups_load_16_bytes_at_a_time_and_meet_twice(name: str, tmp_path: Path) -> None:
    """All loads are in front of the first barrier, and go to registers."""
    case, plan = GROUPS[name]
    kernel = compiled(case, plan)
    text = kernel.ptx.decode()
    low = tile_widths(case.head_dim)[0]
    loads = (2 * plan.block_n + plan.block_m) * low // (32 * 8)  # of a warp
    wide = [m.start() for m in re.finditer(SIGNS["wide loads"], text)]
    assert len(wide) >= loads and "ldmatrix" not in text
    assert len(re.findall(r"bar\.sync", text)) == 2
    assert max(wide) < text.index("bar.sync") < text.index("mma.sync")
    assert stack_bytes(kernel.image, tmp_path) == 0
    assert text.index("griddepcontrol.wait") < text.index("ld.global")


@pytest.mark.parametrize(
    ("width", "tiles"),
    [(16, [16]), (64, [64]), (72, [64, 16]), (80, [64, 16]), (112, [64, 32, 16]), (128, [128])],
)
def test_tiles_of_features(width: int, tiles: list[int]) -> None:
    assert tile_widths(width) == tiles


def halves(keys: int, width: int = 64) -> AttentionPlan:
    fields = {"groups": 2, "num_stages": 2, "num_warps": 8, "family": "halves"}
    return AttentionPlan(64, keys, width, **fields)


HALVES = {
    "256-keys": (work(), halves(64)),
    "512-keys": (work(512), halves(128)),
    "uneven": (work(500), halves(128)),
    "80-features": (work(width=80), halves(64, 128)),
    "everything": (work(250, **EVERYTHING), halves(64)),
}


@pytest.mark.parametrize("name", sampled(HALVES, 5))
def test_halves_ask_for_all_tiles_and_keep_sums_in_registers(name: str, tmp_path: Path) -> None:
    case, plan = HALVES[name]
    keys, width = plan.block_n, plan.block_k
    kernel = compiled(case, plan)
    text = kernel.ptx.decode()
    assert len(re.findall(SIGNS["tensor copies"], text)) == 5
    assert re.search(SIGNS["wgmma"], text) and not re.search(SIGNS["mma"], text)
    assert stack_bytes(kernel.image, tmp_path) == 0 and kernel.num_warps == 8
    tiles = 2 * 64 * width + 2 * 4 * keys * 2 * width
    assert tiles < kernel.shared_bytes <= tiles + 2 * 64 * (4 * width + 8) + 1024
    assert text.index("griddepcontrol.wait") < text.index("cp.async.bulk")
    begin, end = text.index("mbarrier.init"), text.rindex("cp.async.bulk.tensor")
    # One after each operation on a barrier would be 12; Triton 3.9 has one between copies
    assert len(re.findall(r"bar\.sync", text[begin:end])) <= 5


def flash(keys: int, width: int, stages: int = 2) -> TilePlan:
    return TilePlan(128, keys, width, num_stages=stages, num_warps=12, family="flash")


WIDE_BIAS = {"bias_dims": (False, True, True, True), "bias_dtype": "float16"}
FLASH = {
    "64": (work(1024, 64, mask_dims=(True,) * 4), flash(128, 64, 3)),
    "128": (work(1024, 128, causal="bottom_right"), flash(128, 128)),
    "256": (work(1024, 256, bias_dims=(True,) * 4), flash(64, 256)),
    "bias": (work(1024, 128, **WIDE_BIAS), flash(128, 128)),
}


@pytest.mark.parametrize("name", sampled(FLASH))
def test_the_main_loop_of_flash_stays_in_registers(name: str, tmp_path: Path) -> None:
    kernel = compiled(*FLASH[name])
    assert kernel.threads == 384 and kernel.scratch_bytes == 0
    text = kernel.ptx.decode()
    assert "wgmma.mma_async" in text and "cp.async.bulk.tensor" in text
    loops = innermost_loops(said_by("nvdisasm", "-c", kernel.image, tmp_path), "HGMMA")
    for warp_group in range(2):
        # Without a bias or mask, none in the loop over blocks that all rows see
        body = sorted(loops, key=len)[warp_group].splitlines()
        spilled = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in body)
        assert spilled <= (0 if name == "128" else len(body) // 40)


def innermost_loops(code: str, sign: str) -> list[str]:
    """Return the bodies of loops that have `sign`, and no other such loop inside.

    They end with a branch on a condition; others go back from waits that had to be repeated.
    """
    lines = code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    spans = []
    for i, line in enumerate(lines):
        target = re.search(r"@.*BRA.*`\((\.L\w+)\)", line)
        if target and labels[target[1]] < i:
            body = lines[labels[target[1]] : i]
            if any(sign in b for b in body):
                spans.append((labels[target[1]], i))
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return ["\n".join(lines[a:b]) for a, b in inner]


def test_parts_are_merged_by_warps_that_wait_for_no_other(tmp_path: Path) -> None:
    kernel = compiled(decode(), pointer(16, 128, 4, split=64), at=1)
    text = kernel.ptx.decode()
    assert kernel.entry == "attention_combine" and kernel.num_warps == 1
    loads = re.findall(SIGNS["wide loads"], text)
    assert len(loads) == 32 * 32 // (32 * 4), "of 32 parts, a warp loads 32 columns"
    assert stack_bytes(kernel.image, tmp_path) == 0


def pointer(rows: int, width: int, stages: int, warps: int = 4, split: int = 1) -> TilePlan:
    fields = {"num_stages": stages, "num_warps": warps, "split_k": split, "family": "attention"}
    return TilePlan(rows, 64, width, **fields)


@cache
def decode(heads: int = 8, width: int = 128) -> Attention:
    keys = DynamicDim("kv_len")
    return work(keys, width, batch=1, q_len=1, q_heads=32, kv_heads=heads)


PREFILL = work(1024, 128, q_heads=32, causal="bottom_right")
POINTER = {  # and the device, and what multiplies
    "decode": (decode(), pointer(16, 128, 4, split=8), "h200", "mma"),
    "decode-64": (decode(32, 64), pointer(16, 64, 4, split=8), "a100", "mma"),
    "decode-80": (decode(8, 80), pointer(16, 128, 3, split=8), "rtx4090", "mma"),
    "prefill": (PREFILL, pointer(128, 128, 2, 8), "h200", "wgmma"),
    "prefill-sm80": (PREFILL, pointer(64, 128, 2, 8), "a100", "mma"),
}


@pytest.mark.parametrize("name", sampled(POINTER))
def test_copies_are_wide_and_nothing_is_spilled(name: str, tmp_path: Path) -> None:
    case, plan, dev, multiplied = POINTER[name]
    kernel = compiled(case, plan, dev)
    text = kernel.ptx.decode()
    assert re.search(SIGNS["copies"], text) and not re.search(NARROW["copies"], text)
    assert re.search(SIGNS[multiplied], text)
    # One value may wait there until the loop is over: ptxas leaves registers to further blocks
    assert stack_bytes(kernel.image, tmp_path) <= 8


def test_a_bound_lets_nan_through() -> None:  # numpy's minimum does anyway: see the code
    kernel = compiled(work(bias_dims=(True,) * 4, bias_op="min"), pointer(16, 64, 2))
    assert b"min.NaN.f32" in kernel.ptx
