"""What the compiler makes of `attention_halves`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_fusion.launch.kernel import CompiledKernel
from relax_fusion.triton_bridge.kernels.attention_halves import attention_halves

from ...support.slow import sampled
from .attention_code import compiled as compile_one
from .test_attention_groups import EVERYTHING, PLAIN
from .test_code import SIGNS, stack_bytes

CASES = {  # keys of a quarter, padded features, changes, and whether there are all keys
    "256-keys": (64, 64, {}, True),
    "512-keys": (128, 64, {}, True),
    "uneven": (128, 64, {}, False),
    "80-features": (64, 128, {"v_dim": 80}, True),
    "everything": (64, 64, EVERYTHING, False),
}


def compiled(keys: int, width: int, changes: dict[str, Any], even: bool) -> CompiledKernel:
    constants = replace(PLAIN, block_n=keys, **changes).constants(even_keys=even)
    maps = {n: (1, 1, rows, width) for n, rows in (("q", 64), ("k", 2 * keys), ("v", 2 * keys))}
    return compile_one(attention_halves, constants, maps=maps)


@pytest.mark.parametrize("name", sampled(CASES))
def test_tiles_are_copied_by_tma_and_sums_stay_in_registers(name: str, tmp_path: Path) -> None:
    keys, width, _, _ = CASES[name]
    kernel = compiled(*CASES[name])
    text = kernel.ptx.decode()
    assert len(re.findall(SIGNS["tensor copies"], text)) == 5
    assert re.search(SIGNS["wgmma"], text)
    assert not re.search(SIGNS["mma"], text)
    assert stack_bytes(kernel.image, tmp_path) == 0
    assert kernel.num_warps == 8
    tiles = 2 * 64 * width + 2 * 4 * keys * 2 * width
    assert tiles < kernel.shared_bytes <= tiles + 2 * 64 * (4 * width + 8) + 1024
    assert text.index("griddepcontrol.wait") < text.index("cp.async.bulk")


@pytest.mark.parametrize("name", CASES)
def test_the_tiles_are_asked_for_without_waiting_in_between(name: str) -> None:
    text = compiled(*CASES[name]).ptx.decode()
    begin, end = text.index("mbarrier.init"), text.rindex("cp.async.bulk.tensor")
    # One after each operation on a barrier would be 12; Triton 3.9 has one between copies
    assert len(re.findall(r"bar\.sync", text[begin:end])) <= 5
